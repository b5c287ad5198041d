"""A trace: one dispatch mode, which shows every operator of this thread."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from apex._core import dtypes
from apex._engine.conversion.state import state_of
from apex._engine.session import Session
from apex._torch import dtensor, ranks
from apex._torch.autograd import backward_id
from apex._torch.copies import capturing, is_wrapped
from apex._torch.dispatch_modes import (
    receives,
    records_operators,
    suspend_modes,
    written_arguments,
)
from apex._torch.modules import modules_in
from apex._torch.sparse import stored_values, with_memory
from apex.debug.common import eager
from apex.debug.place import Tracker

SomeTrace = TypeVar("SomeTrace", bound="Trace")
Fact = TypeVar("Fact")

_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)

WIDE = {
    **dict.fromkeys(dtypes.CASTABLE, torch.float64),
    **dict.fromkeys(_COMPLEX, torch.complex128),
}
"""The dtypes of values that are checked, and the widest of their kind."""

SAVES_INFINITIES = ("ctc_loss", "scaled_dot_product", "flash_attention", "efficient_attention")
"""Name prefixes of operators whose outputs after the first may contain infinities.

These outputs are saved for the backward pass.
"""

_EXCHANGES = ("c10d", "_c10d", "symm_mem", "_dtensor")
"""Prefixes of the namespaces whose operators exchange data between processes."""

_LOCAL = ("aten.", "torchvision.")
"""Prefixes of operators that compute in this process only."""


def operators(names: str) -> frozenset[str]:
    """Returns the operators that a text names, by their base names."""
    return frozenset(names.split())


_OVERWRITES = operators("copy fill zero uniform normal recv recv_any_source")
"""Operators that write an argument without reading its previous values."""

_RUNNING_STATISTICS = ("running_mean", "running_var")
_WRITES = {
    "native_batch_norm": _RUNNING_STATISTICS,
    "cudnn_batch_norm": _RUNNING_STATISTICS,
    "miopen_batch_norm": _RUNNING_STATISTICS,
    # It replaces the tensor's memory: by a loaded file's, or a worker process's.
    "set_": (),
    # FSDP2's copies this rank's shard into the buffer of the all-gather.
    "all_gather_copy_in": ("all_gather_output",),
}
"""The arguments that operators write, where their schemas say otherwise."""

_SHARING = operators("unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk")
"""Operators that return views although their schemas do not say so."""

_UNINITIALIZED = ("empty", "new_empty", "resize", "set_")
"""Name prefixes of operators that allocate or replace memory and set no values."""


class Traits(NamedTuple):
    """Properties of an operator, derived from its schema.

    Attributes:
        name: Namespace and operator, such as ``"aten.exp_"``.
        base: The operator without namespace, underscores and ``foreach``, such as ``"exp"``.
        defaults: The default of each argument by name, in order; None for an argument without.
        view: Whether it returns a view of its input and writes nothing.
        writes: Names of the arguments that it writes.
        reads_written: Whether the result depends on the previous values of these arguments.
        exchanges: Whether other processes take part. Its results may arrive after the call, and
            a second call would wait for the other processes.
        uninitialized: Whether it allocates memory and sets no values.
    """

    name: str
    base: str
    defaults: dict[str, Any]
    view: bool
    writes: tuple[str, ...]
    reads_written: bool
    exchanges: bool
    uninitialized: bool


class Call(NamedTuple):
    """One call of an operator: the overload, its traits, and the arguments."""

    func: Any
    traits: Traits
    args: Any
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """Namespace and operator, such as ``"aten.exp_"``."""
        return self.traits.name

    @property
    def base(self) -> str:
        """The operator without namespace, underscores and ``foreach``, such as ``"exp"``."""
        return self.traits.base

    def run(self) -> Any:
        """Runs the operator."""
        return self.func(*self.args, **self.kwargs)

    @property
    def may_communicate(self) -> bool:
        """Whether other processes may take part.

        An operator of an unknown library hides the operators that it calls.
        """
        known = self.name.startswith(_LOCAL) or ranks.world_size() == 1
        return self.traits.exchanges or not known

    @property
    def arguments(self) -> list[Any]:
        """The arguments that were passed, positional ones first."""
        return [*self.args, *self.kwargs.values()]

    @property
    def named(self) -> dict[str, Any]:
        """All arguments by name; those that were not passed have their defaults."""
        defaults = self.traits.defaults
        positional = zip(defaults, self.args, strict=False)
        return {**defaults, **dict(positional), **self.kwargs}

    @property
    def overwritten(self) -> list[Any]:
        """The arguments that the call writes, of any dtype."""
        return [self.named[name] for name in self.traits.writes]

    @property
    def written(self) -> list[Tensor]:
        """The floating-point tensors that the call writes."""
        return list(floating(self.overwritten))

    def mapped(self, replaced: Callable[[Any], Any]) -> Call:
        """Returns the call with each argument, and each item of a list, replaced."""
        args = list(tree_map(replaced, self.args))
        return self._replace(args=args, kwargs=tree_map(replaced, self.kwargs))


@functools.cache
def traits(func: Any) -> Traits:
    """Returns the traits of an operator overload."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    base = operator_name(name)
    written = written_arguments(func)
    if name in _WRITES:
        written = [argument for argument in schema.arguments if argument.name in _WRITES[name]]
    overwrites = base in _OVERWRITES or any(argument.is_out for argument in written)
    if receives(func) and "Tensor" in str(schema.arguments[1].type):  # the tensors to send
        overwrites = True
    aliases = any(result.alias_info is not None for result in schema.returns)
    shares_memory = aliases or base in _SHARING
    return Traits(
        name=f"{namespace}.{name}",
        base=base,
        defaults={argument.name: argument.default_value for argument in schema.arguments},
        view=shares_memory and not written,
        writes=tuple(argument.name for argument in written),
        reads_written=not overwrites,
        exchanges=namespace.startswith(_EXCHANGES) and name != "wait_tensor",
        uninitialized=name.lstrip("_").startswith(_UNINITIALIZED),
    )


