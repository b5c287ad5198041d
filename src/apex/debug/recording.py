"""Records every operator: its dtypes, time, FLOPs and ranges, and the casts made for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from apex._core import dtypes
from apex._core.dtypes import is_castable
from apex._torch.sparse import with_memory
from apex.debug import tensors
from apex.debug.attribution import DtypeRules
from apex.debug.clock import Clock, Span
from apex.debug.module_tracker import Direction, ModuleTracker
from apex.debug.records import CAST, LOW, CastCount, OpRow, RoundTrip, WeightCasts
from apex.debug.tracing_old import is_uninitialized

aten = torch.ops.aten

_Place = tuple[str, Direction, tuple[str, str, str], str, str]
"""Module, direction, dtypes, operator and what decided its dtype."""

_Holder = Tensor | UntypedStorage
"""What holds a tensor's values: its storage, shared by its views, or itself without a plain one."""

# Operators that a result passes on its way to the cast back.
_PASS_ON = {aten.native_dropout, aten.mul, aten.div, aten.clone, aten.masked_fill}

_CASTS = {aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.other}

# Views whose schema does not say so.
_SHARING = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk}


@dataclass(eq=False)
class Cast:
    """One cast, until an operator consumes its result; see also :class:`CastCount`.

    Attributes:
        losses: See :func:`_losses`.
        span: Its time.
        own: The record that lists it if no operator consumes it.
        before: The casts that produced its source and are charged together with it.
        charged: Whether a record or another cast's ``before`` lists it.
        used: Whether an operator has computed with its result.
        origin: The cast that first produced its result: itself, unless it undoes another cast.
        prior: The origin of its source.
    """

    source: str
    target: str
    bytes: int
    values: int
    losses: Tensor | None
    span: Span
    own: OpRow
    before: tuple[Cast, ...] = ()
    charged: bool = False
    used: bool = False
    origin: Cast | None = None
    prior: Cast | None = None


@dataclass(eq=False)
class Detour:
    """An operator that computed in a wider dtype, on inputs cast from 16 bits.

    Attributes:
        key: Its record.
        low: Dtype of the inputs before the casts.
        casts: The casts made for it.
        returned: Whether a cast has taken its result back.
    """

    key: OpRow
    low: str
    casts: list[Cast]
    returned: bool = False


