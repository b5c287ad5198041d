"""Traces every operator, forward and backward, and names the operators that lose digits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.parameters import without_functions
from apex.debug import rules, tracing
from apex.debug.causes import explained, in_fp32, module_in_fp32, remedies, section_of
from apex.debug.common import counted, held_by, listed, to_json
from apex.debug.ends import GradientEnds
from apex.debug.place import Finding, Place
from apex.debug.shadows import (
    NoVerdictError,
    Results,
    ShadowCall,
    Shadows,
    Verdict,
    can_shadow,
)
from apex.debug.tracing import Call, floating


def trace_rounding(*models: nn.Module) -> RoundingTrace:
    """Returns a context that finds the operators at which low precision loses digits.

    Enter it around one or more whole iterations, forward and backward. The block may include
    ``optimizer.step``, which is not judged. Every value that fp16 or bf16 touched has a shadow in
    fp32. The same operators compute the shadows, from the values at the start of the iteration.

    An operator loses digits if its result is much further from the shadow than expected. The
    errors of its inputs, the dtype's eps and the operator's shape explain an error. Causes are
    the operator's own rounding, cancellation, a long chain of small steps, or a lost update. The
    report also shows where the error entered. The trace counts gradients in fp16 that are 0
    although they are not 0 in fp32.

    Works with and without ``amp.initialize``, under ``torch.autocast``, and on 16-bit models.
    Random operators draw once. The fp32 computation reuses the run's decisions, such as the sign in
    a ReLU's gradient or the index of a maximum. The trace does not change the run's results.
    ``skipped`` lists operators without a verdict, such as one whose kernel does not run in fp32.

    Each operator runs once more in fp32, and host syncs follow it. An iteration takes ten to twenty
    times as long, and additional memory for its activations in fp32. Models under
    ``torch.compile`` run uncompiled inside the context, because compiled code is opaque.

    Args:
        models: Models, as passed to ``amp.initialize`` or since wrapped by ``torch.compile`` or
            DistributedDataParallel, which provide the names of modules. Without any, they are found
            as they are called.

    Returns:
        A :class:`RoundingTrace` context; its ``worst`` is the operator at which digits were first
        lost, or None.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> class Shift(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x + 1000) - 1000
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), Shift()).bfloat16()
        >>> with amp.debug.trace_rounding(model) as trace:
        ...     model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
        >>> trace.worst.module, trace.worst.op, trace.worst.direction, trace.worst.kind
        ('1', 'aten.sub', 'forward', 'cancellation')
        >>> trace.worst.error > 10 * trace.worst.tolerance > 10 * trace.worst.inherited
        True
    """
    return RoundingTrace(*models)


@dataclass(frozen=True)
class RoundingRow(Finding):
    """An operator that lost digits, by its worst call.

    Errors are norms of differences from the fp32 shadows, relative to the shadows' norms. ``kind``
    is one of:

    - ``"rounding"``: The result is wrong for the inputs that the operator got.
    - ``"cancellation"``: The result is right for these inputs, and magnifies their errors.
    - ``"chain"``: The errors of many small steps have added up.
    - ``"lost update"``: A value that lasts, such as a counter, does not change.
    - ``"underflow"``: Gradients in fp16 are 0.

    Attributes:
        error: Error of the result. The error of a lost update is relative to the update.
        tolerance: The largest error that the inputs' errors, the dtype and the operator's shape
            explain.
        inherited: The largest error among the inputs. In a chain of linear operators, such as a
            running sum, the largest among the values that entered the chain.
    """

    error: float = 0.0
    tolerance: float = 0.0
    inherited: float = 0.0


@dataclass(frozen=True)
class Skipped:
    """An operator without a verdict.

    Attributes:
        module: Qualified name of its module; ``""`` for the model itself and outside it.
        op: Operator, such as ``"aten.sub"``.
        reason: Why there is none. The operator's results count as exact.
    """

    module: str
    op: str
    reason: str


# -- the trace ----------------------------------------------------------------------------------

_CASTS = re.compile(r"\.(to|half|bfloat16|type|type_as)\(|dtype")
"""Matches a line of code that casts explicitly, without autocast or the model's dtype."""

