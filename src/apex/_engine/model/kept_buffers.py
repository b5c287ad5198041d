"""Buffers that stay in fp32 inside a 16-bit model, and take the dtype of what they meet.

Note [Kept buffers]
    Models register a buffer as non-persistent where they can compute it again: rotary frequencies,
    tables of positions, masks, schedules. They rely on the precision of such values (in bf16 the
    angle at position 4097 of an ``inv_freq`` is off by several radians), so rounding them with the
    weights is wrong. But a plain fp32 buffer would widen every activation that it is added to, and
    the next linear layer would refuse that.

    So a kept buffer is an fp32 tensor that yields, as a Python number does: where it meets a 16-bit
    tensor it is rounded to that dtype for this one call. What is computed from kept buffers, alone
    or with fp32 constants, is computed in fp32 and yields in turn. With fp32 tensors that require
    gradients it gives plain ones, and ``.float()`` gives the plain fp32 tensor that it asks for.
    What is written into one, such as an average or the keys of a cache, becomes fp32 first.

    In eager a class does this, put on the buffer's own object, so that all who hold the buffer keep
    it, and calls without a kept buffer cost nothing. Dynamo does not pass every call to a subclass
    (torch 2.13: a tuple of them), and torch.export replaces buffers. So while a forward is traced
    its buffers are plain, and a function mode yields for those that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

from apex._core import dtypes, tree
from apex._engine.undo import Undo
from apex._torch.dynamo import allow_subclass_inputs, at_tracing, make_traceable
from apex._torch.modules import child
from apex._torch.overrides import without_overrides

_is_compiling = torch.compiler.is_compiling

_ASSIGNMENTS = frozenset(
    {"__setitem__", "__set__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")}
)
"""Functions that write to their first argument, beside those that end in one underscore."""

_NEEDS_EQUAL = frozenset(
    {"index_put", "index_put_", "__setitem__", "prelu", "scatter", "scatter_", "masked_scatter"}
)
"""Functions that refuse a 0-d tensor of another dtype."""

_REPLACEMENTS = frozenset({"__set__", "set_"})
"""Functions that give their first argument another storage or attribute."""

_UPDATES = frozenset({"batch_norm", "instance_norm"})
"""Functions that write to arguments beside the first: running statistics."""

_SELECTIONS = frozenset(
    {"__get__", "__getitem__", "chunk", "clone", "contiguous", "detach", "embedding", "expand"}
    | {"flatten", "gather", "index_select", "narrow", "permute", "repeat", "reshape", "select"}
    | {"split", "squeeze", "t", "to", "transpose", "unbind", "unsqueeze", "view"}
)
"""Functions whose result holds values of the buffer as they are."""

_NOTE = "_apex_note"


class KeptBuffer(Tensor):
    """An fp32 buffer of a 16-bit model; see Note [Kept buffers]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls ``func`` with kept buffers in the dtype of the 16-bit tensors beside them."""
        kwargs = kwargs or {}
        with without_overrides():
            given = _tensors((*args, *kwargs.values()) if kwargs else args)
            if len(types) == 1 or all(kind in _OWN for kind in types):
                return _call(func, args, kwargs, given, None)
            low, _ = _met(_name(func), given, None)
            if low is not None:
                args, kwargs = _rounded(_name(func), args, kwargs, low, None)
            args, kwargs = plain(args), plain(kwargs)
        return func(*args, **kwargs)  # by the other subclass

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        """Formats a plain tensor; torch's own refuses subclasses."""
        return format(plain(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = mark(plain(self).clone())
        made: Tensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor; a model marks its own again."""
        return plain(self).__reduce_ex__(protocol)


_OWN = (KeptBuffer, Tensor, nn.Parameter)
"""Types of tensors that leave a call to :class:`KeptBuffer`."""


class Yielding(TorchFunctionMode):
    """Makes plain fp32 tensors yield in all calls inside, and what is computed from them.

    Args:
        kept: The tensors.
    """

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = list(kept)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls ``func`` with known tensors in the dtype of the 16-bit tensors beside them."""
        kwargs = kwargs or {}
        given = _tensors((*args, *kwargs.values()))
        for tensor in given:
            if _is_kept(tensor, self._known):
                return _call(func, args, kwargs, given, self._known)
        return func(*args, **kwargs)


def mark(buffer: Tensor, undo: Undo | None = None) -> Tensor:
    """Makes an fp32 tensor a kept buffer, in place."""
    if undo is not None and not isinstance(buffer, KeptBuffer):
        undo.push(unmark, buffer)
    buffer.__class__ = KeptBuffer
    make_traceable(KeptBuffer)
    return buffer


def of(model: nn.Module, names: Iterable[str]) -> list[Tensor]:
    """Returns the fp32 buffers of these qualified names, as far as the model still has them."""
    found: list[Tensor] = []
    for name in names:
        *path, own = name.split(".")
        module: nn.Module | None = model
        for part in path:
            module = None if module is None else child(module, part)
        buffer = None if module is None else module._buffers.get(own)
        if buffer is not None and buffer.dtype is torch.float32:
            found.append(buffer)
    return found


def mark_plain(buffers: Iterable[Tensor]) -> list[Tensor]:
    """Marks those that are plain, and returns them.

    A model gets such ones from ``functional_call``, as a replica of DataParallel, and by being
    compiled.
    """
    return [mark(buffer) for buffer in buffers if type(buffer) is Tensor]


def unmark(buffer: Tensor) -> None:
    """Makes a kept buffer a plain tensor again, in place."""
    if isinstance(buffer, KeptBuffer):
        changed: Any = buffer
        changed.__class__ = Tensor
        changed.__dict__.pop(_NOTE, None)


def plain(value: Any) -> Any:
    """Returns ``value`` with plain tensors for all that yield, in any nesting."""
    if type(value) is Tensor:
        return value
    return tree.map_tensors(_unmarked, value)


def _unmarked(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, KeptBuffer):
        return tensor
    with without_overrides():
        return tensor.as_subclass(Tensor)


def attach(buffer: Tensor, note: Callable[[], object]) -> None:
    """Has ``note`` called when values of a kept buffer are rounded, in all that hold them."""
    buffer.__dict__[_NOTE] = note


# -- the rule ------------------------------------------------------------------------------------
# ``known`` lists the tensors that yield; None where their class tells.


def _call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: list[Tensor],
    known: list[Tensor] | None,
) -> Any:
    """Calls ``func`` with arguments of which ``given`` are the tensors, some of them kept."""
    name = _name(func)
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return _call_unary(func, name, args[0], known)
    if name.startswith("_foreach_"):  # what meets in lists are their elements, one by one
        return _strong(func(*args, **kwargs), known)
    if _written(name) and args and isinstance(args[0], Tensor):
        return _call_in_place(func, name, args, kwargs, given, known)
    low, yields = _met(name, given, known)
    before = args
    if low is not None:
        args, kwargs = _rounded(name, args, kwargs, low, known)
    result = func(*args, **kwargs)
    if name in _UPDATES:
        for held, used in zip(before, args, strict=True):
            if held is not used:
                held.copy_(used)
    if low is not None or "out" in kwargs:
        return result
    if not yields or _asks_for_fp32(name, args, kwargs):
        return _strong(result, known)
    return _keep(result, given, name, known)


def _call_in_place(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: list[Tensor],
    known: list[Tensor] | None,
) -> Any:
    """Calls a function that writes to its first argument."""
    target = args[0]
    if not _is_kept(target, known):
        low, _ = _met(name, given, known)
        if low is not None:
            args, kwargs = _rounded(name, args, kwargs, low, known)
    elif name not in _REPLACEMENTS:
        args = (target, *_widened(args[1:]))
        kwargs = dict(zip(kwargs, _widened(kwargs.values()), strict=True))
    result = func(*args, **kwargs)
    # Traced, an operator in place gives another object than the one it writes to.
    return target if _is_compiling() else result


def _call_unary(func: Any, name: str, tensor: Tensor, known: list[Tensor] | None) -> Any:
    """Gives an attribute of a kept buffer, or an operator of it alone."""
    result = func(tensor)
    if name == "float":
        return _strong(result, known)
    if name == "__get__" and func in get_default_nowrap_functions():  # such as grad
        return result
    return _keep(result, [tensor], name, known)


@at_tracing
def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0] if "." in name else name  # behind it an operator's overload


