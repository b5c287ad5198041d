"""``explain``: the dtype of each operator of a model, the reason for it, and its cost."""

from __future__ import annotations

import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from apex._core import dtypes, tree
from apex._core.dtypes import is_castable
from apex._core.op_names import NAMES
from apex._core.op_table import CastSpec, Category
from apex._engine.autocast.region import CastRegion, active_spec
from apex._engine.model.plan import fp32_modules
from apex._engine.session import Session
from apex._torch.copies import record
from apex._torch.dispatcher import AUTOCAST_KEYS, has_kernel, has_operator
from apex.amp._amp_state import _amp_state
from apex.debug import common, tracing
from apex.debug.common import (
    casts_off,
    check_loss,
    check_loss_fn,
    checked_model,
    floating_outputs,
    preserve_state,
    save,
)
from apex.debug.place import Direction, Tracker, active_autocast
from apex.debug.tracing import Call, Detector, Trace, floating

aten = torch.ops.aten

LOW = ("float16", "bfloat16")
_CAST = "aten._to_copy"
_OF_FORWARD = "dtypes of the forward"
_FOLLOWS = "follows its input"


def explain(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    backward: bool = True,
    **keywords: Any,
) -> Explanation:
    """Returns the dtypes of each operator of a model, what decided them, and what they cost.

    Runs the model forward and backward as a training step would. The model may be prepared by
    ``amp.initialize``, called inside ``torch.autocast``, or plain. For every module and operator,
    the result lists calls, input and output dtypes, casts made for it (bytes), share of the time,
    FLOPs, and the row of the op table that decided.

    Changes nothing: gradients, buffers (batch norm's statistics), random number generators, inputs,
    mode, hooks, loss scale and weight cache are preserved, also after an error. Compiled parts run
    eagerly, and data-parallel wrappers are bypassed.

    Cost: the model runs twice; the first pass warms up kernels. Memory: that of a step, plus one
    set of gradients and a copy of the buffers and inputs. The time of an operator is measured
    around it alone: wall time on a CPU, events on CUDA and XPU.

    Args:
        model: The model, as called in training.
        *inputs: Positional arguments of the model.
        loss_fn: Computes the loss (a one-element floating-point tensor) from the model's output; by
            default the mean of the floating-point tensors in the output.
        backward: Whether to run the backward pass too.
        **keywords: Keyword arguments of the model.

    Raises:
        TypeError: If ``model`` is not a module, or the loss not a tensor.
        ValueError: If the inputs contain no tensor, the model has lazy or meta parameters, or the
            loss is not one floating-point number or does not require gradients.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> from apex.debug import explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(dim=-1))
        >>> model = amp.initialize(model, opt_level="O4", verbosity=0)
        >>> found = explain(model, torch.randn(2, 8), backward=False)
        >>> for row in found.ops[:2]:
        ...     print(row.op, row.dtypes_in, row.dtype_out, "|", row.decided_by)
        aten.addmm ('bfloat16',) bfloat16 | low precision list (linear)
        aten._softmax ('float32',) float32 | fp32 list (softmax)
        >>> found.low_precision_share
        1.0
    """
    check_loss_fn("explain", loss_fn)
    given = inputs, keywords
    inner = checked_model("explain", model, given)
    every = (*inner.parameters(), *inner.buffers(), *tree.tensors(given))
    device = next((t.device for t in every if t.device.type != "cpu"), torch.device("cpu"))

    def run() -> _Costs:
        trace = _CostTrace(inner, device)
        with preserve_state(inner, given), torch.set_grad_enabled(backward), trace:
            with trace.calls:
                loss = inner(*inputs, **keywords)
                if loss_fn is not None or backward:
                    loss = (loss_fn or _mean_of)(loss)
            if backward:
                _differentiate(inner, given, loss)
        return trace.costs

    run()
    costs = run()
    ops = costs.records()
    notes = ["Time is measured around each operator, after a pass that warms up."]
    if loss_fn is None and backward:
        notes.append("Without loss_fn, the loss is the mean of the floating-point outputs.")
    if costs.without_formula:
        names = ", ".join(sorted(costs.without_formula))
        notes.append(f"torch has no FLOP formula for {names}: counted as 0.")
    kinds = {name: type(module).__name__ for module, name in costs.tracker.names.items()}
    level = _level(costs.reasons, inner, ops)
    return Explanation(type(inner).__name__, level, ops, kinds, tuple(notes))


