"""Arguments for every operator of the op table, as the dispatcher gets them."""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from apex._core.op_table import AutocastSpec, OpTable
from apex._engine import registry
from apex._engine.autocast.region import AutocastRegion
from apex._engine.autocast.weights import Weights
from apex._torch import dispatcher

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

MPS = pytest.param(
    "mps",
    marks=pytest.mark.skipif(
        dispatcher.TORCH_VERSION < (2, 9),
        reason="this torch asks for MPS's driver, or lacks its conv3d",
    ),
)


def floats(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Returns values in (low, high), exact in bfloat16 and float16, the same at every call."""
    count = torch.Size(shape).numel()
    steps = (torch.arange(count, dtype=torch.float32) * 37 + 11).remainder(64) / 64
    return (low + (high - low) * steps).bfloat16().half().float().reshape(shape)


def signs(*shape: int) -> Tensor:
    return torch.where(floats(*shape) > 0.5, 1.0, -1.0)


_x, _y, _z = floats(2, 3), floats(2, 3, low=0.2), floats(2, 3, low=0.3, high=2.0)
_square = floats(3, 3) + torch.eye(3)
_classes = torch.tensor([1, 0])
_definite = torch.tensor([[0.875, 0.25, 0.125], [0.25, 0.75, 0.25], [0.125, 0.25, 0.8125]])
_tall, _signal = floats(3, 2), floats(2, 8)
_tensor = (floats(6, 6) + 2 * torch.eye(6)).reshape(2, 3, 6)
_pivots = torch.tensor([1, 2, 3], dtype=torch.int32)
_logits = floats(2, 3, low=-9.0, high=9.0)
_CONVOLUTIONS = {
    "conv1d": (floats(2, 3, 8), floats(4, 3, 3), floats(4)),
    "conv2d": (floats(2, 3, 5, 5), floats(4, 3, 3, 3), floats(4)),
    "conv3d": (floats(1, 2, 4, 4, 4), floats(3, 2, 3, 3, 3), floats(3)),
}
_LOG_PROBS = F.log_softmax(floats(4, 2, 3), 2)
_LABELS, _TIMES, _LENGTHS = torch.tensor([[1, 2], [2, 1]]), [4, 4], [2, 2]


def _in_place(row: str) -> str:
    name, dot, overload = row.partition(".")
    return f"{name}_{dot}{overload}"


def _resized(row: str) -> tuple[Any, ...]:
    """Returns an image for a row of ``F.interpolate``, and twice its size or that factor."""
    count = int(row[row.index("d") - 1]) if "nearest" in row else int(row.split("d")[0][-1])
    corners = () if "nearest" in row else (False,)
    image = floats(1, 2, *[4] * count)
    if row.endswith(".vec"):
        return (image, None, *corners, [2.0] * count)
    return (image, [8] * count, *corners)


def _cell(gates: int, states: int) -> tuple[Any, ...]:
    hidden: Any = floats(2, 3)
    if states == 2:
        hidden = [hidden, floats(2, 3, low=0.2)]
    rows = gates * 3
    return (floats(2, 4), hidden, floats(rows, 4), floats(rows, 3), floats(rows), floats(rows))


def _network(gates: int, states: int, *, packed: bool) -> tuple[Any, ...]:
    rows = gates * 3
    hidden: Any = floats(1, 2, 3)
    if states == 2:
        hidden = [hidden, floats(1, 2, 3, low=0.2)]
    weights = [floats(rows, 4), floats(rows, 3), floats(rows), floats(rows)]
    if packed:
        data = (floats(5, 4), torch.tensor([2, 2, 1]))
        return (*data, hidden, weights, True, 1, 0.0, True, False)
    return (floats(3, 2, 4), hidden, weights, True, 1, 0.0, True, False, False)


_INDEX, _PLACES = torch.tensor([1]), torch.tensor([[1, 0, 1]])
_WRITES = {
    **dict.fromkeys(("index_add", "index_copy"), (_x, 0, _INDEX, floats(1, 3))),
    "index_put": (_x, [_INDEX], floats(1, 3)),
    "index_reduce": (_x, 0, _INDEX, floats(1, 3), "prod"),
    "masked_scatter": (_x, torch.tensor([True, False, True]), _y),
    "put": (_x, _INDEX, floats(1)),
    **dict.fromkeys(("scatter_add", "scatter.src"), (_x, 0, _PLACES, floats(1, 3))),
    "scatter.reduce": (_x, 0, _PLACES, floats(1, 3)),
    "scatter_reduce.two": (_x, 0, _PLACES, floats(1, 3), "amax"),
}
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    _coo, _csr = _square.to_sparse(), _square.to_sparse_csr()
_SPARSE = {
    "_sparse_mm": (_coo, _tall),
    "_sparse_mm.reduce": (_csr, _tall, "sum"),
    "_sparse_addmm": (_tall, _coo, _tall),
    "sparse_sampled_addmm": (_csr, _tall, _x),
    **dict.fromkeys(("smm", "hspmm"), (_coo, _tall)),
    "sspaddmm": (_coo, _coo, _square),
}

_GATES = {"lstm": (4, 2), "gru": (3, 1), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}

# Weights, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights.
_BAG = (_x, torch.tensor([0, 1, 1]), torch.tensor([0, 2]), False, 0, False, floats(3))

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **_CONVOLUTIONS,
    **{f"{name}.padding": (*args, [1], "same") for name, args in _CONVOLUTIONS.items()},
    "conv_transpose1d": (floats(2, 3, 8), floats(3, 4, 3), floats(4)),
    "conv_transpose2d.input": (floats(2, 3, 5, 5), floats(3, 4, 3, 3), floats(4)),
    "conv_transpose3d.input": (floats(1, 2, 3, 3, 3), floats(2, 3, 3, 3, 3), floats(3)),
    "conv_tbc": (floats(5, 2, 3), floats(3, 3, 4), floats(4)),
    "prelu": (signs(2, 3, 4) * floats(2, 3, 4), floats(3)),
    "addmv": (floats(2), floats(2, 4), floats(4)),
    "addr": (floats(2, 3), floats(2), floats(3)),
    "addbmm": (floats(2, 3), floats(5, 2, 4), floats(5, 4, 3)),
    "baddbmm": (floats(5, 2, 3), floats(5, 2, 4), floats(5, 4, 3)),
    "mv": (floats(2, 4), floats(4)),
    "bmm": (floats(5, 2, 4), floats(5, 4, 3)),
    "_grouped_mm": (floats(6, 8), floats(2, 8, 8), torch.tensor([4, 6], dtype=torch.int32)),
    "einsum": ("ij,jk->ik", [floats(2, 4), floats(4, 3)]),
    **{f"{name}_cell": _cell(*shape) for name, shape in _GATES.items()},
    **{f"{name}.input": _network(*shape, packed=False) for name, shape in _GATES.items()},
    **{f"{name}.data": _network(*shape, packed=True) for name, shape in _GATES.items()},
    "linalg_matrix_norm": (_x, 2),
    "nuclear_norm.dim": (_x, [0, 1]),
    "layer_norm": (_x, [3], floats(3), floats(3)),
    "group_norm": (floats(2, 4, 3), 2, floats(4), floats(4)),
    "rms_norm": (_x, [3], floats(3)),
    "cosine_embedding_loss": (_x, _y, signs(2)),
    "multilabel_margin_loss": (_x, torch.tensor([[1, 0, -1], [2, -1, 0]])),
    "multi_margin_loss": (_x, _classes),
    "grid_sampler": (floats(1, 1, 3, 3), floats(1, 2, 2, 2), 0, 0, False),
    **dict.fromkeys(("nll_loss_nd", "nll_loss"), (-_x, _classes)),
    "nll_loss2d": (-floats(1, 3, 2, 2), torch.tensor([[[1, 0], [2, 1]]])),
    "ctc_loss.IntList": (_LOG_PROBS, _LABELS, _TIMES, _LENGTHS),
    "ctc_loss.Tensor": (_LOG_PROBS, _LABELS, torch.tensor(_TIMES), torch.tensor(_LENGTHS)),
    "cross": (_x, _y, 1),
    **dict.fromkeys(("meshgrid", "cartesian_prod"), ([floats(2), floats(3)],)),
    "embedding_bag": _BAG,
    "bilinear": (floats(2, 3), floats(2, 4), floats(5, 3, 4), floats(5)),
    **dict.fromkeys(("dot", "vdot"), (floats(4), floats(4, low=0.2))),
    "convolution": (floats(2, 3, 8), floats(4, 3, 3), floats(4), [1], [0], [1], False, [0], 1),
    "histogram.bins_tensor": (_x, torch.tensor([0.0, 0.5, 1.0])),
    "histogramdd": (_tall, [2, 2]),
    "histogramdd.TensorList_bins": (_tall, [torch.tensor([0.0, 0.5, 1.0])] * 2),
    "special_zeta": (_z + 1, _z),
    **_WRITES,
    **{_in_place(row): args for row, args in _WRITES.items()},
    **_SPARSE,
    "fused_moving_avg_obs_fake_quant": (
        *(_x, torch.tensor([1]), torch.tensor([1]), torch.zeros(1), torch.ones(1)),
        *(torch.ones(1), torch.zeros(1, dtype=torch.int32), 0.1, 0, 255, 0),
    ),
    "view_as_complex": (_tall,),
    **dict.fromkeys(("quantile", "nanquantile"), (_x, torch.tensor([0.25, 0.5]))),
    **dict.fromkeys(("orgqr", "linalg_householder_product"), (_tall, floats(2))),
    "ormqr": (_tall, floats(2), _square),
    "stft": (_signal, 4, None, None, torch.ones(4), False, True, True),
    "stft.center": (_signal, 4, None, None, torch.ones(4), True, "reflect", False, True, True),
    **{f"linalg_{name}": (_definite, _pivots, _tall) for name in ("ldl_solve", "lu_solve")},
    "linalg_cond.p_str": (_square, "fro"),
    "linalg_matrix_rank.tol_tensor": (_square, torch.tensor(0.25)),
    "linalg_tensorinv": (_tensor,),
    "linalg_tensorsolve": (_tensor, _x),
}

_WITH_OPTIONS: dict[str, list[Arguments]] = {
    "cross_entropy_loss": [
        ((_logits, _classes), {}),
        ((_logits, _classes, floats(3)), {"label_smoothing": 0.3}),
        ((_logits, floats(2, 3)), {}),
        ((_logits, floats(2, 3), floats(3)), {"label_smoothing": 0.3, "reduction": 2}),
        ((floats(1, 3, 2, low=-9.0, high=9.0), torch.tensor([[2, 0]])), {"label_smoothing": 0.1}),
    ],
    "meshgrid.indexing": [(([floats(2), floats(3)],), {"indexing": "xy"})],
    "embedding_bag.padding_idx": [((*_BAG, False, None), {})],
    "norm.ScalarOpt_dtype": [((_x, 2), {"dtype": torch.float32})],
    "norm.ScalarOpt_dim_dtype": [((_x, 2, [1], False), {"dtype": torch.float32})],
    "linalg_solve_triangular": [((_definite, _tall), {"upper": True})],
    **{
        f"{name}.reduce": [(_WRITES["scatter.reduce"], {"reduce": "add"})]
        for name in ("scatter", "scatter_")
    },
}


_NUMBERS: dict[str, Any] = {"int": 1, "List[int]": [1], "number": 0.5, "float": 0.5, "bool": True}
_NUMBERS |= {"Optional[number]": 0.5, "Optional[List[int]]": [1]}


def _of_schema(row: str) -> tuple[Any, ...]:
    """Returns arguments by their types: definite matrices, each another one, and numbers."""
    matrices = (_definite * (1 - index / 8) for index in itertools.count())
    found: list[Any] = []
    for argument in dispatcher.overload(row)._schema.arguments:
        if argument.has_default_value() or argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            found.append(next(matrices))
        elif kind == "List[Tensor]":
            found.append([next(matrices), next(matrices)])
        else:
            found.append(_NUMBERS[kind])
    return tuple(found)


def arguments(row: str) -> list[Arguments]:
    """Returns the arguments of each call that a row is tested with."""
    if row in _WITH_OPTIONS:
        return _WITH_OPTIONS[row]
    if "upsample" in row:
        return [(_resized(row), {})]
    plain = row if row in ARGUMENTS else row.removesuffix("_")
    if row.endswith(".out"):
        return []  # test_op_table.py
    return [(ARGUMENTS[plain] if plain in ARGUMENTS else _of_schema(row), {})]


NO_KERNEL = {"_grouped_mm"} if dispatcher.TORCH_VERSION == (2, 8) else set()
"""Rows whose operator has no kernel for a CPU."""


@functools.cache
def rows(device: str = "cpu") -> list[str]:
    """Returns every row that is called by itself, of those that this torch has.

    The emulated device has no sparse tensors, and CUDA has no histograms.
    """
    known = [row for row in OpTable.default().rows if row not in NO_KERNEL and arguments(row)]
    return [r for r in known if device == "cpu" or not (r in _SPARSE or "histogram" in r)]


def floating(value: Any) -> list[Tensor]:
    """Returns the floating tensors in ``value`` in order, complex ones as real."""
    if isinstance(value, Tensor):
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return [value] if value.is_floating_point() else []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in floating(item)]
    return []


def called(row: str, args: Any, kwargs: Any) -> Any:
    """Calls a row's operator, if it writes into its arguments on copies of them."""
    if row.partition(".")[0].endswith("_") or row == "fused_moving_avg_obs_fake_quant":
        args = tree_map_only(Tensor, torch.clone, args)
    return dispatcher.overload(row)(*args, **kwargs)


def placed(row: str, args: Any, device: str) -> Any:
    """Returns the arguments on a device, but the lengths of packed sequences on the host."""
    there = tree_map_only(Tensor, lambda tensor: tensor.to(device), args)
    return (there[0], args[1].cpu(), *there[2:]) if row.endswith(".data") else there


def convert(value: Any, *dtypes: torch.dtype, device: str = "cpu") -> Any:
    """Copies ``value``, its floating tensors in the dtypes in turn, the last repeated."""
    left = list(dtypes)

    def placed(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if tensor.is_floating_point():
            dtype = left.pop(0) if len(left) > 1 else left[0]
        return tensor.detach().to(device, dtype, copy=True)

    return tree_map_only(Tensor, placed, value)


def mixes(args: Any, low: torch.dtype) -> Iterator[list[torch.dtype]]:
    """Yields the dtypes that the call's tensors are given, the last repeated."""
    yield from ([torch.float32], [low])
    if len(floating(args)) > 1:
        yield from ([low, torch.float32], [torch.float32, low])


class Region(AutocastRegion):
    """Stands for a session, too: one that casts, without models and optimizers."""

    made_by = "suggest"
    is_ambient = follows_other_steps = False
    thread = None
    models = members = ()

    def __init__(self, spec: AutocastSpec) -> None:
        super().__init__(spec)
        registry.live.add(self)  # as a session

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self.casts(Weights(), args, kwargs):
            return fn(*args, **kwargs)


def region_of(low: torch.dtype, device: str = "cpu") -> Region:
    """Returns a region that casts by the op table."""
    return Region(AutocastSpec(low, (device,), OpTable.default()))
