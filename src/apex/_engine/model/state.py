"""The conversion state of a model: its plan, the casts by that plan, and the hooks to remove."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, rounding, tree
from apex._engine.autocast.region import UncastRegion
from apex._engine.model import kept_buffers
from apex._engine.model.kept_buffers import KeptBuffer
from apex._engine.model.plan import (
    ModelPlan,
    Parts,
    Region,
    planned_dtypes,
    topmost_fp32_modules,
)
from apex._engine.model.state_dict import Fp32Hooks, MasterLink
from apex._engine.undo import Undo, all_or_nothing
from apex._pickle import empty, rebuild
from apex._torch import dtensor
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import at_tracing
from apex._torch.modules import children, has_buffers, named_modules, own_tensors, state_dict_hooks

STATE = "_apex_state"

_NOT_SAVED = ("owner", "region", "in_proxy", "model", "known")

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
        hooked: The low-precision dtype that the attached hooks are for.
        in_proxy: Ids of the threads inside the ``forward`` of a proxy of the model, which casts in
            its place; see Note [Proxies].
        keeps: Names of the buffers that yield; see Note [Kept buffers].
        given: The plan of the conversion; differs from ``plan`` after the model was cast to another
            dtype.
        model: The model, for code that runs while its forward is traced.
        known: The modules that the plan was applied to.
    """

    plan: ModelPlan
    region: Region
    link: MasterLink
    owner: object = None
    inner_forward: Callable[..., Any] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    hooked: torch.dtype | None = None
    in_proxy: set[int] = field(default_factory=set)
    keeps: tuple[str, ...] = ()
    given: ModelPlan = field(init=False)
    model: weakref.ref[nn.Module] | None = None
    known: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.given = self.plan

    def kept(self, model: nn.Module) -> list[Tensor]:
        """Returns the buffers of ``model`` that yield; see Note [Kept buffers]."""
        return kept_buffers.of(model, self.keeps) if self.plan.casts_down else []

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
        """Does while dynamo traces what compiled code cannot: :meth:`begin_forward`."""
        self.begin_forward(traced=True)
        if self.link.source is not None:
            self.link.source.write_back_before_each_run()
        model = None if self.model is None else self.model()
        for buffer in () if model is None else self.kept(model):
            kept_buffers.unmark(buffer)

    def apply(self, model: nn.Module, undo: Undo | None = None, parts: Parts | None = None) -> None:
        """Casts parameters and buffers and attaches the hooks; on failure, reverts the casts.

        May be called again, for ``parts`` added to ``model`` or after its own class rebuilt it from
        part of its state. ``undo`` receives the inverse of the casts.
        """
        self.model = weakref.ref(model)
        parts = named_modules(model).items() if parts is None else parts
        with all_or_nothing() as casts:
            if undo is not None:
                undo.push(casts.undo)
            for each in planned_dtypes(model, self.plan, parts):
                cast_in_place(each.tensor, each.dtype, casts)
                if each.yields:
                    self.keeps = tuple(dict.fromkeys((*self.keeps, each.name)))
                    kept_buffers.mark(each.tensor, casts)
        low = self.plan.param_dtype if self.plan.casts_down else None
        if low is not self.hooked:
            self.remove_hooks()
            self.hooked = low
        if low is not None:
            self._attach_hooks(model, low, parts)
        self.known.update(module for _, module in parts)
        flatten_rnns(module for _, module in parts)

    def _attach_hooks(self, model: nn.Module, low: torch.dtype, parts: Parts) -> None:
        """Attaches the hooks to every module of ``parts`` that lacks them, and to its parents."""
        for module in topmost_fp32_modules(model, self.plan):
            if not _has(module._forward_pre_hooks, InputCast):
                cast = module.register_forward_pre_hook(InputCast(), with_kwargs=True)
                self.handles.append(cast)
                self.handles.append(module.register_forward_hook(OutputCast(low)))
        inside: dict[nn.Module, bool] = {}
        hooked = [name for name, module in parts if _holds_low(module, inside)]
        modules = dict(parts)
        for name in dict.fromkeys(chain.from_iterable(map(_path, hooked))):
            module = modules[name] if name in modules else model.get_submodule(name)
            if not _has(state_dict_hooks(module), Fp32Hooks):
                Fp32Hooks(self.link).attach(module, self.handles)

    def compute_in(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Casts the exact fp32 values to ``dtype``, and makes the model compute in it.

        All or nothing. Masters, optimizers and loss scales stay.
        """
        source, before = self.link.source, self.plan
        if source is not None:
            source.write_back()
        casting = nullcontext() if source is None else source.cast_gradients()
        with casting, all_or_nothing() as undo:
            undo.push(setattr, self, "plan", before)
            self.plan = self.given
            if dtype is not self.given.param_dtype:
                kept = self.given.fp32_modules if dtype in dtypes.LOW_PRECISION else ()
                self.plan = replace(
                    self.given, param_dtype=dtype, input_dtype=dtype, fp32_modules=kept
                )
            for tensor in [*model.parameters(), *model.buffers()]:
                if dtypes.is_low_precision(tensor):
                    exact = None if source is None else source.master_of(tensor)
                    set_in_place(tensor, rounding.exact_value(tensor, [exact]), undo)
            self.apply(model)
        self._warn_of_dtype(model, dtype, before.param_dtype)

    def follow_dtype(self, model: nn.Module) -> None:
        """Casts inputs to the dtype of the model's parameters, where the plan made these fp32."""
        before = self.plan.input_dtype
        found = {param.dtype for param in model.parameters() if dtypes.is_castable(param)}
        if self.plan.param_dtype is None or before is None or len(found) != 1 or before in found:
            return
        dtype = found.pop()
        self.plan = replace(self.plan, input_dtype=dtype)
        self._warn_of_dtype(model, dtype, before)

    def _warn_of_dtype(
        self, model: nn.Module, dtype: torch.dtype, before: torch.dtype | None
    ) -> None:
        _log.warning(
            "%s.to(%s): the model now computes in %s, and no longer in %s, as amp.initialize set "
            "up. model.to(%s) switches back.",
            *(type(model).__name__, dtype, dtype, before, self.given.param_dtype),
        )

    def late_parts(self, model: nn.Module, wanted: Set[int]) -> Parts:
        """Returns the modules added to ``model`` since the plan was applied that hold parameters.

        Searches level by level until every parameter of these ids is found, so that a new head
        costs the same in a model of any size. Modules on the way that have buffers, or one of the
        parameters, are among the result, which is empty if the model has none of them.
        """
        parts: list[tuple[str, nn.Module]] = []
        left, seen, level = set(wanted), {model}, [("", model)]
        while level:
            around: list[tuple[str, nn.Module]] = []
            for name, module in level:
                if module in self.known:
                    around.append((name, module))
                else:
                    parts += named_modules(module, name).items()
                    left.difference_update(map(id, module.parameters()))
            for name, module in around:
                found = left and left.intersection(id(own) for _, own in own_tensors(module))
                if found or has_buffers(module):
                    parts.append((name, module))
                left -= found
            level = []
            for name, module in around if left else ():
                inside = [each for each in children(module, name) if each[1] not in seen]
                seen.update(inner for _, inner in inside)
                level += inside
        return parts if len(left) < len(wanted) else []

    def remove_hooks(self) -> None:
        """Removes every hook that ``apply`` attached."""
        while self.handles:
            self.handles.pop().remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        new = memo[id(self)] = object.__new__(type(self))
        own = {**self.__dict__, "owner": None, "model": None, "known": None}
        new.__dict__.update(copy.deepcopy(own, memo))
        new.in_proxy, new.known = set(), weakref.WeakSet()
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without owner and region: no level casts both parameters and operators.

        A model that casts no parameters is pickled as a plain model, without this state.
        """
        if not self.plan.casts_down:
            return type(None), ()
        return empty, ("model_state",), {**self.__dict__, **dict.fromkeys(_NOT_SAVED)}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update({"given": saved["plan"], **saved}, region=UncastRegion())
        self.in_proxy, self.known = set(), weakref.WeakSet()


def _holds_low(module: nn.Module, known: dict[nn.Module, bool]) -> bool:
    """Returns whether a module or one inside holds a tensor that its ``state_dict`` converts."""
    if module not in known:
        known[module] = False  # ends a cycle of modules
        inside = [_holds_low(inner, known) for _, inner in children(module)]
        known[module] = any(inside) or any(
            dtypes.is_low_precision(tensor) or isinstance(tensor, KeptBuffer)
            for _, tensor in own_tensors(module)
        )
    return known[module]


def _path(name: str) -> Iterator[str]:
    """Yields a qualified name, and those of the modules around it."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


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

    See Note [Proxies].
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


def flatten_rnns(modules: Iterable[nn.Module]) -> None:
    """Makes the weights of recurrent layers contiguous again, as cuDNN requires."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


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
    if not dtensor.is_dtensor(tensor):
        tensor.data = data
    elif tensor.dtype is not data.dtype:
        _swap(tensor, data)
    if grad is not None:
        tensor.grad = grad


def _swap(tensor: Tensor, data: Tensor) -> None:
    """Sets a DTensor's data and dtype; assigning ``data`` does not change its local tensor."""
    other = data.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    attributes = dict(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    tensor.__dict__.update(attributes)
