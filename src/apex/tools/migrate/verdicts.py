"""Decides for each name of apex whether it works, works with a note, or is not supported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from apex.tools.migrate.definitions import Definition, bindings, definition_of, parameters
from apex.tools.migrate.names import Name
from apex.tools.migrate.notes import GONE, IDLE, NOTES, OPTIMIZERS, nearest
from apex.tools.source import did_you_mean

Kind = Literal["works", "note", "not supported"]

_NOTES = NOTES | OPTIMIZERS


def verdict_of(use: Name) -> tuple[Kind, str]:
    """Returns the verdict on one use, including its arguments, and the remedy."""
    verdict, note = verdict_of_name(use.name)
    if verdict == "not supported":
        return verdict, note
    accepted = parameters(definition_of(use.name))
    idle = IDLE.get(_noted_name(use.name), ())
    errors = []
    notes = [note]
    for keyword in use.keywords:
        if accepted is not None and keyword not in accepted:
            remedy = did_you_mean(keyword, accepted) or " Remove it."
            errors.append(f"{use.name} takes no argument {keyword}.{remedy}")
        elif keyword in idle:
            notes.append(f"{keyword} has no effect: remove it.")
    if not errors and use.values:
        errors += _error_of_values(use)
    if errors:
        return "not supported", " ".join(errors)
    return _noted(*notes)


@cache
def verdict_of_name(name: str) -> tuple[Kind, str]:
    """Returns the verdict on a full name, such as ``apex.optimizers.FusedAdam``."""
    gone = nearest(name, GONE)
    if gone:
        return "not supported", GONE[gone]
    definition = definition_of(name)
    if definition.name and definition.node is None:
        why = _why_missing(definition)
        if why:
            return "not supported", why
    return _noted(_NOTES.get(_noted_name(name), ""))


def _error_of_values(use: Name) -> Iterator[str]:
    """Yields the error that a call always raises because of its literal arguments."""
    definition = definition_of(use.name)
    try:
        if definition[:2] == ("apex.amp.frontend", "initialize"):
            _check_initialize(use)
        elif definition.module.startswith("apex.optimizers."):
            _check_optimizer(definition, use.values)
    except ImportError:  # no torch here
        return
    except Exception as error:  # noqa: BLE001 - any that the call raises
        unknown = use.keywords - use.values.keys()
        # An argument whose value is unknown may be what the error asks for.
        if not any(keyword in str(error) for keyword in unknown):
            yield f"Raises an error: {error}"


def _check_initialize(use: Name) -> None:
    """Raises as ``amp.initialize`` does for a level, or an override that has no meaning there."""
    values = dict(use.values)
    level = values.pop("opt_level", "O1")
    if values.pop("enabled", True) in (False, "False"):
        return
    levels = bindings("apex.amp.properties")  # read from the source, without torch
    if not values and level in levels:
        return
    from apex.amp import properties

    defaults = properties.level_defaults(level)
    overrides = {name: value for name, value in values.items() if name in defaults.options}
    properties.resolve(defaults, overrides, hard_override=False)


def _check_optimizer(definition: Definition, values: Mapping[str, Any]) -> None:
    """Raises as the constructor does."""
    import torch

    constructor = getattr(importlib.import_module(definition.module), definition.name)
    if issubclass(constructor, torch.optim.Optimizer):
        param = torch.zeros(1, dtype=torch.float32, device="cpu")
        constructor([param], **{"lr": 0.1, **values})


def _why_missing(definition: Definition) -> str:
    """Returns why a module lacks a name that its source does not bind; empty if it defines it."""
    name = f"{definition.module}.{definition.name}"
    try:  # only running the module can tell
        getattr(importlib.import_module(definition.module), definition.name)
        return ""
    except (AttributeError, ImportError) as error:
        if str(error).startswith(name):  # our own explanations begin with the full name
            return str(error)
    known = bindings(definition.module)
    remedy = did_you_mean(definition.name, known) or " If it comes from a fork, keep that fork."
    return f"{name} is not part of this apex.{remedy}"


def _noted(*notes: str) -> tuple[Kind, str]:
    text = " ".join(filter(None, notes))
    if text:
        return "note", text
    return "works", ""


def _noted_name(name: str) -> str:
    """Returns the name that the notes use for an object, which apex may export under several."""
    return nearest(name, _NOTES) or _noted_definitions().get(definition_of(name), name)


@cache
def _noted_definitions() -> dict[Definition, str]:
    return {definition_of(name): name for name in sorted({*NOTES, *IDLE})}
