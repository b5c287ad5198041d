"""Whether a name of apex works here, according to the package itself and the notes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any

from apex._unavailable import INSTEAD
from apex.tools.migrate.level_tests import remark
from apex.tools.migrate.notes import NOTED_KEYWORDS, NOTES, OPTIMIZER_ATTRIBUTES, REFUSED_KEYWORDS
from apex.tools.migrate.uses import OPTIMIZER, Use

NOT_IMPORTED = ("apex.integrations",)
"""Packages whose modules import another library; their names are assumed to exist."""


class Kind(str, Enum):
    """Whether a use works."""

    WORKS = "works"
    NOTE = "note"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Verdict:
    """A kind and a remark or remedy; the text is empty if the use works unchanged."""

    kind: Kind
    text: str = ""


def verdict_of_use(use: Use) -> Verdict:
    """Returns the verdict on one use, including its arguments."""
    if use.passing is not None:
        return _noted(remark(use.passing))
    return _verdict_of_call(use.name, use.keywords)


@cache
def _verdict_of_call(full_name: str, keywords: tuple[str, ...]) -> Verdict:
    verdict = verdict_of(full_name)
    if verdict.kind is Kind.NOT_SUPPORTED or full_name.startswith(OPTIMIZER):
        return verdict
    refused = list(_refusals(full_name, keywords))
    if refused:
        return Verdict(Kind.NOT_SUPPORTED, " ".join(refused))
    name = _noted_name(full_name)
    notes = [verdict.text, *(NOTED_KEYWORDS.get((name, key), "") for key in keywords)]
    return _noted(" ".join(filter(None, notes)))


@cache
def verdict_of(name: str) -> Verdict:
    """Returns the verdict on a full name, such as ``apex.optimizers.FusedAdam``."""
    if name.startswith(OPTIMIZER):
        return _noted(OPTIMIZER_ATTRIBUTES[name.removeprefix(OPTIMIZER)])
    if (instead := _instead(name)) is not None:
        return Verdict(Kind.NOT_SUPPORTED, f"Use {instead}.")
    try:
        resolve(name)
    except LookupError as error:
        return Verdict(Kind.NOT_SUPPORTED, str(error.args[0]))
    return _noted(NOTES.get(_noted_name(name), ""))


def is_known(name: str) -> bool:
    """Returns whether apex has or had this name."""
    return verdict_of(name).kind is not Kind.NOT_SUPPORTED or _instead(name) is not None


def resolve(name: str) -> Any:
    """Returns the object with a full name; for an attribute of an object, the object.

    Raises:
        LookupError: If the package has no such name.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        if not isinstance(found, ModuleType) or found.__name__ in NOT_IMPORTED:
            break
        found = _member(found, part, ".".join(parts[: index + 1]))
    return found


def _member(module: ModuleType, part: str, name: str) -> Any:
    try:
        return getattr(module, part)
    except AttributeError as missing:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            own = not isinstance(error, ModuleNotFoundError) or error.name != name
            message = str(error) if own else str(missing)
            # Our own explanations name the missing object in full.
            if not message.startswith(name) and not (own and name in message):
                message = (
                    f"{name} is not part of this apex. If it comes from a fork, keep that fork."
                )
            raise LookupError(message) from error


def _instead(name: str) -> str | None:
    return next((INSTEAD[key] for key in INSTEAD if f"{name}.".startswith(f"{key}.")), None)


def _noted(text: str) -> Verdict:
    return Verdict(Kind.NOTE, text) if text else Verdict(Kind.WORKS)


def _noted_name(name: str) -> str:
    """Returns the name that the notes use for the same object, which apex exports twice."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if (prefix := ".".join(parts[:end])) in NOTES:
            return prefix
    return _names_of_objects().get(id(resolve(name)), name)


@cache
def _names_of_objects() -> dict[int, str]:
    keys = {name for name, _ in (*REFUSED_KEYWORDS, *NOTED_KEYWORDS)} | set(NOTES)
    objects = {name: resolve(name) for name in sorted(keys)}
    return {id(found): name for name, found in objects.items()}


def _refusals(full_name: str, keywords: tuple[str, ...]) -> Iterable[str]:
    name = _noted_name(full_name)
    taken = _parameters(resolve(full_name)) if keywords else None
    for keyword in keywords:
        if (name, keyword) in REFUSED_KEYWORDS:
            yield REFUSED_KEYWORDS[name, keyword]
        elif taken is not None and keyword not in taken:
            yield f"{full_name} takes no argument {keyword}: remove it."


def _parameters(function: Any) -> frozenset[str] | None:
    """Returns the names of the arguments; None if any name is accepted."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)
