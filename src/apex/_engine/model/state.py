"""The conversion state of a model: its plan, the casts by that plan, and the hooks to remove."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, tree
from apex._engine.autocast.region import UncastRegion
from apex._engine.model.plan import ModelPlan, Region, planned_dtypes, topmost_fp32_modules
from apex._engine.model.state_dict import Fp32Hooks, MasterLink
from apex._engine.model.writes import Writes
from apex._engine.undo import Undo, all_or_nothing
from apex._pickle import empty, rebuild
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import at_tracing
from apex._torch.modules import state_dict_hooks

STATE = "_apex_state"

_log = logging.getLogger("apex")


@dataclass(eq=False)
class ModelState:
    """The conversion state in a model's ``__dict__``.

    Attributes:
        plan: The present plan.
        region: Runs the model's own forward.
        link: Finds the masters of the parameters.
        owner: Kept alive by the model; not copied with it.
        inner_forward: A ``forward`` that was set on the object, called in place of the class's.
        handles: Hooks to remove at the end.
        hooked: The dtype that the attached hooks are for.
        given: The plan of the conversion; differs from ``plan`` after the model was cast to another
            dtype.
        names: Names of the positional arguments of ``forward``.
        uncast: Positions and names of its arguments that are not cast.
        writes: Finds what the model writes in 16 bits.
    """

    plan: ModelPlan
    region: Region
    link: MasterLink
    owner: object = None
    inner_forward: Callable[..., Any] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    hooked: torch.dtype | None = None
    given: ModelPlan = field(init=False)
    names: tuple[str, ...] = ()
    uncast: tuple[int | str, ...] = ()
    writes: Writes = field(default_factory=Writes)

    def __post_init__(self) -> None:
        self.given = self.plan

    def begin_forward(self, *, traced: bool = False) -> None:
        """Rounds written masters into the model, and records the active DDP wrapper."""
        source = self.link.source
        if source is None:
            return
        if not traced:
            source.write_back()
        wrapper = active_wrapper()
        if wrapper is not None:
            source.runs_under(wrapper, traced=traced)

    @at_tracing
    def begin_traced_forward(self) -> None:
        """Records, while dynamo traces a forward pass, what compiled code cannot."""
        self.begin_forward(traced=True)

    def apply(self, model: nn.Module, undo: Undo | None = None) -> None:
        """Casts parameters and buffers and attaches the hooks; on failure, reverts the casts.

        May be called again: casts what was added to the model. ``undo`` receives the inverse of the
        casts.
        """
        self.names = positional_names(self.inner_forward or model.forward)
        named = self.plan.fp32_inputs
        self.uncast = (*named, *(at for at, name in enumerate(self.names) if name in named))
        with all_or_nothing() as casts:
            if undo is not None:
                undo.push(casts.undo)
            for each in planned_dtypes(model, self.plan):
                cast_in_place(each.tensor, each.dtype, casts)
        if self.plan.param_dtype is not self.hooked:
            self.remove_hooks()
            self.hooked = self.plan.param_dtype
        if self.given.casts_down:
            self._attach_hooks(model)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # makes the weights contiguous again, for cuDNN

    def _attach_hooks(self, model: nn.Module) -> None:
        """Attaches the hooks to every module that lacks them."""
        low = self.hooked or torch.float32
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

        A 16-bit model that is cast to another dtype first gets its exact fp32 values, and computes
        in that dtype from then on. Modules that the plan keeps in fp32, such as batch norm, are
        never cast to 16 bits. A model at O0 casts its inputs to its new dtype.
        """
        low, before = self.given.param_dtype, self._compute_dtype(model)
        if self.given.casts_down and low is not None:
            asked = fn(torch.empty(0, dtype=self.plan.param_dtype)).dtype
            if asked is not self.plan.param_dtype:
                self._compute_in(model, asked)
                self._warn(model, asked, before, f"model.to({low}) switches back.")
            return apply(lambda tensor: _unless_lower(tensor, fn(tensor)))
        applied, now = apply(fn), self._compute_dtype(model)
        if now is before or now is None:
            return applied
        if self.plan.input_dtype is before:
            self.plan = replace(self.plan, input_dtype=now)
        remedy = f"model.to({before}) switches back."
        if now in dtypes.LOW_PRECISION:
            remedy = (
                f"The optimizer now steps {dtypes.name(now)} weights without fp32 masters. For "
                "those, call amp.restore and then amp.initialize at opt_level O2 or O5."
            )
        self._warn(model, now, before, remedy)
        return applied

    def _compute_dtype(self, model: nn.Module) -> torch.dtype | None:
        if self.given.casts_down:
            return self.plan.param_dtype
        return next((p.dtype for p in model.parameters() if dtypes.is_castable(p)), None)

    def _warn(
        self, model: nn.Module, now: torch.dtype, before: torch.dtype | None, remedy: str
    ) -> None:
        _log.warning(
            "%s.to(%s) after amp.initialize: the model's weights are now %s, and no longer %s, as "
            "amp.initialize set up. %s",
            *(type(model).__name__, now, now, before, remedy),
        )

    def _compute_in(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Gives a 16-bit model its exact values, and makes it compute in ``dtype``.

        All or nothing. Masters, optimizers and loss scales stay.
        """
        self.link.write_back()
        with all_or_nothing() as undo:
            undo.push(setattr, self, "plan", self.plan)
            self.plan = self.given
            if dtype is not self.given.param_dtype:
                self.plan = self.given.computing_in(dtype)
            for tensor in [*model.parameters(), *model.buffers()]:
                if dtypes.is_low_precision(tensor):
                    set_in_place(tensor, self.link.exact(tensor, tensor.detach()), undo)
            self.apply(model)

    def remove_hooks(self) -> None:
        """Removes every hook that ``apply`` attached."""
        while self.handles:
            self.handles.pop().remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        new = memo[id(self)] = object.__new__(type(self))
        own = {**self.__dict__, "owner": None, "writes": None}
        new.__dict__.update(copy.deepcopy(own, memo), writes=Writes())
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without owner and region: no level casts both parameters and operators.

        A model that casts no parameters is pickled as a plain model, without this state.
        """
        if not self.plan.casts_down:
            return type(None), ()
        saved = ("plan", "given", "link", "inner_forward", "handles", "hooked")
        return empty, ("model_state",), {name: getattr(self, name) for name in saved}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(saved["plan"], UncastRegion(), saved["link"])  # type: ignore[misc]
        for name in ("given", "inner_forward", "handles", "hooked"):
            setattr(self, name, saved.get(name, getattr(self, name)))


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

    Drops the class's own, which scripts that replace ``forward`` for a while leave on the object.
    """
    own = model.__dict__.pop("forward", None)
    if own is not None and getattr(own, "__func__", None) is not type(model).forward:
        state.inner_forward = own


def module_behind(model: nn.Module) -> nn.Module:
    """Returns the module that a proxy stands for, and any other object itself.

    A proxy is an object whose ``__class__`` says that it is a module, such as a model of
    classy_vision; it finds its attributes in the module.
    """
    if issubclass(type(model), nn.Module):
        return model
    try:
        first = next(iter(model.modules()), model)
    except (AttributeError, TypeError):  # no proxy of a module
        return model
    return first if issubclass(type(first), nn.Module) else model


def state_of(model: nn.Module) -> ModelState | None:
    """Returns the conversion state of ``model``, or ``None`` for a plain one."""
    state = module_behind(model).__dict__.get(STATE)
    return state if isinstance(state, ModelState) else None


def is_converted(model: nn.Module) -> bool:
    """Returns whether ``model`` is converted."""
    return state_of(model) is not None


# -- fp32 modules inside a low-precision model ---------------------------------------------------


@dataclass(frozen=True)
class InputCast:
    """A forward pre-hook that casts floating inputs to fp32; pickles by its kind."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


# -- dtype changes in place ----------------------------------------------------------------------


def cast_in_place(tensor: Tensor, dtype: torch.dtype, undo: Undo) -> None:
    """Casts ``tensor`` and its gradient in place."""
    if tensor.dtype is not dtype and dtypes.is_castable(tensor):
        set_in_place(tensor, tensor.detach().to(dtype), undo)


def set_in_place(tensor: Tensor, value: Tensor, undo: Undo) -> None:
    """Gives ``tensor`` the storage and dtype of ``value``, its gradient the same dtype."""
    grad = tensor.grad if tensor.is_leaf else None
    new_grad = None if grad is None else dtypes.cast(grad.detach(), value.dtype)
    undo.push(assign, tensor, tensor.data, grad)
    assign(tensor, value, new_grad)


def assign(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    """Gives ``tensor`` the storage and dtype of ``data`` and the gradient ``grad``."""
    if tensor.is_leaf:
        tensor.grad = None  # torch rejects a gradient whose dtype differs from its tensor's
    tensor.data = data
    if grad is not None:
        tensor.grad = grad
