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
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from apex._core import tree
from apex._core.mixins import MIXIN, known_with_mixin, mixin_of, new_class
from apex._engine.model import messages
from apex._engine.model.state import STATE, ModelState, stash_forward, state_of
from apex._pickle import rebuild
from apex._torch.dynamo import untraced

_RECONSTRUCTOR: Any = object().__reduce_ex__(1)[0]
"""The function that pickle's protocol 1 creates objects with."""

_is_compiling = torch.compiler.is_compiling


class Converted(nn.Module):
    """Precedes the model's class in a generated class's bases."""

    def __init_subclass__(cls) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""


class _Overrides:
    """The attributes of every generated class; they call the model's own by :func:`_own_class`."""

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        apply, state = (
            functools.partial(_own_class(self)._apply, self, recurse=recurse),
            state_of(self),
        )
        return apply(fn) if state is None else state.cast_model(self, apply, fn)

    def __prepare_scriptable__(self: Any) -> NoReturn:
        raise RuntimeError(
            f"torch.jit.script got the model {type(self).__name__}, which amp has prepared and "
            "which casts in Python. Use torch.compile, torch.jit.trace or torch.export, or script "
            "the plain fp32 model: amp.restore(model)."
        )

    @untraced
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of their masters."""
        _own_class(self).zero_grad(self, set_to_none)
        state = state_of(self)
        if state is not None and state.link.source is not None:
            state.link.source.clear_grads(self.parameters(), set_to_none=set_to_none)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickles a model that casts no parameters as a plain model, any other by its kind."""
        base, state = _own_class(self), state_of(self)
        if state is not None:
            state.link.write_back()
        reduced = base.__reduce_ex__(self, 2)
        if isinstance(reduced, str) or not is_generated(type(self)):
            return reduced
        func, args, inner, *rest = (*reduced, None)[: max(len(reduced), 3)]
        func = base if func is type(self) else func
        args = tuple(base if arg is type(self) else _unconverted(arg) for arg in args)
        inner = _unconverted(inner)
        if state is not None and state.plan.casts_down:
            return rebuild, ("model", func, *args), (state, inner), *rest
        if func is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle accepts this one only if the object's ``__class__`` is its first argument.
            func, args = _RECONSTRUCTOR, (args[0], object, None)
        if state is not None and state.inner_forward and isinstance(inner, dict):
            inner = {"forward": state.inner_forward, **inner}
        return func, args, inner, *rest

    def __setstate__(self: Any, saved: Any) -> None:
        if not (isinstance(saved, tuple) and saved and isinstance(saved[0], ModelState)):
            _own_class(self).__setstate__(self, saved)
            return
        state, inner = saved
        if inner is not None:
            _own_class(self).__setstate__(self, inner)
        _continue(self, state)

    def __copy__(self: Any) -> Any:
        """Returns a converted model that shares parameters, owner and masters."""
        return _copied(self, None)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Returns a converted model with its own parameters; optimizers copy the masters."""
        new, state = _copied(self, memo), state_of(self)
        made = state_of(new)
        if made is not None and state is not None and state.link.source is not None:
            state.writes.note_copy(new)
        return new


def _copied(module: Any, memo: dict[int, Any] | None) -> Any:
    """Returns a deep copy, or without ``memo`` a shallow one."""
    base, state = _own_class(module), state_of(module)
    deep: Any = (lambda each: each) if memo is None else lambda each: copy.deepcopy(each, memo)
    if state is not None:
        state.link.write_back()
    own = getattr(base, "__copy__" if memo is None else "__deepcopy__", None)
    is_graph = issubclass(base, GraphModule)  # its methods change the class of their object
    if own is not None:
        with _in_class(module, base) if is_graph else nullcontext():
            new = own(module, *([] if memo is None else [memo]))
        if is_graph:
            convert_class(new)
    else:
        func, args, inner = (*base.__reduce_ex__(module, 4), None)[:3]
        new = func(*deep(args))
        if memo is not None:
            memo[id(module)] = new
        if inner is not None:
            new.__setstate__(deep(inner))
    if state is not None and STATE not in new.__dict__ and (own is None or is_graph):
        _continue(new, deep(state))
    return new


def _continue(model: nn.Module, state: ModelState) -> None:
    """Gives a copy its state, and converts what its own class rebuilt."""
    model.__dict__[STATE] = state
    stash_forward(model, state)
    if getattr(state.inner_forward, "__func__", None) is type(model).forward:
        state.inner_forward = None  # the model's own, which pickle looks up by its name
    state.apply(model)


def rebuild_model(func: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Rebuilds a pickled converted model; its state is set afterwards."""
    model = func(*args)
    convert_class(model)
    return model


def refuse_proxy(*_: object) -> NoReturn:
    """Raises for a file of an earlier release that holds a proxy of a 16-bit model."""
    raise ValueError(
        "The file holds a prepared proxy of a 16-bit model, which this release does not load. Load "
        "it with apex 0.1, and save its state_dict."
    )


def _unconverted(value: Any) -> Any:
    """Returns a copy of an object's attributes without the conversion; other values as they are."""
    if not isinstance(value, dict) or STATE not in value:
        return value
    return {name: kept for name, kept in value.items() if name != STATE}


def swap_class(model: object, new: type) -> None:
    """Sets the class of ``model``, bypassing its own ``__setattr__`` and ``__class__``.

    The former may reject or forward attributes, as compiled models do; the latter may be a
    property.
    """
    vars(object)["__class__"].__set__(model, new)


