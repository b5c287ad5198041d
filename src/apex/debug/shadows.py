"""Repeats operator calls in fp32, and keeps the fp32 shadow of each value they compute."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex._core import dtypes, tree
from apex._torch.sparse import with_memory
from apex.debug import rules
from apex.debug.place import Place
from apex.debug.tracing import SAVES_INFINITIES, ByMemory, Call, floating, kind_of

_FIRST_RESULT = (
    "native_layer_norm",
    "native_batch_norm",
    "batch_norm_with_update",
    "cudnn_batch_norm",
    "native_group_norm",
    *SAVES_INFINITIES,
)
"""Name prefixes of operators of which only the first result is judged.

The other results of a forward operator are saved for its backward. The other results of a norm's
backward are the gradients of its weight and bias. Kernels on a CPU sum them in the tensors' own
dtype: off by up to a quarter in bf16, in every model and on no other device.
"""

_NEGLIGIBLE = 0.1
"""Errors below this share of a unit roundoff have not entered yet."""

_NOISE = 64 * torch.finfo(torch.float32).eps
"""Differences below this share of their operands have no correct digit in fp32."""

_FEW = 64
"""Results with fewer elements may be small by chance; so may products with a few columns."""


# -- values --------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """Where an error entered: the operator that rounded first, and its error."""

    op: str
    place: Place
    error: float


class Pair(NamedTuple):
    """A tensor of the run, and its values in fp32."""

    low: Tensor
    high: Tensor


@dataclass
class Shadow:
    """The shadow of one storage.

    Attributes:
        values: One value for each element of the storage, 1-d, in fp32 (fp64 for fp64).
        real: Dtype of the storage's elements.
        unit: Unit roundoff of the coarsest dtype that the values passed through.
        entry: The error with which the running chain began; None outside a chain. See Note
            [Chains] in ``rules``.
        origin: Where the largest error entered; None for exact values.
    """

    values: Tensor
    real: torch.dtype
    unit: float = 0.0
    entry: float | None = None
    origin: Origin | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the shadow of a view of the storage; shares memory with it."""
        values = self.values
        if tensor.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        values = values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if tensor.is_conj():
            values = values.conj()
        if tensor.is_neg():
            values = torch._neg_view(values)
        return values

    def write(self, pair: Pair, *, unit: float, entry: float | None, origin: Origin | None) -> None:
        """Takes the values of a tensor that an operator has just written, and their history."""
        tensor = pair.low
        self.origin = origin or self.origin
        self.unit = max(unit, self.unit, rules.roundoff(tensor.dtype))
        # A write to a part of the storage ends the chain of the whole.
        is_whole = tensor.numel() == self.values.numel()
        self.entry = entry if is_whole else None
        self.view(tensor).copy_(pair.high)


