"""The generated class of a converted model; see Note [Generated class].

A ``forward`` on the object, as in apex, would stay bound to the first object in replicas and other
copies of its attributes. Hooks do not run for ``model.forward(x)``. A class has neither problem.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes, tree
from apex._core.arguments import positional_names
from apex._core.mixins import plain_class, swap_class, with_mixin
from apex._engine.conversion import notes
from apex._engine.conversion.casts import cast_parts, restore, undo_convert
from apex._engine.conversion.state import STATE, ModelState, state_of
from apex._engine.masters import mark_zeros, without_grad
from apex._pickle import rebuild
from apex._torch.modules import named_parameters

_is_compiling = torch.compiler.is_compiling


class Converted(nn.Module):
    """The methods of every generated class; each one also calls the model's own method."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""

    @staticmethod
    def _apex_overrides(own: Any) -> dict[str, Any]:
        """Returns the methods that depend on ``own``."""
        return {"forward": _casting_forward(own)}

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Applies the function of ``to``, ``half``, ``float`` and the like.

        A 16-bit model that is cast to another dtype becomes plain first, with its exact values.
        Otherwise the modules that the plan keeps in fp32, such as batch norm, stay in fp32.
        """
        state = _own_state(self)
        apply: Any = super()._apply
        before = state.plan.param_dtype or torch.float32
        after = fn(torch.empty(0, dtype=before, device="cpu")).dtype
        if after is before:
            return apply(lambda tensor: _unless_lower(tensor, fn(tensor)), *args, **kwargs)
        if state.plan.casts_down:
            restore(self, {})
        if not state.link.is_copy:  # which are cast to be saved
            state.link.writes.tell(
                "dtype",
                "%s.to(%s) after amp.initialize: the model's weights are no longer %s. To train at "
                "another level, or with fp32 masters (O2 or O5), call amp.restore, then "
                "amp.initialize.",
                type(self).__name__,
                after,
                before,
            )
        return apply(fn, *args, **kwargs)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, also those that an unfinished pass has put aside."""
        own_method: Any = super().zero_grad
        own_method(*args, **kwargs)
        session = _own_state(self).link.session
        if session is None:
            return
        params = [param for _, param in named_parameters(self)]
        if getattr(own_method, "__func__", None) is nn.Module.zero_grad:
            mark_zeros(filter(None, map(session.masters.pair_of, params)))
        else:
            params = without_grad(params)
        session.forget_cleared(params)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickles a model that casts no parameters as a plain model, any other by its kind."""
        state = _own_state(self)
        with _as_plain(self):
            # The protocol that names the class in a form that pickle accepts for our object, too.
            reduced: Any = self.__reduce_ex__(1)
        if isinstance(reduced, str):
            return reduced
        # A reduction has at least two parts; those that are left out count as None.
        parts = [*reduced, None, None, None]
        function, args, inner, *items = parts[:5]
        if isinstance(inner, dict):
            inner = dict(inner)  # it may be the object's own ``__dict__``
            inner.pop(STATE, None)
            if state.inner_forward is not None:
                inner.setdefault("forward", state.inner_forward)
        if not state.plan.casts_down:
            return function, args, inner, *items
        if inner is None:  # the class rebuilds a module, without hooks
            state = replace(state, handles=[])
        # The sixth part of a reduction, which sets what is saved: set_saved_state().
        set_saved = functools.partial(rebuild, "model")
        return function, args, (state, inner), *items, set_saved

    def __copy__(self: Any) -> Any:
        """Returns a converted model that shares parameters, session and masters."""
        with _as_plain(self):
            new = copy.copy(self)
        if isinstance(new, nn.Module) and new is not self:
            # Its hooks are the original's, which removes them.
            state = replace(_own_state(self), handles=[])
            set_state(new, state, ExitStack())
        return new

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Returns a converted model with its own parameters; optimizers copy the masters."""
        with _as_plain(self):
            new = copy.deepcopy(self, memo)
        if isinstance(new, nn.Module) and new is not self:
            state = _own_state(self)
            # By its values: copied by ``__reduce__``, it would lose its region.
            values = copy.deepcopy(vars(state), memo)
            copied = ModelState(**values)
            if state.plan.casts_down:
                state.link.writes.note_copy(new, copied.link)
            set_state(new, copied, ExitStack())
        return new


def _own_state(model: nn.Module) -> ModelState:
    """Returns the state of an object of a generated class, which always has one."""
    state: ModelState = vars(model)[STATE]
    return state


def _unless_lower(tensor: Tensor, moved: Tensor) -> Tensor:
    """Returns ``moved``, but in the dtype of ``tensor`` if the move has lowered the precision."""
    if moved.dtype is not tensor.dtype and dtypes.is_low_precision(moved):
        return tensor.to(moved.device)
    return moved


class Rounded(Converted):
    """The methods of the class of a 16-bit model, whose public methods are :class:`_Method`."""

    @staticmethod
    def _apex_overrides(own: Any) -> dict[str, Any]:
        # DataParallel and others read weights through the first two. torch's other methods leave
        # masters alone: fairscale calls some while a master holds a difference, not a weight.
        methods = ["parameters", "named_parameters"]
        for name in dir(own):
            function = inspect.getattr_static(own, name)
            is_plain = isinstance(function, FunctionType) and not name.startswith("_")
            if is_plain and function is not getattr(nn.Module, name, None):
                methods.append(name)
        overrides: dict[str, Any] = {}
        for name in methods:
            if name != "zero_grad":  # Converted's needs no rounding
                overrides[name] = _Method(own, name)
        # Last, as ``forward`` is among the methods.
        return overrides | Converted._apex_overrides(own)


