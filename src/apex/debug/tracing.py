"""A trace: one dispatch mode, which shows every operator of this thread."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from apex._core import dtypes, tree
from apex._engine.conversion.state import state_of
from apex._torch import dtensor, ranks
from apex._torch.autograd import backward_id
from apex._torch.copies import capturing
from apex._torch.dispatch_modes import computes_shapes_only, receives, written_arguments
from apex._torch.sparse import stored_values, with_memory
from apex.debug.common import eager
from apex.debug.place import Tracker

SomeTrace = TypeVar("SomeTrace", bound="Trace")
Fact = TypeVar("Fact")

WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64, torch.complex128), torch.complex128),
}
"""The dtypes of values that are checked, and the widest of their kind."""

SAVES_INFINITIES = ("ctc_loss", "scaled_dot_product", "flash_attention", "efficient")
"""How operators begin whose outputs after the first, saved for backward, may hold infinities."""

EXCHANGES = ("c10d", "_c10d", "symm_mem", "_dtensor")
"""How the namespaces begin whose operators take part in what several processes compute."""

_LOCAL = ("aten.", "torchvision.")
"""Namespaces whose operators compute in this process alone."""

_OVERWRITES = {"copy", "fill", "zero", "uniform", "normal", "recv", "recv_any_source"}
# They write the running mean and variance, which their schemas do not say.
_WRITES_RUNNING_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
# Views whose schema does not say so.
_SHARING = {"unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
_UNINITIALIZED = ("empty", "new_empty", "resize", "set_")


class Traits(NamedTuple):
    """What an operator's schema says.

    Attributes:
        name: Namespace and operator, such as ``"aten.exp_"``.
        base: The operator without namespace, underscores and ``foreach``, such as ``"exp"``.
        view: Whether it returns a view of its input and writes nothing.
        writes: Positions (names if keyword-only) of the arguments that it writes.
        reads_written: Whether the result depends on the previous values of these arguments.
        exchanges: Whether other processes take part. What such a call writes and returns may come
            later, and a second call would wait for theirs.
        uninitialized: Whether it gives memory and sets no values.
    """

    name: str
    base: str
    view: bool
    writes: tuple[int | str, ...]
    reads_written: bool
    exchanges: bool
    uninitialized: bool


class Call(NamedTuple):
    """One call of an operator: the overload, what its schema says, and the arguments."""

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
        """Whether other processes may take part: a library's operator hides what it calls."""
        known = self.name.startswith(_LOCAL) or ranks.world_size() == 1
        return self.traits.exchanges or not known

    @property
    def arguments(self) -> list[Any]:
        """All arguments, positional ones first."""
        return [*self.args, *self.kwargs.values()]

    def mapped(
        self,
        values_of: Callable[[Tensor], Tensor],
        kinds: Mapping[torch.dtype, torch.dtype] | None = None,
    ) -> Call:
        """Returns the call with other tensors and, where given, other dtypes as arguments.

        A tensor that is given twice, as in ``x.mul_(x)``, is one tensor there, too.
        """

        def other(value: Any) -> Any:
            return kinds.get(value, value) if kinds and isinstance(value, torch.dtype) else value

        args, kwargs = tree.map_tensors(values_of, (self.args, self.kwargs))
        named = {name: other(value) for name, value in kwargs.items()}
        return self._replace(args=tuple(map(other, args)), kwargs=named)

    @property
    def written(self) -> list[Tensor]:
        """The floating-point tensors that the call writes."""
        return list(floating(self.overwritten))

    @property
    def overwritten(self) -> list[Any]:
        """The arguments that the call writes, of any dtype."""
        return [
            self.kwargs.get(place) if isinstance(place, str) else self.args[place]
            for place in self.traits.writes
            if isinstance(place, str) or place < len(self.args)
        ]


