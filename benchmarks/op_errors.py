"""Measures the error of each fp32 row in bf16, which decides the rows that O4 needs.

``python -m benchmarks.op_errors`` measures the running torch on the CPU and writes the table of the
documentation.

The inputs are exact in bf16. A call computes from them twice: in bf16, and in fp32 as in its row.
The row's gradient is then rounded to bf16, the dtype of the inputs. Both are compared with float64.
Errors are relative root mean squares. One rounding to bf16 is 0.0017 on average, 0.0039 at most.
"""

from __future__ import annotations

import csv
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apex._core.op_rows import OPERATORS, WITHOUT_BF16
from apex._core.op_table import OpTable, operators
from apex._engine.autocast import kernels

PATH = Path(__file__).parents[1] / "docs/_static/op_errors.csv"
LOW = torch.bfloat16
ROUNDING = 2.0**-8
"""The largest relative error of one rounding to bf16."""
AUTOCASTS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
CATEGORIES = ("fp32", "banned")
HEAD = ("name", "output in bf16", "gradient in bf16", "gradient by the row", "at O4")

Function = Callable[..., Any]


class Errors(NamedTuple):
    """The errors of one name, the largest of its calls; None without a kernel in bf16."""

    name: str
    output: float | None
    gradient: float | None
    gradient_of_row: float | None
    in_autocast: list[str]

    @property
    def range_only(self) -> bool:
        """Whether the name is in fp32 only because of the range of fp16."""
        if self.in_autocast or self.output is None:
            return False
        return self.output <= ROUNDING and self.gradient <= 1.05 * self.gradient_of_row

    @property
    def reason(self) -> str:
        """The reason for the name's dtype at O4."""
        if self.range_only:
            return "bf16: one rounding, as any operator without a row"
        if self.in_autocast:
            return f"fp32, as in torch.autocast on {', '.join(self.in_autocast)}"
        if self.output is None:
            return "fp32: no kernel in bf16"
        if self.output > ROUNDING:
            return f"fp32: {self.output / ROUNDING:.1f} roundings lost"
        return f"fp32: {self.gradient / self.gradient_of_row:.1f} times the gradient's error"


OTHERS = (
    "fused_moving_avg_obs_fake_quant",
    *("_sparse_addmm", "_sparse_mm", "sparse_sampled_addmm", "hspmm", "smm", "sspaddmm"),
    *("histogram", "histogramdd"),
)
"""Fake quantization, products of sparse tensors and histograms, which have no bf16 kernel."""


PUBLIC = ("softmax", "nll_loss", "pow")
"""Functions that share an operator with another function."""


def names() -> dict[str, tuple[str, ...]]:
    """Returns the names in fp32 at O1 that have kernels in bf16, with this torch's operators."""
    rows = OpTable.default().rows
    without_bf16 = {*WITHOUT_BF16.split(), *OTHERS}
    selected = set[str]()
    for op, category in rows.items():
        name = _name_of(op)
        if category in CATEGORIES and without_bf16.isdisjoint((op, name)):
            selected.add(name)
    for ops in OPERATORS.values():
        for op in ops.split():
            name = _name_of(op)
            if name not in PUBLIC:
                selected.discard(name)  # measured as the function that calls it
    for name, ops in OPERATORS.items():
        if without_bf16.isdisjoint(ops.split()):
            selected.add(name)
    selected.discard("__rpow__")  # measured as pow
    ops_by_name: dict[str, tuple[str, ...]] = {}
    for name in sorted(selected):
        overloads = operators(_namespace(name), name)
        ops_by_name[name] = tuple(op for op in overloads if op in rows)
    return ops_by_name


def _name_of(op: str) -> str:
    """Returns an operator's name without its overload."""
    return op.partition(".")[0]


def _namespace(name: str) -> str:
    return "torch.nn.functional" if hasattr(F, name) else "torch"


@functools.cache
def measured() -> tuple[Errors, ...]:
    """Measures every name."""
    return tuple(_errors(name, ops) for name, ops in names().items())


