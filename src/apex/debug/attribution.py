"""Attributes an operator's dtypes to the op table, the conversion or a user's registration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from apex._core import dtypes
from apex._core.op_names import NAMES
from apex._core.op_table import CastSpec, Category
from apex._engine.autocast.region import CastRegion, active_spec
from apex._engine.autocast.user_functions import Kind
from apex._engine.model.plan import fp32_modules
from apex._engine.model.state import ModelState
from apex._engine.session import Session
from apex._torch.dispatcher import AUTOCAST_KEYS, has_kernel, has_operator
from apex.amp._amp_state import _amp_state
from apex.debug.module_tracker import ModuleTracker, active_autocast
from apex.debug.records import CAST, OF_FORWARD, OpRow

FOLLOWS = "follows its input"


class Call(NamedTuple):
    """A call to torch's Python API, and the casts active around it.

    Attributes:
        name: Name of the function, such as ``"linear"``.
        spec: The active op casts; None without any.
        autocast: Device type and dtype of an active ``torch.autocast``; None without one.
    """

    name: str
    spec: CastSpec | None
    autocast: tuple[str, torch.dtype] | None


class CallTracker(TorchFunctionMode):
    """Tracks the running call to torch's Python API.

    An operator does not identify its caller: ``aten.addmm`` may come from ``linear``, and the op
    table's rows are named after the called function. Autocast also looks disabled inside a
    dispatch mode.

    Attributes:
        current: The running call; None outside any call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Call | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.current
        name = getattr(func, "__name__", "").strip("_")
        self.current = Call(name, active_spec(), active_autocast())
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.current = before


class DtypeRules:
    """The rules that decide dtypes in one model.

    Attributes:
        session: The session that prepared the model, or whose casts are active; None without one.
        prepared: Whether amp has prepared the model, or the one of which it is a copy.
    """

    def __init__(self, tracker: ModuleTracker, calls: CallTracker) -> None:
        """Reads how each module was treated; any submodule of the model may be converted."""
        self._calls = calls
        self._converted: dict[str, str] = {}
        self._region: CastSpec | None = None
        states = tracker.prepared()
        for module, state in states:
            self._converted.update(_converted(module, state, tracker.names))
            if isinstance(state.region, CastRegion):
                self._region = state.region.spec
        self._registered = _amp_state.functions.kinds()
        self.session = _session(states)
        self.prepared = bool(states)

    def decided_by(self, row: OpRow) -> str:
        """Returns a phrase that says why the running operator computes in its dtype."""
        call, inside = self._calls.current, row.inside
        op = row.op.rpartition(".")[2]
        if row.op == CAST:
            if row.direction == "backward":
                return "gradient in the dtype before the cast"
            return f"cast by {call.name}()" if call and call.name else "cast"
        if row.direction == "backward":  # autograd's formulas follow the forward
            return OF_FORWARD
        if call is None and inside and self._region is not None:
            call = Call("", self._region, None)  # called from C++
        if call is not None and call.spec is not None:
            return self._by_table(op, call.name, call.spec)
        if call is not None and call.autocast is not None:
            return _by_autocast(op, row.computed_in, call.name, *call.autocast)
        if inside and self._region is not None:
            return "op casts off here"
        return self._converted.get(row.module, FOLLOWS) if inside else FOLLOWS

    def _by_table(self, op: str, function: str, spec: CastSpec) -> str:
        kind = self._registered.get(function)
        if kind is not None:
            return f"registered by you: {_KINDS[kind]} ({function})"
        for name, row in _rows(op, function):
            if row in spec.table.rows:
                return f"{_LISTS[spec.table.rows[row]]} ({name})"
        return "widest input (torch)" if op.strip("_") in _PROMOTING else FOLLOWS


def _session(states: list[tuple[nn.Module, ModelState]]) -> Session | None:
    for _, state in states:
        if isinstance(state.owner, Session):
            return state.owner
    spec = None if states else active_spec()
    for session in _amp_state.sessions() if spec is not None else ():
        if isinstance(session.region, CastRegion) and session.region.spec is spec:
            return session
    return None


def _converted(
    model: nn.Module, state: ModelState, names: Mapping[nn.Module, str]
) -> Iterator[tuple[str, str]]:
    plan = state.plan
    if plan.param_dtype is None:
        return
    kept = fp32_modules(model, plan)
    for module in model.modules():
        if module not in kept:
            verb = "converted to" if plan.casts_down else "kept in"
            yield names.get(module, ""), f"model {verb} {dtypes.name(plan.param_dtype)}"
        elif isinstance(module, _BatchNorm) and plan.keep_batchnorm_fp32:
            yield names.get(module, ""), "batch norm kept fp32"
        else:
            yield names.get(module, ""), "fp32_modules"


def _rows(op: str, function: str) -> Iterator[tuple[str, str]]:
    """Yields the candidate rows of the op table as (name, operator), the most specific first."""
    for names in NAMES.values():
        for row in names.get(function, ()) or names.get(f"__{function}__", ()):
            yield function, row
    yield function, function  # torch.fft.rfft calls itself "fft_rfft"
    for name in (*(caller for caller, calls in _CALLS.items() if op in calls), op):
        for names in NAMES.values():
            for row in names.get(name, ()):
                yield name, row
        yield name, name


def _by_autocast(op: str, computed_in: str, function: str, device: str, dtype: torch.dtype) -> str:
    """Returns the decision of torch's own autocast, inferred from its kernels."""
    key = AUTOCAST_KEYS[device]
    rows = [f"aten::{row}" for _, row in _rows(op, function)]
    if not any(has_operator(row) and has_kernel(row, key) for row in rows):
        return FOLLOWS
    found = computed_in if computed_in == dtypes.name(dtype) else "fp32 or widest"
    return f"torch.autocast: {found} ({function})"


_LISTS: dict[Category, str] = {
    "low_precision": "low precision list",
    "destination": "dtype of what is written",
    "recurrent": "low precision list",
    "fp32": "fp32 list",
    "fp32_inplace": "fp32 list",
    "banned": "banned list, run in fp32",
    "promote": "promote list",
}

_KINDS: dict[Kind, str] = {
    "low_precision": "low precision",
    "bfloat16": "bfloat16",
    "float": "fp32",
    "promote": "widest input",
}

_COMPARISONS = {"eq", "ge", "gt", "le", "lt", "ne"}
_PROMOTING = {"add", "sub", "rsub", "mul", "div", "cat", "stack", *_COMPARISONS}

# The operators that a function calls, for operators whose caller is unknown.
_CALLS: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "bmm", "mv", "dot"),
    "linear": ("addmm", "mm"),
    "einsum": ("bmm",),
    "conv2d": ("convolution",),
    "softmax": ("_softmax", "_safe_softmax"),
    "log_softmax": ("_log_softmax",),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
    "rms_norm": ("_fused_rms_norm",),
    "bilinear": ("_trilinear",),
    "norm": ("linalg_vector_norm",),
    "prelu": ("_prelu_kernel",),
    "nll_loss": ("nll_loss_forward", "nll_loss2d_forward"),
    "lstm": ("mkldnn_rnn_layer", "_cudnn_rnn"),
    "scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}
