"""Watches every operator: dtypes, casts and whom they were for, time, FLOPs, ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from apex._core import dtypes
from apex.debug.attribution import Caller, Rules
from apex.debug.clock import Clock, Span, Stopwatch
from apex.debug.module_tracker import Direction, Whereabouts
from apex.debug.ranges import Ranges, cast_losses, is_measurable
from apex.debug.records import CAST, CastCount, OpRow, RoundTrip, computed_in

aten = torch.ops.aten

_CASTS = {aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.other}


class Key(NamedTuple):
    """What one row is for."""

    module: str
    inside: bool
    direction: Direction
    op: str
    dtypes_in: tuple[str, ...]
    dtype_out: str
    decided_by: str


@dataclass(eq=False)
class Cast:
    """One cast, until an operator consumes it.

    Attributes:
        source: Tensor dtype before.
        target: And after.
        bytes: Read and written.
        values: Numbers cast.
        losses: See :func:`apex.debug.ranges.cast_losses`.
        span: Its time.
        own: The row that it gets if nothing consumes it.
        before: The casts that led to its source and are charged together with it.
        charged: Whether it stands in a row, or in another cast's ``before``.
        used: Whether an operator has computed with its result.
        origin: The cast that its result is the result of: itself, unless it undoes another one.
        prior: The origin of its source.
    """

    source: str
    target: str
    bytes: int
    values: int
    losses: Tensor | None
    span: Span
    own: Key
    before: tuple[Cast, ...] = ()
    charged: bool = False
    used: bool = False
    origin: Cast | None = None
    prior: Cast | None = None


@dataclass
class Tally:
    """What one row adds up."""

    calls: int = 0
    flops: int = 0
    spans: list[Span] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    ranges: Ranges = field(default_factory=Ranges)


class Recorder(Stopwatch):  # type: ignore[no-untyped-call]
    """Keeps a row for every operator that runs on floating tensors, views left out.

    Casts are charged to the operator that first computes with their result, through views; the
    weight cache's casts are therefore seen once. Results are looked at where they are made: to be
    read by ``rows`` after the run.
    """

    def __init__(self, here: Whereabouts, caller: Caller, rules: Rules, clock: Clock) -> None:
        """Records what runs while it is entered; ``here`` and ``caller`` are entered outside."""
        super().__init__(clock)
        self.without_formula: set[str] = set()
        self._here = here
        self._caller = caller
        self._rules = rules
        self._flops = _flop_formulas()
        self._tallies: dict[Key, Tally] = {}
        self._trips: dict[tuple[str, Direction, tuple[str, str, str]], list[int]] = {}
        # A storage's address is its own only while a weak reference to it lives.
        self._casts: dict[int, tuple[StorageWeakRef, Cast]] = {}

    def _observe(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, span: Span
    ) -> None:
        given = [t for t in _tensors((*args, *kwargs.values())) if is_measurable(t)]
        made = [t for t in _tensors((result,)) if is_measurable(t)]
        if func in _CASTS and given and made and given[0].dtype is not made[0].dtype:
            self._cast(given[0], made[0], span)
        elif given or made:
            self._operator(func, args, kwargs, result, given, made, span)

    # -- one operator ----------------------------------------------------------------------------

    def _operator(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        given: list[Tensor],
        made: list[Tensor],
        span: Span,
    ) -> None:
        key = self._key(func, given, made)
        tally = self._tallies.setdefault(key, Tally())
        tally.calls += 1
        tally.spans.append(span)
        if func is aten.clone.default:
            self._hand_on(given[0], result)
        else:
            self._consume(given, tally)
        if func._schema.is_mutable:
            for tensor in given:  # may hold other values than the cast gave it
                self._casts.pop(_address(tensor), None)
        formula = self._flops.get(func._overloadpacket)
        if formula is not None:
            tally.flops += int(formula(*args, **kwargs, out_val=result))
        elif "low precision" in key.decided_by:
            self.without_formula.add(key.op)
        for tensor in made:
            tally.ranges.add(tensor)

    def _consume(self, given: list[Tensor], tally: Tally) -> None:
        for tensor in given:
            cast = self._cast_of(tensor)
            if cast is not None:
                _charge(tally, cast)
                cast.used = True

    def _hand_on(self, source: Tensor, copy: Tensor) -> None:
        """Lets a copy in another layout stand for what was cast: whoever reads it needed that."""
        cast = self._cast_of(source)
        if cast is not None and _address(copy):
            self._casts[_address(copy)] = (_reference(copy), cast)

    def _cast(self, source: Tensor, result: Tensor, span: Span) -> None:
        cast = Cast(
            source=dtypes.name(source.dtype),
            target=dtypes.name(result.dtype),
            bytes=source.numel() * (source.itemsize + result.itemsize),
            values=source.numel(),
            losses=cast_losses(source, result),
            span=span,
            own=self._key(aten._to_copy.default, [source], [result]),
        )
        first = self._cast_of(source)
        cast.origin = cast
        cast.prior = None if first is None else first.origin
        if cast.prior is not None and cast.prior.source == cast.target:
            self._round_trip(cast.prior, cast)
            cast.origin = cast.prior.prior
        if first is not None and not first.charged:
            first.charged, cast.before = True, (*first.before, first)
        address = _address(result)
        if address:
            self._casts[address] = (_reference(result), cast)
        else:
            _charge(self._tallies.setdefault(cast.own, Tally()), cast)

    def _round_trip(self, there: Cast, back: Cast) -> None:
        place = (back.own.module, back.own.direction, (there.source, there.target, back.target))
        wasted = [back] if there.used else [there, back]
        counts = self._trips.setdefault(place, [0, 0, 0])
        for index, more in enumerate((1, len(wasted), sum(cast.bytes for cast in wasted))):
            counts[index] += more

    def _cast_of(self, tensor: Tensor) -> Cast | None:
        return self._casts.get(_address(tensor), (None, None))[1]

    def _key(self, func: Any, given: list[Tensor], made: list[Tensor]) -> Key:
        here = self._here
        ins = tuple(dict.fromkeys(dtypes.name(tensor.dtype) for tensor in given))
        out = dtypes.name(made[0].dtype) if made else ""
        name = func._overloadpacket.__name__
        op = f"{func.namespace}.{name}"
        module, inside, direction = here.module, here.inside, here.direction
        call = self._caller.now
        if op == CAST:
            why = _explicit(direction, call.name if call else "")
        else:
            why = self._rules.decided_by(
                name, computed_in(ins, out), module, inside, direction, call
            )
        return Key(module, inside, direction, op, ins, out, why)

    # -- afterwards ------------------------------------------------------------------------------

    def rows(self) -> tuple[OpRow, ...]:
        """Returns a row for every operator, as first met; waits for the device."""
        self._clock.finish()
        for _, cast in self._casts.values():
            if not cast.charged:
                _charge(self._tallies.setdefault(cast.own, Tally()), cast)
        self._casts.clear()
        return tuple(_row(key, tally) for key, tally in self._tallies.items())

    def round_trips(self) -> tuple[RoundTrip, ...]:
        """Returns the casts there and back again, as first met."""
        return tuple(RoundTrip(*place, *counts) for place, counts in self._trips.items())


def _charge(tally: Tally, cast: Cast) -> None:
    if not cast.charged:
        cast.charged = True
        tally.casts += [*cast.before, cast]


def _row(key: Key, tally: Tally) -> OpRow:
    """Reads a tally; a row of casts that nothing consumed has as many calls as casts."""
    largest, nonfinite = tally.ranges.read()
    spans = [*tally.spans, *(cast.span for cast in tally.casts)]
    return OpRow(
        module=key.module,
        inside=key.inside,
        direction=key.direction,
        op=key.op,
        calls=tally.calls or len(tally.casts),
        dtypes_in=key.dtypes_in,
        dtype_out=key.dtype_out,
        casts=tuple(_counts(tally.casts)),
        seconds=sum(span() for span in spans),
        flops=tally.flops,
        values=tally.ranges.values,
        largest=largest,
        nonfinite=nonfinite,
        decided_by=key.decided_by,
    )


def _counts(casts: list[Cast]) -> Iterator[CastCount]:
    for source, target in dict.fromkeys((cast.source, cast.target) for cast in casts):
        same = [cast for cast in casts if (cast.source, cast.target) == (source, target)]
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


def _explicit(direction: Direction, function: str) -> str:
    if direction == "backward":
        return "gradient in the dtype before the cast"
    return f"cast by {function}()" if function else "cast"


def _address(tensor: Tensor) -> int:
    """Returns what views of one tensor have in common; 0 for tensors without a storage."""
    if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
        return 0
    return int(tensor.untyped_storage()._cdata)


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Returns torch's formulas, and its attention formula for the CPU's kernel, which lacks one."""
    from torch.utils.flop_counter import flop_registry

    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for suffix in ("", "_backward"):
        known = formulas.get(getattr(aten, f"_scaled_dot_product_flash_attention{suffix}"))
        on_cpu = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}", None)
        if known is not None and on_cpu is not None:
            formulas.setdefault(on_cpu, known)
    return formulas