def _differentiate(model: nn.Module, given: object, loss: Any) -> None:
    check_loss("explain", loss, instead=" Pass backward=False to run only the forward pass.")
    with casts_off():
        wide = loss if loss.dtype is torch.float64 else loss.float()
        targets = [*model.parameters(), *tree.tensors(given)]
        # Unlike backward(), grad() neither writes .grad nor runs its hooks.
        torch.autograd.grad(wide, [t for t in targets if t.requires_grad], allow_unused=True)


def _mean_of(output: Any) -> Tensor:
    outputs = floating_outputs("explain", output, instead=" or backward=False")
    wide = (t.mean(dtype=torch.promote_types(t.dtype, torch.float32)) for t in outputs)
    return functools.reduce(torch.add, wide)


def _level(reasons: _Reasons, model: nn.Module, ops: tuple[OpRow, ...]) -> str:
    """Returns what set the dtypes; of a plain model known only after the run."""
    if reasons.session is not None:
        return reasons.session.policy.opt_level
    # The model may enter autocast itself, as accelerate's do.
    entered = any(row.decided_by.startswith("torch.autocast") for row in ops)
    if entered or active_autocast() is not None:
        return "torch.autocast"
    low = {dtypes.name(p.dtype) for p in model.parameters() if dtypes.is_low_precision(p)}
    return f"{', '.join(sorted(low))} parameters" if low else "none"


# -- the result ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CastCount:
    """Casts from one dtype to another that are charged to one operator: count, and bytes moved."""

    source: str
    target: str
    count: int
    bytes: int


@dataclass(frozen=True)
class OpRow:
    """One operator in one module and direction, with one set of dtypes.

    Attributes:
        module: Qualified name; ``""`` for the model itself and for code outside it.
        inside: Whether the model ran the operator, rather than the loss.
        direction: ``"forward"`` or ``"backward"``.
        op: Name such as ``"aten.addmm"``; ``"aten._to_copy"`` for casts that no operator consumed.
        dtypes_in: Floating-point dtypes of its inputs, after casts.
        dtype_out: Dtype of its first floating-point result; ``""`` without one.
        decided_by: What decided these dtypes.
        calls: Number of calls.
        casts: Casts made for it.
        seconds: Time in the operator and its casts.
        flops: Floating-point operations by torch's formulas; 0 without a formula.
    """

    module: str
    inside: bool
    direction: Direction
    op: str
    dtypes_in: tuple[str, ...]
    dtype_out: str
    decided_by: str = ""
    calls: int = 0
    casts: tuple[CastCount, ...] = ()
    seconds: float = 0.0
    flops: int = 0

    @property
    def computed_in(self) -> str:
        """The dtype in which the operator computed, derived from its inputs and result.

        This is the dtype of the result if an input has it too, because auxiliary inputs (batch
        norm's statistics, attention's log-sum) may be wider; otherwise the widest dtype of the
        inputs.
        """
        if not self.dtypes_in or self.dtype_out in self.dtypes_in:
            return self.dtype_out
        return max(self.dtypes_in, key=lambda dtype: torch.finfo(getattr(torch, dtype)).bits)


@dataclass(frozen=True)
class ModuleRow:
    """The sums over a module and its submodules.

    Attributes:
        name: Qualified name; ``""`` for the model.
        kind: Class name.
        dtype: Dtype in which its forward computed, ``"mixed"``, or ``""`` if it computed nothing.
        seconds: Time.
        flops: Floating-point operations.
        low_precision_flops: Floating-point operations in 16 bits.
        casts: Number of casts.
        cast_bytes: Bytes that these casts read and wrote.
    """

    name: str
    kind: str
    dtype: str
    seconds: float
    flops: int
    low_precision_flops: int
    casts: int
    cast_bytes: int


