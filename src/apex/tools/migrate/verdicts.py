"""Decides for each name of apex whether it works, works with a note, or is not supported."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Literal

from apex._unavailable import INSTEAD
from apex.tools.migrate.definitions import Definition, bindings, definition_of, parameters
from apex.tools.migrate.names import Name
from apex.tools.migrate.notes import IDLE, NOTES, OPTIMIZERS
from apex.tools.source import did_you_mean

Kind = Literal["works", "note", "not supported"]

_FORK = " If it comes from a fork, keep that fork."


def verdict_of(use: Name) -> tuple[Kind, str]:
    """Returns the verdict on one use, including its arguments, and the remedy."""
    verdict, note = verdict_of_name(use.name)
    if verdict == "not supported" or use.name in OPTIMIZERS:
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
    if errors:
        return "not supported", " ".join(errors)
    return _noted(*notes)


@cache
def verdict_of_name(name: str) -> tuple[Kind, str]:
    """Returns the verdict on a full name, such as ``apex.optimizers.FusedAdam``."""
    if name in OPTIMIZERS:
        return _noted(OPTIMIZERS[name])
    for removed, instead in INSTEAD.items():
        # The removed name itself, or an attribute of it.
        if f"{name}.".startswith(f"{removed}."):
            return "not supported", f"Use {instead}."
    definition = definition_of(name)
    if definition.name and definition.node is None:
        why = _why_missing(definition)
        if why:
            return "not supported", why
    return _noted(NOTES.get(_noted_name(name), ""))


def _why_missing(definition: Definition) -> str:
    """Returns why a module lacks a name that its source does not bind; empty if it defines it."""
    name = f"{definition.module}.{definition.name}"
    known = bindings(definition.module)
    if {"__getattr__", "*"} & known.keys():  # only running the module can tell
        try:
            getattr(importlib.import_module(definition.module), definition.name)
            return ""
        except AttributeError as error:
            if str(error).startswith(name):  # our own explanations begin with the full name
                return str(error)
    similar = did_you_mean(definition.name, known)
    return f"{name} is not part of this apex.{similar or _FORK}"


def _noted(*notes: str) -> tuple[Kind, str]:
    text = " ".join(filter(None, notes))
    if text:
        return "note", text
    return "works", ""


def _noted_name(name: str) -> str:
    """Returns the name that the notes use for an object, which apex may export under several."""
    prefix = name
    while prefix:
        if prefix in NOTES:
            return prefix
        prefix = prefix.rpartition(".")[0]
    return _noted_definitions().get(definition_of(name), name)


@cache
def _noted_definitions() -> dict[Definition, str]:
    return {definition_of(name): name for name in sorted({*NOTES, *IDLE})}
