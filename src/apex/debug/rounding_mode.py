"""Runs every operator once more on fp32 shadows and measures how much further it is from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.param_groups import params_of, states_in
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.overrides import without_functions
from apex.debug import rounding_rules as rules
from apex.debug import tensors
from apex.debug.module_tracker import ModuleTracker
from apex.debug.rounding_records import Kind, RoundingLog, RoundingRow
from apex.debug.shadows import Pair, ShadowCall, Shadows, can_shadow
from apex.debug.tensors import OperatorCall
from apex.debug.tracing_old import OperatorMode, is_uninitialized

_SAVES_FOR_BACKWARD = (
    "native_layer_norm",
    "native_batch_norm",
    "_native_batch_norm",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "native_group_norm",
    *tensors.SAVES_INFINITIES,
)
"""How operators begin of which only the first result is judged.

Of a forward, the others are for the backward. Of a norm's backward, they are the gradients of its
weight and bias, which kernels on a CPU sum in the tensors' own dtype: off by up to a quarter in
bf16, in every model and on no other device.
"""

_FEW = 64
"""Results with fewer elements may be small by chance."""

_FOREIGN = (*tensors.EXCHANGES, "fsdp", "inductor", "prim", "prims", "profiler")
"""Namespaces whose operators have effects beyond their results."""


class RoundingMode(OperatorMode):  # type: ignore[no-untyped-call]
    """Computes the shadows of every operator's results, and logs their errors."""

    def __init__(self, tracker: ModuleTracker, log: RoundingLog) -> None:
        super().__init__(tracker)
        self._log = log
        self._shadows = Shadows()
        self._stepping = False

    # -- steps of optimizers ----------------------------------------------------------------------

    def enter_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Stops tracing, except in the closure."""
        self._stepping = True

        def traced(given: Any) -> Any:
            is_closure = callable(given) and not isinstance(given, Optimizer)
            return self._traced_closure(given) if is_closure else given

        return tuple(map(traced, args)), {name: traced(given) for name, given in kwargs.items()}

    def leave_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Makes the new weights and the optimizer's state exact: an iteration has ended."""
        self._stepping = False
        own = [list(model.parameters()) for model in self.tracker.models]
        state = [list(each.values()) for _, each in states_in(optimizer.state)]
        for tensor in tensors.floating([own, params_of(optimizer), state]):
            self._shadows.discard(tensor)

    def _traced_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            before, self._stepping = self._stepping, False
            try:
                return closure()
            finally:
                self._stepping = before

        return run

    # -- operators --------------------------------------------------------------------------------

    def _operator(self, call: OperatorCall) -> Any:
        if call.traits.view:
            return call.run()
        before: ShadowCall | str | None = None
        with _apart():
            # What the call overwrites has to be read before it runs.
            given = [call.args, call.kwargs]
            if call.traits.writes and not self._stepping and self._shadows.touch(given):
                before = self._shadow_call(call)
        result = call.run()
        with _apart():
            outputs = _outputs(call, result)
            reason = self._follow(before, call, result) if outputs else None
            if reason is not None:
                for tensor in outputs:
                    self._shadows.discard(tensor)
                if reason:
                    self._log.skip(self.tracker.module, call.traits.name, reason)
        return result

    def _follow(
        self, before: ShadowCall | str | None, call: OperatorCall, result: Any
    ) -> str | None:
        """Computes the shadows of a call's results.

        Returns:
            Why its results are without: ``""`` if they are exact, None if they have shadows.
        """
        if self._stepping or not self._shadows.touch([call.args, call.kwargs, result]):
            return ""
        reason = _without_verdict(call, result)
        if reason is not None:
            return reason
        shadow_call = before or self._shadow_call(call)
        if isinstance(shadow_call, str):
            return shadow_call
        self._log.operators += 1
        try:
            return self._compare(shadow_call, result)
        except Exception as error:  # noqa: BLE001 - as in _shadow_call
            return f"its result cannot be compared with fp32: {_first_line(error)}"

    def _shadow_call(self, call: OperatorCall) -> ShadowCall | str:
        """Returns the call with its arguments in fp32, or why it has none."""
        try:
            return ShadowCall(call, self._shadows)
        except Exception as error:  # noqa: BLE001 - such as memory: the run goes on
            return f"its arguments cannot be read in fp32: {_first_line(error)}"

    def _compare(self, call: ShadowCall, result: Any) -> str | None:
        """Computes the shadows of a call's results and judges them; returns as ``_follow``."""
        if call.lacks_workspace:
            return "its workspace was filled before the trace"
        try:
            pairs, workspaces = call.run(call.shadows, result)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the run goes on
            return f"it does not run in fp32: {_first_line(error)}"
        if any(low.shape != high.shape for low, high in pairs):
            return "its result has another shape in fp32"
        made = any(tensors.kind_of(low) and not tensors.kind_of(high) for low, high in pairs)
        if made and not any(map(tensors.kind_of, tensors.floating(call.own.arguments))):
            self._log.skip(self.tracker.module, call.name, _OVERFLOW)
        pairs = [(low, rules.within_range(low, high)) for low, high in pairs]
        if call.name not in rules.MOVES:
            saves = call.name.removeprefix("aten.").startswith(_SAVES_FOR_BACKWARD)
            if not self._judge(call, result, pairs[:1] if saves else pairs):
                return _NO_DIGITS
        entry = call.inherited if call.name in rules.LINEAR else None
        for low, high in pairs:
            unit = max(call.unit, rules.roundoff(low.dtype))
            self._shadows.write(low, high, unit=unit, entry=entry)
        for low, high in workspaces:
            self._shadows.keep_workspace(low, high)
        return None

    # -- verdicts ---------------------------------------------------------------------------------

    def _judge(self, call: ShadowCall, result: Any, pairs: list[Pair]) -> bool:
        """Logs the errors of a call's results; returns whether fp32 has digits to compare with."""
        tracker = self.tracker
        judged: set[torch.dtype] = set()
        for index, (low, high) in enumerate(pairs):
            found = self._error(call, low, high, index)
            if found is None:
                return False
            error, tolerance = found
            kind: Kind = ""
            if error > tolerance:
                kind = self._kind(call, result, index, error)
            elif (lost := self._lost_change(call, result)) > rules.LOST_CHANGE:
                error, tolerance, kind = lost, rules.LOST_CHANGE, "rounding"
            row = RoundingRow(
                tracker.module,
                call.name,
                tracker.direction,
                error,
                tolerance,
                call.inherited,
                dtypes.name(low.dtype),
                tracker.inside,
                calls=int(low.dtype not in judged),
                kind=kind,
                location=tracker.location() if kind else "",
            )
            self._log.add(row)
            judged.add(low.dtype)
        return True

    def _error(
        self, call: ShadowCall, low: Tensor, high: Tensor, index: int
    ) -> tuple[float, float] | None:
        """Returns the relative error of one result, and its tolerance; None without digits."""
        found = _distance(call, low.detach(), high)
        unit = max(call.unit, rules.roundoff(low.dtype))
        tolerance = rules.AMPLIFICATION * (call.inherited + unit)
        if 2 * found.relative < tolerance:
            return found.relative, tolerance
        size = found.size
        if self.tracker.direction == "backward" or low.numel() < _FEW:
            least = rules.least_sizes(call.name, call.shadows)
            size = max(size, least[index] if index < len(least) else 0.0)
        if not size:
            return 0.0, tolerance
        if rules.has_no_digits(call.name, [each.size for each in call.inputs], size):
            return None
        tolerance += rules.sum_bound(call.name, call.own.args, low) + rules.underflow(low) / size
        return found.difference / size, tolerance

    def _lost_change(self, call: ShadowCall, result: Any) -> float:
        """Returns the error of a small change relative to it; see Note [Small changes]."""
        if call.first is None or self.tracker.direction == "backward":
            return 0.0
        low, exact = call.own_pairs(result)[0]
        return rules.distance(low.detach() - call.first, exact - call.first).relative

    def _kind(self, call: ShadowCall, result: Any, index: int, error: float) -> Kind:
        """Returns what lost the digits; see :class:`RoundingRow`."""
        try:
            low, exact = call.own_pairs(result)[index]
        except RuntimeError:
            return "rounding"
        if 2 * _distance(call, low.detach(), exact).relative > error:
            return "rounding"
        largest = max(each.relative for each in call.inputs)
        return "chain" if rules.AMPLIFICATION * largest > error else "cancellation"