@dataclass(frozen=True)
class Explanation:
    """The dtypes of each operator of a model, the reasons for them, and their cost.

    ``print`` shows tables; ``save`` writes text or JSON.

    Attributes:
        model: Class name of the model.
        level: What set the dtypes, such as ``"O4"`` or ``"torch.autocast"``.
        ops: One record per operator, module, direction and set of dtypes, in order of first use.
        kinds: Class name by module name, parents first.
        notes: Remarks on how the numbers were measured.
    """

    model: str
    level: str
    ops: tuple[OpRow, ...]
    kinds: Mapping[str, str]
    notes: tuple[str, ...]

    @functools.cached_property
    def total(self) -> ModuleRow:
        """The sums over everything, the loss included."""
        return _summed("", self.model, self.ops)

    @property
    def low_precision_share(self) -> float | None:
        """Share of the floating-point operations in 16 bits; None without any."""
        return self.total.low_precision_flops / self.total.flops if self.total.flops else None

    @functools.cached_property
    def modules(self) -> tuple[ModuleRow, ...]:
        """One record per module of the model, parents first."""
        return tuple(
            _summed(name, kind, [row for row in self.ops if row.inside and _within(row, name)])
            for name, kind in self.kinds.items()
        )

    def to_text(self, *, rows: int | None = 40) -> str:
        """Returns tables for a terminal.

        Args:
            rows: Largest number of operators to show, those that took the most time; None for all.
        """
        total, share = self.total, common.percent(self.low_precision_share)
        longest = sorted(self.ops, key=lambda row: -row.seconds)[:rows]
        shown = [row for row in self.ops if row in longest]
        hidden = len(self.ops) - len(shown)
        lines = [
            f"{self.model}, explained: level {self.level}",
            f"  {share} of {common.amount(total.flops)} FLOPs in 16 bits; "
            f"{common.counted(total.casts, 'cast')}, {common.size(total.cast_bytes)} moved",
            "",
            *_table(_MODULE_HEAD, map(self._module_cells, self.modules)),
            "",
            *_table(_OP_HEAD, map(self._op_cells, shown)),
            *([f"{hidden} faster rows omitted; to_json() has all."] * bool(hidden)),
            "",
            *self.notes,
        ]
        return "\n".join(lines)

    def _share(self, seconds: float) -> str:
        return common.percent(seconds / self.total.seconds if self.total.seconds else None)

    def _module_cells(self, row: ModuleRow) -> tuple[str, ...]:
        indent = "  " * (row.name.count(".") + bool(row.name))
        name = indent + (row.name.rpartition(".")[2] or "(model)")
        casts = common.amount(row.casts) if row.casts else ""
        return name, row.kind, common.short(row.dtype), self._share(row.seconds), casts

    def _op_cells(self, row: OpRow) -> tuple[str, ...]:
        made = [f"{c.count} {_arrow([c.source, c.target])}" for c in row.casts]
        moved = f", {common.size(sum(c.bytes for c in row.casts))}" if made else ""
        taken = " + ".join(map(common.short, row.dtypes_in)) or common.short("")
        return (
            common.place(row.module, row.inside),
            row.op.removeprefix("aten.")[:26],
            row.direction,
            common.amount(row.calls),
            f"{taken} → {common.short(row.dtype_out)}",
            ", ".join(made) + moved,
            self._share(row.seconds),
            row.decided_by,
        )

    def to_json(self) -> str:
        """Returns all data as JSON."""
        sums = {"total": asdict(self.total), "modules": list(map(asdict, self.modules))}
        return json.dumps({**asdict(self), **sums}, indent=2)

    def save(self, path: str | Path) -> None:
        """Writes a file in the format given by its suffix: ``.json`` or ``.txt``.

        Raises:
            ValueError: If the suffix is neither; nothing is written.
        """
        save(path, "an explanation", {".json": self.to_json, ".txt": self.to_text})

    def __str__(self) -> str:
        return self.to_text()