class Shadows(ByMemory[Shadow]):
    """The shadows of all live storages; a value without a shadow is exact."""

    def of(self, tensor: Tensor) -> Shadow | None:
        """Returns the shadow of a tensor's storage; None if its values are exact."""
        if not can_shadow(tensor):
            return None
        shadow = super().of(tensor)
        if shadow is None or shadow.real is not tensor.dtype.to_real():
            return None
        return shadow

    def values_of(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's values in fp32; may be a view of the shadow or of the tensor."""
        shadow = self.of(tensor)
        if shadow is None:
            return own_values(tensor)
        return shadow.view(tensor)

    def touch(self, values: Any) -> bool:
        """Returns whether any tensor in nested lists is in low precision or has a shadow."""
        for tensor in floating(values):
            if dtypes.is_low_precision(tensor) or self.of(tensor) is not None:
                return True
        return False

    def added(self, tensor: Tensor) -> Shadow:
        """Returns the shadow of a tensor's storage; at first, equal to its present values."""
        shadow = self.of(tensor)
        if shadow is None:
            real = tensor.dtype.to_real()
            whole = tensor.new_empty(0, dtype=real)
            whole.set_(tensor.untyped_storage())
            shadow = Shadow(own_values(whole).clone(), real)
            self.note(tensor, shadow)
        return shadow


def can_shadow(tensor: Tensor) -> bool:
    """Returns whether a floating-point tensor's values can have a shadow: strided, in memory."""
    return with_memory(tensor) is tensor and tensor.layout is torch.strided


def own_values(tensor: Tensor) -> Tensor:
    """Returns a tensor's own values, in fp32 instead of 16 bits; does not copy others."""
    values = with_memory(tensor)
    if dtypes.is_low_precision(tensor):
        values = values.float()
    return values


# -- calls ---------------------------------------------------------------------------------------


class NoVerdictError(Exception):
    """Raised with the reason why a call's results cannot be judged."""


class Input(NamedTuple):
    """A tensor that a call reads, its distance from its shadow, and the shadow; None if exact."""

    tensor: Tensor
    distance: rules.Distance
    shadow: Shadow | None

    @property
    def mean_size(self) -> float:
        """The mean size of an element, because a broadcast operand is used several times."""
        return self.distance.size / math.sqrt(max(1, self.tensor.numel()))

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest dtype that the values passed through."""
        if self.shadow is None:
            return rules.roundoff(self.tensor.dtype)
        return self.shadow.unit


class ShadowCall:
    """A call of an operator in fp32; created before the call runs, if it writes its arguments.

    Attributes:
        name, base: The operator's names, as in ``Call``, without ``foreach``.
        own: The call on its own arguments in fp32.
        shadows: The call on the shadows of its arguments.
        before: The value before the call of a state that the call changes a little, or None. See
            Note [Small changes] in ``rules``.
        inputs: The floating-point tensors that the call reads.
        unit: Unit roundoff of the coarsest dtype that the inputs passed through.
        inherited: The largest relative error among the inputs. If the call continues a chain, the
            largest among the values that entered the chain.
        origin: Where the largest error among the inputs entered; None if the error is small.
    """

    def __init__(self, call: Call, shadows: Shadows) -> None:
        if call.base in ("softmax", "log_softmax"):
            # The third argument, a result in fp32, is allowed for fp16 inputs only.
            call = call._replace(args=(*call.args[:2], False))
        self.name = call.name.replace("aten._foreach_", "aten.")
        self.base = call.base
        self._call = call
        # Ids of the tensors that the call overwrites.
        written = tree.tensors(call.overwritten)
        self._written = set(map(id, written))
        # Both calls copy what they overwrite, so neither changes the run or a shadow.
        self.own = self._in_fp32(own_values)
        self.shadows = self._in_fp32(shadows.values_of)
        if call.base in rules.DECIDED_BY_SECOND:  # as in the run; see Note [Decisions]
            self.shadows.args[1] = self.own.args[1]
        # A copy, because the call overwrites the state.
        self.before: Tensor | None = None
        changed = rules.changed_a_little(call)
        if changed is not None and self._is_state(changed, shadows.of(changed)):
            self.before = own_values(changed).clone()
        self.inputs = self._read(shadows)
        units = [read.unit for read in self.inputs]
        self.unit = max(units, default=0.0)
        # Both start without an error; `_inherit` raises them to the largest error of an input.
        self.inherited = 0.0
        self.origin: Origin | None = None
        self._inherit()

    def _in_fp32(self, values_of: Callable[[Tensor], Tensor]) -> Call:
        """Returns the call on these values in fp32, and on copies of those that it writes."""
        copies: dict[int, Tensor] = {}

        def in_fp32(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                if argument in dtypes.LOW_PRECISION:
                    return torch.float32
                return rules.limit_in_fp32(self._call, argument)
            values = values_of(argument)
            if id(argument) not in self._written:
                return values
            return copies.setdefault(id(argument), values.clone())

        return self._call.mapped(in_fp32)

    def _is_state(self, value: Tensor, shadow: Shadow | None) -> bool:
        """Returns whether a value may be a state, such as an average, and not an activation."""
        if value.requires_grad and torch.is_grad_enabled():
            return False
        if shadow is None or shadow.origin is None:  # exact
            return True
        lasts = id(value) in self._written or value.numel() == 1
        return lasts and shadow.entry is not None

    def _read(self, shadows: Shadows) -> list[Input]:
        """Returns the inputs; not the arguments that the call only overwrites."""
        inputs = []
        lows = floating(self._call.arguments)
        highs = floating(self.shadows.arguments)
        for low, high in zip(lows, highs, strict=True):
            is_written = id(low) in self._written
            is_read = self._call.traits.reads_written or not is_written
            if is_read and can_shadow(low):
                distance = rules.distance(low, high)
                inputs.append(Input(low, distance, shadows.of(low)))
        return inputs

    def _inherit(self) -> None:
        """Finds the largest error among the inputs, and where it entered."""
        sizes = [read.mean_size for read in self.inputs]
        sizes += [abs(number) for number in self.own.arguments if isinstance(number, int | float)]
        largest = max(sizes, default=0.0) or 1.0  # never 0, because sizes are divided by it
        # An operator on fp32 adds no error, however small, to its inputs' errors.
        operands = [read.tensor for read in self.inputs if read.tensor.dim()]
        rounds = self.base == "to_copy" or all(map(dtypes.is_low_precision, operands))
        worst = _NEGLIGIBLE * self.unit if rounds else 0.0
        for read in self.inputs:
            share = 1.0
            if rounds and self.base in rules.SUMS_OF_OPERANDS:  # see Note [Chains]
                share = read.mean_size / largest
            error = share * read.distance.relative
            shadow = read.shadow
            if shadow is not None:
                if error > worst:
                    worst = error
                    self.origin = shadow.origin
                # A call that continues a chain inherits the error with which the chain began.
                is_whole = read.tensor.numel() == shadow.values.numel()
                if is_whole and self.base in rules.LINEAR and shadow.entry is not None:
                    error = share * shadow.entry
            self.inherited = max(self.inherited, error)

    def run(self, in_fp32: Call, result: Any) -> list[Pair]:
        """Runs ``shadows`` or ``own``, whose arguments it may overwrite.

        Returns each tensor that the call returned in ``result`` or wrote, with its value in fp32.
        """
        if self.base == "native_dropout":
            values, dropped = in_fp32.args[:2]
            mask = result[1]  # the run's decision
            kept = (1.0 - dropped) or 1.0  # if not, the mask is 0 everywhere
            wide: Any = (values * mask / kept, mask)
        else:
            wide = in_fp32.run()
        lows = [*self._call.written, *floating(result)]
        highs = [*in_fp32.written, *floating(wide)]
        pairs: dict[int, Pair] = {}
        for low, high in zip(lows, highs, strict=True):
            if can_shadow(low):
                pairs[id(low)] = Pair(low, high)
        return list(pairs.values())


class Verdict(NamedTuple):
    """Whether a result has lost digits.

    Attributes:
        dtype: Name of the result's dtype.
        error: Error of the result, as in ``RoundingRow``.
        tolerance: The largest error that is explained.
        kind: What lost digits if the error is larger, as in ``RoundingRow``; else ``""``.
    """

    dtype: str
    error: float
    tolerance: float
    kind: str


class Results:
    """The results of a call, beside the same results in fp32.

    Attributes:
        pairs: Each tensor that the call returned or wrote, with its shadow.
        overflows: Whether one is inf or NaN although neither its shadow nor an input is.
    """

    def __init__(self, call: ShadowCall, result: Any, place: Place) -> None:
        """Runs the call on the shadows of its arguments.

        Raises:
            NoVerdictError: If a result has another shape in fp32.
        """
        self._call = call
        self._result = result
        self._place = place
        self.pairs: list[Pair] = []
        overflows = False
        for low, high in call.run(call.shadows, result):
            if low.shape != high.shape:
                raise NoVerdictError("its result has another shape in fp32")
            if kind_of(low) and not kind_of(high):
                overflows = True
            shadow = rules.comparable(call.own, low, high)
            self.pairs.append(Pair(low, shadow))
        self.overflows = overflows and not any(map(kind_of, floating(call.own.arguments)))

    @functools.cached_property
    def _exact(self) -> list[Pair]:
        """Each result with its value in fp32 for the inputs that the call got."""
        return self._call.run(self._call.own, self._result)

    def verdicts(self) -> Iterator[Verdict]:
        """Judges the results that can lose more digits than a cast.

        Raises:
            NoVerdictError: If fp32 has no correct digit to compare with.
        """
        base = self._call.base
        # The derivative of a softmax cancels, and a fused kernel does not show the terms.
        is_fused = base.startswith(SAVES_INFINITIES) and base.endswith("backward")
        if base in rules.MOVES or is_fused:
            return
        indices = range(len(self.pairs))
        if base.startswith(_FIRST_RESULT):
            first = len(self._call.own.written)  # behind the running statistics
            indices = range(first, first + 1)
        # An overflow leaves few elements to judge. In a forward pass, infinities may be a mask.
        is_overflow = self.overflows or self._place.direction == "backward"
        for index in indices:
            if not (is_overflow and kind_of(self.pairs[index].low)):
                yield self._verdict(index)

    def _verdict(self, index: int) -> Verdict:
        dtype = dtypes.name(self.pairs[index].low.dtype)
        lost = self._lost_change()
        if lost > rules.LOST_CHANGE:
            return Verdict(dtype, lost, rules.LOST_CHANGE, "lost update")
        error, tolerance = self._error(index)
        if error <= tolerance:
            return Verdict(dtype, error, tolerance, "")
        kind = self._kind(index, error)
        # The residual of a regression is meant to be a small difference.
        base = self._call.base
        is_in_loss = base == "sub" and not self._place.inside
        is_residual = is_in_loss or base.startswith(rules.RESIDUALS)
        if kind == "cancellation" and is_residual:
            tolerance = max(tolerance, rules.LOST_RESIDUAL)
        return Verdict(dtype, error, tolerance, kind)

    def _error(self, index: int) -> tuple[float, float]:
        """Returns the relative error of one result, and its tolerance; see Note [Tolerance]."""
        call = self._call
        low, high = self.pairs[index]
        distance = rules.distance_of_result(call.own, low, high)
        unit = max(call.unit, rules.roundoff(low.dtype))
        tolerance = rules.AMPLIFICATION * (call.inherited + unit)
        if call.base in rules.EXPONENTIALS:
            tolerance += rules.LARGEST_LOGIT * call.inherited
        # The terms below need further passes over the tensors; most results do without them.
        if 2 * distance.relative < tolerance:
            return distance.relative, tolerance
        size = distance.size
        results = low.numel()
        if call.base in rules.PRODUCTS:  # the rows may be alike
            results = low.shape[-1] ** 2
        if self._place.direction == "backward" or results < _FEW:
            sizes = rules.least_sizes(call.shadows)
            if index < len(sizes):
                size = max(size, sizes[index])
        if not size:
            return 0.0, tolerance
        operands = [read.distance.size for read in call.inputs]
        noise = _NOISE * max(operands, default=0.0)
        if call.base in rules.DIFFERENCES and size < noise:
            raise NoVerdictError(
                "it cancels so far that fp32 holds hardly a digit of its result, either"
            )
        # Every element may underflow, by half the smallest subnormal.
        info = torch.finfo(low.dtype)
        subnormal = info.smallest_normal * info.eps
        underflow = rules.AMPLIFICATION * subnormal / 2 * math.sqrt(low.numel())
        tolerance += rules.sum_bound(call.own, low) + underflow / size
        return distance.difference / size, tolerance

    def _lost_change(self) -> float:
        """Returns the error of a small change relative to it; see Note [Small changes]."""
        before = self._call.before
        if before is None or self._place.direction == "backward":
            return 0.0
        low, exact = self._exact[0]
        change = exact - before
        if rules.norm(change) > rules.SMALL * rules.norm(before):
            return 0.0
        return rules.distance(low - before, change).relative

    def _kind(self, index: int, error: float) -> str:
        """Returns what lost digits, as in ``RoundingRow``."""
        low, exact = self._exact[index]
        distance = rules.distance_of_result(self._call.own, low, exact)
        if 2 * distance.relative > error:
            return "rounding"
        largest = max(read.distance.relative for read in self._call.inputs)
        if dtypes.is_low_precision(low) and rules.AMPLIFICATION * largest > error:
            return "chain"
        return "cancellation"

    def write_to(self, shadows: Shadows, *, is_lost: bool) -> None:
        """Sets the shadows of the results, of which one has perhaps lost digits."""
        call = self._call
        may_cancel = call.base in rules.DIFFERENCES and not is_lost
        for pair in self.pairs:
            origin = call.origin
            entry = call.inherited if call.base in rules.LINEAR else None
            if origin is None or may_cancel:
                distance = rules.distance(*pair)
                if origin is None and distance.difference:
                    origin = Origin(call.name, self._place, distance.relative)
                unit = max(call.unit, rules.roundoff(pair.low.dtype))
                explained = rules.AMPLIFICATION * (call.inherited + unit)
                # Terms that nearly cancel leave a larger error than they brought.
                if may_cancel and distance.relative > explained:
                    entry = distance.relative
            shadows.added(pair.low).write(pair, unit=call.unit, entry=entry, origin=origin)
