"""The class of a converted model: a subclass of the model's own, under the same name.

Note [Class swap]: a converted model is the same object with another class, and everything about
the conversion is in one attribute of the object. So all that works by class and ``__dict__`` keeps
working: deep copies and data-parallel replicas compute with their own weights, ``forward`` called
directly casts like a call, ``isinstance`` holds. A closure put in place of ``model.forward`` stays
bound to the first object in all these cases.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import tree
from apex._engine.model import dtype_errors
from apex._engine.model import state_dict as state_values
from apex._engine.model.application import apply_plan
from apex._engine.model.state import STATE, ModelState, stash_forward
from apex._torch.dynamo import untraced

_is_compiling = torch.compiler.is_compiling


class ConvertedModule(nn.Module):
    """What every generated class adds in front of the model's own class."""

    _apex_state: ModelState | None = None

    def __init_subclass__(cls) -> None:
        """Keeps the generated class out of registries that the model's class fills by this."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's state with 16-bit entries in fp32.

        Takes and does what the model's own ``state_dict`` does.
        """
        state = self._apex_state
        if state is None or not state.plan.casts_down:
            return super().state_dict(*args, **kwargs)
        call = state_values.StateDictCall.parse(args, kwargs)
        result = super().state_dict(*args, **kwargs)
        if not call.keep_vars and isinstance(result, MutableMapping):
            call.give_fp32(self, result, state.source)
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        state = self._apex_state
        if state is not None and state.plan.casts_down:
            state_values.refuse_assign(self, local_metadata)
            state.loading = (state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Does what ``to``, ``cuda``, ``float`` and the like ask, apart from another dtype.

        Raises:
            RuntimeError: If the model is one that amp trains in 16 bits, and its dtypes would
                change.
        """
        state = self._apex_state
        if state is None or state.owner is None or not state.plan.casts_down:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

        def keeping_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype is not tensor.dtype:
                raise RuntimeError(
                    f"The model {type(self).__name__} was asked to become {moved.dtype}, but amp "
                    "has prepared it and holds its dtypes. Call amp.restore first; the model is "
                    "plain and fp32 then."
                )
            return moved

        return super()._apply(keeping_dtype, recurse)  # type: ignore[no-untyped-call]

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of their masters."""
        super().zero_grad(set_to_none)
        source = None if self._apex_state is None else self._apex_state.source
        if source is not None:
            source.clear_grads(self.parameters(), set_to_none=set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Names the model's own class, which a fresh process can import."""
        reduced: Any = super().__reduce_ex__(protocol)
        own = type(self)
        if self._apex_state is None or isinstance(reduced, str) or not is_generated(own):
            return reduced
        func, args, *rest = reduced
        base = plain_class(own)
        args = tuple(base if arg is own else arg for arg in args)
        inner = rest[0] if rest else None
        return (
            _revive,
            (base if func is own else func, *args),
            _Saved(self._apex_state, inner),
            *rest[1:],
        )

    def __setstate__(self, saved: Any) -> None:
        """Takes back what ``__reduce_ex__`` gave."""
        if not isinstance(saved, _Saved):
            super().__setstate__(saved)  # type: ignore[no-untyped-call]
            return
        if saved.inner is not None:
            super().__setstate__(saved.inner)  # type: ignore[no-untyped-call]
        intact = self.__dict__.get(STATE) is saved.state
        self.__dict__[STATE] = saved.state
        stash_forward(self, saved.state)
        if not intact:  # its own class made it anew, from something less than its whole state
            apply_plan(self, saved.state)


@dataclass
class _Saved:
    """The pickled state of a converted model: ours, and what its own class gave."""

    state: ModelState
    inner: Any


def _revive(func: Callable[..., nn.Module], *args: Any) -> nn.Module:
    model = func(*args)
    swap_class(model, converted_class(type(model)))
    return model


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
            state.note_wrapper_of_trace()
        else:
            state.note_wrapper()
            if state.source is not None:
                state.source.write_back()
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
