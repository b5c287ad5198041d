"""The class of a converted model: a subclass of the model's own, under the same name.

Note [Class swap]: a converted model is the same object with another class, and one attribute holds
the state of the conversion. So everything that relies on class and ``__dict__`` keeps working: deep
copies and data-parallel replicas use their own weights, ``model.forward(x)`` casts as ``model(x)``
does, ``isinstance`` holds. A closure in place of ``model.forward`` would stay bound to the first
object in all these cases.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from apex._core import dtypes, tree
from apex._core.mixins import known_with_mixin, mixin_of, with_mixin
from apex._core.reduced import copied_by
from apex._engine.model import dtype_errors, kept_buffers
from apex._engine.model.state import STATE, ModelState, module_behind, stash_forward, state_of
from apex._pickle import rebuild
from apex._torch.dynamo import untraced
from apex._torch.modules import saves_plainly

PROXY = "_apex_plain_proxy"
"""Attribute of a prepared proxy's class that holds the plain class; see Note [Proxies]."""

FORWARD = "_apex_forward"
"""Attribute of a prepared proxy that holds a ``forward`` that was set on the object."""

_RECONSTRUCTOR: Any = object().__reduce_ex__(1)[0]
"""The function that pickle's protocol 1 creates objects with."""

_is_compiling = torch.compiler.is_compiling


