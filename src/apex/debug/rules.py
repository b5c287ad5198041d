"""Measures an operator's error by norm, and the largest error that dtype, shape and kind explain.

Note [Tolerance]
    An operator in low precision rounds its result once. Relative to the result's norm, the error
    is at most the dtype's unit roundoff u (eps / 2). Underflow adds at most half the smallest
    subnormal for each element. torch's kernels accumulate 16-bit sums in fp32, which adds next to
    nothing. Kernels that accumulate in the tensor itself (scatters, the gradient of an embedding)
    round n times, which adds u * sqrt(n): rounding errors are independent (Higham and Mary, SISC
    2019).

    The result also contains the errors of the inputs. A well-conditioned operator multiplies them
    by a small constant, of which ``AMPLIFICATION`` is the largest. It also multiplies u, because
    fused kernels round more than once::

        tolerance = AMPLIFICATION * (inherited + u) + bound of the sum + underflow

    The relative error of an exponential is the absolute error of its argument. So arguments of
    usual size, up to ``LARGEST_LOGIT``, add this multiple of the inherited error.

    The size of a result is its norm. A sum of n terms of both signs may be far smaller than its
    terms, by chance or by construction. For example, a bias before a batch norm and the bias of an
    attention's keys have no gradient. The gradients of a Wasserstein loss's two means nearly
    cancel. Such a sum loses no digits. Therefore the terms' absolute values determine the size of a
    small sum, of a product with a few columns, and of any sum in a backward pass (Skeel's condition
    number).

Note [Chains]
    In a running sum, the error of one step explains the error of the next. No step would exceed
    its tolerance. Therefore a chain of linear elementwise operators (an accumulation, an
    EMA, a residual stream) counts as one operator. A chain inherits the largest error among the
    values that enter it; ``Shadow.entry`` carries this error from one operator to the next. In a
    sum in 16 bits, an operand's error is weighted by the operand's size relative to the largest
    operand. A sum in fp32 does not round: a later difference may bring back an operand's own error.

Note [Small changes]
    ``average.mul_(0.999)`` in bf16 changes nothing, because half of bf16's eps is 0.002. By norm,
    this error is within one rounding, but an average that is updated so never changes. Therefore
    the error of a small change is also measured relative to the change that fp32 makes. From
    ``LOST_CHANGE`` on, the update is lost. Small changes come from products with a number close to
    1, ``lerp``, counters, and batch norms with a small momentum. An activation,
    ``0.999 * layer(x)``, is excluded, because its next value does not start from this one.

Note [Decisions]
    Some operators decide: the sign in the gradient of a relu, the index of a maximum, a dropout.
    There, the shadow takes the decision of the low-precision run. Otherwise the few elements for
    which rounding changed the decision would dominate the error.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex._core import dtypes, tree
from apex.debug import tracing
from apex.debug.tracing import Call, floating, operators

AMPLIFICATION = 4.0
"""Factor by which a well-conditioned operator may multiply errors."""

LARGEST_LOGIT = 16.0
"""Size up to which the arguments of exponentials are usual."""

LOST_CHANGE = 0.5
"""Error of an update, relative to the update, from which the update counts as lost."""

LOST_RESIDUAL = 0.5
"""Error up to which the residual of a regression does not count as cancellation."""

SMALL = 2.0**-4
"""Largest relative change of a value that counts as small."""

LOST_GRADIENT = 0.1
"""Share of a gradient's norm that may underflow."""

LEAST_NUMBER = 1e-3
"""Smaller numbers in a sum count as an epsilon."""

_MASK = -1000.0
"""Values below this may come from a mask."""

_DECIDED = 0.9
"""Probability from which a row of a softmax counts as decided."""


# -- operators, by their base names ----------------------------------------------------------------

MOVES = operators(
    """to_copy copy clone cat stack repeat roll flip where constant_pad_nd embedding gather index
    index_select masked_select masked_fill select_backward slice_backward"""
)
"""Operators that only move values, and so lose no more than a cast."""

DIFFERENCES = operators("add sub rsub")

LINEAR = MOVES | DIFFERENCES | operators("mul div neg lerp addcmul")
"""Operators that continue a chain; see Note [Chains]."""

