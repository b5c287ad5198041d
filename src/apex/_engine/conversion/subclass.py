"""The generated class of a converted model; see Note [Generated class].

A ``forward`` on the object, as in apex, would stay bound to the first object in replicas and other
copies of its attributes. Hooks do not run for ``model.forward(x)``. A class has neither problem.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes, tree
from apex._core.arguments import positional_names, signature_of
from apex._core.mixins import plain_class, swap_class, with_mixin
from apex._engine import master_table
from apex._engine.conversion import hints
from apex._engine.conversion.casts import cast_parts, restore, undo_convert
from apex._engine.conversion.copies import (
    deepcopy_by_class,
    object_of,
    shallow_copy,
    snapshot,
)
from apex._engine.conversion.state import ModelState, converted_in, state_of
from apex._engine.masters import mark_zeros, without_grad
from apex._engine.session import STATE, forget_cleared
from apex._engine.wrappers.averages import view_for
from apex._torch.dynamo import is_compiling, is_exporting_onnx, is_jit_tracing
from apex._torch.modules import params_in

_log = logging.getLogger("apex")

_ONNX = (
    "torch.onnx.export got a model that amp has prepared. Export its plain copy, without casts:\n"
    "    with amp.disable_casts():\n"
    "        torch.onnx.export(copy.deepcopy(model), ...)"
)


class Converted(nn.Module):
    """The methods of every generated class; each one also calls the model's own method."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""

    @staticmethod
    def _apex_overrides(own: Any) -> dict[str, Any]:
        """Returns the methods that depend on ``own``."""
        overrides: dict[str, Any] = {"forward": _casting_forward(own)}
        for name in ("half", "bfloat16", "float", "double"):
            if getattr(own, name) is getattr(nn.Module, name):  # else a method of the script
                overrides[name] = _dtype_method(name)
        return overrides

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Applies the function of ``to`` and the like.

        A model that is cast to another dtype becomes plain first, with its exact values. Otherwise
        the modules that the plan keeps in fp32, such as batch norm, stay in fp32.
        """
        apply: Any = super()._apply
        before = _own_state(self).plan.param_dtype or torch.float32
        after = fn(torch.empty(0, dtype=before, device="cpu")).dtype
        if after is before:
            return apply(lambda tensor: _moved(tensor, fn(tensor)), *args, **kwargs)
        _become_plain(self, f"to({after})")
        return apply(fn, *args, **kwargs)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, also those that an unfinished pass has put aside."""
        own_method: Any = super().zero_grad
        own_method(*args, **kwargs)
        params = params_in(self)
        if getattr(own_method, "__func__", None) is nn.Module.zero_grad:
            mark_zeros(master_table.pairs_of(params))
        else:
            params = without_grad(params)
        forget_cleared(params)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickles as the plain model; see Note [Plain copies]."""
        with _as_plain(self):
            return snapshot(self.__reduce_ex__(protocol), vars(self))

    def __prepare_scriptable__(self: Any) -> Any:
        """Returns what ``torch.jit.script`` compiles in place of the model: the plain model."""
        return copy.copy(self)

    def __copy__(self: Any) -> Any:
        """Returns the plain model over the same fp32 weights; see Note [Plain copies]."""
        state = _own_state(self)
        if state.plan.casts_down:
            return shallow_copy(self)
        with _as_plain(self):
            return copy.copy(self)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Returns the plain model; see Note [Plain copies]."""
        copied_object = object_of(sys._getframe(1), self)
        if copied_object is not self:
            return deepcopy_by_class(copied_object, memo)
        _own_state(self).note_copy()
        with _as_plain(self):
            return deepcopy_by_class(self, memo)


def _own_state(model: nn.Module) -> ModelState:
    """Returns the state of an object of a generated class, which always has one."""
    state: ModelState = vars(model)[STATE]
    return state


def _become_plain(model: nn.Module, call: str) -> nn.Module:
    """Restores a model on which ``call`` was called, with a warning; returns it."""
    _log.warning(
        "amp: %s.%s after amp.initialize makes the model plain. To train at another level, or with "
        "fp32 masters (O2 or O5), call amp.restore, then amp.initialize.",
        type(model).__name__,
        call,
    )
    for part in converted_in([model]):
        restore(part)
    return model


def _moved(tensor: Tensor, moved: Tensor) -> Tensor:
    """Returns ``moved``, but in the dtype of ``tensor`` if the move has lowered the precision.

    A buffer that moves is another tensor: it takes its exact value along.
    """
    if moved.dtype is not tensor.dtype and dtypes.is_low_precision(moved):
        moved = tensor.to(moved.device)
    if tensor in master_table.exact:
        master_table.exact[moved] = master_table.exact[tensor]
    return moved


