"""The class of a converted model: a subclass of the model's own, under the same name.

Note [Class swap]: a converted model is the same object with another class, and one attribute holds
the state of the conversion. So everything that relies on class and ``__dict__`` keeps working: deep
copies and data-parallel replicas use their own weights, ``model.forward(x)`` casts as ``model(x)``
does, ``isinstance`` holds. A closure in place of ``model.forward`` would stay bound to the first
object in all these cases.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from apex._core import tree
from apex._core.mixins import MIXIN, known_with_mixin, mixin_of, new_class, plain_class, swap_class
from apex._core.tree import Args, Call, Kwargs
from apex._engine.conversion import notes
from apex._engine.conversion.state import (
    STATE,
    ModelState,
    positional_names,
    stash_forward,
    state_of,
)
from apex._pickle import rebuild
from apex._torch.dynamo import untraced

Method = Callable[..., Any]

_is_compiling = torch.compiler.is_compiling


class Converted(nn.Module):
    """The methods of every generated class, which call the model's own by :func:`_own_class`.

    Most generated classes have it as their first base, and all of them have its methods.
    """

    def __init_subclass__(cls) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        apply = functools.partial(_own_class(self)._apply, self, recurse=recurse)
        state = state_of(self)
        return apply(fn) if state is None else state.cast_model(self, apply, fn)

    @untraced
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of their masters."""
        _own_class(self).zero_grad(self, set_to_none)
        state = state_of(self)
        if state is not None and state.link.session is not None:
            state.link.session.clear_grads(self.parameters(), set_to_none=set_to_none)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickles a model that casts no parameters as a plain model, any other by its kind."""
        state = state_of(self)
        with _as_plain(self):
            # The protocol that names the class in a form that pickle accepts for our object, too.
            reduced = self.__reduce_ex__(1)
        if state is None or isinstance(reduced, str):
            return reduced
        func, args, inner, *rest = (*reduced, None)[: max(len(reduced), 3)]
        args, inner = tuple(map(_unconverted, args)), _unconverted(inner)
        if state.plan.casts_down:
            return rebuild, ("model", func, *args), (state, inner), *rest
        if state.inner_forward and isinstance(inner, dict):
            inner = {"forward": state.inner_forward, **inner}
        return func, args, inner, *rest

    def __setstate__(self: Any, saved: Any) -> None:
        is_ours = isinstance(saved, tuple) and saved and isinstance(saved[0], ModelState)
        state, inner = saved if is_ours else (None, saved)
        if inner is not None or state is None:
            _own_class(self).__setstate__(self, inner)
        _continue(self, state)

    def __copy__(self: Any) -> Any:
        """Returns a converted model that shares parameters, session and masters."""
        with _as_plain(self):
            new = copy.copy(self)
        state = None if new is self else state_of(self)  # its hooks are the original's
        return _continue(new, None if state is None else replace(state, handles=[]))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Returns a converted model with its own parameters; optimizers copy the masters."""
        with _as_plain(self):
            new = copy.deepcopy(self, memo)
        state = None if new is self else state_of(self)
        if state is not None and state.link.session is not None:
            state.writes.note_copy(new)
        return _continue(new, copy.deepcopy(state, memo))


@contextmanager
def _as_plain(model: nn.Module) -> Iterator[None]:
    """Gives a model its own class for a while, with the values that its masters have."""
    state, converted = state_of(model), type(model)
    if state is not None:
        state.link.write_back()
    swap_class(model, plain_class(converted))
    try:
        yield
    finally:
        swap_class(model, converted)


def _continue(model: Any, state: ModelState | None) -> Any:
    """Gives a copy its state, converts what its own class rebuilt, and returns it."""
    if state is not None:
        convert_class(model)
        model.__dict__[STATE] = state
        stash_forward(model, state)
        with ExitStack() as undo:
            state.apply(model, undo)
            undo.pop_all()
    return model