def operator_name(op: str) -> str:
    """Returns an operator's name without namespace, underscores and ``foreach``."""
    return op.rpartition(".")[2].strip("_").removeprefix("foreach_")


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows operators on plain tensors to a trace, in the process that entered it."""

    # Such as `torch.cond`, whose branches are not traced.
    supports_higher_order_operators = True

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._process = os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_forked = os.getpid() != self._process  # such as a data loader's worker
        if is_forked or records_operators():
            return func(*args, **kwargs)
        # A tensor class such as DTensor redispatches the operators on its inner tensors.
        plain = Tensor.__torch_dispatch__
        if any(tensor_class.__torch_dispatch__ is not plain for tensor_class in types):
            return NotImplemented
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        trace = self._trace
        trace._tracker.record_site()
        call = Call(func, traits(func), args, kwargs)
        before = trace._before(call)
        result = call.run()
        trace._after(call, before, result)
        return result


class Trace:
    """A context that traces every operator of this thread, and of its backward passes.

    A subclass observes each operator call before and after it runs, and each optimizer step.

    Attributes:
        mode: The active dispatch mode; None before and after the trace.
    """

    _NAME: str

    def __init__(self, *models: nn.Module) -> None:
        """Prepares a trace; tracing starts on entry.

        Raises:
            TypeError: If an argument is not a module.
        """
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"{self._NAME} got {type(model).__name__}; it takes models (nn.Module), one "
                    "by one, and a GradScaler as scaler=."
                )
        self._tracker = Tracker(*models)
        # The optimizer whose step is running.
        self._stepping: Optimizer | None = None
        # A trace runs once, so that a second entry raises an error.
        self._entered = False
        self.mode: TorchDispatchMode | None = None

    def __enter__(self: SomeTrace) -> SomeTrace:
        """Starts tracing this thread.

        Raises:
            RuntimeError: If the trace was entered before.
        """
        if self._entered:
            raise RuntimeError(
                f"This trace was entered before, and a trace traces once. Call {self._NAME} again."
            )
        self._entered = True
        with ExitStack() as hooks:
            hooks.enter_context(self._tracker.tracking())
            hooks.callback(register_optimizer_step_pre_hook(self._enter_step).remove)
            hooks.callback(register_optimizer_step_post_hook(self._leave_step).remove)
            hooks.enter_context(eager)
            self.mode = hooks.enter_context(Mode(self))
            self._hooks = hooks.pop_all()  # undone on exit
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models."""
        with suspend_modes(self.mode):  # such as a trace that ends later
            self._hooks.close()
        self.mode = None

    @property
    def _nothing(self) -> str:
        """The report of a trace in which no operator ran."""
        return (
            f"Nothing traced: no operator ran inside. Write `with amp.debug.{self._NAME}(model) as "
            "trace:` around a whole iteration, in the thread that runs it."
        )

    def _before(self, call: Call) -> Any:
        """Runs before the call; ``_after`` receives the value that it returns."""

    def _after(self, call: Call, before: Any, result: Any) -> None:
        """Runs after the call."""

    def _enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Runs before each step of an optimizer."""
        self._stepping = optimizer

    def _leave_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Runs after each step of an optimizer."""
        self._stepping = None

    @property
    def _in_step(self) -> bool:
        """Whether an optimizer is updating weights; False in its closure, a forward pass."""
        in_closure = torch.is_grad_enabled() or backward_id() != -1
        return self._stepping is not None and not in_closure

    @property
    def _way(self) -> str:
        """How the models train: amp's level, ``"autocast"`` or ``"plain"``."""
        for model in self._tracker.models:
            for module in modules_in(model):
                state = state_of(module)
                if state is not None:
                    return state.session.policy.opt_level
        if not self._tracker.autocasts:
            return "plain"
        for session in Session.live:
            if session.made_by == "init":  # it has no models
                return session.policy.opt_level
        return "autocast"


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """The finite values of one tensor.

    Attributes:
        dtype: Name of its dtype.
        shape: Its shape.
        low: Least finite value; 0 if there is none. For complex numbers, of their parts.
        high: Largest finite value; 0 if there is none.
        smallest: Least absolute value other than 0; 0 if there is none.
        nonfinite: Number of elements that are inf or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    smallest: float
    nonfinite: int

    @property
    def largest(self) -> float:
        """Largest finite absolute value."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        span = f"{self.low:.4g}"
        if self.low != self.high:
            span = f"from {self.low:.4g} to {self.high:.4g}"
        if self.nonfinite:
            span = f"{span}, {self.nonfinite} not finite"
        return f"{self.dtype} {list(self.shape)} {span}"