@functools.cache
def traits(func: Any) -> Traits:
    """Returns the traits of an operator overload."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    base = operator_name(name)
    written = [
        (argument.name if argument.kwarg_only else place, argument.is_out)
        for place, argument in written_arguments(func)
    ]
    if base in _WRITES_RUNNING_STATISTICS:
        written = [(3, False), (4, False)]
    if name == "set_":  # gives the tensor other memory: a loaded file's, a worker process's
        written = []
    if name == "all_gather_copy_in":  # FSDP2's, to memory of which a part is this rank's
        names = [argument.name for argument in schema.arguments]
        written = [(place, False) for place, n in enumerate(names) if n == "all_gather_output"]
    aliases = any(result.alias_info is not None for result in schema.returns)
    view = not written and (aliases or base in _SHARING)
    reads = base not in _OVERWRITES and not any(out for _, out in written)
    if receives(func) and "Tensor" in str(schema.arguments[1].type):  # what it sends
        reads = False
    exchanges = namespace.startswith(EXCHANGES) and name != "wait_tensor"
    places = tuple(place for place, _ in written)
    uninitialized = name.lstrip("_").startswith(_UNINITIALIZED)
    return Traits(f"{namespace}.{name}", base, view, places, reads, exchanges, uninitialized)


def operator_name(op: str) -> str:
    """Returns an operator's name without namespace, underscores and ``foreach``."""
    return op.rpartition(".")[2].strip("_").removeprefix("foreach_")


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows operators on plain tensors to a trace, in the process that entered it."""

    # Their bodies consist of operators, which are traced.
    supports_higher_order_operators = True

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._process = os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In a forked data loader worker, or without values.
        if os.getpid() != self._process or computes_shapes_only():
            return func(*args, **kwargs)
        plain = Tensor.__torch_dispatch__  # of classes with memory of their own, not quantized ones
        if any(kind.__torch_dispatch__ is not plain for kind in types):  # inner operators come next
            return NotImplemented
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        trace = self._trace
        trace._tracker.record_site()
        call = Call(func, traits(func), args, kwargs)
        before = trace._before(call)
        result = func(*args, **kwargs)
        trace._after(call, before, result)
        return result


class Trace:
    """A context that traces every operator of this thread, and of its backward passes.

    A subclass looks at each call of an operator, before and after it runs, and at optimizer steps.

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
        self._stepping: Optimizer | None = None  # whose step is running
        self._entered = False
        self._hooks = ExitStack()
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
            hooks.enter_context(eager())
            self.mode = hooks.enter_context(Mode(self))
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models."""
        self.mode = None
        self._stepping = None
        self._hooks.close()

    @property
    def _nothing(self) -> str:
        """What a report says if nothing was traced."""
        return (
            f"Nothing traced: no operator ran inside. Write `with amp.debug.{self._NAME}(model) as "
            "trace:` around a whole iteration."
        )

    def _before(self, call: Call) -> Any:
        """Returns what ``_after`` needs of the time before the call."""

    def _after(self, call: Call, before: Any, result: Any) -> None:
        """Looks at the result."""

    def _enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Called before every step of an optimizer."""
        self._stepping = optimizer

    def _leave_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Called after it."""
        self._stepping = None

    @property
    def _in_step(self) -> bool:
        """Whether an optimizer computes: its closure, a forward pass, enables gradients."""
        in_closure = torch.is_grad_enabled() or backward_id() != -1
        return self._stepping is not None and not in_closure

    @property
    def _way(self) -> str:
        """How the models train: amp's level, ``"autocast"`` or ``"plain"``."""
        for model in self._tracker.models:
            for module in model.modules():
                state = state_of(module)
                if state is not None and state.link.session is not None:
                    return state.link.session.policy.opt_level
        return "autocast" if self._tracker.autocasts else "plain"


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
        return max(-self.low, self.high)

    def __str__(self) -> str:
        bad = f", {self.nonfinite} not finite" if self.nonfinite else ""
        span = f"from {self.low:.4g} to {self.high:.4g}"
        span = f"{self.low:.4g}" if self.low == self.high else span
        return f"{self.dtype} {list(self.shape)} {span}{bad}"


