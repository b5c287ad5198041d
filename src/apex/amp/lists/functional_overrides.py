"""apex's op lists for ``torch.nn.functional``; change them before ``amp.initialize``."""

from __future__ import annotations

import torch.nn.functional

from apex.amp.lists._original import ORIGINAL

_SPACE = ORIGINAL["torch.nn.functional"]

MODULE = torch.nn.functional
FP16_FUNCS: list[str] = list(_SPACE["FP16_FUNCS"])
FP32_FUNCS: list[str] = list(_SPACE["FP32_FUNCS"])
CASTS: list[str] = list(_SPACE["CASTS"])
SEQUENCE_CASTS: list[str] = list(_SPACE["SEQUENCE_CASTS"])
BANNED_FUNCS: list[tuple[str, str]] = [
    (name, "Use its with_logits form, which is stable in low precision.")
    for name in _SPACE["BANNED_FUNCS"]
]