def outputs(call: Call, result: Any) -> list[Tensor]:
    """Returns each floating-point tensor that a call returned or wrote, once."""
    tensors = {id(tensor): tensor for tensor in [*floating(result), *call.written]}
    return list(tensors.values())


def floating(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point and complex tensors in nested lists, tuples and dicts."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and is_checked(leaf):
            yield leaf


def is_checked(tensor: Tensor) -> bool:
    """Returns whether a tensor has floating-point or complex values of at least 16 bits.

    Nested tensors, which few operators take, are not checked.
    """
    has_values = tensor.device.type != "meta" and not is_lazy(tensor) and not is_wrapped(tensor)
    return has_values and tensor.dtype in WIDE and not tensor.is_nested


def real(values: Tensor) -> Tensor:
    """Returns a real view of complex values; others unchanged."""
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    return values


def dense(tensor: Tensor) -> Tensor:
    """Returns the values stored on this rank: the tensor, a sparse tensor's values, or a shard."""
    tensor = dtensor.local(tensor).detach()
    if tensor.layout is torch.strided:
        return with_memory(tensor)
    if tensor.layout is torch.sparse_coo:
        return stored_values(tensor)
    return tensor.values()


def storage(tensor: Tensor) -> UntypedStorage:
    """Returns the memory of a tensor, which its views share."""
    return dense(tensor).untyped_storage()


class ByMemory(Generic[Fact]):
    """Facts about the floating-point tensors in nested values.

    All views of a memory share one fact, and the memory's end removes it.
    """

    def __init__(self) -> None:
        self._facts: MutableMapping[UntypedStorage, Fact] = WeakIdKeyDictionary()

    def of(self, values: Any) -> Fact | None:
        """Returns the fact about the first tensor that has one; None without one."""
        # Makes no view without facts: in an optimizer's hook, the trace would see the operator.
        if self._facts:
            for tensor in floating(values):
                fact = self._facts.get(storage(tensor))
                if fact is not None:
                    return fact
        return None

    def note(self, values: Any, fact: Fact) -> None:
        """Records a fact about each tensor's memory."""
        for tensor in floating(values):
            self._facts[storage(tensor)] = fact

    def discard(self, values: Any) -> None:
        """Removes the fact about each tensor's memory."""
        for tensor in floating(values):
            self._facts.pop(storage(tensor), None)


def kind_of(tensor: Tensor) -> str:
    """Returns ``"nan"`` if a tensor contains NaN, else ``"inf"`` if it contains inf, else ``""``.

    Returns ``""`` while a CUDA graph is captured, because nothing has been computed yet. Syncs.
    ``aminmax`` makes one pass without a copy and keeps NaN: 10 to 60 times as fast as ``isfinite``.
    """
    values = dense(tensor)
    if values.numel() == 0 or capturing(values.device):
        return ""
    least, largest = map(float, torch.aminmax(real(values)))  # sync: tracing is a diagnosis
    if math.isnan(largest):
        return "nan"
    if math.isinf(least) or math.isinf(largest):
        return "inf"
    return ""


def values_of(tensor: Tensor) -> Values:
    """Returns the range of a tensor's finite values. Syncs."""
    values = real(dense(tensor))
    finite = values[torch.isfinite(values)]
    nonfinite = values.numel() - finite.numel()
    if not finite.numel():
        finite = finite.new_zeros(1)
    sizes = finite[finite != 0.0].abs()
    return Values(  # sync: tracing is a diagnosis
        dtypes.name(tensor.dtype),
        tuple(tensor.shape),
        float(finite.min()),
        float(finite.max()),
        float(sizes.min()) if sizes.numel() else 0.0,
        nonfinite,
    )


def is_mask(tensor: Tensor) -> bool:
    """Returns whether a tensor's infinities look deliberate, as in a mask.

    A mask is added: it holds 0 and -inf only.
    """
    values = dense(tensor)
    if not kind_of(tensor):
        return False
    return bool(((values == 0.0) | (values == -math.inf)).all())  # sync: tracing is a diagnosis


def largest_in_double(call: Call) -> float | None:
    """Returns the largest absolute result of an operator recomputed in float64.

    Returns ``inf`` if the result is infinite or NaN in float64, too; None if the operator cannot
    be rerun. The arguments must be as they were before the call.
    """
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    if is_random or call.may_communicate:
        return None
    try:
        call = call.mapped(_widened)
        # autograd and autocast are off in a dispatch mode. A block that disables autocast would
        # deadlock here, because torch holds the lock of its weight cache while it casts a weight.
        result = call.run()
    except Exception:  # noqa: BLE001 - kernels that lack float64 say so in words of their own
        return None
    largest = 0.0
    for tensor in outputs(call, result):
        if kind_of(tensor):
            return math.inf
        largest = max(largest, values_of(tensor).largest)
    return largest


def _widened(argument: Any) -> Any:
    """Returns a tensor in the widest dtype of its kind, or the widest dtype for a dtype."""
    if not isinstance(argument, Tensor):
        return WIDE.get(argument, argument)
    return argument.to(WIDE.get(argument.dtype, argument.dtype))
