"""How large an operator's error is by norm, and may be: bounds from dtype, shape and operator.

Note [Tolerance]
    An operator in low precision rounds its result once: relative to the result's norm, by at most
    the dtype's unit roundoff u (eps / 2), plus what underflows, half the smallest subnormal for
    each element. torch's kernels accumulate 16-bit sums in fp32, which adds u32 * sqrt(n) for n
    terms (rounding errors are independent: Higham and Mary, SISC 2019). Kernels that accumulate in
    the tensor itself (scatters, the gradient of an embedding) round n times: u * sqrt(n).

    It also passes on the errors of its inputs. A well-conditioned operator multiplies them by a
    small constant; ``AMPLIFICATION`` is the constant that counts as small, for its own rounding
    too, because fused kernels round more than once. So::

        tolerance = AMPLIFICATION * (inherited + u) + bound of the sum + underflow

    The size of a result is its norm. A sum of n terms of both signs may be far smaller than its
    terms by chance, or by construction: a bias before a batch norm and the bias of an attention's
    keys have no gradient, and those of a Wasserstein loss's two means nearly cancel. That is no
    loss of digits, so in a backward pass and in small results a sum's size is that of the sum of
    absolute values, as in Skeel's condition number.

Note [Chains]
    Each step of a running sum explains its error by that of the step before, so none would stand
    out. A chain of linear elementwise operators (an accumulation, an EMA, a residual stream)
    therefore counts as one operator: what a chain inherits is the largest error among the values
    that enter it. ``Shadow.entry`` carries it from one operator of a chain to the next. In a sum,
    an operand's error counts by the operand's share of the largest one.

Note [Small changes]
    ``average.mul_(0.999)`` in bf16 changes nothing: half of bf16's eps is 0.002. By norm that is an
    error within one rounding, but an average that is updated so stands still, iteration for
    iteration. So where a number close to 1 multiplies a value, or a ``lerp`` moves it, the error is
    also measured relative to the change that fp32 makes, and is lost from ``LOST_CHANGE`` on. The
    same holds for the running mean of a batch norm with a small momentum. It does not hold for an
    activation, ``0.999 * layer(x)``, whose next value does not start from this one.

Note [Decisions]
    Where an operator decides (the sign in the gradient of a relu, the index of a maximum, a
    dropout), the shadow takes the decision of the low-precision run. Otherwise the few elements
    for which rounding changed it would dominate the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex.debug import tracing
from apex.debug.tracing import Call

AMPLIFICATION = 4.0

LOST_CHANGE = 0.5

LOST_RESIDUAL = 0.5
"""Error up to which cancellation in the residual of a regression is none."""

SMALL = 2.0**-4
"""Changes by a larger share are no small ones."""

LOST_GRADIENT = 0.1
"""Share of a gradient's norm that may underflow."""

_LEAST_NUMBER = 1e-3
"""Smaller numbers that are added are an epsilon, which may be lost."""

_MASK = -1000.0
"""Values below this may be those of a mask."""

_DECIDED = 0.9
"""Probability from which a row of a softmax counts as decided."""


# -- operators, by their base names ----------------------------------------------------------------

MOVES = {
    "to_copy",
    "copy",
    "clone",
    "cat",
    "stack",
    "repeat",
    "roll",
    "flip",
    "where",
    "constant_pad_nd",
    "embedding",
    "gather",
    "index",
    "index_select",
    "masked_select",
    "masked_fill",
    "select_backward",
    "slice_backward",
}
"""Operators that only move values, so that they can lose no more than a cast."""

DIFFERENCES = {"add", "sub", "rsub"}

LINEAR = MOVES | DIFFERENCES | {"mul", "div", "neg", "lerp", "addcmul"}
"""Operators that continue a chain; see Note [Chains]."""

SUMS_OF_OPERANDS = DIFFERENCES | {"cat", "stack", "lerp"}
"""Operators to whose result each input contributes by its size."""

