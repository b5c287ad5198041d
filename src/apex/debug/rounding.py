"""Traces every operator, forward and backward, and names those that lose digits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes, tree
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.parameters import without_functions
from apex._torch.sparse import with_memory
from apex.debug import rules, tracing
from apex.debug.causes import explained, in_fp32, module_in_fp32, remedies, section_of
from apex.debug.common import held_by, listed, to_json
from apex.debug.place import Finding, Place
from apex.debug.tracing import ByMemory, Call, Trace, floating

MasterPair = tuple[Tensor, Tensor]
"""A tensor, and its values in fp32."""


def trace_rounding(*models: nn.Module) -> RoundingTrace:
    """Returns a context that finds the operators at which low precision loses digits.

    Enter it around one or more whole iterations, forward and backward; it may include
    ``optimizer.step``, which is not judged. Every value that fp16 or bf16 touched has an fp32
    shadow, which the same operators compute from the values that the iteration began with. An
    operator stands out where its result is much further from its shadow than the errors of its
    inputs, the dtype's eps and the operator's shape explain: by its own rounding, by cancellation,
    at the end of a long chain of small steps, or as an update that is lost. The report says where
    the error entered, too. Gradients in fp16 that are 0 where fp32's are not are counted.

    Works with and without ``amp.initialize``: under ``torch.autocast``, on 16-bit models. Random
    operators draw once. The fp32 computation reuses the run's decisions, such as the sign in a
    ReLU's gradient or the index of a maximum. The trace does not change the run's results.
    Operators without a verdict, such as one whose kernel does not run in fp32, are listed in
    ``skipped``.

    Each operator runs once more in fp32, and host syncs follow it: an iteration takes ten
    to twenty times as long, and additional memory for its activations in fp32. Models under
    ``torch.compile`` run uncompiled inside the context, as compiled code is opaque.

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

    Errors are norms of differences from the fp32 shadows, relative to the shadows' norms. Its
    ``kind`` is ``"rounding"`` if the operator's own result is wrong for the inputs that it got,
    ``"cancellation"`` if it is right and magnifies their errors, ``"chain"`` if the errors of many
    small steps have added up, ``"lost update"`` if a value that lasts, such as a counter, stands
    still, and ``"underflow"`` if gradients in fp16 are 0.

    Attributes:
        error: Error of the result; of a lost update, relative to the update.
        tolerance: The largest error that is explained by the errors of the inputs, the dtype and
            the operator's shape.
        inherited: The largest error among the inputs; in a chain of linear operators, such as a
            running sum, among the values that entered the chain.
    """

    error: float = 0.0
    tolerance: float = 0.0
    inherited: float = 0.0


class Origin(NamedTuple):
    """Where an error entered: the operator that first rounded."""

    op: str
    place: Place
    error: float


_ROUND = ("aten._to_copy", "aten.arange", "aten.full", "aten.linspace", "aten.lift_fresh")
"""Operators that round what is given to them, as casts do."""

_CASTS = re.compile(r"\.(to|half|bfloat16|type|type_as)\(|dtype")
"""What a line has that casts by itself, and not because autocast or the model's dtype does."""


@dataclass(frozen=True)
class Skipped:
    """An operator without a verdict.

    Attributes:
        module: Qualified name of its module; ``""`` for the model itself and outside it.
        op: Operator, such as ``"aten.sub"``.
        reason: Why its results count as exact from there on.
    """

    module: str
    op: str
    reason: str


# -- the trace ----------------------------------------------------------------------------------

_FIRST_RESULT = (
    "native_layer_norm",
    "native_batch_norm",
    "batch_norm_with_update",
    "cudnn_batch_norm",
    "native_group_norm",
    *tracing.SAVES_INFINITIES,
)
"""How operators begin of which only the first result is judged.

Of a forward, the others are for the backward. Of a norm's backward, they are the gradients of its
weight and bias, which kernels on a CPU sum in the tensors' own dtype: off by up to a quarter in
bf16, in every model and on no other device.
"""

