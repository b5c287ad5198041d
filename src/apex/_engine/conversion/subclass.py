"""The generated class of a converted model; see Note [Generated class].

A ``forward`` on the object, as in apex, would stay bound to the first object in replicas and in
what copies attributes, and hooks do not run for ``model.forward(x)``. A class does both.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from apex._core import tree
from apex._core.arguments import positional_names
from apex._core.mixins import plain_class, shown_as, swap_class, with_mixin
from apex._core.tree import Args, Call, Kwargs
from apex._engine.autocast.region import Region
from apex._engine.conversion import notes
from apex._engine.conversion.casts import begin_apply, cast_parts, undo_convert
from apex._engine.conversion.plan import ModelPlan
from apex._engine.conversion.state import STATE, ModelState, state_of
from apex._engine.conversion.state_dict import MasterLink
from apex._pickle import rebuild
from apex._torch import fsdp
from apex._torch.dynamo import untraced
from apex._torch.modules import named_parameters
from apex._torch.parameters import grad_version

if TYPE_CHECKING:
    from apex._engine.session import Session

_is_compiling = torch.compiler.is_compiling
_is_traced = torch.compiler.is_dynamo_compiling  # not in what dynamo itself calls

_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Converted(nn.Module):
    """The methods of every generated class, which pass on what they get to the model's own."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""

    @staticmethod
    def _apex_overrides(own: Any) -> dict[str, Any]:
        """Returns the methods that depend on ``own``."""
        names: dict[str, Any] = {"forward": _casting_forward(own)}
        if issubclass(own, GraphModule):
            names["recompile"] = _recompile
        return names

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        apply: Any = super()._apply
        state = state_of(self)
        if state is not None:
            fn = begin_apply(self, state, fn)
        return apply(fn, *args, **kwargs)

    @untraced
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients of the parameters, and of the masters of those that it cleared."""
        state = state_of(self)
        versions = {param: grad_version(param) for _, param in named_parameters(self)}
        super().zero_grad(*args, **kwargs)
        if state is None or state.link.session is None:
            return
        cleared = []
        for param, version in versions.items():
            if param.grad is None or grad_version(param) != version:
                cleared.append(param)
        state.link.session.clear_grads(cleared)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickles a model that casts no parameters as a plain model, any other by its kind."""
        state = state_of(self)
        with _as_plain(self):
            # The protocol that names the class in a form that pickle accepts for our object, too.
            reduced: Any = self.__reduce_ex__(1)
        if state is None or isinstance(reduced, str):
            return reduced
        func, args, inner, *items = [*reduced, None, None, None][:5]
        args, inner = tuple(map(_unconverted, args)), _unconverted(inner)
        if state.plan.casts_down:
            if inner is None:  # what the class rebuilds has no hooks yet
                state = replace(state, handles=[])
            return func, args, (state, inner), *items, functools.partial(rebuild, "model")
        if state.inner_forward and isinstance(inner, dict):
            inner = {"forward": state.inner_forward, **inner}
        return func, args, inner, *items

    def __copy__(self: Any) -> Any:
        """Returns a converted model that shares parameters, session and masters."""
        with _as_plain(self):
            new = copy.copy(self)
        state = _state_for(new, self)  # its hooks are the original's
        return _continue(new, None if state is None else replace(state, handles=[]))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Returns a converted model with its own parameters; optimizers copy the masters."""
        with _as_plain(self):
            new = copy.deepcopy(self, memo)
        state = _state_for(new, self)
        copied: ModelState | None = copy.deepcopy(state, memo)
        if state is not None and copied is not None and state.plan.casts_down:
            state.writes.note_copy(new, copied.link)
        return _continue(new, copied)


class Rounded(Converted):
    """The methods of the class of a 16-bit model, whose public methods are :class:`_Method`."""

    @staticmethod
    def _apex_overrides(own: Any) -> dict[str, Any]:
        # By the first two, DataParallel and others get the weights.
        methods = ["parameters", "named_parameters"]
        for name in dir(own):
            function = inspect.getattr_static(own, name)
            is_plain = isinstance(function, FunctionType) and not name.startswith("_")
            if is_plain and function is not getattr(nn.Module, name, None):
                methods.append(name)
        names = {name: _Method(own, name) for name in methods if name != "zero_grad"}
        return names | Converted._apex_overrides(own)

    def _replicate_for_data_parallel(self: Any) -> Any:
        self.parameters  # noqa: B018 - rounds written masters
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]


class _Method:
    """A method that runs with written masters rounded into the model, and explains dtype errors.

    On the class it is the model's own function, and so it is inside of another such method.
    """

    def __init__(self, base: type, name: str) -> None:
        self._base, self._name = base, name
        # A function that does not run when it is called stays itself.
        runs_later = getattr(base, name).__code__.co_flags & _RUNS_LATER
        self._explained = None if runs_later else _explained(base, name)

    def __get__(self, model: Any, cls: type) -> Any:
        function = getattr(self._base, self._name)  # now, as scripts replace methods
        if model is None:
            return function
        if _is_traced():
            return functools.partial(function, model)  # dynamo cannot trace MethodType
        if _is_compiling() or (state := state_of(model)) is None or state.runs_here():
            return MethodType(function, model)
        state.link.write_back(model)
        return MethodType(self._explained or function, model)


def _explained(base: type, name: str) -> Any:
    def explained(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(base, name)
        if _is_compiling() or (state := state_of(self)) is None:
            return function(self, *args, **kwargs)
        with ExitStack() as call:
            state.enter_thread(call)
            try:
                return function(self, *args, **kwargs)
            except RuntimeError as error:
                notes.explain(self, state.plan, error)
                raise

    return shown_as(getattr(base, name), explained)


def _recompile(module: Any) -> Any:
    """Compiles a graph anew; torch sets the ``forward`` of the object's class."""
    with _as_plain(module):
        return module.recompile()