DECIDED_BY_SECOND = {
    "threshold_backward",
    "leaky_relu_backward",
    "hardtanh_backward",
    "hardswish_backward",
    "hardsigmoid_backward",
    "hardshrink_backward",
    "softshrink_backward",
    "prelu_kernel_backward",
}
"""Operators that decide on the sign of their second argument; see Note [Decisions]."""

DECISIONS = {
    "sign",
    "sgn",
    "round",
    "floor",
    "ceil",
    "trunc",
    "heaviside",
    "frac",
    "amp_update_scale",
}
"""Operators whose result is a decision."""

_SUMS = {
    "add",
    "sum",
    "mean",
    "mm",
    "bmm",
    "mv",
    "dot",
    "addmm",
    "addmv",
    "addbmm",
    "baddbmm",
    "linear",
    "convolution",
    "convolution_backward",
}
_IN_PLACE_SUMS = {
    "embedding_dense_backward",
    "index_add",
    "scatter_add",
    "index_put",
    "index_put_impl",
    "put",
    "scatter_reduce",
}
"""Operators that sum in the tensor itself; see Note [Tolerance]."""

_NORM_BACKWARDS = {
    "native_layer_norm_backward": ("rstd", "weight"),
    "native_batch_norm_backward": ("save_invstd", "weight"),
    "native_group_norm_backward": ("rstd", "weight"),
    "cudnn_batch_norm_backward": ("save_var", "weight"),
}
_RESIDUALS = ("mse_loss", "smooth_l1_loss", "huber_loss", "nll_loss")
SOFTMAXES = {"softmax", "log_softmax", "safe_softmax"}


class Distance(NamedTuple):
    """The norms of a difference from a shadow, and of the shadow."""

    difference: float
    size: float

    @property
    def relative(self) -> float:
        """The difference relative to the shadow."""
        return self.difference / self.size if self.size else math.inf if self.difference else 0.0


def distance(values: Tensor, shadow: Tensor) -> Distance:
    """Returns the distance of a value from its shadow, masked elements left out.

    Masked are elements that are infinite or NaN on either side and, where a mask was added, those
    far below all others: their size would hide the error of the rest.
    """
    values = tracing.real(values)
    shadow = tracing.real(shadow)
    if not values.numel():
        return Distance(0.0, 0.0)
    wide = values.double()
    shadow = shadow.double()
    known = torch.isfinite(wide) & torch.isfinite(shadow)
    shadow = torch.where(known, shadow, 0.0)
    difference = torch.where(known, wide, 0.0) - shadow
    least = float(shadow.amin())  # sync: tracing is a diagnosis, here and below
    if least < _MASK:
        masked = shadow < least / 2
        rest = torch.where(masked, 0.0, shadow)
        if 50.0 * float(rest.abs().amax()) < -least and not bool(masked.all()):
            shadow = rest
            difference = torch.where(masked, 0.0, difference)
    return Distance(norm(difference), norm(shadow))


def distance_of_probabilities(
    values: Tensor, shadow: Tensor, dim: int, *, is_log: bool
) -> Distance:
    """Returns the distance of a softmax from its shadow, over the rows that are not yet decided.

    Rows in which one probability is almost 1 are exact whatever the logits' errors are, and would
    hide those of the others.
    """
    values = values.double()
    shadow = shadow.double()
    if is_log:
        values = values.exp()
        shadow = shadow.exp()
    open_rows = shadow.amax(dim, keepdim=True) < _DECIDED
    return distance(torch.where(open_rows, values, 0.0), torch.where(open_rows, shadow, 0.0))


