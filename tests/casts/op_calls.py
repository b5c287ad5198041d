"""One call of every function in apex's lists, with the arguments of its operator's row."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.casts.op_rows import ARGUMENTS, arguments, floats, rows

LISTS = json.loads(
    (Path(__file__).parents[1] / "support/reference/apex_op_lists.json").read_text(encoding="utf-8")
)
HOLDERS = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": Tensor}


class Call(NamedTuple):
    namespace: str
    name: str
    category: str
    args: tuple[Any, ...]


_x, _y, _z = floats(2, 3), floats(2, 3, low=0.2), floats(2, 3, low=0.3, high=2.0)
_PAIRS = "add radd iadd div rdiv idiv truediv rtruediv itruediv mul rmul imul sub rsub isub"
_COMPARISONS = "eq ge gt le lt ne"
_OF_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys([*("add", "div", "mul", "sub"), *_COMPARISONS.split()], (_x, _y)),
    **{f"__{name}__": (_x, _y) for name in f"{_PAIRS} {_COMPARISONS}".split()},
    **dict.fromkeys(("__pow__", "__rpow__", "__ipow__"), (_z, 2.5)),
    "__matmul__": arguments("matmul")[0][0],
    "pow": (_z, _x),
    **dict.fromkeys(("cat", "stack"), ([_x, _y], 1)),
    "interpolate": (floats(1, 1, 3, 3), None, 2.0),
    "grid_sample": (floats(1, 1, 3, 3), floats(1, 2, 2, 2), "bilinear", "zeros", False),
    **dict.fromkeys(("softmin", "softmax", "log_softmax"), (_x, 1)),
    "local_response_norm": (floats(2, 4, 3), 2),
    "cross_entropy": (_x, torch.tensor([1, 0])),
    "multilabel_soft_margin_loss": (_x, (_y > 0.5).float()),
    "kl_div": (_x, _y, None, None, "batchmean"),
    "poisson_nll_loss": (_x, _y),
    "ctc_loss": ARGUMENTS["ctc_loss.Tensor"],
}


@functools.cache
def calls() -> list[Call]:
    """Returns a call for every name of every list."""
    return [
        Call(namespace, name, category, _arguments(name))
        for namespace, categories in LISTS.items()
        if namespace != "about"
        for category, names in categories.items()
        for name in names
    ]


def _arguments(name: str) -> tuple[Any, ...]:
    if name in _OF_FUNCTIONS:
        return _OF_FUNCTIONS[name]
    for row in (name, f"{name}.input"):
        if row in rows():
            return arguments(row)[0][0]
    return (_x,)