class _Method:
    """A method of the own class; reading it on a model first rounds written masters into it."""

    def __init__(self, base: type, name: str) -> None:
        self._base = base
        self._name = name

    def __get__(self, model: Any, cls: type) -> Any:
        function = getattr(self._base, self._name)  # now, as scripts replace methods
        if model is None:
            return function
        if torch.compiler.is_dynamo_compiling():  # false in Python that dynamo itself calls
            return functools.partial(function, model)  # dynamo cannot trace MethodType
        if not _is_compiling():
            _own_state(model).link.masters.update_model(model)
        return MethodType(function, model)


def _casting_forward(own: Any) -> Any:
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        if state is None:  # restored, but a script has kept this method
            return plain_class(type(self)).forward(self, *args, **kwargs)
        run = state.inner_forward or super(Converted, self).forward
        cast = begin_call(self, state, args, kwargs)
        cast_args, cast_kwargs = cast
        if _is_compiling():
            output = state.region.run_traced(run, cast_args, cast_kwargs)
            return end_call(state, output)
        with ExitStack() as call:
            writes = state.link.writes
            if state.plan.casts_down and writes.left > 0:
                given = args, kwargs
                watch = writes.watch(self, state.link, run, given, cast)
                call.enter_context(watch)
            state.region.share_casts(call, self)
            state.region.enter(call, cast_args, cast_kwargs)
            try:
                output = run(*cast_args, **cast_kwargs)
            except RuntimeError as error:
                if state.link.session is not None:
                    state.link.session.check_shards()
                notes.explain(self, state.plan, error)
                raise
            state.region.await_backward(output)
        return end_call(state, output)

    function = inspect.getattr_static(own, "forward")
    if isinstance(function, FunctionType):
        shown: Any = functools.update_wrapper(forward, function)
        shown.__signature__ = inspect.signature(function)  # for ``inspect.getfullargspec``
    return forward


def begin_call(
    model: nn.Module, state: ModelState, args: tree.Args, kwargs: tree.Kwargs
) -> tree.Call:
    """Begins a forward pass: returns its arguments, cast by the plan."""
    state.begin_forward(model)
    plan = state.plan
    dtype = plan.param_dtype
    if dtype is None:
        return args, kwargs
    if plan.cast is not None:
        return plan.cast(args, dtype), plan.cast(kwargs, dtype)
    # In fp32, objects stay as they are.
    return tree.cast_arguments(args, kwargs, dtype, objects=plan.casts_down, skip=state.uncast)


def end_call(state: ModelState, output: Any) -> Any:
    """Returns the output of a forward pass, cast by the plan."""
    plan = state.plan
    if plan.output_dtype is None:
        return output
    cast = plan.cast or tree.cast_tensors
    return cast(output, plan.output_dtype)


def set_state(model: nn.Module, state: ModelState, undo: ExitStack) -> None:
    """Converts a plain model in place, by the plan of its new state.

    Parameters and buffers stay the same objects, so optimizers and tied weights keep them. Call
    ``check`` first: this function validates nothing. On failure, call :func:`undo_convert`;
    ``undo`` receives the inverse of the tensors' casts.
    """
    model.__dict__[STATE] = state  # first, because undo_convert() needs it
    mixin = Rounded if state.plan.casts_down else Converted
    own = plain_class(type(model))
    generated = with_mixin(mixin, own)
    swap_class(model, generated)
    # The class's ``forward`` runs, and calls the one that was set on the object. Scripts that
    # replace ``forward`` for a while leave the class's own there.
    inner = model.__dict__.pop("forward", state.inner_forward)
    class_forward = type.__getattribute__(generated, "forward")  # past the metaclass
    is_class_own = getattr(inner, "__func__", None) is class_forward
    state.inner_forward = None if is_class_own else inner
    # The script may pass an argument by name or by position.
    kept = state.plan.fp32_inputs
    by_position = positional_names(state.inner_forward or model.forward)
    positions = [at for at, name in enumerate(by_position) if name in kept]
    state.uncast = (*kept, *positions)
    cast_parts(model, state, undo)


def hand_over(model: nn.Module, undo: ExitStack) -> None:
    """Makes a converted model plain for another conversion; pushes the inverse to ``undo``.

    Only for plans that do not cast weights to 16 bits. Does nothing to a plain model.
    """
    state = state_of(model)
    if state is not None:
        undo_convert(model)
        undo.callback(set_state, model, state, ExitStack())


# -- copies and pickles ----------------------------------------------------------------------------


def set_saved_state(model: Any, saved: tuple[ModelState, Any]) -> None:
    """Sets the saved state of a model whose parameters are cast."""
    state, inner = saved
    if inner is not None:
        model.__setstate__(inner)
    if isinstance(model, nn.Module):  # what its own class rebuilt
        set_state(model, state, ExitStack())


@contextmanager
def _as_plain(model: nn.Module) -> Iterator[None]:
    """Gives a model its own class inside the block; first rounds written masters into it."""
    converted = type(model)
    _own_state(model).link.masters.update_model(model)
    swap_class(model, plain_class(converted))
    try:
        yield
    finally:
        swap_class(model, converted)