_MODULE_HEAD = ("module", "class", "dtype", "time", "casts")
_OP_HEAD = ("where", "operator", "pass", "calls", "dtypes", "casts", "time", "decided by")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    cells = common.aligned([head, *rows], [True] * len(head))
    return ("  ".join(line).rstrip() for line in cells)


def _arrow(names: Sequence[str]) -> str:
    return "→".join(map(common.short, names))


def _summed(name: str, kind: str, rows: Sequence[OpRow]) -> ModuleRow:
    casts = [cast for row in rows for cast in row.casts]
    forward = [row for row in rows if row.direction == "forward"]
    found = {row.computed_in for row in forward or rows if row.op != _CAST} - {""}
    return ModuleRow(
        name,
        kind,
        found.pop() if len(found) == 1 else "mixed" if found else "",
        math.fsum(row.seconds for row in rows),
        sum(row.flops for row in rows),
        sum(row.flops for row in rows if row.computed_in in LOW),
        sum(cast.count for cast in casts),
        sum(cast.bytes for cast in casts),
    )


def _within(row: OpRow, parent: str) -> bool:
    return not parent or row.module == parent or row.module.startswith(parent + ".")


# -- what was measured -----------------------------------------------------------------------------

_Holder = Tensor | UntypedStorage
"""What holds a tensor's values: its storage, shared by its views, or itself without a plain one."""

_CASTS = {aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.other}

# Views whose schema does not say so.
_SHARING = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk}


@dataclass(eq=False)
class _Made:
    """One cast, until an operator consumes its result.

    Attributes:
        cast: Its dtypes and bytes.
        span: When it began and ended.
        own: The record that lists it if no operator consumes it.
        before: The casts that produced its source and are charged together with it.
        charged: Whether a record or another cast's ``before`` lists it.
    """

    cast: CastCount
    span: tuple[Any, Any]
    own: OpRow
    before: tuple[_Made, ...] = ()
    charged: bool = False


@dataclass
class _Stats:
    """What one record accumulates."""

    calls: int = 0
    flops: int = 0
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    casts: list[_Made] = field(default_factory=list)

    def charge(self, made: _Made) -> None:
        """Adds a cast that no record lists yet."""
        if not made.charged:
            made.charged = True
            self.casts += [*made.before, made]


class _CostTrace(Trace):
    """Traces one pass of :func:`explain`."""

    _NAME = "explain"

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model)
        self.calls = _CallTracker()
        self.costs = _Costs(self._tracker, _Reasons(self._tracker, self.calls), device)

    def _detector(self) -> Detector:
        return self.costs