class Rounded(Converted):
    """The methods of the class of a 16-bit model, whose public methods are :class:`_Method`."""

    @staticmethod
    def _apex_overrides(own: Any) -> dict[str, Any]:
        # DataParallel and others read weights through the first three. torch's other methods leave
        # masters alone: fairscale calls some while a master holds a difference, not a weight.
        methods = ["parameters", "named_parameters", "buffers"]
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


def _dtype_method(name: str) -> Callable[..., Any]:
    """Returns the method by which a model becomes the plain model in another dtype."""

    def become(self: Any) -> Any:
        return getattr(_become_plain(self, f"{name}()"), name)()

    return become


class _Method:
    """A method of the own class; reading it on a model first rounds written masters into it."""

    def __init__(self, base: type, name: str) -> None:
        self._base = base
        self._name = name

    def __get__(self, model: Any, cls: type) -> Any:
        function = getattr(self._base, self._name)  # now, as scripts replace methods
        state = _own_state(model)
        if is_compiling():
            state.follow_masters()
            if torch.compiler.is_dynamo_compiling():  # false in Python that dynamo itself calls
                return functools.partial(function, model)  # dynamo cannot trace MethodType
            return MethodType(function, model)
        if is_exporting_onnx():
            raise RuntimeError(_ONNX)
        reader = sys._getframe(1)
        view = view_for(reader, self._name)
        if view is not None:
            state.use()
            return lambda: map(view, function(model))
        state.use(reader)
        return MethodType(function, model)


def _casting_forward(own: Any) -> Any:
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        if state is None:  # restored, but a script has kept this method
            return plain_class(type(self)).forward(self, *args, **kwargs)
        is_traced = is_compiling()
        if (is_traced or is_jit_tracing()) and is_exporting_onnx():  # which takes 8 us
            raise RuntimeError(_ONNX)
        run = state.inner_forward or super(Converted, self).forward
        cast = begin_call(state, args, kwargs, traced=is_traced)
        cast_args, cast_kwargs = cast
        if is_traced:
            return end_call(state, state.region.run_traced(run, cast_args, cast_kwargs))
        watched = state.session.observer.forward(self, state, run, (args, kwargs), cast)
        with watched, state.region.casts(state.weights, cast_args, cast_kwargs) as casts:
            try:
                output = run(*cast_args, **cast_kwargs)
            except RuntimeError as error:
                state.session.check_shards()
                hints.explain(self, state.plan, state.session.policy, error)
                raise
            casts.await_backward(output)
            state.await_backward(output)
        return end_call(state, output)

    # Dynamo counts recompilations by code object, and classes must not share its limit.
    forward.__code__ = forward.__code__.replace()
    function = inspect.getattr_static(own, "forward")
    if isinstance(function, FunctionType):
        shown: Any = functools.update_wrapper(forward, function)
        # By the marks of a compiled forward, dynamo would run the script's in place of this one.
        for name in [*vars(shown)]:
            if name.startswith("_torchdynamo"):
                delattr(shown, name)
        shown.__signature__ = signature_of(function)  # for ``inspect.getfullargspec``
    return forward


def begin_call(
    state: ModelState, args: tree.Args, kwargs: tree.Kwargs, *, traced: bool
) -> tree.Call:
    """Begins a forward pass: returns its arguments, cast by the plan."""
    state.begin_forward(traced=traced)
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
    if getattr(inner, "__func__", None) is class_forward:
        inner = None
    # The script may pass an argument by name or by position.
    kept = state.plan.fp32_inputs
    by_position = positional_names(inner or model.forward)
    positions = [at for at, name in enumerate(by_position) if name in kept]
    state.set_forward(inner, (*kept, *positions))
    cast_parts(model, state, undo)


def hand_over(model: nn.Module, undo: ExitStack) -> None:
    """Makes a converted model plain for another conversion; pushes the inverse to ``undo``.

    Only for plans that do not cast weights to 16 bits. Does nothing to a plain model.
    """
    state = state_of(model)
    if state is not None:
        undo_convert(model)
        undo.callback(set_state, model, state, ExitStack())


@contextmanager
def _as_plain(model: nn.Module) -> Iterator[None]:
    """Gives a model its own class and attributes inside the block, but leaves its tensors."""
    converted = type(model)
    attributes = vars(model)
    state: ModelState = attributes.pop(STATE)
    shows_forward = state.inner_forward is not None and "forward" not in attributes
    if shows_forward:
        attributes["forward"] = state.inner_forward
    swap_class(model, plain_class(converted))
    try:
        yield
    finally:
        if shows_forward:
            del attributes["forward"]
        attributes[STATE] = state
        swap_class(model, converted)