def outputs(call: Call, result: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors that a call returned or wrote."""
    returned = list(floating(result))
    known = set(map(id, returned))
    yield from returned
    yield from (tensor for tensor in call.written if id(tensor) not in known)


def leaves(value: Any) -> Iterator[Any]:
    """Yields what nested lists, tuples and dicts hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def floating(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point and complex tensors in nested lists, tuples and dicts."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and is_checked(leaf))


def is_checked(tensor: Tensor) -> bool:
    """Returns whether a tensor has floating-point or complex values, of at least 16 bits."""
    return tensor.dtype in WIDE and tensor.device.type != "meta" and not is_lazy(tensor)


def real(values: Tensor) -> Tensor:
    """Returns a real view of complex values; others unchanged."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def dense(tensor: Tensor) -> Tensor:
    """Returns the values stored on this rank: the tensor, a sparse tensor's values, or a shard."""
    tensor = dtensor.local(tensor)
    if tensor.layout is torch.strided:
        return with_memory(tensor.detach())
    if tensor.layout is torch.sparse_coo:
        return stored_values(tensor.detach())
    return tensor.detach().values()


def storage(tensor: Tensor) -> UntypedStorage:
    """Returns the memory of a tensor, which its views share."""
    return dense(tensor).untyped_storage()


class ByMemory(Generic[Fact]):
    """Facts about tensors, each shared by all views of the memory, and gone with it."""

    def __init__(self) -> None:
        self._facts: MutableMapping[UntypedStorage, Fact] = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> Fact | None:
        """Returns what is known of a tensor's memory; None if nothing."""
        # Without facts, no view is made: in an optimizer's hook it is an operator of the trace.
        return self._facts.get(storage(tensor)) if self._facts else None

    def note(self, tensor: Tensor, fact: Fact) -> None:
        """Records a fact about a tensor's memory."""
        self._facts[storage(tensor)] = fact

    def discard(self, tensor: Tensor) -> None:
        """Forgets what was known of a tensor's memory."""
        self._facts.pop(storage(tensor), None)


def kind_of(tensor: Tensor) -> str:
    """Returns ``"nan"`` if a tensor holds any, else ``"inf"`` if it does, else ``""``. Syncs.

    Also returns ``""`` while a CUDA graph is captured, when nothing has been computed yet.
    ``aminmax`` makes one pass without a copy and keeps NaN: 10 to 60 times as fast as ``isfinite``.
    """
    values = dense(tensor)
    if values.numel() == 0 or capturing(values.device):
        return ""
    ends = [float(end) for end in torch.aminmax(real(values))]  # sync: tracing is a diagnosis
    if any(map(math.isnan, ends)):
        return "nan"
    return "inf" if any(map(math.isinf, ends)) else ""


def values_of(tensor: Tensor) -> Values:
    """Returns the range of a tensor's finite values. Syncs."""
    values = real(dense(tensor))
    values = values if values.dtype is torch.float64 else values.float()
    finite = values[torch.isfinite(values)]
    nonfinite = values.numel() - finite.numel()
    if not finite.numel():
        finite = finite.new_zeros(1)
    sizes = finite[finite != 0.0].abs()
    smallest = float(sizes.min()) if sizes.numel() else 0.0  # sync: tracing is a diagnosis
    return Values(
        dtypes.name(tensor.dtype),
        tuple(tensor.shape),
        float(finite.min()),
        float(finite.max()),
        smallest,
        nonfinite,
    )


def is_mask(tensor: Tensor) -> bool:
    """Returns whether a tensor's infinities look deliberate, as in a mask.

    In a mask, all infinities have the same sign, there is no NaN, and all finite values are equal.
    A mask is real.
    """
    values = dense(tensor)
    if values.is_complex() or kind_of(tensor) == "nan":
        return False
    infinite = values[torch.isinf(values)]
    finite = values[torch.isfinite(values)]
    # sync: tracing is a diagnosis
    return len(torch.unique(infinite)) == 1 and bool((finite == finite[:1]).all())


def covers_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor covers its whole storage."""
    return dense(tensor).nbytes >= storage(tensor).nbytes()


def largest_in_double(call: Call) -> float | None:
    """Returns the largest absolute result of an operator recomputed in float64.

    ``inf`` if the result is infinite or NaN in float64 too; None if the operator cannot be rerun.
    The arguments are as they were before the call.
    """
    if call.may_communicate or torch.Tag.nondeterministic_seeded in call.func.tags:
        return None
    try:
        wide = call.mapped(_doubled, WIDE)
        # autocast is off in a dispatch mode. Ending a block of it here would wait for itself: torch
        # holds the lock of its weight cache while it casts a weight.
        with torch.no_grad():
            result = wide.run()
    except (RuntimeError, TypeError):  # some kernels and devices lack float64
        return None
    found = [*floating(result), *wide.written]
    if any(map(kind_of, found)):
        return math.inf
    return max((values_of(tensor).largest for tensor in found), default=0.0)


def _doubled(tensor: Tensor) -> Tensor:
    wide = WIDE.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(wide) if tensor.layout is torch.strided else tensor