def _written(name: str) -> bool:
    """Returns whether a function writes to its first argument."""
    return name in _ASSIGNMENTS or (name[-1:] == "_" and name[-2:] != "__")


def _asks_for_fp32(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call casts to fp32 in so many words."""
    if name not in ("to", "type"):
        return False
    return any(value is torch.float32 for value in (*args, *kwargs.values()))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among ``values`` and in lists and tuples there."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _is_kept(tensor: Tensor, known: list[Tensor] | None) -> bool:
    if known is None:
        return isinstance(tensor, KeptBuffer)
    return any(tensor is each for each in known)


def _met(
    name: str, given: Iterable[Tensor], known: list[Tensor] | None
) -> tuple[torch.dtype | None, bool]:
    """Returns the 16-bit dtype that kept buffers yield to, and whether what they give yields too.

    As in torch's own rule for a result's dtype, a 0-d tensor is no match for one that has
    dimensions.
    """
    has_dims = strict = name in _NEEDS_EQUAL
    others: list[Tensor] = []
    for tensor in given:
        if _is_kept(tensor, known):
            has_dims = has_dims or tensor.dim() > 0
        elif tensor.is_floating_point():
            others.append(tensor)
    found: torch.dtype | None = None
    mixed, yields = False, True
    for tensor in others:
        shaped = tensor.dim() > 0
        if tensor.requires_grad or (shaped and not has_dims):
            yields = False
        if shaped == has_dims or strict:
            mixed = mixed or found not in (None, tensor.dtype)
            found = tensor.dtype
    return (found if found in dtypes.LOW_PRECISION and not mixed else None), yields


def _rounded(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    low: torch.dtype,
    known: list[Tensor] | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with kept buffers rounded to ``low``, but for what is written to."""
    first = args[: int(_written(name))]
    rest = [_round(value, low, known) for value in args[len(first) :]]
    read = {key: _round(value, low, known) for key, value in kwargs.items() if key != "out"}
    return (*first, *rest), {**kwargs, **read}


def _widened(values: Iterable[Any]) -> list[Any]:
    """Returns ``values`` with 16-bit tensors, also those in lists and tuples, in fp32."""
    return [
        type(value)(_widened(value))
        if type(value) in (list, tuple)
        else value.float()
        if isinstance(value, Tensor) and dtypes.is_low_precision(value)
        else value
        for value in values
    ]


def _round(value: Any, low: torch.dtype, known: list[Tensor] | None) -> Any:
    if isinstance(value, (list, tuple)):
        items = [_round(item, low, known) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, Tensor) or not _is_kept(value, known):
        return value
    if not _is_compiling() and (note := value.__dict__.get(_NOTE)) is not None:
        note()
    return value.to(low)


def _strong(result: Any, known: list[Tensor] | None) -> Any:
    """Returns a result that does not yield."""
    if known is None:
        return plain(result)
    is_known = isinstance(result, Tensor) and _is_kept(result, known)
    return result.view_as(result) if is_known else result


def _keep(result: Any, given: list[Tensor], name: str, known: list[Tensor] | None) -> Any:
    """Makes the fp32 tensors that a function gave yield, and returns them."""
    if type(result) is torch.Size:
        return result
    if known is None and _is_compiling():
        return _traced_keep(result)
    for tensor in _tensors((result,)):
        if tensor.dtype is not torch.float32 or _is_kept(tensor, known):
            continue
        if known is not None:
            known.append(tensor)
        elif not any(tensor is each for each in given):
            mark(tensor)
            if name in _SELECTIONS:
                for each in given:
                    if (note := each.__dict__.get(_NOTE)) is not None:
                        attach(tensor, note)
    return result


def _traced_keep(result: Any) -> Any:
    """Does so in a part of a model that is compiled by itself: with other objects."""
    allow_subclass_inputs()
    if isinstance(result, Tensor):
        is_fp32 = result.dtype is torch.float32
        return result.as_subclass(KeptBuffer) if is_fp32 else result
    if type(result) in (tuple, list):
        return type(result)([_traced_keep(item) for item in result])
    return result
