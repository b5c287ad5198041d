"""One call of every function in apex's lists: its arguments, with values inside its domain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LISTS = json.loads(
    (Path(__file__).parents[1] / "support/reference/apex_op_lists.json").read_text(encoding="utf-8")
)
HOLDERS = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": Tensor}


class Call(NamedTuple):
    namespace: str
    name: str
    category: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def floats(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Returns values in (low, high), exact in bfloat16 and float16, the same at every call."""
    count = torch.Size(shape).numel()
    steps = (torch.arange(count, dtype=torch.float32) * 37 + 11).remainder(64) / 64
    return (low + (high - low) * steps).bfloat16().half().float().reshape(shape)


def signs(*shape: int) -> Tensor:
    return torch.where(floats(*shape) > 0.5, 1.0, -1.0)


_x, _y, _z = floats(2, 3), floats(2, 3, low=0.2), floats(2, 3, low=0.3, high=2.0)
_classes = torch.tensor([1, 0])
_conv = {
    "conv1d": (floats(2, 3, 8), floats(4, 3, 3), floats(4)),
    "conv2d": (floats(2, 3, 5, 5), floats(4, 3, 3, 3), floats(4)),
    "conv3d": (floats(1, 2, 4, 4, 4), floats(3, 2, 3, 3, 3), floats(3)),
    "conv_transpose1d": (floats(2, 3, 8), floats(3, 4, 3), floats(4)),
    "conv_transpose2d": (floats(2, 3, 5, 5), floats(3, 4, 3, 3), floats(4)),
    "conv_transpose3d": (floats(1, 2, 3, 3, 3), floats(2, 3, 3, 3, 3), floats(3)),
    "conv_tbc": (floats(5, 2, 3), floats(3, 3, 4), floats(4)),
}
_products = {
    "prelu": (signs(2, 3, 4) * floats(2, 3, 4), floats(3)),
    "addmm": (floats(2, 3), floats(2, 4), floats(4, 3)),
    "addmv": (floats(2), floats(2, 4), floats(4)),
    "addr": (floats(2, 3), floats(2), floats(3)),
    "matmul": (floats(2, 4), floats(4, 3)),
    "mm": (floats(2, 4), floats(4, 3)),
    "mv": (floats(2, 4), floats(4)),
    "addbmm": (floats(2, 3), floats(5, 2, 4), floats(5, 4, 3)),
    "baddbmm": (floats(5, 2, 3), floats(5, 2, 4), floats(5, 4, 3)),
    "bmm": (floats(5, 2, 4), floats(5, 4, 3)),
    "__matmul__": (floats(2, 4), floats(4, 3)),
    "linear": (floats(2, 4), floats(3, 4), floats(3)),
}
_binary = ["atan2", "add", "div", "mul", "sub", "eq", "equal", "ge", "gt", "le", "lt", "ne", "dist"]
_dunder = [
    "add",
    "radd",
    "iadd",
    "div",
    "rdiv",
    "idiv",
    "truediv",
    "rtruediv",
    "itruediv",
    "mul",
    "rmul",
    "imul",
    "sub",
    "rsub",
    "isub",
]
_special: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_binary, (_x, _y)),
    **{f"__{name}__": (_x, _y) for name in [*_dunder, *["eq", "ge", "gt", "le", "lt", "ne"]]},
    **dict.fromkeys(("addcmul", "addcdiv"), (_x, _y, _z)),
    **dict.fromkeys(("cumsum", "cumprod"), (_x, 1)),
    "pow": (_z, _x),
    "__pow__": (_z, 2.5),
    "__rpow__": (_z, 2.5),
    "__ipow__": (_z, 2.5),
    "renorm": (_x, 2, 0, 0.5),
    "cross": (_x, _y, 1),
    "dot": (floats(4), floats(4, low=0.2)),
    "bilinear": (floats(2, 3), floats(2, 4), floats(5, 3, 4), floats(5)),
    "cat": ([_x, _y], 1),
    "stack": ([_x, _y], 1),
    "interpolate": (floats(1, 1, 3, 3), None, 2.0),
    "grid_sample": (floats(1, 1, 3, 3), floats(1, 2, 2, 2), "bilinear", "zeros", False),
    "softmin": (_x, 1),
    "softmax": (_x, 1),
    "log_softmax": (_x, 1),
    "layer_norm": (_x, [3], floats(3), floats(3)),
    "group_norm": (floats(2, 4, 3), 2, floats(4), floats(4)),
    "local_response_norm": (floats(2, 4, 3), 2),
    "cosine_similarity": (_x, _y),
    "cosine_embedding_loss": (_x, _y, signs(2)),
    "cross_entropy": (_x, _classes),
    "nll_loss": (-_x, _classes),
    "hinge_embedding_loss": (_x, signs(2, 3)),
    "margin_ranking_loss": (floats(4), floats(4, low=0.3), signs(4)),
    "multilabel_margin_loss": (_x, torch.tensor([[1, 0, -1], [2, -1, 0]])),
    "multilabel_soft_margin_loss": (_x, (_y > 0.5).float()),
    "multi_margin_loss": (_x, _classes),
    "soft_margin_loss": (_x, signs(2, 3)),
    "triplet_margin_loss": (_x, _y, _z),
    "kl_div": (_x, _y, None, None, "batchmean"),
    "ctc_loss": (
        F.log_softmax(floats(4, 2, 3), 2),
        torch.tensor([[1, 2], [2, 1]]),
        torch.tensor([4, 4]),
        torch.tensor([2, 2]),
    ),
    **dict.fromkeys(
        (
            *("poisson_nll_loss", "l1_loss", "mse_loss", "smooth_l1_loss"),
            *("binary_cross_entropy_with_logits", "binary_cross_entropy"),
        ),
        (_x, _y),
    ),
}


def calls() -> list[Call]:
    """Returns a call for every name of every list."""
    return [
        Call(namespace, name, category, _arguments(name), {})
        for namespace, categories in LISTS.items()
        if namespace != "about"
        for category, names in categories.items()
        for name in names
    ]


def _arguments(name: str) -> tuple[Any, ...]:
    return {**_conv, **_products, **_special}.get(name, (_x,))


def convert(value: Any, *dtypes: torch.dtype, device: str = "cpu") -> Any:
    """Returns ``value`` with its floating tensors in the dtypes in turn, the last repeated."""
    left = list(dtypes)

    def visit(item: Any) -> Any:
        if isinstance(item, Tensor):
            item = item.to(device)
            if not item.is_floating_point():
                return item
            return item.to(left.pop(0) if len(left) > 1 else left[0])
        if isinstance(item, list | tuple):
            return type(item)([visit(part) for part in item])
        return item

    return visit(value)


def tensor_dtypes(value: Any) -> list[torch.dtype]:
    """Returns the dtypes of the floating tensors in ``value`` in order."""
    if isinstance(value, Tensor):
        return [value.dtype] if value.is_floating_point() else []
    if isinstance(value, list | tuple):
        return [dtype for item in value for dtype in tensor_dtypes(item)]
    return []