@dataclass
class OpStats:
    """The statistics that one record accumulates; those of values stay on the device.

    Attributes:
        values: Number of elements of the results.
        largest: Their largest finite absolute value, 0-d; None without any.
        nonfinite: Numbers of inf and NaN among them, 0-d.
    """

    calls: int = 0
    flops: int = 0
    spans: list[Span] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    values: int = 0
    largest: Tensor | None = None
    nonfinite: list[Tensor] = field(default_factory=list)

    def add_values(self, result: Tensor) -> None:
        """Adds the values of a floating-point tensor."""
        if result.numel() == 0:
            return
        result = with_memory(result.detach()).to_dense()
        largest = _largest(result)
        if largest.device.type != "cpu" or not math.isfinite(float(largest)):  # CPU only: no sync
            finite = torch.isfinite(result)
            largest = _largest(result.masked_fill(~finite, 0.0))
            self.nonfinite.append(result.numel() - finite.count_nonzero())
        before = largest if self.largest is None else self.largest
        self.largest = torch.maximum(before, largest.to(before))
        self.values += result.numel()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every operator that computes, not views, and records those on floating-point tensors.

    A cast is charged to the operator that first computes with its result, also through views, so
    each cast in the weight cache counts once. Statistics stay on the device; ``records`` reads
    them after the run.

    Attributes:
        inspects: Whether to record operators; if not, they are only timed.
        without_formula: Operators in low precision whose FLOPs torch cannot count.
    """

    def __init__(self, tracker: ModuleTracker, rules: DtypeRules, clock: Clock) -> None:
        """Creates a recorder; the caller enters ``tracker`` around it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.inspects = False
        self.without_formula: set[str] = set()
        self._tracker, self._rules, self._clock = tracker, rules, clock
        self._flops = _flop_formulas()
        self._stats: defaultdict[OpRow, OpStats] = defaultdict(OpStats)
        self._trips: defaultdict[_Place, list[list[Cast]]] = defaultdict(list)
        self._weight_casts: defaultdict[str, list[Cast]] = defaultdict(list)
        self._all_casts: list[Cast] = []
        self._detours: MutableMapping[_Holder, Detour] = WeakIdKeyDictionary()
        self._casts: MutableMapping[_Holder, Cast] = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inspects:
            self._tracker.record_site()
        if torch.is_inference_mode_enabled():  # where composites arrive whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.is_view or func._overloadpacket in _SHARING:
            return func(*args, **kwargs)
        result, span = self._clock.time(func, *args, **kwargs)
        if self.inspects:
            self._record(func, args, kwargs, result, span)
        return result

    def _record(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, span: Span
    ) -> None:
        inputs = list(filter(is_castable, tensors.floating([args, kwargs])))
        outputs = list(filter(is_castable, tensors.floating(result)))
        if func in _CASTS and inputs and outputs and inputs[0].dtype is not outputs[0].dtype:
            self._cast(inputs[0], outputs[0], span)
            return
        if not inputs and not outputs:
            return
        key = self._key(f"{func.namespace}.{func._overloadpacket.__name__}", inputs, outputs)
        stats = self._stats[key]
        stats.calls += 1
        stats.spans.append(span)
        self._follow_detour(func, key, inputs, outputs)
        self._charge_casts(func, stats, inputs, result)
        formula = self._flops.get(func._overloadpacket)
        if formula is not None:
            stats.flops += int(formula(*args, **kwargs, out_val=result))
        elif "low precision" in key.decided_by:
            self.without_formula.add(key.op)
        if not is_uninitialized(key.op):
            for tensor in outputs:
                stats.add_values(tensor)

    # -- casts -----------------------------------------------------------------------------------

    def _charge_casts(self, func: Any, stats: OpStats, inputs: list[Tensor], result: Any) -> None:
        """Charges an operator with the casts of its inputs."""
        casts = filter(None, map(self._cast_of, inputs))
        if func is aten.clone.default:  # a copy in another layout counts as the cast's own result
            for cast in casts:
                self._casts[_holder(result)] = cast
        else:
            for cast in casts:
                _charge(stats, cast)
                cast.used = True
        if func._schema.is_mutable:
            for tensor in inputs:  # may no longer hold the values of the cast
                self._casts.pop(_holder(tensor), None)

    def _follow_detour(
        self, func: Any, key: OpRow, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Remembers a result of inputs that were cast up for it, also behind a dropout."""
        if not outputs:
            return
        before = (self._cast_of(tensor) for tensor in inputs)
        casts = [c for c in before if c and c.source in LOW and c.target == key.dtype_out]
        detour: Detour | None = None
        if casts:
            detour = Detour(key, casts[0].source, [cast for cast in casts if not cast.used])
        elif func._overloadpacket in _PASS_ON:
            known = (self._detours.get(_holder(tensor)) for tensor in inputs)
            detour = next(filter(None, known), None)
        if detour is not None:
            self._detours[_holder(outputs[0])] = detour
        else:
            self._detours.pop(_holder(outputs[0]), None)

    def _cast(self, source: Tensor, result: Tensor, span: Span) -> None:
        cast = Cast(
            source=dtypes.name(source.dtype),
            target=dtypes.name(result.dtype),
            bytes=source.numel() * (source.itemsize + result.itemsize),
            values=source.numel(),
            losses=_losses(source, result),
            span=span,
            own=self._key(CAST, [source], [result]),
        )
        first = self._cast_of(source)
        cast.origin = cast
        cast.prior = None if first is None else first.origin
        if cast.prior is not None and cast.prior.source == cast.target:
            path = (cast.prior.source, cast.prior.target, cast.target)
            wasted = [cast] if cast.prior.used else [cast.prior, cast]
            self._trips[cast.own.module, cast.own.direction, path, "", ""].append(wasted)
            cast.origin = cast.prior.prior
        detour = self._detours.get(_holder(source))
        if detour is not None and detour.low == cast.target and not detour.returned:
            detour.returned = True
            path = (detour.low, cast.source, cast.target)
            key = detour.key
            place = key.module, key.direction, path, key.op, key.decided_by
            self._trips[place].append([*detour.casts, cast])
        if cast.target in LOW and source in self._tracker.parameters:
            self._weight_casts[cast.target].append(cast)
        if first is not None and not first.charged:
            first.charged, cast.before = True, (*first.before, first)
        self._casts[_holder(result)] = cast
        self._all_casts.append(cast)

    def _cast_of(self, tensor: Tensor) -> Cast | None:
        return self._casts.get(_holder(tensor))

    def _key(self, op: str, inputs: list[Tensor], outputs: list[Tensor]) -> OpRow:
        tracker = self._tracker
        row = OpRow(
            module=tracker.module,
            inside=tracker.inside,
            direction=tracker.direction,
            op=op,
            dtypes_in=tuple(dict.fromkeys(dtypes.name(tensor.dtype) for tensor in inputs)),
            dtype_out=dtypes.name(outputs[0].dtype) if outputs else "",
        )
        return replace(row, decided_by=self._rules.decided_by(row))

    # -- results ---------------------------------------------------------------------------------

    def records(self) -> tuple[OpRow, ...]:
        """Returns one record per operator, in order of first use; waits for the device."""
        self._clock.finish()
        for cast in self._all_casts:
            if not cast.charged:
                _charge(self._stats[cast.own], cast)
        return tuple(_read(key, stats) for key, stats in self._stats.items())

    def round_trips(self) -> tuple[RoundTrip, ...]:
        """Returns the round trips, in order of first use; call it after ``records``."""
        found = []
        for (module, direction, path, op, why), trips in self._trips.items():
            count, size, seconds = _cost([cast for trip in trips for cast in trip])
            found.append(
                RoundTrip(module, direction, path, len(trips), count, size, op, why, seconds)
            )
        return tuple(found)

    def weight_casts(self) -> tuple[WeightCasts, ...]:
        """Returns the casts of parameters by dtype; call it after ``records``."""
        return tuple(
            WeightCasts(target, *_cost(casts), tuple(dict.fromkeys(c.own.module for c in casts)))
            for target, casts in self._weight_casts.items()
        )


def _losses(source: Tensor, result: Tensor) -> Tensor | None:
    """Returns how many values a cast turned into zero, subnormal and inf: int64 of shape [3].

    Values that were already zero, subnormal or non-finite do not count. Returns None if the target
    dtype can represent the range of the source dtype.
    """
    old, new = torch.finfo(source.dtype), torch.finfo(result.dtype)
    if new.max >= old.max and new.smallest_normal <= old.smallest_normal:
        return None
    source, result = with_memory(source.detach()), with_memory(result.detach())
    size = result.abs()
    to_zero = (source != 0.0) & (size == 0.0)
    shrunk = (size < new.smallest_normal) & (size != 0.0)
    to_subnormal = shrunk & (source.abs() >= old.smallest_normal)
    to_inf = torch.isfinite(source) & torch.isinf(size)
    return torch.stack([mask.count_nonzero() for mask in (to_zero, to_subnormal, to_inf)])


def _largest(values: Tensor) -> Tensor:
    """Returns the largest absolute value, 0-d; NaN if there is any.

    ``aminmax`` makes one pass without a copy: 50 times faster than ``abs().amax()`` on a CPU.
    """
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high)


def _cost(casts: list[Cast]) -> tuple[int, int, float]:
    """Returns the number of casts, the bytes that they read and wrote, and their time."""
    return len(casts), sum(cast.bytes for cast in casts), sum(cast.span() for cast in casts)


def _charge(stats: OpStats, cast: Cast) -> None:
    if not cast.charged:
        cast.charged = True
        stats.casts += [*cast.before, cast]


def _read(key: OpRow, stats: OpStats) -> OpRow:
    """Reads the statistics; unconsumed casts count as calls."""
    spans = [*stats.spans, *(cast.span for cast in stats.casts)]
    return replace(
        key,
        calls=stats.calls or len(stats.casts),
        casts=tuple(_counts(stats.casts)),
        seconds=sum(span() for span in spans),
        flops=stats.flops,
        values=stats.values,
        largest=0.0 if stats.largest is None else float(stats.largest),  # sync: a report
        nonfinite=sum(map(int, stats.nonfinite)),  # sync: a report
    )


def _counts(casts: list[Cast]) -> Iterator[CastCount]:
    groups: defaultdict[tuple[str, str], list[Cast]] = defaultdict(list)
    for cast in casts:
        groups[cast.source, cast.target].append(cast)
    for (source, target), same in groups.items():
        # sync: a report, after the run
        losses = [cast.losses.tolist() for cast in same if cast.losses is not None]
        yield CastCount(
            source,
            target,
            len(same),
            sum(cast.bytes for cast in same),
            sum(cast.values for cast in same),
            *(sum(column) for column in zip(*losses, strict=True)),
        )


def _holder(tensor: Tensor) -> _Holder:
    plain = tensor.layout is torch.strided and tensors.is_plain(type(tensor))
    return tensor.untyped_storage() if plain else tensor


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Returns torch's FLOP formulas, extended to the CPU's attention kernel, which lacks one."""
    from torch.utils.flop_counter import flop_registry

    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    name = "_scaled_dot_product_flash_attention"
    for suffix in ("", "_backward"):
        known = formulas[getattr(aten, f"{name}{suffix}")]
        formulas.setdefault(getattr(aten, f"{name}_for_cpu{suffix}"), known)
    return formulas