@contextmanager
def _in_class(model: object, kind: type) -> Iterator[None]:
    before = type(model)
    swap_class(model, kind)
    try:
        yield
    finally:
        swap_class(model, before)


def convert_class(model: nn.Module) -> None:
    """Gives a plain model its generated class, always the same one for a class."""
    base = type(model)
    if is_generated(base):
        return
    made = known_with_mixin(Converted, base)
    if made is None:
        # Python lets an object change to a class whose instances are laid out alike. With a base
        # without ``__dict__`` (abc.ABC, Generic) first, that is a class with the only base.
        root: Any = base
        while root.__base__ is not None and root.__base__.__dictoffset__:
            root = root.__base__
        bases = (Converted, base) if root is nn.Module else (base,)
        made = new_class(base, bases, {MIXIN: Converted, **_namespace(base)})
    swap_class(model, made)


def plain_class(kind: type) -> type:
    """Returns ``kind`` without the conversion.

    A class generated on top of it (by ``fully_shard`` or a parametrization of the model itself) is
    rebuilt over the plain class.
    """
    if is_generated(kind):
        return kind.__bases__[-1]
    if not any(map(is_generated, kind.__mro__)):
        return kind
    bases = tuple(map(plain_class, kind.__bases__))
    names = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    made: type = new_class(kind, bases, names)
    return made


def is_generated(kind: type) -> bool:
    """Returns whether ``convert_class`` made ``kind``."""
    return mixin_of(kind) is Converted


def _own_class(module: nn.Module) -> Any:
    """Returns the model's own class."""
    return next(kind.__bases__[-1] for kind in type(module).__mro__ if is_generated(kind))


def _namespace(base: Any) -> dict[str, Any]:
    """Returns the attributes of the generated class of ``base``."""
    names: dict[str, Any] = {n: f for n, f in vars(_Overrides).items() if inspect.isfunction(f)}
    names |= {name: _explained(method) for name, method in _methods(base).items()}
    names["forward"] = _casting_forward(base)
    if issubclass(base, GraphModule):
        names["recompile"] = _recompile
    return names


def _recompile(module: Any) -> Any:
    """Compiles a graph anew; torch sets the ``forward`` of the object's class."""
    with _in_class(module, base := _own_class(module)):
        return base.recompile(module)


def _methods(base: Any) -> dict[str, Any]:
    """Returns the public methods of the model's own classes, such as ``encode``."""
    kinds = [kind for kind in base.__mro__ if issubclass(kind, nn.Module)]
    own = [kind for kind in reversed(kinds) if kind.__module__.partition(".")[0] != "torch"]
    found = {name: each for kind in own for name, each in vars(kind).items() if name[0] != "_"}
    return {
        name: each
        for name, each in found.items()
        if inspect.isfunction(each) and not hasattr(nn.Module, name)
    }


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method whose dtype errors tell the remedy, as those of ``forward`` do."""

    @functools.wraps(method)
    def explained(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = getattr(_own_class(self), method.__name__, method)  # scripts replace methods
        if _is_compiling() or (state := state_of(self)) is None:
            return run(self, *args, **kwargs)
        return _explaining(self, state, run, self, *args, **kwargs)

    return explained


def _casting_forward(base: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(base.forward)  # keeps the signature, which libraries read
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        state: ModelState | None = getattr(self, STATE, None)
        if state is None:  # restored, or made by type(model)(...)
            return base.forward(self, *args, **kwargs)
        replaced = state.inner_forward
        run, bound = (base.forward, (self,)) if replaced is None else (replaced, ())
        if _is_compiling():
            args, kwargs = begin_call(state, args, kwargs, traced=True)
            return end_call(state, state.region.run(run, *bound, *args, **kwargs))
        return end_call(state, _run(self, state, run, bound, args, kwargs))

    return forward


def begin_call(
    state: ModelState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    traced: bool,
    made: list[Tensor] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Begins a forward pass: returns its arguments, cast by the plan.

    ``made`` receives the tensors that casts make.
    """
    if traced:
        state.begin_traced_forward()
    else:
        state.begin_forward()
    plan = state.plan
    if plan.input_dtype is None:
        return args, kwargs
    if plan.cast is not None:
        return plan.cast(args, plan.input_dtype), plan.cast(kwargs, plan.input_dtype)
    cast = tree.Cast(plan.input_dtype, made)
    convert = cast.convert if plan.casts_down else None  # in fp32, objects stay as they are
    return tree.map_arguments(cast, args, kwargs, convert, state.uncast)


def end_call(state: ModelState, output: Any) -> Any:
    """Returns the output of a forward pass, cast by the plan."""
    plan = state.plan
    if plan.output_dtype is None:
        return output
    return (plan.cast or tree.cast_tensors)(output, plan.output_dtype)


def _run(
    model: nn.Module,
    state: ModelState,
    forward: Callable[..., Any],
    bound: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls ``forward`` in eager mode, with cast arguments; notes what it writes in vain."""
    made: list[Tensor] = []
    args, kwargs = begin_call(state, args, kwargs, traced=False, made=made)
    writes, region = state.writes, state.region.run_eagerly
    watched = writes.watches and state.plan.casts_down
    before = writes.begin(model, state.link.has_master) if watched else {}
    output = _explaining(model, state, region, forward, *bound, *args, **kwargs)
    if watched:
        writes.end(model, before)
    if made:
        writes.check_arguments(model, state.names, (args, kwargs), made)
    return output


def _explaining(
    model: nn.Module, state: ModelState, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    try:
        return fn(*args, **kwargs)
    except RuntimeError as error:
        messages.explain(model, state.plan, error)
        raise