def _casting_forward(own: Any) -> Any:
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        state: ModelState | None = getattr(self, STATE, None)
        if state is None:  # restored, but a script has kept this method
            return own.forward(self, *args, **kwargs)
        run = state.inner_forward or super(Converted, self).forward
        if _is_compiling():
            args, kwargs = begin_call(self, state, args, kwargs)
            return end_call(state, state.region.run(run, *args, **kwargs))
        with ExitStack() as call:
            state.enter_thread(call)
            cast_args, cast_kwargs = begin_call(self, state, args, kwargs)
            watched = state.plan.casts_down and state.writes.left > 0
            if watched:
                state.writes.begin_forward(self, state.link, call)
            state.region.enter(call, cast_args, cast_kwargs)
            try:
                output = run(*cast_args, **cast_kwargs)
            except RuntimeError as error:
                notes.explain(self, state.plan, error)
                raise
        if watched:
            names, given = positional_names(run), (args, kwargs)
            state.writes.end_forward(self, names, given, (cast_args, cast_kwargs))
        return end_call(state, output)

    function = inspect.getattr_static(own, "forward")
    return shown_as(function, forward) if isinstance(function, FunctionType) else forward


def begin_call(model: nn.Module, state: ModelState, args: Args, kwargs: Kwargs) -> Call:
    """Begins a forward pass: returns its arguments, cast by the plan."""
    if _is_compiling():
        state.begin_traced_forward(model)
    else:
        state.begin_forward(model)
    plan = state.plan
    if plan.input_dtype is None:
        return args, kwargs
    if plan.cast is not None:
        return plan.cast(args, plan.input_dtype), plan.cast(kwargs, plan.input_dtype)
    if state.unplaced:
        state.check_unplaced(args, kwargs)
    low, dtype = plan.casts_down, plan.input_dtype  # in fp32, objects stay as they are
    return tree.cast_arguments(args, kwargs, dtype, objects=low, skip=state.uncast)


def end_call(state: ModelState, output: Any) -> Any:
    """Returns the output of a forward pass, cast by the plan."""
    plan = state.plan
    if plan.output_dtype is None:
        return output
    return (plan.cast or tree.cast_tensors)(output, plan.output_dtype)


def convert(
    model: nn.Module, plan: ModelPlan, region: Region, session: Session | None, undo: ExitStack
) -> None:
    """Converts ``model`` by ``plan``, in place; on failure, call :func:`undo_convert`.

    Parameters and buffers stay the same objects, so optimizers and tied weights keep them. Call
    ``check`` first: this function validates nothing.

    Args:
        model: A plain model.
        plan: The conversion.
        region: Runs the model's own forward.
        session: Has the exact values for ``state_dict`` and ``restore``; receives loaded ones. The
            model keeps it alive.
        undo: Receives the inverse of the tensors' casts.
    """
    if any(map(fsdp.compute_dtype, fsdp.param_groups(model))):
        plan = replace(plan, input_dtype=None)  # fully_shard casts inputs itself
    set_state(model, ModelState(plan, region, MasterLink(session)), undo)


def set_state(model: nn.Module, state: ModelState, undo: ExitStack) -> None:
    """Makes a plain model a converted one; ``undo`` receives the inverse of its tensors' casts."""
    model.__dict__[STATE] = state  # first, because undo_convert() needs it
    mixin = Rounded if state.plan.casts_down else Converted
    swap_class(model, with_mixin(mixin, plain_class(type(model))))
    # The class's ``forward`` runs, and calls the one that was set on the object. Scripts that
    # replace ``forward`` for a while leave the class's own there.
    inner = model.__dict__.pop("forward", state.inner_forward)
    generated = type.__getattribute__(type(model), "forward")
    is_class_own = getattr(inner, "__func__", None) is generated
    state.inner_forward = None if is_class_own else inner
    cast_parts(model, state, undo)


def hand_over(model: nn.Module, undo: ExitStack) -> None:
    """Makes a converted model plain for another conversion; pushes the inverse to ``undo``.

    Only for plans that do not cast weights to 16 bits. Does nothing to a plain model.
    """
    state = state_of(model)
    if state is not None:
        undo_convert(model)
        undo.callback(convert, model, state.plan, state.region, state.link.session, ExitStack())


# -- copies and pickles ----------------------------------------------------------------------------


def set_saved_state(model: Any, saved: tuple[ModelState, Any]) -> None:
    """Sets what a file holds of a model whose parameters are cast."""
    state, inner = saved
    if inner is not None:
        model.__setstate__(inner)
    if isinstance(model, nn.Module):
        _continue(model, state)


def _state_for(copied: object, model: nn.Module) -> ModelState | None:
    """Returns the state for a copy of ``model``, if the class made one and it is a module."""
    is_copy = copied is not model and isinstance(copied, nn.Module)
    return state_of(model) if is_copy else None


def _continue(model: Any, state: ModelState | None) -> Any:
    """Gives a copy its state, converts what its own class rebuilt, and returns it."""
    if state is not None:
        set_state(model, state, ExitStack())
    return model


@contextmanager
def _as_plain(model: nn.Module) -> Iterator[None]:
    """Gives a model its own class for a while, with the values that its masters have."""
    state, converted = state_of(model), type(model)
    if state is not None:
        state.link.write_back(model)
    swap_class(model, plain_class(converted))
    try:
        yield
    finally:
        swap_class(model, converted)


def _unconverted(value: Any) -> Any:
    """Returns a copy of an object's attributes without the conversion; other values as they are."""
    if not isinstance(value, dict) or STATE not in value:
        return value
    return {name: kept for name, kept in value.items() if name != STATE}