_NOISE = 64 * torch.finfo(torch.float32).eps
"""Differences below this share of their operands hold no digit in fp32."""

_FEW = 64
"""Results with fewer elements may be small by chance."""

_FOREIGN = (*tracing.EXCHANGES, "fsdp", "inductor", "prim", "prims", "profiler")
"""Namespaces whose operators have effects beyond their results."""

_WORKSPACES = {"workspace", "reserve", "reserveSpace"}
"""Names of arguments that a kernel has filled for its backward in a layout of its own."""

_NO_DIGITS = "it cancels so far that fp32 holds hardly a digit of its result, either"
_OVERFLOW = "it returned inf or NaN where fp32 does not; amp.debug.trace_overflow tells why"


class RoundingTrace(Trace):
    """The result of :func:`trace_rounding`. ``print`` shows it.

    Attributes:
        operators: Number of operator calls that were compared with fp32.
    """

    _NAME = "trace_rounding"

    def __init__(self, *models: nn.Module) -> None:
        super().__init__(*models)
        self.operators = 0
        self._seen = 0  # calls, of which ``operators`` were compared
        self._lost: dict[tuple[Any, ...], RoundingRow] = {}
        self._skipped: dict[Skipped, None] = {}
        self._shadows = _Shadows()
        # Of the gradients in fp16: see _count_underflow, and where the first underflows.
        self._underflow = torch.zeros(4, dtype=torch.float64, device="cpu")
        self._underflow_at: Place | None = None
        self._underflow_way = ""

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models and all values."""
        self._judge_underflow()
        super().__exit__(*exc_info)
        self._shadows = _Shadows()

    @property
    def worst(self) -> RoundingRow | None:
        """The operator at which digits were first lost beyond tolerance; None if at none."""
        return next(iter(self.lost), None)

    @property
    def lost(self) -> tuple[RoundingRow, ...]:
        """All operators beyond tolerance in order of time; later ones may only pass on the damage.

        One record per module, operator, direction and dtype. Gradients that underflow come first.
        """
        return tuple(self._lost.values())

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The operators without a verdict: from there on, their results count as exact."""
        return tuple(self._skipped)

    def __str__(self) -> str:
        lines = [self._verdict]
        later = [f"{row.op} {row.where}, {row.direction}" for row in self.lost[1:]]
        if later:
            lines.append(f"later  {listed(later)}")
        for skip in self.skipped:
            module = skip.module or "(no module)"
            lines.append(f"skipped: {skip.op} in {module}: {skip.reason}")
        return "\n".join(lines)

    @property
    def _verdict(self) -> str:
        if self.worst is not None:
            return f"Digits first lost: {self.worst}"
        if not self._seen:
            return self._nothing
        if not self.operators and not self.skipped:
            return f"Nothing to judge: none of {self._seen} operators computed in 16 bits."
        rest = f"; {len(self.skipped)} without a verdict" if self.skipped else ""
        return f"No digits lost: {self.operators} operators traced, all within tolerance{rest}."

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

    def _leave_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Makes the new weights and the optimizer's state exact: an iteration has ended."""
        super()._leave_step(optimizer)
        for held in held_by(self._tracker.models, [optimizer]):
            for tensor in floating(held.value):
                self._shadows.discard(tensor)

    def _before(self, call: Call) -> _ShadowCall | Exception | None:
        """Returns the call on shadows of what it overwrites, which has to be read before."""
        self._seen += 1
        if not call.traits.writes or self._in_step:
            return None
        with without_functions(), suspend_modes():  # the user's, too; the grad mode is the call's
            if not self._shadows.touch(call.arguments):
                return None
            try:
                return _ShadowCall(call, self._shadows)
            except Exception as error:  # noqa: BLE001 - such as memory: the run goes on
                return error

    def _after(self, call: Call, before: _ShadowCall | Exception | None, result: Any) -> None:
        """Computes the shadows of the results; those without count as exact from here on."""
        with without_functions(), suspend_modes():
            outputs = [] if call.traits.view else list(tracing.outputs(call, result))
            reason = self._follow(before, call, result) if outputs else None
            if reason is not None:
                for tensor in outputs:
                    self._shadows.discard(tensor)
            if reason:
                self._skip(call.name, reason)
            if call.base == "to_copy" and not outputs:
                self._check_integers(call, result)
            if self._tracker.accumulating is not None:
                for grad in floating(result):
                    self._count_underflow(grad)

    def _check_integers(self, call: Call, result: Tensor) -> None:
        """Logs whole numbers, such as token ids, that 16 bits rounded before this cast back."""
        values = call.args[0]
        shadow = self._shadows.of(values)
        if shadow is None:
            return
        exact = shadow.view(values)
        wrong = (exact == exact.round()) & (exact != result)
        share = float(wrong.double().mean())  # sync: tracing is a diagnosis
        if share > 0.0:
            self._lose(
                _ShadowCall(call, self._shadows),
                dtypes.name(values.dtype),
                share,
                rules.roundoff(values.dtype),
                "cancellation",
            )

    def _skip(self, op: str, reason: str) -> None:
        self._skipped.setdefault(Skipped(self._tracker.module[0], op, reason))

    def _follow(
        self, before: _ShadowCall | Exception | None, call: Call, result: Any
    ) -> str | None:
        """Computes the shadows of a call's results.

        Returns:
            Why its results are without: ``""`` if they are exact, None if they have shadows.
        """
        if self._in_step or not self._shadows.touch([call.arguments, result]):
            return ""
        # A model's conversion, after which its weights are exact, as they are after a step.
        is_weight = call.base == "to_copy" and isinstance(call.args[0], nn.Parameter)
        if is_weight and not torch.is_grad_enabled():
            return ""
        reason = _without_verdict(call, result)
        if reason is not None:
            return reason
        try:
            if isinstance(before, Exception):
                raise before
            shadow_call = before or _ShadowCall(call, self._shadows)
            self.operators += 1
            return self._compare(shadow_call, result)
        except Exception as error:  # noqa: BLE001 - as in _before
            message = str(error).strip() or type(error).__name__
            return f"it does not run in fp32: {message.partition(chr(10))[0]}"

    def _compare(self, call: _ShadowCall, result: Any) -> str | None:
        """Computes the shadows of a call's results and judges them; returns as ``_follow``."""
        pairs = []
        overflows = False
        for low, high in call.run(call.shadows, result):
            if low.shape != high.shape:
                return "its result has another shape in fp32"
            if tracing.kind_of(low) and not tracing.kind_of(high):
                overflows = True
            pairs.append((low, rules.within_range(low, high)))
        if overflows and not any(map(tracing.kind_of, floating(call.own.arguments))):
            self._skip(call.name, _OVERFLOW)
        if call.base in rules.SOFTMAXES:
            low, high = pairs[0]
            pairs[0] = low, rules.without_masked_rows(low, high, *call.own.args[:2])
        judged = pairs[:1] if call.base.startswith(_FIRST_RESULT) else pairs
        if call.base not in rules.MOVES and not self._judge(call, result, judged):
            return _NO_DIGITS
        entry = call.inherited if call.base in rules.LINEAR else None
        for low, high in pairs:
            unit = max(call.unit, rules.roundoff(low.dtype))
            origin = call.origin
            if origin is None:
                error = rules.distance(low.detach(), high).relative
                origin = Origin(call.name, self._tracker.place, error) if error else None
            self._shadows.write(low, high, unit=unit, entry=entry, origin=origin)
        return None

    def _judge(self, call: _ShadowCall, result: Any, pairs: list[MasterPair]) -> bool:
        """Logs the errors of a call's results; returns whether fp32 has digits to compare with."""
        for index, (low, high) in enumerate(pairs):
            found = self._error(call, low, high, index)
            if found is None:
                return False
            error, tolerance = found
            if error > tolerance:
                kind = self._kind(call, result, index, error)
                is_residual = rules.is_residual(call.base, inside=self._tracker.module[1])
                if kind == "cancellation" and is_residual:
                    tolerance = max(tolerance, rules.LOST_RESIDUAL)
            else:
                kind = "lost update"
                error = self._lost_change(call, result)
                tolerance = rules.LOST_CHANGE
            if error > tolerance:
                self._lose(call, dtypes.name(low.dtype), error, tolerance, kind)
        return True

    def _lose(
        self, call: _ShadowCall, dtype: str, error: float, tolerance: float, kind: str
    ) -> None:
        """Logs a result beyond its tolerance: what happened, why, and what to do."""
        place = self._tracker.place
        inherited = call.inherited
        key = place.where, place.direction, call.name, dtype
        known = self._lost.get(key)
        if known is not None and error / tolerance <= known.error / known.tolerance:
            return
        origin = call.origin if kind == "cancellation" else None
        accumulates = self._tracker.accumulating is not None
        facts: dict[str, Any] = {"dtype": dtype, "accumulates": accumulates}
        notes = []
        entered = ""
        if origin is not None:
            entered = origin.place.location
            facts["casts"] = origin.op in _ROUND and _CASTS.search(origin.place.source)
            if entered != place.location:
                text = f"{origin.op}, where the error enters ({origin.error:.2g})"
                notes.append(("from", f"{text}\n{origin.place.shown}"))
        section = section_of(kind, {call.base}, place, facts)
        ways = remedies(section, self._way, origin=entered)
        if section == "rounding":
            ways = in_fp32(place, self._way, module=place.module)
        if section == "cancellation":
            ways = [*module_in_fp32(place.module, self._way), *ways]
        facts["times"] = f"{error / inherited:.0f} times" if inherited else "from none"
        self._lost[key] = RoundingRow(
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

    def _error(
        self, call: _ShadowCall, low: Tensor, high: Tensor, index: int
    ) -> tuple[float, float] | None:
        """Returns the relative error of one result, and its tolerance; None without digits."""
        found = _distance(call, low.detach(), high)
        unit = max(call.unit, rules.roundoff(low.dtype))
        tolerance = rules.AMPLIFICATION * (call.inherited + unit)
        if 2 * found.relative < tolerance:
            return found.relative, tolerance
        size = found.size
        if self._tracker.direction == "backward" or low.numel() < _FEW:
            sizes = rules.least_sizes(call.shadows)
            size = max(size, sizes[index] if index < len(sizes) else 0.0)
        if not size:
            return 0.0, tolerance
        largest = max((each.size for each in call.inputs), default=0.0)
        if call.base in rules.DIFFERENCES and size < _NOISE * largest:
            return None
        # Every element may underflow: half the smallest subnormal.
        info = torch.finfo(low.dtype)
        least = rules.AMPLIFICATION * info.smallest_normal * info.eps / 2
        tolerance += rules.sum_bound(call.own, low) + least * math.sqrt(low.numel()) / size
        return found.difference / size, tolerance

    def _lost_change(self, call: _ShadowCall, result: Any) -> float:
        """Returns the error of a small change relative to it; see Note [Small changes]."""
        if call.first is None or self._tracker.direction == "backward":
            return 0.0
        low, exact = call.own_pairs(result)[0]
        if rules.norm(exact - call.first) > rules.SMALL * rules.norm(call.first):
            return 0.0
        return rules.distance(low.detach() - call.first, exact - call.first).relative

    def _kind(self, call: _ShadowCall, result: Any, index: int, error: float) -> str:
        """Returns what lost the digits; see :class:`RoundingRow`."""
        low, exact = call.own_pairs(result)[index]
        if 2 * _distance(call, low.detach(), exact).relative > error:
            return "rounding"
        largest = max(each.relative for each in call.inputs)
        return "chain" if rules.AMPLIFICATION * largest > error else "cancellation"

    # -- gradients that underflow ----------------------------------------------------------------

    def _count_underflow(self, grad: Tensor) -> None:
        """Adds up a gradient's elements that are 0 in fp16 and not in fp32, and all in fp32."""
        shadow = self._shadows.of(grad)
        if shadow is None or shadow.unit != rules.roundoff(torch.float16):
            return
        exact = torch.where(grad.isfinite(), shadow.view(grad), 0.0)
        lost = exact[grad == 0.0]
        sums = [*_sums(lost), *_sums(exact)]
        self._underflow += torch.tensor(sums, dtype=torch.float64, device="cpu")
        if self._underflow_at is None and lost.any():
            self._underflow_at = self._tracker.place
            self._underflow_way = self._way

    def _judge_underflow(self) -> None:
        """Logs, as the first, that many gradients are 0."""
        zeros, lost, elements, total = self._underflow.tolist()
        if self._underflow_at is None or lost <= rules.LOST_GRADIENT**2 * total:
            return
        share = 100 * zeros / elements
        way = self._underflow_way
        ways = [*remedies("underflow", way), *remedies("in bf16", way)]
        row = RoundingRow(
            **vars(self._underflow_at),
            op="aten.add",
            kind="underflow",
            what=f"{share:.0f} % of the fp16 gradients are 0 where those in fp32 are not",
            **explained("underflow", ways, cause="underflow", dtype="float16", facts={}),
            error=math.sqrt(lost / total),
            tolerance=rules.LOST_GRADIENT,
        )
        self._lost = {(): row, **self._lost}


def _sums(values: Tensor) -> tuple[float, float]:
    """Returns how many values are not 0, and the sum of their squares."""
    return float(values.count_nonzero()), rules.norm(values) ** 2  # sync: tracing is a diagnosis


def _distance(call: _ShadowCall, values: Tensor, in_fp32: Tensor) -> rules.Distance:
    if call.base in rules.SOFTMAXES:
        is_log = call.base == "log_softmax"
        return rules.distance_of_probabilities(values, in_fp32, call.own.args[1], is_log=is_log)
    return rules.distance(values, in_fp32)


def _without_verdict(call: Call, result: Any) -> str | None:
    """Returns why the results of a call count as exact; "" if they are, None if they do not."""
    if call.name.startswith(_FOREIGN) or call.may_communicate:
        return "its effects on other processes forbid running it twice"
    if call.traits.uninitialized or call.base in rules.DECISIONS:
        return ""
    if any(not _can_shadow(tensor) for tensor in floating(result)):
        return "its result is not a dense tensor"
    schema = call.func._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given.update(zip(given, call.args, strict=False))
    given.update(call.kwargs)
    if any(getattr(given.get(name), "dtype", None) is torch.uint8 for name in _WORKSPACES):
        return "its workspace is of the kernel in 16 bits"
    if torch.Tag.nondeterministic_seeded in call.func.tags and call.base != "native_dropout":
        share = given.get("dropout_p", given.get("dropout"))
        if share or "rrelu" in call.base:
            return "its kernel draws random numbers"
        return "" if share is None else None
    return None


# -- shadows ---------------------------------------------------------------------------------------

_NEGLIGIBLE = 0.1
"""Errors below this share of a unit roundoff have not entered yet."""


@dataclass
class _Shadow:
    """The shadow of one storage.

    Attributes:
        values: One value for each element of the storage, 1-d, in fp32 (fp64 for fp64).
        real: Dtype of the storage's elements.
        unit: Unit roundoff of the coarsest dtype that the values passed through.
        entry: The error with which the running chain began, see Note [Chains] in ``rules``; None
            outside a chain.
        origin: Where the largest error entered; None of exact values.
    """

    values: Tensor
    real: torch.dtype
    unit: float
    entry: float | None
    origin: Origin | None

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the shadow of a view of the storage, which shares memory with it."""
        values = self.values
        if tensor.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        values = values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        values = values.conj() if tensor.is_conj() else values
        return torch._neg_view(values) if tensor.is_neg() else values


class _Shadows(ByMemory[_Shadow]):
    """The shadows of all live storages; a value without one is exact."""

    def of(self, tensor: Tensor) -> _Shadow | None:
        """Returns the shadow of a tensor's storage; None if its values are exact."""
        shadow = super().of(tensor) if _can_shadow(tensor) else None
        return shadow if shadow is not None and shadow.real is tensor.dtype.to_real() else None

    def values_of(self, tensor: Tensor) -> Tensor:
        """Returns the shadow of a tensor; without one, its own values. May be a view."""
        shadow = self.of(tensor)
        return _own_values(tensor) if shadow is None else shadow.view(tensor)

    def write(
        self,
        tensor: Tensor,
        values: Tensor,
        *,
        unit: float,
        entry: float | None,
        origin: Origin | None,
    ) -> None:
        """Makes ``values`` the shadow of a tensor that an operator has just written."""
        shadow = self.of(tensor)
        if shadow is None:
            real = tensor.dtype.to_real()
            whole = torch.empty(0, dtype=real, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            shadow = _Shadow(_own_values(whole).clone(), real, unit, entry, origin)
            self.note(tensor, shadow)
        else:
            shadow.origin = origin or shadow.origin
            shadow.unit = max(unit, shadow.unit)
            entries = [each for each in (entry, shadow.entry) if each is not None]
            covered = tensor.numel() == shadow.values.numel()
            shadow.entry = entry if covered else max(entries, default=None)
        shadow.view(tensor).copy_(values)

    def touch(self, values: Any) -> bool:
        """Returns whether any tensor in nested lists is in low precision or has a shadow."""
        return any(
            dtypes.is_low_precision(tensor) or self.of(tensor) is not None
            for tensor in floating(values)
        )


def _can_shadow(tensor: Tensor) -> bool:
    """Returns whether a tensor's values can have a shadow: strided, floating-point, in memory."""
    has_memory = tracing.is_checked(tensor) and with_memory(tensor) is tensor
    return has_memory and tensor.layout is torch.strided


def _own_values(tensor: Tensor) -> Tensor:
    """Returns a tensor's own values in the dtype of shadows; of other tensors, themselves.

    Values in fp32 and fp64 are not copied.
    """
    tensor = with_memory(tensor)
    if not _can_shadow(tensor):
        return tensor
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _mean_size(distance: rules.Distance, tensor: Tensor) -> float:
    """Returns the size of an element: a broadcast operand counts as often as it is used."""
    return distance.size / math.sqrt(max(1, tensor.numel()))


class _ShadowCall:
    """One operator call; created before it runs, if it writes to its arguments.

    Attributes:
        name, base: The operator's names, as a call's, without ``foreach``.
        inputs: How far each floating-point input is from its shadow.
        inherited: The largest relative error among the inputs. If the call continues a chain, among
            the values that entered it.
        unit: Unit roundoff of the coarsest dtype that the inputs passed through.
        origin: Where the largest error among the inputs entered; None if it is small.
        shadows: The call on the shadows of its arguments.
        own: The call on its arguments in fp32.
        first: The first result as it was, if the call changes a lasting value by a small share.
    """

    def __init__(self, call: Call, shadows: _Shadows) -> None:
        if call.base in ("softmax", "log_softmax"):  # the third: whether they return fp32 for fp16
            call = call._replace(args=(*call.args[:2], False))
        self.name = call.name.replace("aten._foreach_", "aten.")  # which applies it to each
        self.base = call.base
        self._call = call
        self._written = {id(tensor) for tensor in tree.tensors(call.overwritten)}
        self._own_pairs: list[MasterPair] | None = None
        self.own = self._in_fp32(_own_values)
        self.shadows = self._in_fp32(shadows.values_of)
        if call.base in rules.DECIDED_BY_SECOND:
            first, _, *rest = self.shadows.args
            self.shadows = self.shadows._replace(args=(first, self.own.args[1], *rest))
        changed = rules.changed_a_little(self.own)
        self.first: Tensor | None = None
        if changed is not None and self._may_last(rules.first_of(call.args[changed]), shadows):
            self.first = rules.first_of(self.own.args[changed]).clone()
        self.inputs: list[rules.Distance] = []
        self.inherited = 0.0
        self.unit = 0.0
        self.origin: Origin | None = None
        self._inherit(shadows)

    def _inherit(self, shadows: _Shadows) -> None:
        """Measures the errors of the inputs, and notes the largest and where it entered."""
        read: list[tuple[rules.Distance, Tensor, _Shadow | None]] = []
        sizes = [abs(x) for x in self.own.arguments if isinstance(x, int | float)]
        for low, high in _pairs(self._call.arguments, self.shadows.arguments):
            if id(low) in self._written and not self._call.traits.reads_written:
                continue
            shadow = shadows.of(low)
            distance = rules.distance(low.detach(), high)
            self.inputs.append(distance)
            read.append((distance, low, shadow))
            sizes.append(_mean_size(distance, low))
            if dtypes.is_low_precision(low):
                self.unit = max(self.unit, rules.roundoff(low.dtype))
            if shadow is not None:
                self.unit = max(self.unit, shadow.unit)
        worst = _NEGLIGIBLE * self.unit
        for distance, low, shadow in read:
            share = 1.0
            if self.base in rules.SUMS_OF_OPERANDS:  # by its share of the largest
                share = _mean_size(distance, low) / (max(sizes) or 1.0)
            error = share * distance.relative
            if shadow is not None:
                if error > worst:
                    worst = error
                    self.origin = shadow.origin
                covers = low.numel() == shadow.values.numel()
                if covers and self.base in rules.LINEAR and shadow.entry is not None:
                    error = share * shadow.entry  # with which the chain began
            self.inherited = max(self.inherited, error)

    def _may_last(self, value: Tensor, shadows: _Shadows) -> bool:
        """Returns whether a value may be a state, such as an average, and not an activation."""
        if self.base not in rules.LINEAR:
            return True
        if value.requires_grad and torch.is_grad_enabled():
            return False
        shadow = shadows.of(value)
        if shadow is None or shadow.origin is None:  # exact
            return True
        return id(value) in self._written and shadow.entry is not None

    def _in_fp32(self, values_of: Callable[[Tensor], Tensor]) -> Call:
        """Returns the call on these values in fp32, and on copies of those that it writes."""

        def wide(tensor: Tensor) -> Tensor:
            values = values_of(tensor)
            return values.clone() if id(tensor) in self._written else values

        return self._call.mapped(wide, dict.fromkeys(dtypes.LOW_PRECISION, torch.float32))

    def run(self, in_fp32: Call, result: Any) -> list[MasterPair]:
        """Runs ``shadows`` or ``own``, whose arguments it may overwrite.

        Returns each tensor that the call returned in ``result`` or wrote, with its value in fp32.
        """
        if self.base == "native_dropout":  # with the mask of the run
            values, share = in_fp32.args[:2]
            wide: Any = values * result[1] / (1.0 - share or 1.0), result[1]
        else:
            wide = in_fp32.run()
        found: dict[int, MasterPair] = {}
        for low, high in _pairs(self._call.arguments, in_fp32.arguments):
            if id(low) in self._written:
                found[id(low)] = low, high
        for low, high in _pairs([result], [wide]):
            found.setdefault(id(low), (low, high))
        return list(found.values())

    def own_pairs(self, result: Any) -> list[MasterPair]:
        """Returns each result with its value for the inputs that the call got; runs once."""
        if self._own_pairs is None:
            self._own_pairs = self.run(self.own, result)
        return self._own_pairs


def _pairs(lows: Any, highs: Any) -> Iterator[MasterPair]:
    """Yields the pairs of floating-point tensors in two nestings of the same structure."""
    for low, high in zip(lows, highs, strict=True):
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            if _can_shadow(low) and _can_shadow(high):
                yield low, high
        elif isinstance(low, list | tuple):
            yield from _pairs(low, high)
