"""One record per operator and module of a rounding trace, made of the errors of its calls."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from apex.debug.module_tracker import Direction, place_in_words

Kind = Literal["rounding", "cancellation", "chain", ""]

_Place = tuple[str, bool, Direction, str, str]
"""Module, whether a model was running, direction, operator and dtype."""


@dataclass(frozen=True)
class RoundingRow:
    """One operator of one module, by the call of it that lost most digits.

    Errors are norms of differences from the fp32 shadows, relative to the shadows' norms.

    Attributes:
        module: Qualified name in the model; ``""`` for the model itself and outside it.
        op: Operator, such as ``"aten.sub"``.
        direction: ``"forward"`` or ``"backward"``.
        error: Error of the result.
        tolerance: The largest error that is explained by the errors of the inputs, the dtype and
            the operator's shape.
        inherited: The largest error among the inputs; in a chain of linear operators, such as a
            running sum, among the values that entered the chain.
        dtype: Dtype of the result.
        inside: Whether a model was running, forward or backward.
        calls: Number of calls.
        kind: ``"rounding"`` if the operator's own result is wrong for the inputs that it got,
            ``"cancellation"`` if it is right and magnifies their errors, ``"chain"`` if the errors
            of many small steps have added up; ``""`` within the tolerance.
        location: ``"file:line"`` of user code; ``""`` within the tolerance. In a backward pass, the
            line of the forward.
    """

    module: str
    op: str
    direction: Direction
    error: float
    tolerance: float
    inherited: float
    dtype: str
    inside: bool
    calls: int
    kind: Kind
    location: str

    @property
    def suspicion(self) -> float:
        """The error in multiples of the tolerance."""
        return self.error / self.tolerance

    @property
    def place(self) -> str:
        """Where it ran, in words."""
        return place_in_words(self.module, inside=self.inside)

    @property
    def cause(self) -> str:
        """What happened, in one sentence; ``""`` within the tolerance."""
        times = f"{self.error / self.inherited:.0f} times" if self.inherited else "from none"
        return _CAUSES[self.kind].format(dtype=self.dtype, times=times)

    @property
    def remedy(self) -> str:
        """The recommended remedy, in one sentence; ``""`` within the tolerance."""
        if not self.kind:
            return ""
        name = self.module.rpartition(":")[2]
        place = _FP32_MODULE.format(name=name) if name else "compute it in fp32, on .float() inputs"
        return f"{place}, or {_FORMS[self.kind]}."


_FP32_MODULE = (
    "keep the module in fp32 with amp.initialize(..., fp32_modules=[{name!r}]) (O2, O3, O5) or run "
    "it on .float() inputs `with amp.disable_casts():` (O1, O4)"
)

_CAUSES: dict[Kind, str] = {
    "": "",
    "rounding": "rounding: in {dtype}, its result is wrong even for the inputs that it got.",
    "cancellation": "cancellation: right for the inputs that it got, but their errors grew "
    "{times}: it subtracts near-equal numbers, or its result depends steeply on them.",
    "chain": "accumulation: each step is right, but the roundings of many steps in {dtype} add up.",
}

_FORMS: dict[Kind, str] = {
    "rounding": "hold what it updates in fp32",
    "cancellation": "use a form that does not cancel (the mean of (x - mean)**2 as a variance, a "
    "logsumexp, positions and angles in fp32)",
    "chain": "hold the running value in fp32",
}


@dataclass(frozen=True)
class Skipped:
    """An operator without a verdict.

    Attributes:
        module: See :class:`RoundingRow`.
        op: See :class:`RoundingRow`.
        reason: Why its results count as exact from there on.
    """

    module: str
    op: str
    reason: str


@dataclass
class RoundingLog:
    """Collects what a :class:`RoundingTrace` shows; ``lost`` are places, in order of time."""

    operators: int = 0
    skipped: dict[Skipped, None] = field(default_factory=dict)
    rows: dict[_Place, RoundingRow] = field(default_factory=dict)
    lost: dict[_Place, None] = field(default_factory=dict)

    def add(self, row: RoundingRow) -> None:
        """Records one result of one call."""
        place = row.module, row.inside, row.direction, row.op, row.dtype
        if row.error > row.tolerance:
            self.lost.setdefault(place)
        known = self.rows.setdefault(place, row)
        if known is not row:
            worst = max(known, row, key=lambda each: each.suspicion)
            self.rows[place] = replace(worst, calls=known.calls + row.calls)

    def skip(self, module: str, op: str, reason: str) -> None:
        """Records that an operator has no verdict."""
        self.skipped.setdefault(Skipped(module, op, reason))
