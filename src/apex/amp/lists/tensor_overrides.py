"""apex's op lists for ``torch.Tensor``; change them before ``amp.initialize``."""

# ruff: noqa: SIM905 - names read better as text

from __future__ import annotations

import torch

MODULE = torch.Tensor
FP16_FUNCS = "__matmul__ prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm".split()
FP32_FUNCS = (
    "__ipow__ __pow__ __rpow__ cpu acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt "
    "sinh tan pow cumprod cumsum dist norm prod std sum var renorm"
).split()
CASTS = (
    "__add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__ "
    "__lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ "
    "addcdiv addcmul atan2 cross dot add div mul eq equal ge gt le lt ne"
).split()
SEQUENCE_CASTS: list[str] = []
