"""apex's op lists for ``torch.Tensor``; change them before ``amp.initialize``."""

from __future__ import annotations

import torch

from apex.amp.lists._original import ORIGINAL

_SPACE = ORIGINAL["torch.Tensor"]

MODULE = torch.Tensor
FP16_FUNCS: list[str] = list(_SPACE["FP16_FUNCS"])
FP32_FUNCS: list[str] = list(_SPACE["FP32_FUNCS"])
CASTS: list[str] = list(_SPACE["CASTS"])
SEQUENCE_CASTS: list[str] = list(_SPACE["SEQUENCE_CASTS"])