_WORKSPACES = ("workspace", "reserve", "reserveSpace")
"""Names of arguments that a forward kernel filled, in its own layout, for its backward."""

_OVERFLOW = "it returned inf or NaN where fp32 does not; `apex trace` (trace_overflow) tells why"


class RoundingTrace(GradientEnds):
    """The result of :func:`trace_rounding`. ``print`` shows it.

    Attributes:
        operators: Number of operator calls that were compared with fp32.
    """

    _NAME = "trace_rounding"

    def __init__(self, *models: nn.Module) -> None:
        super().__init__(*models)
        self.operators = 0
        # All calls, of which ``operators`` were compared.
        self._seen = 0
        # The worst call of each module, direction, operator and dtype.
        self._lost: dict[tuple[str, ...], RoundingRow] = {}
        # A set in order of time.
        self._skipped: dict[Skipped, None] = {}
        self._shadows = Shadows()
        # The elements of fp16 gradients that are 0 although fp32's are not, and their sum of
        # squares in fp32.
        self._zeros = 0.0
        self._lost_squares = 0.0
        # The same of all elements of fp16 gradients that are not 0 in fp32.
        self._elements = 0.0
        self._squares = 0.0
        # Where such an element first was 0, and how the model trained then.
        self._underflow_at: Place | None = None
        self._underflow_way = ""

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models and all values."""
        self._judge_underflow()
        super().__exit__(*exc_info)
        self._shadows = Shadows()

    @property
    def worst(self) -> RoundingRow | None:
        """The operator at which digits were first lost beyond tolerance; None if at none."""
        return next(iter(self.lost), None)

    @property
    def lost(self) -> tuple[RoundingRow, ...]:
        """All operators beyond tolerance in order of time; later ones may only pass on errors.

        One row per module, operator, direction and dtype. Gradients that underflow come first.
        """
        return tuple(self._lost.values())

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The operators without a verdict; their results count as exact."""
        return tuple(self._skipped)

    def __str__(self) -> str:
        lines = [self.cut_off, self._headline]
        later = [f"{row.op} {row.where}, {row.direction}" for row in self.lost[1:]]
        if later:
            lines.append(f"later  {listed(later)}")
        for skip in self.skipped:
            module = skip.module or "(no module)"
            lines.append(f"skipped: {skip.op} in {module}: {skip.reason}")
        return "\n".join(filter(None, lines))

    @property
    def _headline(self) -> str:
        if self.worst is not None:
            return f"Digits first lost: {self.worst}"
        if not self._seen:
            return self._nothing
        if not self.operators and not self.skipped:
            return (
                f"Nothing to judge: none of {counted(self._seen, 'operator')} computed in 16 bits."
            )
        operators = counted(self.operators, "operator")
        text = f"No digits lost: {operators} traced, all within tolerance"
        if self.skipped:
            text = f"{text}; {len(self.skipped)} without a verdict"
        return f"{text}."

    def to_json(self) -> str:
        """Returns all data as JSON; an infinite number as null."""
        return to_json(
            {
                "worst": self.worst,
                "lost": self.lost,
                "skipped": self.skipped,
                "operators": self.operators,
            }
        )

    # -- operators -------------------------------------------------------------------------------

    def _leave_step(self, optimizer: Optimizer, *given: Any) -> None:
        """Makes the new weights and the optimizer's state exact, because an iteration has ended."""
        super()._leave_step(optimizer, *given)
        for held in held_by(self._tracker.models, [optimizer]):
            self._shadows.discard(held.value)

    def _before(self, call: Call) -> ShadowCall | Exception | None:
        """Returns the shadow call if the call writes its arguments, or the error that it raised."""
        self._seen += 1
        if not call.traits.writes or self._in_step:
            return None
        # Also suspends the user's modes. The gradient mode stays, as the call's.
        with without_functions(), suspend_modes():
            if not self._shadows.touch(call.arguments):
                return None
            try:
                return ShadowCall(call, self._shadows)
            except Exception as error:  # noqa: BLE001 - such as out of memory: the run goes on
                return error

    def _after(self, call: Call, before: ShadowCall | Exception | None, result: Any) -> None:
        """Computes the shadows of the results; a result without one counts as exact."""
        with without_functions(), suspend_modes():
            outputs = []
            if not call.traits.view:
                outputs = tracing.outputs(call, result)
            if outputs and not self._follow(call, before, result):
                self._shadows.discard(outputs)
            if call.base == "to_copy" and not outputs:
                self._check_integers(call, result)
            if self._tracker.accumulating is not None:
                for gradient in floating(result):
                    self._count_underflow(gradient)
            super()._after(call, before, result)

    def _follow(self, call: Call, before: ShadowCall | Exception | None, result: Any) -> bool:
        """Computes the shadows of a call's results; returns whether they have shadows."""
        if self._in_step or not self._shadows.touch([call.arguments, result]):
            return False
        # The conversion of a model makes its weights exact, as a step does.
        is_weight = call.base == "to_copy" and isinstance(call.args[0], nn.Parameter)
        if is_weight and not torch.is_grad_enabled():
            return False
        # z * (h - n) + n, in which the digits of a small difference do not matter.
        if call.base == "sub" and isinstance(self._tracker.running, nn.GRU | nn.GRUCell):
            return False
        try:
            if _is_exact(call, result):
                return False
            if isinstance(before, Exception):
                raise before
            shadow_call = before or ShadowCall(call, self._shadows)
            self.operators += 1
            self._compare(shadow_call, result)
        except NoVerdictError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - as in _before
            message = str(error).strip() or type(error).__name__
            reason = f"it does not run in fp32: {message.splitlines()[0]}"
        else:
            return True
        self._skip(call.name, reason)
        return False

    def _skip(self, op: str, reason: str) -> None:
        self._skipped[Skipped(self._tracker.module[0], op, reason)] = None

    def _compare(self, call: ShadowCall, result: Any) -> None:
        """Judges a call's results, and sets their shadows."""
        results = Results(call, result, self._tracker.place)
        if results.overflows:
            self._skip(call.name, _OVERFLOW)
        lost = [verdict for verdict in results.verdicts() if verdict.error > verdict.tolerance]
        for verdict in lost:
            self._lose(call, verdict)
        results.write_to(self._shadows, is_lost=bool(lost))

    def _check_integers(self, call: Call, result: Tensor) -> None:
        """Records a cast to integers of whole numbers, such as token ids, that 16 bits rounded."""
        values = call.args[0]
        shadow = self._shadows.of(values)
        if shadow is None:
            return
        exact = shadow.view(values)
        wrong = (exact == exact.round()) & (exact.to(result.dtype) != result)
        verdict = Verdict(
            dtypes.name(values.dtype),
            float(wrong.double().mean()),  # sync: tracing is a diagnosis
            rules.roundoff(values.dtype),
            "cancellation",
        )
        if verdict.error > 0.0:
            self._lose(ShadowCall(call, self._shadows), verdict)

    # -- rows ------------------------------------------------------------------------------------

    def _lose(self, call: ShadowCall, verdict: Verdict) -> None:
        """Records a result beyond its tolerance, unless a worse one of this operator is known."""
        place = self._tracker.place
        key = (place.where, place.direction, call.name, verdict.dtype)
        known = self._lost.get(key)
        excess = verdict.error / verdict.tolerance
        if known is None or excess > known.error / known.tolerance:
            self._lost[key] = self._row(place, call, verdict)

    def _row(self, place: Place, call: ShadowCall, verdict: Verdict) -> RoundingRow:
        """Returns the row of a result: the error, its cause, and remedies."""
        dtype, error, tolerance, kind = verdict
        inherited = call.inherited
        facts: dict[str, Any] = {
            "dtype": dtype,
            "accumulates": self._tracker.accumulating is not None,
            "formula": self._tracker.runs_formula,
            "way": self._way,
        }
        notes = []
        entered = ""
        module = place.module
        if kind == "cancellation" and call.origin is not None:
            origin = call.origin
            entered = origin.place.location
            casts = _CASTS.search(origin.place.source)
            facts["casts"] = casts
            is_argument = (origin.op, origin.place.module) == ("aten._to_copy", "")
            is_direct = inherited < 1.5 * origin.error
            facts["argument"] = is_argument and is_direct and not casts
            is_inside = f"{origin.place.module}.".startswith(f"{module}.")
            if not is_inside and call.base not in rules.DIFFERENCES:
                module = ""  # its inputs bring the error
            if entered != place.location:
                entry = f"{origin.op}, where the error enters ({origin.error:.2g})"
                notes.append(("from", f"{entry}\n{origin.place.shown}"))
        section = section_of(kind, {call.base}, place, facts)
        ways = remedies(section, self._way, origin=entered)
        if section == "rounding":
            ways = in_fp32(place, self._way, module=place.module)
        if section == "cancellation":
            ways = [*module_in_fp32(module, self._way), *ways]
        return RoundingRow(
            **vars(place),
            op=call.name,
            kind=kind,
            what=f"{call.name} {place.where}, {place.direction}, in {dtype}: error {error:.2g}, "
            f"explained {tolerance:.2g}, inherited {inherited:.2g}",
            **explained(section, ways, cause=kind, dtype=dtype, facts=facts),
            notes=tuple(notes),
            error=error,
            tolerance=tolerance,
            inherited=inherited,
        )

    # -- gradients that underflow ----------------------------------------------------------------

    def _count_underflow(self, gradient: Tensor) -> None:
        """Adds a gradient's elements to the sums, if it is in fp16."""
        shadow = self._shadows.of(gradient)
        fp16 = rules.roundoff(torch.float16)
        if shadow is None or shadow.unit != fp16:
            return
        exact = shadow.view(gradient)
        exact = torch.where(gradient.isfinite(), exact, 0.0)
        lost = exact[gradient == 0.0]
        self._zeros += float(lost.count_nonzero())  # sync: tracing is a diagnosis
        self._lost_squares += rules.norm(lost) ** 2
        self._elements += float(exact.count_nonzero())
        self._squares += rules.norm(exact) ** 2
        if self._zeros and self._underflow_at is None:
            self._underflow_at = self._tracker.place
            self._underflow_way = self._way

    def _judge_underflow(self) -> None:
        """Records, as the first row, that many gradients are 0."""
        place = self._underflow_at
        if place is None or self._lost_squares <= rules.LOST_GRADIENT**2 * self._squares:
            return
        share = 100 * self._zeros / self._elements
        ways = remedies("underflow", self._underflow_way)
        ways += remedies("in bf16", self._underflow_way)
        row = RoundingRow(
            **vars(place),
            op="aten.add",
            kind="underflow",
            what=f"{share:.0f} % of the fp16 gradients are 0 where those in fp32 are not",
            **explained("underflow", ways, cause="underflow", dtype="float16"),
            error=math.sqrt(self._lost_squares / self._squares),
            tolerance=rules.LOST_GRADIENT,
        )
        self._lost = {(): row, **self._lost}


def _is_exact(call: Call, result: Any) -> bool:
    """Returns whether results count as exact: decisions, random numbers, memory without values.

    Raises:
        NoVerdictError: If the call cannot run again in fp32.
    """
    if call.may_communicate:
        raise NoVerdictError("its effects on other processes forbid running it twice")
    if call.traits.uninitialized or call.base in rules.DECISIONS:
        return True
    if not all(map(can_shadow, floating(result))):
        raise NoVerdictError("its result is not a dense tensor")
    named = call.named
    for name in _WORKSPACES:
        if getattr(named.get(name), "dtype", None) is torch.uint8:
            raise NoVerdictError("its workspace is of the kernel in 16 bits")
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    if not is_random or call.base == "native_dropout":
        return False
    dropout = named.get("dropout_p", named.get("dropout"))
    if dropout or "rrelu" in call.base:
        raise NoVerdictError("its kernel draws random numbers")
    return dropout is None