_NO_DIGITS = "it cancels so far that fp32 holds hardly a digit of its result, either"
_OVERFLOW = "it returned inf or NaN where fp32 does not; amp.debug.trace_overflow tells why"


def _distance(call: ShadowCall, values: Tensor, in_fp32: Tensor) -> rules.Distance:
    if call.name in rules.SOFTMAXES:
        is_log = "log" in call.name
        return rules.distance_of_probabilities(values, in_fp32, call.own.args[1], is_log=is_log)
    return rules.distance(values, in_fp32)


@contextmanager
def _apart() -> Iterator[None]:
    """Keeps what runs inside from all modes, the user's included; the grad mode is the call's."""
    with without_functions(), suspend_modes():
        yield


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _outputs(call: OperatorCall, result: Any) -> list[Tensor]:
    """Returns the tensors that a call wrote or created; not views of its arguments."""
    given = filter(can_shadow, tensors.floating([call.args, call.kwargs]))
    known = {id(tensor.untyped_storage()) for tensor in given}
    returned = filter(can_shadow, tensors.floating(result))
    return [*call.written(), *(t for t in returned if id(t.untyped_storage()) not in known)]


def _without_verdict(call: OperatorCall, result: Any) -> str | None:
    """Returns why the results of a call count as exact; "" if they are, None if they do not."""
    func, full_name = call.func, call.traits.name
    namespace, _, name = full_name.partition(".")
    if namespace.startswith(_FOREIGN) or call.may_communicate:
        return "its effects on other processes forbid running it twice"
    if is_uninitialized(full_name) or full_name in rules.DECISIONS:
        return ""
    if any(not can_shadow(tensor) for tensor in tensors.floating(result)):
        return "its result is not a dense tensor"
    if torch.Tag.nondeterministic_seeded in func.tags and name != "native_dropout":
        names = (argument.name for argument in func._schema.arguments)
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        dropout = [a for a in func._schema.arguments if a.name in ("dropout_p", "dropout")]
        if dropout:
            share = given.get(dropout[0].name, dropout[0].default_value)
            return "its kernel draws random numbers" if share else None
        return "its kernel draws random numbers" if "rrelu" in name else ""
    return None
