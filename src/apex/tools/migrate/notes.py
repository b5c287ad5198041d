"""Notes on names of apex, from notes.ini."""

from __future__ import annotations

import configparser
from importlib import resources

_DATA = configparser.ConfigParser(delimiters=("=",), interpolation=None)
_DATA.optionxform = str  # type: ignore[assignment, method-assign] # names keep their case
_DATA.read_string(resources.files("apex.tools.migrate").joinpath("notes.ini").read_text("utf-8"))

OPTIMIZER = "optimizer."
"""Prefix for the attributes that amp and apex's wrappers add to optimizers."""

CLIPPING = "clip_grad_norm_(model.parameters())"

NOTES = dict(_DATA["notes"])
"""Notes on names of apex."""

OPTIMIZERS = dict(_DATA["optimizers"])
"""Notes on uses of optimizers: attributes with their prefix, and ``CLIPPING``."""

IDLE = {name: words.split() for name, words in _DATA["idle"].items()}
"""Arguments without effect, by the name of the function."""