class ConvertedModule(nn.Module):
    """The mixin that every generated class puts before the model's own class."""

    _apex_state: ModelState | None = None

    def __init_subclass__(cls) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Implements ``to``, ``cuda``, ``float`` and the like.

        A 16-bit model that is cast to another dtype first gets its exact fp32 values, computes in
        that dtype from then on, and logs a warning. Modules that the plan keeps in fp32, such as
        batch norm, are never cast to 16 bits. A model at O0 casts its inputs to its new dtype.
        """
        state = self._apex_state
        if state is None or not state.given.casts_down:
            applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            if state is not None:
                state.follow_dtype(self)
            return applied
        try:
            return super()._apply(_keeping(fn, state), recurse)  # type: ignore[no-untyped-call]
        except _AnotherDtype as asked:
            state.compute_in(self, asked.dtype)
        return super()._apply(_keeping(fn, state), recurse)  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses ``torch.jit.script``, which would fail over the class's own attributes."""
        raise RuntimeError(
            f"torch.jit.script got the model {type(self).__name__}, which amp has prepared and "
            "which casts in Python. Use torch.compile, torch.jit.trace or torch.export, or script "
            "the plain fp32 model: amp.restore(model)."
        )

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of their masters."""
        super().zero_grad(set_to_none)
        source = None if self._apex_state is None else self._apex_state.link.source
        if source is not None:
            source.clear_grads(self.parameters(), set_to_none=set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a model that casts no parameters as a plain model.

        Any other model is pickled under its own class, which a fresh process can import.
        """
        state = self._apex_state
        if not is_generated(type(self)):
            return super().__reduce_ex__(protocol)
        if state is not None:
            state.link.write_back()
        if state is not None and state.plan.casts_down:
            return self._reduced(state, protocol)
        # Protocol 2 requires the object's present class; protocol 1 trusts ``__class__``.
        reduced: Any = super().__reduce_ex__(1 if self.__class__ is type(self) else 2)
        return reduced_as_plain(type(self), reduced, None if state is None else state.inner_forward)

    def _reduced(self, state: ModelState, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        if isinstance(reduced, str):
            return reduced
        func, args, inner = of_plain_class(type(self), reduced)
        return rebuild, ("model", func, *args), (state, inner), *reduced[3:]

    def __copy__(self) -> Any:
        """Returns a converted model that shares parameters, owner and masters."""
        if self._apex_state is not None:
            self._apex_state.link.write_back()
        own = getattr(super(), "__copy__", None)
        return self._copied({}, copy.copy) if own is None else own()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a converted model with its own parameters; optimizers copy the masters."""
        if self._apex_state is not None:
            self._apex_state.link.write_back()
        own = getattr(super(), "__deepcopy__", None)
        if own is not None:
            new = own(memo)
        elif is_generated(type(self)):
            new = self._copied(memo, functools.partial(copy.deepcopy, memo=memo))
        else:  # a class added on top, such as a parametrization's, which does not pickle
            new = memo[id(self)] = type(self).__new__(type(self))
            new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        _note_copy(self, new)
        return new

    def _copied(self, memo: dict[int, Any], copied: Callable[[Any], Any]) -> Any:
        state = self._apex_state
        if state is None or not is_generated(type(self)):
            reduced: Any = super().__reduce_ex__(4)
        else:
            reduced = self._reduced(state, 4)
        return copied_by(copied, self, reduced, memo)

    def __setstate__(self, saved: Any) -> None:
        if not (isinstance(saved, tuple) and saved and isinstance(saved[0], ModelState)):
            super().__setstate__(saved)  # type: ignore[no-untyped-call]
            return
        state, inner = saved
        if inner is not None:
            super().__setstate__(inner)  # type: ignore[no-untyped-call]
        intact = self.__dict__.get(STATE) is state
        self.__dict__[STATE] = state
        stash_forward(self, state)
        if getattr(state.inner_forward, "__func__", None) is type(self).forward:
            state.inner_forward = None  # the model's own, which pickle looks up by its name
        if not intact:  # the model's own class rebuilt it from part of its state
            state.apply(self)
        state.model = weakref.ref(self)
        kept_buffers.mark_plain(state.kept(self))  # plain in files


def _note_copy(model: nn.Module, copied: nn.Module) -> None:
    """Tells the session of a model's copy."""
    state = state_of(copied)
    if state is not None and state.link.source is not None:
        state.link.source.note_copy(model, module_behind(copied))


class _AnotherDtype(Exception):  # noqa: N818 - a signal, not an error
    """Signals that a tensor of the plan's dtype would be cast to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.dtype = dtype


def _keeping(fn: Callable[[Tensor], Tensor], state: ModelState) -> Callable[[Tensor], Tensor]:
    """Returns ``fn`` limited to the plan's dtypes; raises if it would change the plan's dtype."""
    own = state.plan.param_dtype

    def keeping(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.dtype is tensor.dtype:
            return moved
        if tensor.dtype is own:
            raise _AnotherDtype(moved.dtype)
        return tensor.to(moved.device) if moved.dtype in dtypes.LOW_PRECISION else moved

    return keeping


def rebuild_model(func: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Rebuilds a pickled converted model; its state is set afterwards."""
    model = func(*args)
    swap_class(model, converted_class(type(model)))
    return model


def reduced_as_plain(own: type, reduced: Any, forward: Callable[..., Any] | None) -> Any:
    """Returns what a plain class's ``__reduce_ex__`` gave for an object, without its conversion.

    ``own`` is its generated class, ``forward`` the one that was set on the object, if any.
    """
    if isinstance(reduced, str):
        return reduced
    func, args, inner = of_plain_class(own, reduced)
    if func is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle accepts this one only if the object's ``__class__`` is its first argument.
        func, args = _RECONSTRUCTOR, (args[0], object, None)
    inner = _unconverted(inner)
    if forward is not None and isinstance(inner, dict):
        inner = {"forward": forward, **inner}
    return func, args, inner, *reduced[3:]


def of_plain_class(own: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the function, arguments and state of a reduced model, naming its plain class."""
    func, args, *rest = reduced
    base = plain_class(own)
    args = tuple(base if arg is own else _unconverted(arg) for arg in args)
    return base if func is own else func, args, rest[0] if rest else None


def _unconverted(value: Any) -> Any:
    """Returns a copy of an object's attributes without the conversion; other values as they are."""
    if not isinstance(value, dict) or value.keys().isdisjoint((STATE, FORWARD)):
        return value
    return {name: kept for name, kept in value.items() if name not in (STATE, FORWARD)}


def swap_class(model: object, new: type) -> None:
    """Sets the class of ``model``, bypassing its own ``__setattr__`` and ``__class__``.

    The former may reject or forward attributes, as compiled models do; the latter may be a
    property.
    """
    vars(object)["__class__"].__set__(model, new)


def converted_class(base: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of converted models of class ``base``, always the same one.

    ``base`` is that class where ``type(model)(...)`` made the object, as a slice of a Sequential.
    """
    if mixin_of(base) is ConvertedModule:
        return base
    known = known_with_mixin(ConvertedModule, base)
    if known is None:
        names = {"forward": _casting_forward(base), "state_dict": _fp32_state_dict(base)}
        if issubclass(base, GraphModule):
            names |= {name: _of_graph(base, name) for name in _ON_CLASS}
        known = with_mixin(ConvertedModule, base, names, despite_metaclass=True)
    made: type[nn.Module] = known
    return made


_ON_CLASS = "recompile", "__copy__", "__deepcopy__"
"""Methods of a ``torch.fx.GraphModule`` that use its class as one of this object alone."""


def _of_graph(base: Any, name: str) -> Callable[..., Any]:
    """Returns the method of a converted ``GraphModule``: its class is ``base`` while torch's runs.

    Copies, which torch makes of the graph and what it names, are converted again.
    """
    method = getattr(base, name)

    @functools.wraps(method)
    def run(self: ConvertedModule, *memo: Any) -> Any:
        kind, state = type(self), self._apex_state
        if state is None or not is_generated(kind):
            return method(self, *memo)
        state.link.write_back()
        swap_class(self, base)
        try:
            result = method(self, *memo)
        finally:
            swap_class(self, kind)
        if isinstance(result, nn.Module):
            swap_class(result, converted_class(type(result)))
            own = result.__dict__[STATE] = copy.deepcopy(state, *memo) if memo else state
            cast(ConvertedModule, result).__setstate__((own, None))
            _note_copy(self, result)
        return result

    return run


def plain_class(kind: type) -> type:
    """Returns ``kind`` without the conversion.

    A class generated on top of it (by ``fully_shard`` or a parametrization of the model itself) is
    rebuilt over the plain class.
    """
    if is_generated(kind):
        return kind.__bases__[-1]
    bases = tuple(plain_class(b) if issubclass(b, ConvertedModule) else b for b in kind.__bases__)
    names = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return types.new_class(kind.__name__, bases, {}, lambda namespace: namespace.update(names))


def is_generated(kind: type) -> bool:
    """Returns whether ``converted_class`` or ``proxy_class`` made ``kind``."""
    return mixin_of(kind) is ConvertedModule or PROXY in vars(kind)


def _casting_forward(base: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(base.forward)  # keeps the signature, which libraries read
    def forward(self: ConvertedModule, /, *args: Any, **kwargs: Any) -> Any:
        state: ModelState | None = getattr(self, STATE, None)
        if state is None:  # restored, or made by type(model)(...)
            return base.forward(self, *args, **kwargs)
        replaced = state.inner_forward
        run, bound = (base.forward, (self,)) if replaced is None else (replaced, ())
        if state.in_proxy and threading.get_ident() in state.in_proxy:
            return run(*bound, *args, **kwargs)
        return cast_call(self, state, run, bound, args, kwargs)

    return forward


def _fp32_state_dict(base: Any) -> Callable[..., Any]:
    @functools.wraps(base.state_dict)
    def state_dict(self: ConvertedModule, *args: Any, **kwargs: Any) -> Any:
        state: ModelState | None = getattr(self, STATE, None)
        found = None
        if state is not None and state.hooked is None:  # else the hooks do so
            state.link.write_back()
        if state is not None and not args and saves_plainly(base):
            found = state.link.state_dict(self, **kwargs)
        return base.state_dict(self, *args, **kwargs) if found is None else found

    return state_dict


def cast_call(
    model: nn.Module,
    state: ModelState,
    forward: Callable[..., Any],
    bound: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls ``forward(*bound, *args, **kwargs)``, casting ``args``, ``kwargs`` and the output."""
    traced = _is_compiling()
    args, kwargs = begin_call(state, args, kwargs, traced=traced)
    run = _run_traced if traced else _run
    return end_call(state, run(model, state, forward, *bound, *args, **kwargs))


def begin_call(
    state: ModelState, args: tuple[Any, ...], kwargs: dict[str, Any], *, traced: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Begins a forward pass: returns its arguments, cast by the plan."""
    if traced:
        state.begin_traced_forward()
    else:
        state.begin_forward()
    plan = state.plan
    if plan.input_dtype is None:
        return args, kwargs
    if plan.cast is None:
        return tree.cast_arguments(args, kwargs, plan.input_dtype)
    return plan.cast(args, plan.input_dtype), plan.cast(kwargs, plan.input_dtype)


def end_call(state: ModelState, output: Any) -> Any:
    """Returns the output of a forward pass, cast by the plan."""
    plan = state.plan
    if plan.output_dtype is not None:
        output = (plan.cast or tree.cast_tensors)(output, plan.output_dtype)
    return kept_buffers.plain(output) if state.keeps else output


def _run_traced(
    model: nn.Module, state: ModelState, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    kept = state.kept(model) if state.keeps else []
    if not kept:  # dynamo cannot resume after a graph break inside a block
        return state.region.run(forward, *args, **kwargs)
    with kept_buffers.Yielding(kept):
        return state.region.run(forward, *args, **kwargs)


def _run(
    model: nn.Module, state: ModelState, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    marked = kept_buffers.mark_plain(state.kept(model)) if state.keeps else ()
    try:
        return state.region.run_eagerly(forward, *args, **kwargs)
    except RuntimeError as error:
        dtype_errors.explain(model, state.plan, error)
        raise
    finally:
        for buffer in marked:
            kept_buffers.unmark(buffer)
