"""The conversion state of a model: its plan, the casts by that plan, and the way back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, tree
from apex._core.mixins import plain_class, swap_class
from apex._engine.autocast.region import NoAutocastRegion
from apex._engine.conversion.notes import Writes
from apex._engine.conversion.plan import ModelPlan, Region, planned_dtypes, topmost_fp32_modules
from apex._engine.conversion.state_dict import Fp32Hooks, MasterLink
from apex._pickle import empty, rebuild
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import at_tracing
from apex._torch.modules import state_dict_hooks

STATE = "_apex_state"


@dataclass(eq=False)
class ModelState:
    """The conversion state in a model's ``__dict__``.

    Attributes:
        plan: The conversion.
        region: Runs the model's own forward.
        link: Finds the masters of the parameters.
        inner_forward: A ``forward`` that was set on the object, called in place of the class's.
        handles: Hooks to remove at the end.
        uncast: Positions and names of the arguments of ``forward`` that are not cast.
        writes: Finds what the model writes in 16 bits.
    """

    plan: ModelPlan
    region: Region
    link: MasterLink
    inner_forward: Callable[..., Any] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    uncast: tuple[int | str, ...] = ()
    writes: Writes = field(default_factory=Writes)

    def begin_forward(self, *, traced: bool = False) -> None:
        """Rounds written masters into the model, and records the active DDP wrapper."""
        if not traced:
            self.link.write_back()
        session = self.link.session
        if session is None:
            return
        if session.masters.has_clipped and torch.is_grad_enabled() and not traced:
            session.masters.move_clipped_grads()
        wrapper = active_wrapper()
        if wrapper is not None:
            session.ddp_tracker.mark_forward(wrapper, traced=traced)

    @at_tracing
    def begin_traced_forward(self) -> None:
        """Records, while dynamo traces a forward pass, what compiled code cannot."""
        self.begin_forward(traced=True)

    def apply(self, model: nn.Module, undo: ExitStack) -> None:
        """Casts parameters and buffers and attaches the hooks; ``undo`` receives the inverse.

        May be called again: casts what was added to the model.
        """
        names = positional_names(self.inner_forward or model.forward)
        named = self.plan.fp32_inputs
        self.uncast = (*named, *(at for at, name in enumerate(names) if name in named))
        for _, tensor, dtype in planned_dtypes(model, self.plan):
            if tensor.dtype is not dtype and dtypes.is_castable(tensor):
                set_in_place(tensor, tensor.detach().to(dtype), undo)
        if self.plan.casts_down:
            self._attach_hooks(model)
        flatten_rnns(model)

    def _attach_hooks(self, model: nn.Module) -> None:
        """Attaches the hooks to every module that lacks them."""
        low = self.plan.param_dtype or torch.float32
        for module in topmost_fp32_modules(model, self.plan):
            if not _has(module._forward_pre_hooks, InputCast):
                cast = module.register_forward_pre_hook(InputCast(), with_kwargs=True)
                self.handles.append(cast)
                self.handles.append(module.register_forward_hook(OutputCast(low)))
        for module in model.modules():
            if not _has(state_dict_hooks(module), Fp32Hooks):
                Fp32Hooks(self.link).attach(module, self.handles)

    def cast_model(
        self, model: nn.Module, apply: Callable[..., Any], fn: Callable[[Tensor], Tensor]
    ) -> Any:
        """Implements ``to``, ``half``, ``float`` and the like by ``apply``, torch's own method.

        A 16-bit model that is cast to another dtype becomes plain first, with its exact values.
        Otherwise the modules that the plan keeps in fp32, such as batch norm, stay in fp32.
        """
        before = self.plan.param_dtype or torch.float32
        now = fn(torch.empty(0, dtype=before, device="cpu")).dtype
        if now is before:
            return apply(lambda tensor: _unless_lower(tensor, fn(tensor)))
        if self.plan.casts_down:
            restore(model)
        self.writes.tell(
            "dtype",
            "%s.to(%s) after amp.initialize: the model's weights are now %s, no longer %s. Weights "
            "cast to 16 bits train without fp32 masters: for those, or another level, call "
            "amp.restore and then amp.initialize (O2 or O5 for masters).",
            *(type(model).__name__, now, now, before),
        )
        return apply(fn)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        new = memo[id(self)] = object.__new__(type(self))
        own = {**self.__dict__, "writes": None}
        new.__dict__.update(copy.deepcopy(own, memo), writes=Writes())
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without region: no level casts both parameters and operators.

        A model that casts no parameters is pickled as a plain model, without this state.
        """
        if not self.plan.casts_down:
            return type(None), ()
        saved = ("plan", "link", "inner_forward", "handles")
        return empty, ("model_state",), {name: getattr(self, name) for name in saved}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        plan, link, forward, handles = map(saved.get, ("plan", "link", "inner_forward", "handles"))
        self.__init__(plan, NoAutocastRegion(), link, forward, handles)  # type: ignore[misc]


def positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments that ``forward`` takes by position."""
    try:
        params = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # written in C
        return ()
    return tuple(p.name for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _unless_lower(tensor: Tensor, moved: Tensor) -> Tensor:
    """Returns ``moved``, in the dtype of ``tensor`` if its own is a lower one."""
    is_lower = moved.dtype is not tensor.dtype and moved.dtype in dtypes.LOW_PRECISION
    return tensor.to(moved.device) if is_lower else moved


def _has(hooks: Mapping[int, object], kind: type) -> bool:
    return any(isinstance(hook, kind) for hook in hooks.values())


def stash_forward(model: nn.Module, state: ModelState) -> None:
    """Moves a ``forward`` set on the object into ``state``, so that the class's runs.

    Drops the class's own, which scripts that replace ``forward`` for a while leave on the object,
    and which a file names for the one below it.
    """
    own = model.__dict__.pop("forward", state.inner_forward)
    is_class_own = getattr(own, "__func__", None) is type(model).forward
    state.inner_forward = None if is_class_own else own


def state_of(model: nn.Module) -> ModelState | None:
    """Returns the conversion state of ``model``, or ``None`` for a plain one."""
    state = model.__dict__.get(STATE)
    return state if isinstance(state, ModelState) else None


def is_converted(model: nn.Module) -> bool:
    """Returns whether ``model`` is converted."""
    return state_of(model) is not None


# -- fp32 modules inside a low-precision model ---------------------------------------------------


@dataclass(frozen=True)
class InputCast:
    """A forward pre-hook that casts floating inputs to fp32; pickles by its kind."""

    def __call__(self, module: nn.Module, args: tree.Args, kwargs: tree.Kwargs) -> tree.Call:
        """Returns the arguments with every floating tensor in fp32."""
        return tree.cast_arguments(args, kwargs, torch.float32)

    def __reduce__(self) -> tuple[Any, ...]:
        """See :mod:`apex._pickle`."""
        return rebuild, ("input_cast",)


@dataclass(frozen=True)
class OutputCast:
    """A forward hook that casts floating outputs; pickles by its kind."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns ``output`` with every floating tensor in the dtype."""
        return tree.cast_tensors(output, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """See :mod:`apex._pickle`."""
        return rebuild, ("output_cast", self.dtype)


# -- the way back --------------------------------------------------------------------------------


def restore(model: nn.Module, masters: Mapping[int, Tensor] | None = None) -> None:
    """Turns a converted model back into a plain fp32 model, in place.

    A parameter takes its master's exact value if that rounds to the parameter's value.

    Args:
        model: A converted model.
        masters: Fp32 masters by ``id`` of their parameter, in addition to those that the model has
            a link to (an unpickled model has none).
    """
    state = state_of(model)
    if state is None:
        return
    state.link.write_back()
    with ExitStack() as undo:
        for tensor in [*model.parameters(), *model.buffers()] if state.plan.casts_down else ():
            if dtypes.is_low_precision(tensor):
                exact = state.link.exact(tensor, tensor, (masters or {}).get(id(tensor)))
                set_in_place(tensor, exact, undo)
        undo.pop_all()
    undo_convert(model)
    flatten_rnns(model)


def undo_convert(model: nn.Module) -> None:
    """Makes a converted model plain, but leaves the dtypes of its tensors.

    Allocates no tensors, so it works out of memory.
    """
    state = model.__dict__.pop(STATE, None)
    if state is None:
        return
    swap_class(model, plain_class(type(model)))
    while state.handles:
        state.handles.pop().remove()
    if state.inner_forward is not None:
        model.__dict__.setdefault("forward", state.inner_forward)


def flatten_rnns(model: nn.Module) -> None:
    """Makes the weights of RNNs contiguous again after a change of dtype, for cuDNN."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


# -- dtype changes in place ----------------------------------------------------------------------


def set_in_place(tensor: Tensor, value: Tensor, undo: ExitStack) -> None:
    """Gives ``tensor`` the storage and dtype of ``value``, its gradient the same dtype."""
    grad = tensor.grad if tensor.is_leaf else None
    new_grad = None if grad is None else dtypes.cast(grad.detach(), value.dtype)
    undo.callback(assign, tensor, tensor.data, grad)
    assign(tensor, value, new_grad)


def assign(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    """Gives ``tensor`` the storage and dtype of ``data`` and the gradient ``grad``."""
    if tensor.is_leaf:
        tensor.grad = None  # torch rejects a gradient whose dtype differs from its tensor's
    tensor.data = data
    if grad is not None:
        tensor.grad = grad
