"""Notes on names of apex and beside it, from notes.ini."""

from __future__ import annotations

import configparser
from collections.abc import Container, Iterator
from importlib import resources

from apex._unavailable import INSTEAD

_DATA = configparser.ConfigParser(delimiters="=", interpolation=None)
_DATA.optionxform = str  # type: ignore[assignment, method-assign] # names keep their case
_DATA.read_string(resources.files(__package__).joinpath("notes.ini").read_text("utf-8"))


def _rows(section: str) -> Iterator[tuple[str, str]]:
    """Yields each name with its note; a row may list several names."""
    for names, note in _DATA[section].items():
        for name in names.split():
            yield name, note


OPTIMIZER = "optimizer."
"""Prefix for the attributes that amp and apex's wrappers add to optimizers."""

NOTES = dict(_rows("notes"))
"""Notes on names of apex, and on those of other libraries that do something else today."""

OPTIMIZERS = dict(_rows("optimizers"))
"""Notes on attributes of optimizers, with their prefix."""

GONE = dict(_rows("fails")) | {name: f"Use {use}." for name, use in INSTEAD.items()}
"""What to do about names that are gone, here or in other libraries, and calls that always raise."""

IDLE = {name: words.split() for name, words in _DATA["idle"].items()}
"""Arguments without effect, by the name of the function."""

REQUIRED = dict(_DATA["required"])
"""The argument that a call of another library's function should give."""

LOCAL_RANK = "--local_rank"
STEP = "FusedAdam.step(grads)"
VIEW = "x[:k].view(-1)"
WRAPPED = "amp.initialize(DataParallel)"


def nearest(name: str, names: Container[str]) -> str:
    """Returns which of ``names`` a full name is, or is an attribute of; empty without one."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name