class _Costs(Detector):
    """Times every operator that computes, not views, and records those on floating-point tensors.

    A cast is charged to the operator that first computes with its result, also through views, so
    each cast in the weight cache counts once.

    Attributes:
        without_formula: Operators in low precision whose FLOPs torch cannot count.
    """

    def __init__(self, tracker: Tracker, reasons: _Reasons, device: torch.device) -> None:
        super().__init__(tracker)
        self.reasons = reasons
        self.without_formula: set[str] = set()
        self._device = device
        self._flops = _flop_formulas()
        self._stats: defaultdict[OpRow, _Stats] = defaultdict(_Stats)
        self._all: list[_Made] = []
        self._casts: MutableMapping[_Holder, _Made] = WeakIdKeyDictionary()

    def _now(self) -> Any:
        on_device = self._device.type in ("cuda", "xpu")
        return record(self._device, timing=True) if on_device else time.perf_counter()

    def before(self, call: Call) -> Any:
        """Returns when the call began."""
        return self._now()

    def after(self, call: Call, before: Any, result: Any) -> None:
        """Records the call."""
        span = before, self._now()
        if call.traits.view or call.func._overloadpacket in _SHARING:
            return
        inputs = list(filter(is_castable, floating([call.args, call.kwargs])))
        outputs = list(filter(is_castable, floating(result)))
        if call.func in _CASTS and inputs and outputs and inputs[0].dtype is not outputs[0].dtype:
            self._cast(inputs[0], outputs[0], span)
            return
        if not inputs and not outputs:
            return
        row = self._row(call.name, inputs, outputs)
        stats = self._stats[row]
        stats.calls += 1
        stats.spans.append(span)
        self._charge_casts(call, stats, inputs, result)
        formula = self._flops.get(call.func._overloadpacket)
        if formula is not None:
            stats.flops += int(formula(*call.args, **call.kwargs, out_val=result))
        elif "low precision" in row.decided_by:
            self.without_formula.add(row.op)

    # -- casts -----------------------------------------------------------------------------------

    def _charge_casts(self, call: Call, stats: _Stats, inputs: list[Tensor], result: Any) -> None:
        """Charges an operator with the casts of its inputs."""
        casts = list(filter(None, map(self._cast_of, inputs)))
        for made in casts:
            if call.func is aten.clone.default:  # a copy in another layout is the cast's own result
                self._casts[_holder(result)] = made
            else:
                stats.charge(made)
        if call.traits.writes:
            for tensor in inputs:  # may no longer hold the values of the cast
                self._casts.pop(_holder(tensor), None)

    def _cast(self, source: Tensor, result: Tensor, span: tuple[Any, Any]) -> None:
        moved = source.numel() * (source.itemsize + result.itemsize)
        cast = CastCount(dtypes.name(source.dtype), dtypes.name(result.dtype), 1, moved)
        made = _Made(cast, span, self._row(_CAST, [source], [result]))
        first = self._cast_of(source)
        if first is not None and not first.charged:
            first.charged, made.before = True, (*first.before, first)
        self._casts[_holder(result)] = made
        self._all.append(made)

    def _cast_of(self, tensor: Tensor) -> _Made | None:
        return self._casts.get(_holder(tensor))

    def _row(self, op: str, inputs: list[Tensor], outputs: list[Tensor]) -> OpRow:
        row = OpRow(
            *self.tracker.module,
            self.tracker.direction,
            op,
            tuple(dict.fromkeys(dtypes.name(tensor.dtype) for tensor in inputs)),
            dtypes.name(outputs[0].dtype) if outputs else "",
        )
        return replace(row, decided_by=self.reasons.decided_by(row))

    # -- results ---------------------------------------------------------------------------------

    def records(self) -> tuple[OpRow, ...]:
        """Returns one record per operator, in order of first use; waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # sync: a report, after the run
        for made in self._all:
            if not made.charged:
                self._stats[made.own].charge(made)
        return tuple(
            replace(
                row,
                calls=stats.calls or len(stats.casts),
                casts=tuple(_counted(made.cast for made in stats.casts)),
                seconds=_seconds([*stats.spans, *(made.span for made in stats.casts)]),
                flops=stats.flops,
            )
            for row, stats in self._stats.items()
        )


def _seconds(spans: Iterable[tuple[Any, Any]]) -> float:
    return math.fsum(
        end - start if isinstance(start, float) else start.elapsed_time(end) / 1000.0
        for start, end in spans
    )


def _counted(casts: Iterable[CastCount]) -> Iterator[CastCount]:
    groups: defaultdict[tuple[str, str], list[CastCount]] = defaultdict(list)
    for cast in casts:
        groups[cast.source, cast.target].append(cast)
    for kinds, same in groups.items():
        yield CastCount(*kinds, len(same), sum(cast.bytes for cast in same))


def _holder(tensor: Tensor) -> _Holder:
    plain = tensor.layout is torch.strided and tracing.is_plain(type(tensor))
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


# -- what decided ----------------------------------------------------------------------------------


class _Function(NamedTuple):
    """A call to torch's Python API, and the casts active around it."""

    name: str
    spec: CastSpec | None
    autocast: tuple[str, torch.dtype] | None


