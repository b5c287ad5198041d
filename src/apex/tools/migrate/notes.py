"""Notes on names of apex, from notes.ini."""

from __future__ import annotations

import configparser
from importlib import resources

_DATA = configparser.ConfigParser(delimiters=("=",), interpolation=None)
_DATA.optionxform = str  # type: ignore[assignment, method-assign] # names keep their case
_DATA.read_string(resources.files("apex.tools.migrate").joinpath("notes.ini").read_text("utf-8"))

OPTIMIZER = "optimizer."
"""Prefix for the attributes that amp and apex's wrappers add to optimizers."""

NOTES = dict(_DATA["notes"])
"""Notes on names of apex."""

OPTIMIZERS = dict(_DATA["optimizers"])
"""Notes on attributes of optimizers, with their prefix."""

WRAPPED = "amp.initialize(DistributedDataParallel)"
STEP = "FusedAdam.step(grads)"
LOCAL_RANK = "--local_rank"
VIEW = "x[:k].view(-1)"


def _by_name(section: str) -> dict[str, str]:
    notes = {}
    for names, note in _DATA[section].items():
        for name in names.split():
            notes[name] = note
    return notes


FAILS = _by_name("fails")
"""What to do about names of other libraries that are gone, and calls that always raise."""


def gone(name: str) -> str:
    """Returns what to do about a full name of another library that is gone; empty if it is not."""
    for removed, note in FAILS.items():
        if f"{name}.".startswith(f"{removed}."):
            return note
    return ""


CHANGED = _by_name("changed")
"""Notes on names of other libraries that do something else today."""

IDLE = {name: words.split() for name, words in _DATA["idle"].items()}
"""Arguments without effect, by the name of the function."""