def rebuild_model(func: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Rebuilds a pickled converted model; its state is set afterwards."""
    model = func(*args)
    convert_class(model)
    return model


def _unconverted(value: Any) -> Any:
    """Returns a copy of an object's attributes without the conversion; other values as they are."""
    if not isinstance(value, dict) or STATE not in value:
        return value
    return {name: kept for name, kept in value.items() if name != STATE}


def convert_class(model: nn.Module) -> None:
    """Gives a plain model its generated class, always the same one for a class."""
    base = type(model)
    if mixin_of(base) is Converted:
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


def _own_class(module: nn.Module) -> Any:
    """Returns the model's own class."""
    return next(kind.__bases__[-1] for kind in type(module).__mro__ if mixin_of(kind) is Converted)


def _namespace(base: Any) -> dict[str, Any]:
    """Returns the attributes of the generated class of ``base``."""
    names = {
        name: _explained(base, name)
        for name in dir(base)
        if name[0] != "_" and not hasattr(nn.Module, name)
        if inspect.isfunction(inspect.getattr_static(base, name))
    }
    names |= {name: each for name, each in vars(Converted).items() if inspect.isfunction(each)}
    names["forward"] = _casting_forward(base)
    if issubclass(base, GraphModule):
        names["recompile"] = _recompile
    return names


def _recompile(module: Any) -> Any:
    """Compiles a graph anew; torch sets the ``forward`` of the object's class."""
    with _as_plain(module):
        return module.recompile()


def _like(fn: Method, wrapper: Any) -> Method:
    """Shows ``wrapper`` as ``fn``, also to ``inspect.getfullargspec``, which libraries call."""
    with suppress(TypeError, ValueError):  # written in C
        wrapper.__signature__ = inspect.signature(fn)
    return functools.update_wrapper(wrapper, fn)


def _explained(base: Any, name: str) -> Callable[..., Any]:
    """Returns a public method whose dtype errors tell the remedy, as those of ``forward`` do."""

    def explained(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = getattr(base, name)  # now, as scripts replace methods
        if _is_compiling() or (state := state_of(self)) is None:
            return run(self, *args, **kwargs)
        return _explaining(self, state, run, self, *args, **kwargs)

    return _like(getattr(base, name), explained)


def _casting_forward(base: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        state: ModelState | None = getattr(self, STATE, None)
        if state is None:  # restored, or made by type(model)(...)
            return base.forward(self, *args, **kwargs)
        replaced = state.inner_forward
        run = functools.partial(base.forward, self) if replaced is None else replaced
        if _is_compiling():
            args, kwargs = begin_call(state, args, kwargs)
            return end_call(state, state.region.run(run, *args, **kwargs))
        return end_call(state, _run(self, state, run, args, kwargs))

    return _like(base.forward, forward)


def begin_call(state: ModelState, args: Args, kwargs: Kwargs) -> Call:
    """Begins a forward pass: returns its arguments, cast by the plan."""
    if _is_compiling():
        state.begin_traced_forward()
    else:
        state.begin_forward()
    plan = state.plan
    if plan.input_dtype is None:
        return args, kwargs
    if plan.cast is not None:
        return plan.cast(args, plan.input_dtype), plan.cast(kwargs, plan.input_dtype)
    low, dtype = plan.casts_down, plan.input_dtype  # in fp32, objects stay as they are
    return tree.cast_arguments(args, kwargs, dtype, objects=low, skip=state.uncast)


def end_call(state: ModelState, output: Any) -> Any:
    """Returns the output of a forward pass, cast by the plan."""
    plan = state.plan
    if plan.output_dtype is None:
        return output
    return (plan.cast or tree.cast_tensors)(output, plan.output_dtype)


def _run(model: nn.Module, state: ModelState, forward: Method, args: Args, kwargs: Kwargs) -> Any:
    """Calls ``forward`` in eager mode, with cast arguments; notes what it writes in vain."""
    given = args, kwargs
    args, kwargs = begin_call(state, args, kwargs)
    watched = state.plan.casts_down and state.writes.watches
    if watched:
        state.writes.note_forward(model, state.link.has_master)
    output = _explaining(model, state, state.region.run, forward, *args, **kwargs)
    if watched:
        names = positional_names(forward)
        state.writes.note_arguments(model, names, given, (args, kwargs))
    return output


def _explaining(
    model: nn.Module, state: ModelState, fn: Method, /, *args: Any, **kwargs: Any
) -> Any:
    try:
        return fn(*args, **kwargs)
    except RuntimeError as error:
        notes.explain(model, state.plan, error)
        raise