class _CallTracker(TorchFunctionMode):
    """Tracks the running call to torch's Python API.

    An operator does not identify its caller: ``aten.addmm`` may come from ``linear``, and the op
    table's rows are named after the called function. Autocast also looks disabled inside a
    dispatch mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: _Function | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.current
        name = getattr(func, "__name__", "").strip("_")
        self.current = _Function(name, active_spec(), active_autocast())
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.current = before


class _Reasons:
    """What decides dtypes in one model.

    Attributes:
        session: The session that prepared the model; None without one.
    """

    def __init__(self, tracker: Tracker, calls: _CallTracker) -> None:
        """Reads how each module was treated; any submodule of the model may be converted."""
        self._calls = calls
        self._converted: dict[str, str] = {}
        self._region: CastSpec | None = None
        self.session: Session | None = None
        for module, state in tracker.prepared():
            if isinstance(state.owner, Session):
                self.session = self.session or state.owner
            if isinstance(state.region, CastRegion):
                self._region = state.region.spec
            if state.plan.param_dtype is not None:
                kept = fp32_modules(module, state.plan)
                verb = "converted to" if state.plan.casts_down else "kept in"
                plain = f"model {verb} {dtypes.name(state.plan.param_dtype)}"
                for part in module.modules():
                    norm = isinstance(part, _BatchNorm) and state.plan.keep_batchnorm_fp32
                    own = "batch norm kept fp32" if norm else "fp32_modules"
                    self._converted[tracker.names.get(part, "")] = own if part in kept else plain
        self._registered = _amp_state.functions.kinds()

    def decided_by(self, row: OpRow) -> str:
        """Returns a phrase that says why the running operator computes in its dtype."""
        call, inside = self._calls.current, row.inside
        op = row.op.rpartition(".")[2]
        if row.op == _CAST:
            if row.direction == "backward":
                return "gradient in the dtype before the cast"
            return f"cast by {call.name}()" if call and call.name else "cast"
        if row.direction == "backward":  # autograd's formulas follow the forward
            return _OF_FORWARD
        if call is None and inside and self._region is not None:
            call = _Function("", self._region, None)  # called from C++
        if call is not None and call.spec is not None:
            return self._by_table(op, call.name, call.spec)
        if call is not None and call.autocast is not None:
            return _by_autocast(op, row.computed_in, call.name, *call.autocast)
        if inside and self._region is not None:
            return "op casts off here"
        return self._converted.get(row.module, _FOLLOWS) if inside else _FOLLOWS

    def _by_table(self, op: str, function: str, spec: CastSpec) -> str:
        if function in self._registered:
            return f"registered by you: {self._registered[function]} ({function})"
        for name, row in _rows(op, function):
            if row in spec.table.rows:
                return f"{_LISTS[spec.table.rows[row]]} ({name})"
        return "widest input (torch)" if op.strip("_") in _PROMOTING else _FOLLOWS


def _rows(op: str, function: str) -> Iterator[tuple[str, str]]:
    """Yields the candidate rows of the op table as (name, operator), the most specific first."""
    for name in (function, _CALLED_BY.get(op, op), op):
        for names in NAMES.values():
            for row in names.get(name, ()) or names.get(f"__{name}__", ()):
                yield name, row
        yield name, name  # torch.fft.rfft calls itself "fft_rfft"


def _by_autocast(op: str, computed_in: str, function: str, device: str, dtype: torch.dtype) -> str:
    """Returns the decision of torch's own autocast, inferred from its kernels."""
    rows = [f"aten::{row}" for _, row in _rows(op, function)]
    if not any(has_operator(row) and has_kernel(row, AUTOCAST_KEYS[device]) for row in rows):
        return _FOLLOWS
    found = computed_in if computed_in == dtypes.name(dtype) else "fp32 or widest"
    return f"torch.autocast: {found} ({function})"


_LISTS: dict[Category, str] = {
    **dict.fromkeys(("low_precision", "recurrent"), "low precision list"),
    "destination": "dtype of what is written",
    **dict.fromkeys(("fp32", "fp32_inplace"), "fp32 list"),
    "banned": "banned list, run in fp32",
    "promote": "promote list",
}

_PROMOTING = {
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "cat",
    "stack",
    "eq",
    "ge",
    "gt",
    "le",
    "lt",
    "ne",
}

_CALLED_BY = {"addmm": "linear", "convolution": "conv2d", "native_layer_norm": "layer_norm"}
"""A function that calls an operator, for operators called from C++."""
