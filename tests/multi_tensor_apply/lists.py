"""Lists of tensors, and the flag, as the multi-tensor functions take them."""

import torch

from tests.optimizers import cases

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [FP16, BF16, FP32]
SHAPES = [(3, 4), (5,), (1,), (0,)]
INF, NAN = float("inf"), float("nan")


def flag(value=0):
    return torch.tensor([value], dtype=torch.int32)


def tensors(dtype, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def like(values, dtype=None):
    return [torch.full_like(v, 7.0, dtype=dtype) for v in values]


def clones(values):
    return [v.clone() for v in values]


def assert_same(left, right, **tolerance):
    cases.assert_same(left, right, **(tolerance or {"rtol": 0, "atol": 0}))