def _is_native(op: str, device: str) -> bool:
    # Of torch itself: a session's kernels stay registered until the process ends.
    return kernels.native_category(op, device) is not None


def _errors(name: str, ops: tuple[str, ...]) -> Errors:
    native = []
    for device_type, device in AUTOCASTS.items():
        if any(_is_native(op, device_type) for op in ops):
            native.append(device)
    try:
        errors_of_calls = [_compared(*call) for call in calls()[name]]
    except (NotImplementedError, RuntimeError):
        return Errors(name, None, None, None, native)
    outputs, grads, row_grads = zip(*errors_of_calls, strict=True)
    return Errors(name, max(outputs), max(grads), max(row_grads), native)


def _compared(fn: Function, *args: Tensor) -> tuple[float, float, float]:
    """Returns the errors of the output and the gradient in bf16, and of the row's gradient."""
    exact, exact_grad = _run(fn, args, torch.float64)
    low, low_grad = _run(fn, args, LOW)
    _, row_grad = _run(fn, args, torch.float32)
    output_error = _relative(low, exact)
    grad_error = _relative(low_grad.to(LOW), exact_grad)
    row_grad_error = _relative(row_grad.to(LOW), exact_grad)
    return output_error, grad_error, row_grad_error


def _run(fn: Function, args: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the outputs in one vector, and the gradient of the first argument."""
    args = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    leaf = args[0].detach().requires_grad_()
    outputs = fn(leaf, *args[1:])
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    generator = torch.Generator().manual_seed(1)
    output_grads = []
    for output in outputs:
        exact_in_bf16 = torch.randn(output.shape, generator=generator).to(LOW)
        output_grads.append(exact_in_bf16.to(output.dtype))
    (grad,) = torch.autograd.grad(outputs, leaf, output_grads)
    return torch.cat([output.detach().flatten() for output in outputs]), grad


def _relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


# -- calls ---------------------------------------------------------------------------------------

Call = tuple[Any, ...]
"""A function and its arguments; the gradient is taken of the first argument."""


def _normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _exact(torch.randn(shape or (64, 256)) * std + mean)


def _between(low: float, high: float, *shape: int) -> Tensor:
    return _exact(torch.rand(shape or (64, 256)) * (high - low) + low)


def _exact(values: Tensor) -> Tensor:
    return values.to(LOW).double()


def _along_rows(name: str) -> Function:
    return functools.partial(_function(name), dim=1)


@functools.cache
def calls() -> dict[str, list[Call]]:
    """Returns the calls that measure each name."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        calls_by_name: dict[str, list[Call]] = {}
        for name in names():
            calls_by_name[name] = [(_function(name), *_arguments(name))]
        calls_by_name.update(_calls())
    return calls_by_name


def _function(name: str) -> Function:
    # torch's names of losses are not the functional ones.
    function: Function = getattr(F, name, None) or getattr(torch, name)
    return function


def _arguments(name: str) -> tuple[Tensor, ...]:
    """Returns the arguments of a function that is called once, without options."""
    signs = torch.where(torch.rand(64, 256) > 0.5, 1.0, -1.0).double()
    classes = torch.randint(256, (64,))
    log_probs = _exact(_normal().log_softmax(1))
    arguments: dict[str, tuple[Tensor, ...]] = {
        **dict.fromkeys(("log", "log10", "log2", "reciprocal", "rsqrt"), (_between(0.01, 4.0),)),
        **dict.fromkeys(("acos", "asin", "erfinv"), (_between(-0.99, 0.99),)),
        "log1p": (_between(-0.9, 4.0),),
        "tan": (_between(-1.5, 1.5),),
        **dict.fromkeys(_PAIRED, (_normal(), _normal())),
        "binary_cross_entropy": (_between(0.01, 0.99), _between(0.0, 1.0)),
        "binary_cross_entropy_with_logits": (_normal(), _between(0.0, 1.0)),
        "cosine_embedding_loss": (_normal(), _normal(), signs[:, 0]),
        **dict.fromkeys(("cross_entropy", "multi_margin_loss"), (_normal(), classes)),
        **dict.fromkeys(("hinge_embedding_loss", "soft_margin_loss"), (_normal(), signs)),
        "kl_div": (log_probs, _between(0.001, 0.9)),
        "matrix_exp": (_normal(32, 32, std=0.1),),
        "pinverse": (_normal(32, 16),),
        "margin_ranking_loss": (_normal(64), _normal(64), signs[:, 0]),
        "multilabel_margin_loss": (_normal(), torch.randint(-1, 256, (64, 256))),
        "nll_loss": (log_probs, classes),
        "poisson_nll_loss": (_normal(), _between(0.0, 3.0)),
        "triplet_margin_loss": (_normal(), _normal(), _normal()),
    }
    return arguments.get(name, (_normal(),))


_PAIRED = (
    "cdist",
    "dist",
    "cosine_similarity",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
)


def _calls() -> dict[str, list[Call]]:
    """Returns the calls of functions that need options, or several calls."""
    offset = _normal(mean=4.0)
    weight = _normal(256)
    bias = _normal(256)
    images = _normal(2, 4, 16, 16)
    near_one = _normal(64, 64, mean=1.0, std=0.1)
    labels = torch.arange(1, 9).expand(4, 8)
    lengths = torch.full((4,), 8)
    by_name: dict[str, list[Call]] = {}
    for name in ("cumprod", "prod"):
        by_name[name] = [(_along_rows(name), near_one)]
    for name in ("cumsum", "sum"):
        by_name[name] = [(_along_rows(name), _between(0, 1))]
    by_name["logcumsumexp"] = [(_along_rows("logcumsumexp"), _normal(std=9.0))]
    for name in ("std", "std_mean", "var", "var_mean"):
        by_name[name] = [(_along_rows(name), _normal()), (_along_rows(name), offset)]
    for name in ("softmax", "softmin", "log_softmax", "logsumexp"):
        by_name[name] = [(_along_rows(name), _normal())]
    by_name["norm"] = [(functools.partial(torch.linalg.vector_norm, dim=1), _normal())]
    by_name["renorm"] = [(lambda x: x.renorm(2, 0, 1.0), _normal())]
    by_name["pow"] = [
        (lambda x: x.pow(3.5), _between(0.01, 4.0)),
        (torch.pow, _between(0.01, 4.0), _normal()),
    ]
    by_name["gelu"] = []
    for form in ("none", "tanh"):
        gelu = functools.partial(F.gelu, approximate=form)
        by_name["gelu"] += [(gelu, _normal()), (gelu, _between(-6.0, 6.0))]
    by_name["layer_norm"] = [(lambda x, w, b: F.layer_norm(x, [256], w, b), offset, weight, bias)]
    by_name["rms_norm"] = [(lambda x, w: F.rms_norm(x, [256], w), offset, weight)]
    by_name["group_norm"] = [(lambda x, w, b: F.group_norm(x, 4, w, b), offset, weight, bias)]
    by_name["interpolate"] = []
    for mode in ("nearest", "bilinear", "bicubic"):
        for scale in (2.0, 0.6):
            resize = functools.partial(F.interpolate, scale_factor=scale, mode=mode)
            by_name["interpolate"].append((resize, images))
    sample = functools.partial(F.grid_sample, align_corners=False)
    by_name["grid_sample"] = [(sample, images, _between(-1, 1, 2, 8, 8, 2))]
    log_probs = _exact(_normal(32, 4, 16).log_softmax(2))
    by_name["ctc_loss"] = [(lambda x: F.ctc_loss(x, labels, 4 * lengths, lengths), log_probs)]
    return by_name


def cells(errors: Errors) -> tuple[str, ...]:
    """Returns a name's line of the table."""
    figures = (errors.output, errors.gradient, errors.gradient_of_row)
    shown = ["-" if figure is None else f"{figure:.4f}" for figure in figures]
    return f"``{errors.name}``", *shown, errors.reason


def main() -> None:
    """Writes the table."""
    with PATH.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *map(cells, measured())])
    print(f"wrote {PATH}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
