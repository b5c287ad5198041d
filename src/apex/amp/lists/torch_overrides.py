"""apex's op lists for ``torch``; change them before ``amp.initialize``."""

from __future__ import annotations

import torch

from apex import _unavailable
from apex.amp.lists._original import ORIGINAL

_VERSIONS = ("version_major", "version_minor", "version_num", "version_strings")

__getattr__ = _unavailable.names_instead(__name__, dict.fromkeys(_VERSIONS, "torch.__version__"))

_SPACE = ORIGINAL["torch"]

MODULE = torch
FP16_FUNCS: list[str] = list(_SPACE["FP16_FUNCS"])
FP32_FUNCS: list[str] = list(_SPACE["FP32_FUNCS"])
CASTS: list[str] = list(_SPACE["CASTS"])
SEQUENCE_CASTS: list[str] = list(_SPACE["SEQUENCE_CASTS"])