SUMS_OF_OPERANDS = DIFFERENCES | operators("cat stack lerp")
"""Operators to whose result each input contributes in proportion to its size."""

DECIDED_BY_SECOND = operators(
    """threshold_backward leaky_relu_backward hardtanh_backward hardswish_backward
    hardsigmoid_backward hardshrink_backward softshrink_backward prelu_kernel_backward"""
)
"""Operators that decide by their second argument; see Note [Decisions]."""

DECISIONS = operators("sign sgn round floor ceil trunc heaviside frac amp_update_scale")
"""Operators whose result is a decision."""

_SUMS = operators(
    """add sum mean mm bmm mv dot addmm addmv addbmm baddbmm linear convolution
    convolution_backward"""
)
"""Operators that accumulate in fp32."""

_IN_PLACE_SUMS = operators(
    """embedding_dense_backward index_add scatter_add index_put index_put_impl put scatter_reduce"""
)
"""Operators that accumulate in the tensor itself; see Note [Tolerance]."""

_NORM_BACKWARDS = {
    "native_layer_norm_backward": "rstd",
    "native_batch_norm_backward": "save_invstd",
    "native_group_norm_backward": "rstd",
    "cudnn_batch_norm_backward": "save_var",
}
"""The argument that these operators multiply the gradient by, beside ``weight``."""

RESIDUALS = ("mse_loss", "smooth_l1_loss", "huber_loss", "nll_loss")
"""Name prefixes of losses that subtract targets from outputs."""

SOFTMAXES = operators("softmax log_softmax safe_softmax")

EXPONENTIALS = SOFTMAXES | operators("exp sigmoid")
"""Operators whose relative error is the absolute error of their argument."""

PRODUCTS = operators("mm bmm addmm linear convolution")
"""Products with data. nn.MultiheadAttention adds its mask with baddbmm."""


# -- errors ----------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """The norms of a difference from a shadow, and of the shadow."""

    difference: float
    size: float

    @property
    def relative(self) -> float:
        """The difference relative to the shadow."""
        if self.size:
            return self.difference / self.size
        if self.difference:
            return math.inf
        return 0.0


def distance(values: Tensor, shadow: Tensor) -> Distance:
    """Returns the distance of a value from its shadow, without masked elements.

    An element is masked if it is infinite or NaN on either side, or if a mask was added to it.
    """
    values = tracing.real(values).double()
    shadow = tracing.real(shadow).double()
    if not values.numel():
        return Distance(0.0, 0.0)
    known = torch.isfinite(values) & torch.isfinite(shadow)
    shadow = torch.where(known, shadow, 0.0)
    difference = torch.where(known, values, 0.0) - shadow
    masked = _masked(shadow)
    if masked is not None:
        shadow = torch.where(masked, 0.0, shadow)
        difference = torch.where(masked, 0.0, difference)
    return Distance(norm(difference), norm(shadow))


def _masked(shadow: Tensor) -> Tensor | None:
    """Returns which elements are far below all others, as after adding a mask; None if none are.

    Their size would hide the error of the other elements.
    """
    least = float(shadow.amin())  # sync: tracing is a diagnosis, here and below
    if least >= _MASK:
        return None
    masked = shadow < least / 2
    largest = float(torch.where(masked, 0.0, shadow).abs().amax())
    if not largest or 50.0 * largest >= -least:
        return None
    return masked


def distance_of_result(call: Call, values: Tensor, shadow: Tensor) -> Distance:
    """Returns the distance of a call's result from its shadow.

    In a softmax, only rows that are not decided count. A row in which one probability is almost 1
    is exact whatever the logits' errors are. It would hide the errors of other rows.
    """
    if call.base not in SOFTMAXES:
        return distance(values, shadow)
    values = values.double()
    if call.base == "log_softmax":
        values = values.exp()
        shadow = shadow.exp()
    dim = call.args[1]
    undecided = shadow.amax(dim, keepdim=True) < _DECIDED
    values = torch.where(undecided, values, 0.0)
    shadow = torch.where(undecided, shadow, 0.0)
    return distance(values, shadow)


