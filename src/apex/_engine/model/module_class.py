"""The class of a converted model: a subclass of the model's own, under the same name.

Note [Class swap]: a converted model is the same object with another class, and everything about
the conversion is in one attribute of the object. So all that works by class and ``__dict__`` keeps
working: deep copies and data-parallel replicas compute with their own weights, ``forward`` called
directly casts like a call, ``isinstance`` holds. A closure put in place of ``model.forward`` stays
bound to the first object in all these cases.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes, tree
from apex._engine.model import dtype_errors
from apex._engine.model.state import STATE, ModelState, stash_forward
from apex._pickle import rebuild
from apex._torch.dynamo import untraced

_is_compiling = torch.compiler.is_compiling


class ConvertedModule(nn.Module):
    """What every generated class adds in front of the model's own class."""

    _apex_state: ModelState | None = None

    def __init_subclass__(cls) -> None:
        """Keeps the generated class out of registries that the model's class fills by this."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Does what ``to``, ``cuda``, ``float`` and the like ask.

        Asked for another dtype, a model that amp trains in 16 bits gets its exact fp32 values,
        computes in that dtype from then on, and says so in the log. Batch norm and other parts
        that the plan keeps in fp32 are not made 16-bit.
        """
        state = self._apex_state
        if state is None or not state.given.casts_down:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            return super()._apply(_keeping(fn, state), recurse)  # type: ignore[no-untyped-call]
        except _AnotherDtype as asked:
            state.compute_in(self, asked.dtype)
        return super()._apply(_keeping(fn, state), recurse)  # type: ignore[no-untyped-call]

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of their masters."""
        super().zero_grad(set_to_none)
        source = None if self._apex_state is None else self._apex_state.link.source
        if source is not None:
            source.clear_grads(self.parameters(), set_to_none=set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a model that casts no parameters as the plain model that it is.

        Any other is named by its own class, which a fresh process can import.
        """
        state = self._apex_state
        if state is None or not is_generated(type(self)):
            return super().__reduce_ex__(protocol)
        if not state.plan.casts_down:
            return self._reduced_as_plain(state)
        state.link.write_back()
        return self._reduced(state, protocol)

    def _reduced_as_plain(self, state: ModelState) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # from 2 on the object has to be of its class
        if isinstance(reduced, str):
            return reduced
        func, args, inner = _of_plain_class(type(self), reduced)
        if isinstance(inner, dict):
            inner = {name: value for name, value in inner.items() if name != STATE}
            if state.inner_forward is not None:
                inner.setdefault("forward", state.inner_forward)
        return func, args, inner, *reduced[3:]

    def _reduced(self, state: ModelState, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        func, args, inner = _of_plain_class(type(self), reduced)
        return rebuild, ("model", func, *args), (state, inner), *reduced[3:]

    def __copy__(self) -> Any:
        """Returns a converted model that shares parameters, owner and masters."""
        own = getattr(super(), "__copy__", None)
        return self._copied({}, copy.copy) if own is None else own()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a converted model with parameters of its own; masters come with optimizers."""
        if self._apex_state is not None:
            self._apex_state.link.write_back()
        own = getattr(super(), "__deepcopy__", None)
        if own is not None:
            return own(memo)
        if is_generated(type(self)):
            return self._copied(memo, functools.partial(copy.deepcopy, memo=memo))
        # A class put on top since, such as a parametrization's, which does not reduce.
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def _copied(self, memo: dict[int, Any], copied: Callable[[_Reduced], Any]) -> Any:
        state = self._apex_state
        if state is None or not is_generated(type(self)):
            reduced: Any = super().__reduce_ex__(4)
        else:
            reduced = self._reduced(state, 4)
        if isinstance(reduced, str):
            return self
        given = _Reduced(self, reduced, memo)
        try:
            return copied(given)
        finally:
            given.memo = {}  # which holds it: a cycle would outlive the copy

    def __setstate__(self, saved: Any) -> None:
        """Takes back what ``__reduce_ex__`` gave."""
        if not (isinstance(saved, tuple) and saved and isinstance(saved[0], ModelState)):
            super().__setstate__(saved)  # type: ignore[no-untyped-call]
            return
        state, inner = saved
        if inner is not None:
            super().__setstate__(inner)  # type: ignore[no-untyped-call]
        intact = self.__dict__.get(STATE) is state
        self.__dict__[STATE] = state
        stash_forward(self, state)
        if not intact:  # its own class made it anew, from something less than its whole state
            state.apply(self)


class _AnotherDtype(Exception):  # noqa: N818 - a signal, no error
    """A tensor of the plan's dtype would get ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.dtype = dtype


def _keeping(fn: Callable[[Tensor], Tensor], state: ModelState) -> Callable[[Tensor], Tensor]:
    """Returns ``fn`` for a model in its plan's dtypes; raises where it would change them."""
    own = state.plan.param_dtype

    def keeping(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.dtype is tensor.dtype:
            return moved
        if tensor.dtype is own:
            raise _AnotherDtype(moved.dtype)
        return tensor.to(moved.device) if moved.dtype in dtypes.LOW_PRECISION else moved

    return keeping


class _Reduced:
    """Copies as a model would that has no ``__deepcopy__``: by what its ``__reduce_ex__`` gives."""

    def __init__(self, model: nn.Module, reduced: Any, memo: dict[int, Any]) -> None:
        self._model = model
        self._reduced = reduced
        self.memo = memo

    def __reduce_ex__(self, protocol: Any) -> Any:
        func, args, *rest = self._reduced

        def make(*args: Any) -> Any:
            # What the model refers to may refer to it: known before its state is copied.
            new = self.memo[id(self._model)] = func(*args)
            return new

        return make, args, *rest


def rebuild_model(func: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Makes a converted model from how its own class is rebuilt; its state follows."""
    model = func(*args)
    swap_class(model, converted_class(type(model)))
    return model


def _of_plain_class(own: type[nn.Module], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns function, arguments and state of a reduced model with its plain class in them."""
    func, args, *rest = reduced
    base = plain_class(own)
    args = tuple(base if arg is own else arg for arg in args)
    return base if func is own else func, args, rest[0] if rest else None


def swap_class(model: nn.Module, new: type[nn.Module]) -> None:
    """Gives ``model`` another class, past its own ``__setattr__``.

    That may refuse attributes or send them elsewhere, as compiled models do.
    """
    object.__setattr__(model, "__class__", new)


def converted_class(base: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of converted models of class ``base``, always the same one.

    Python's own list of subclasses is the cache: it holds the class as long as a model uses it.
    """
    bases = (ConvertedModule, base)
    for known in base.__subclasses__():
        if known.__bases__ == bases:
            return known
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": _casting_forward(base),
    }
    return types.new_class(base.__name__, bases, {}, lambda namespace: namespace.update(names))


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns ``kind`` without the conversion.

    Where something else has put a class of its own on top since (``fully_shard``, a
    parametrization of the model itself), that one is made again over the plain class.
    """
    if is_generated(kind):
        return kind.__bases__[1]
    bases = tuple(plain_class(b) if issubclass(b, ConvertedModule) else b for b in kind.__bases__)
    names = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return types.new_class(kind.__name__, bases, {}, lambda namespace: namespace.update(names))


def is_generated(kind: type[nn.Module]) -> bool:
    """Returns whether ``kind`` is a class that ``converted_class`` made."""
    return kind.__bases__[0] is ConvertedModule


def _casting_forward(base: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(base.forward)  # keeps the signature, which libraries read
    def forward(self: ConvertedModule, /, *args: Any, **kwargs: Any) -> Any:
        state: ModelState | None = getattr(self, STATE, None)
        if state is None:  # restored since, or made by type(model)(...)
            return base.forward(self, *args, **kwargs)
        plan = state.plan
        if _is_compiling():
            state.begin_traced_forward()
        else:
            state.begin_forward()
        if plan.input_dtype is not None:
            if plan.cast is None:
                args, kwargs = tree.cast_arguments(args, kwargs, plan.input_dtype)
            else:
                args, kwargs = (plan.cast(part, plan.input_dtype) for part in (args, kwargs))
        if state.inner_forward is None:
            output = _run_inside(self, state, base.forward, self, *args, **kwargs)
        else:
            output = _run_inside(self, state, state.inner_forward, *args, **kwargs)
        if plan.output_dtype is not None:
            output = (plan.cast or tree.cast_tensors)(output, plan.output_dtype)
        return output

    return forward


def _run_inside(
    model: nn.Module, state: ModelState, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if _is_compiling():  # a graph cannot break and go on inside a try block
        return state.region.run(forward, *args, **kwargs)
    try:
        return state.region.run(forward, *args, **kwargs)
    except RuntimeError as error:
        dtype_errors.explain(model, state.plan, error)
        raise