def changed_a_little(call: Call) -> int | None:
    """Returns the place of the argument that a call changes by a small share.

    See Note [Small changes].
    """
    args = call.args
    if call.base == "native_batch_norm":
        training = args[5]
        momentum = args[6]
        return 3 if training and 0.0 < momentum < SMALL else None  # its running mean
    if not args or not isinstance(first_of(args[0]), Tensor):
        return None
    number = args[-1]
    if call.base in ("add", "sub"):  # a running sum, a counter
        lasts = 0 in call.traits.writes or first_of(args[0]).numel() == 1
        is_epsilon = isinstance(number, int | float) and abs(number) < _LEAST_NUMBER
        return 0 if lasts and not is_epsilon else None
    if not isinstance(number, float):
        return None
    if call.base in ("mul", "div"):
        return 0 if 0.0 < abs(number - 1.0) < SMALL else None
    return 0 if call.base == "lerp" and 0.0 < number < SMALL else None


def first_of(values: Any) -> Any:
    """Returns the first of a list, as foreach operators take it; another value itself."""
    return values[0] if isinstance(values, list | tuple) and values else values


def is_residual(name: str, *, inside: bool) -> bool:
    """Returns whether an operator computes a regression's residual, inside a model or outside.

    It is a small difference by its purpose, of which the next step needs few digits.
    """
    return name.startswith(_RESIDUALS) or (name == "sub" and not inside)


def without_masked_rows(low: Tensor, high: Tensor, logits: Tensor, dim: int) -> Tensor:
    """Returns the shadow of a softmax, with the run's own values in rows that are all masked."""
    masked = logits.amax(dim, keepdim=True) < _MASK
    return torch.where(masked, low, high)


def roundoff(dtype: torch.dtype) -> float:
    """Returns the unit roundoff, half of eps."""
    return torch.finfo(dtype).eps / 2


def sum_bound(call: Call, result: Tensor) -> float:
    """Returns the part of the relative bound that grows with the number of terms of a sum."""
    if call.base in _IN_PLACE_SUMS:
        return roundoff(result.dtype) * math.sqrt(_repeats(call.args))
    if call.base in _SUMS:
        terms = max((t.numel() for t in call.args if isinstance(t, Tensor)), default=1)
        return roundoff(torch.float32) * math.sqrt(terms)
    return 0.0


def within_range(values: Tensor, shadow: Tensor) -> Tensor:
    """Returns the shadow, with ``values`` themselves where they or their dtype overflow."""
    out = ~values.isfinite() | (shadow.abs() > torch.finfo(values.dtype).max)
    return torch.where(out, values, shadow)


def least_sizes(in_fp32: Call) -> list[float]:
    """Returns, for each result of a sum, its norm if all terms had one sign; of others, nothing."""
    name = in_fp32.base
    args = in_fp32.args
    if name in _SUMS | _IN_PLACE_SUMS:
        sums = in_fp32._replace(args=[*map(_absolute, args)]).run()
        sums = [sums] if isinstance(sums, Tensor) else sums
        return [0.0 if each is None else norm(each) for each in sums]
    if name == "softmax_backward_data":
        return [norm(args[0] * args[1])]
    if name == "log_softmax_backward_data":
        return [norm(args[0])]
    if name in _NORM_BACKWARDS:
        gain = 1.0
        for argument, value in zip(in_fp32.func._schema.arguments, args, strict=False):
            if argument.name in _NORM_BACKWARDS[name] and isinstance(value, Tensor):
                gain *= norm(value) / math.sqrt(max(1, value.numel()))
        grad = norm(args[0])
        return [grad * gain, grad, grad]
    return []


def norm(values: Tensor) -> float:
    """Returns the 2-norm, in double."""
    return float(torch.linalg.vector_norm(values.double()))  # sync: tracing is a diagnosis


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def _repeats(args: Sequence[Any]) -> int:
    """Returns how often the most frequent index occurs in the index tensors of a call."""
    most = 1
    for value in args:
        for index in value if isinstance(value, list | tuple) else [value]:
            if isinstance(index, Tensor) and index.dtype is torch.int64 and index.numel():
                counts = torch.unique(index, return_counts=True)[1]
                most = max(most, int(counts.max()))  # sync: tracing is a diagnosis
    return most