def comparable(call: Call, values: Tensor, shadow: Tensor) -> Tensor:
    """Returns the shadow of a call's result, with the run's ``values`` where no error is measured.

    These are elements that overflow in the run or in its dtype. In a softmax, they are also the
    rows whose logits are all masked.
    """
    limit = torch.finfo(values.dtype).max
    exceeds = shadow.abs() > limit
    excluded = exceeds | ~values.isfinite()
    if call.base in SOFTMAXES:
        logits, dim = call.args[:2]
        masked_rows = logits.amax(dim, keepdim=True) < _MASK
        excluded = excluded | masked_rows
    return torch.where(excluded, values, shadow)


def norm(values: Tensor) -> float:
    """Returns the 2-norm, in double."""
    return float(torch.linalg.vector_norm(values.double()))  # sync: tracing is a diagnosis


# -- bounds ----------------------------------------------------------------------------------------


def roundoff(dtype: torch.dtype) -> float:
    """Returns the unit roundoff, half of eps."""
    return torch.finfo(dtype).eps / 2


def limit_in_fp32(call: Call, argument: Any) -> Any:
    """Returns an argument; for a clamp by eps or 1 - eps of its 16-bit dtype, fp32's."""
    dtype = getattr(call.args[0], "dtype", None)
    if call.base.startswith("clamp") and dtype in dtypes.LOW_PRECISION:
        eps, fp32_eps = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
        return {eps: fp32_eps, 1 - eps: 1 - fp32_eps}.get(argument, argument)
    return argument


def sum_bound(call: Call, result: Tensor) -> float:
    """Returns the part of the relative bound that grows with the number of terms of a sum."""
    if call.base not in _IN_PLACE_SUMS:
        return 0.0
    return roundoff(result.dtype) * math.sqrt(_repeats(call))


def _repeats(call: Call) -> int:
    """Returns how often the most frequent index occurs in the index tensors of a call."""
    most = 1
    for index in tree.tensors(call.args):
        if index.dtype is torch.int64 and index.numel():
            _, counts = torch.unique(index, return_counts=True)
            most = max(most, int(counts.max()))  # sync: tracing is a diagnosis
    return most


def least_sizes(in_fp32: Call) -> list[float]:
    """Returns the norms of a sum's judged results if all terms had one sign; else no norms."""
    name = in_fp32.base
    if name in _SUMS | _IN_PLACE_SUMS:
        sums = in_fp32.mapped(_absolute).run()
        return [_size(total) for total in tree.tensors(sums)]
    if name == "softmax_backward_data":
        gradient, output = in_fp32.args[:2]
        return [_size(gradient * output)]
    if name == "log_softmax_backward_data":
        return [_size(in_fp32.args[0])]
    if name in _NORM_BACKWARDS:
        named = in_fp32.named
        gain = 1.0
        for factor in (_NORM_BACKWARDS[name], "weight"):
            values = named[factor]
            if values is not None:
                gain *= norm(values) / math.sqrt(max(1, values.numel()))
        return [gain * _size(in_fp32.args[0])]
    return []


def _size(terms: Tensor) -> float:
    """Returns the norm without what overflowed."""
    return norm(torch.nan_to_num(terms, 0.0, 0.0, 0.0))


def _absolute(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.abs()
    return argument


# -- kinds of calls --------------------------------------------------------------------------------


def changed_a_little(call: Call) -> Tensor | None:
    """Returns the tensor that a call changes by a small share; None without one.

    Of the list of a foreach operator, the first tensor counts. See Note [Small changes].
    """
    if call.base == "native_batch_norm":
        value: Tensor | None = call.named["running_mean"]
        is_small = call.named["momentum"] < SMALL
    else:
        value = next(floating(call.args[:1]), None)
        is_small = value is not None and _is_small_change(call, value)
    return value if is_small else None


def _is_small_change(call: Call, value: Tensor) -> bool:
    """Returns whether a call may change its first operand, ``value``, by a small share."""
    number = call.args[-1]
    if call.base in ("add", "sub"):  # a running sum, a counter
        lasts = "self" in call.traits.writes or value.numel() == 1
        is_number = isinstance(number, int | float)
        is_epsilon = is_number and abs(number) < LEAST_NUMBER
        return lasts and not is_epsilon
    if not isinstance(number, float):
        return False
    if call.base in ("mul", "div"):
        return 0.0 < abs(number - 1.0) < SMALL
    return call.base == "lerp" and 0.0 < number < SMALL
