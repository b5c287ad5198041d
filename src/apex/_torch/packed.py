"""An fp32 tensor that another object stores in fewer bytes."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from apex._torch import blocks
from apex._torch.dispatch_modes import OPERANDS, receives, written_arguments
from apex._torch.dynamo import untraced
from apex._torch.parameters import allow_foreach

_MAKERS = frozenset(
    {
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
    }
)


_VIEW_AS = torch.ops.aten.view.dtype


class Packing(Protocol):
    """Stores fp32 values; a form that keeps nothing beside ``high`` inherits what does nothing.

    Attributes:
        high: The upper 16 bits, as bf16; may share the memory of a model's weight.
    """

    high: Tensor

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that hold the values."""

    def complete(self, value: Tensor, spare: Tensor | None) -> None:
        """Adds to fp32 ``value``, which holds ``high``, what ``high`` lacks.

        May use ``spare``, int32 of the same shape.
        """
        return

    def begin_write(self) -> None:
        """Begins a write of all values, by one :meth:`write` or by one of each part."""
        return

    def write(self, value: Tensor, spare: Tensor | None) -> None:
        """Stores ``value``; may use its memory and ``spare``."""

    def load(self, value: Tensor) -> None:
        """Stores ``value`` for a weight that was set to it, rounded to nearest."""

    def note(self) -> None:
        """Notes that ``high`` was not written but by this packing."""
        return

    def follow(self, *, keep_low: bool) -> None:
        """Sets elements to ``high`` that others have written since :meth:`note`, or all."""
        return

    def wait(self) -> None:
        """Has :meth:`follow` wait for :meth:`note`: what others have written may be undone.

        Until then values are read, copied and written as :meth:`followed` has them.
        """
        return

    def settle(self) -> None:
        """Follows after all, if it waits: parts of the values are read or written next."""
        return

    def followed(self) -> Packing:
        """Returns what :meth:`follow` would leave, without a change."""
        return self

    def stacked(self, others: Sequence[Any]) -> Packing:
        """Returns a packing of the values of ``others``, of one kind and shape: ``[N, ...]``."""

    def view(self, of: Callable[[Tensor], Any]) -> Sequence[Packing]:
        """Returns packings that share the memory of the views that ``of`` returns."""

    def copied(self, memo: dict[int, Any]) -> Packing:
        """Returns a packing with memory of its own."""


class Packed(Tensor):
    """An fp32 tensor whose operators read and write a :class:`Packing`.

    An operator gets plain fp32 tensors for as long as it runs; what it writes is stored when it
    returns. Copies of it in files are plain fp32 tensors. Views share its memory.

    Attributes:
        packing: The values.
    """

    packing: Packing
    __torch_function__ = nn.Parameter.__torch_function__  # which is disabled

    @staticmethod
    def __new__(
        cls: type[Packed], packing: Packing, strides: Sequence[int] | None = None
    ) -> Packed:
        """Returns a tensor with the values of ``packing``, in its layout unless given another."""
        high = packing.high
        made: Packed = torch.Tensor._make_wrapper_subclass(
            cls,
            high.size(),
            strides=high.stride() if strides is None else strides,
            dtype=torch.float32,
            device=high.device,
        )
        made.packing = packing
        return made

    def __init__(self, packing: Packing, strides: Sequence[int] | None = None) -> None:
        """Does nothing: :meth:`__new__` has made the tensor."""

    @classmethod
    @untraced  # which compiled code would run one frame at a time
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operator."""
        return _run(func, args, kwargs or {})

    def widened(self) -> Tensor:
        """Returns the values as a new plain tensor in the layout of this one."""
        high = self.packing.high
        if high.stride() == self.stride():
            value = high.to(torch.float32)
        else:
            value = torch.empty_strided(
                self.size(), self.stride(), dtype=torch.float32, device=high.device
            ).copy_(high)
        self.packing.complete(value, None)
        return value

    def viewed(self, of: Callable[[Tensor], Any]) -> Sequence[Packing]:
        """Returns packings of the views that ``of`` returns."""
        packing = self.packing
        if packing.high.stride() != self.stride():
            # The model's weight has changed its layout; views need the layout of this tensor.
            packing.high = torch.empty_strided(
                *(self.size(), self.stride()), dtype=packing.high.dtype, device=packing.high.device
            ).copy_(packing.high)
        return packing.view(of)

    @property
    def data(self) -> Tensor:
        """The values, sharing memory and version counter until ``data`` is assigned."""
        alias = self.detach()
        aliases = vars(self).setdefault("_aliases", weakref.WeakValueDictionary())
        aliases[id(alias)] = alias
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise RuntimeError(
                f"A packed fp32 master of shape {[*self.shape]} got data of shape "
                f"{[*value.shape]}. It shares the memory of the model's weight, so its shape "
                "cannot change; use master_weights=True."
            )
        self._part_from_aliases()
        self.detach().copy_(value)

    def _part_from_aliases(self) -> None:
        """Gives what ``data`` returned earlier memory of its own, with the present values.

        An average that is swapped in and out by assignment (``backup = param.data``, ``param.data =
        shadow``) holds the values so, as torch gives a plain parameter other memory instead.
        """
        aliases = list(vars(self).pop("_aliases", {}).values())
        if aliases:
            held = self.packing.copied({})
            for alias in aliases:
                alias.packing = held

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a copy of the values; read-only, for a write would not reach them."""
        values = self.clone().numpy(force=force)
        values.flags.writeable = False
        return values

    def __dlpack__(self, **options: Any) -> Any:
        """Exports a copy of the values, as :meth:`numpy` does.

        Raises:
            BufferError: If no copy may be made (``copy=False``).
        """
        if options.pop("copy", None) is False:
            raise BufferError(
                "The values of a packed fp32 master lie in two halves, so they can only be "
                "exported as a copy."
            )
        return self.clone().__dlpack__(**options)

    def tolist(self) -> Any:
        return self.detach().clone().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies a parameter with its packing, and any other tensor as a plain one."""
        if not isinstance(self, nn.Parameter):
            return copy.deepcopy(self._plain(), memo)
        new = Packed(self.packing.copied(memo))
        memo[id(self)] = made = nn.Parameter(new, self.requires_grad)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor or parameter, so that it loads without apex."""
        plain: Any = self._plain()
        return plain.__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        value = self.detach().clone()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(value, self.requires_grad)
        return value.requires_grad_(self.requires_grad)


def _rebuild(packing: Packing, strides: Sequence[int], requires_grad: bool | None) -> Tensor:
    made = Packed(packing, strides)
    return made if requires_grad is None else nn.Parameter(made, requires_grad)


def _share(tensor: Packed) -> tuple[Any, ...]:
    """Pickles for another process, which shares the memory; files have their own way."""
    requires_grad = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
    return _rebuild, (tensor.packing, tensor.stride(), requires_grad)


allow_foreach(Packed)
ForkingPickler.register(Packed, _share)


def plain(tensor: Tensor) -> Tensor:
    """Returns a packed tensor's values as a new plain tensor, and any other tensor unchanged."""
    return tensor.widened() if isinstance(tensor, Packed) else tensor


def stacked(tensors: Sequence[Packed]) -> Packed:
    """Returns a copy of packed tensors of one session and shape as one: ``[N, ...]``."""
    packings = [tensor.packing for tensor in tensors]
    return Packed(packings[0].stacked(packings))


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold the values of ``tensor``, packed or not."""
    return tensor.packing.tensors() if isinstance(tensor, Packed) else [tensor]


class _Plan:
    """What an operator does to its arguments.

    Attributes:
        views: Whether it returns views of its first argument.
        makes: Whether it makes a tensor like its first argument, of which it reads no values.
        written: The positions and names of arguments that it writes to.
        lists: Whether it treats lists of tensors element by element.
        waits: Whether it returns before it has written, with an object to wait for: a collective.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        returned = schema.returns[0].alias_info if schema.returns else None
        name = schema.name.removeprefix("aten::")
        self.views = returned is not None and not returned.is_write
        self.makes = name in _MAKERS
        self.written = [(place, argument.name) for place, argument in written_arguments(func)]
        self.lists = name.startswith(("_foreach_", "_fused_"))
        self.waits = receives(func)


_plan = functools.cache(_Plan)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is _VIEW_AS:
        func, args = _without_dtype(*args), args[:1]
    plan = _plan(func)
    if plan.views and isinstance(args[0], Packed):
        return _views(func, args, kwargs)
    if plan.makes and args[0].packing.high.stride() == args[0].stride():
        kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        return func(args[0].packing.high, *args[1:], **kwargs)
    if plan.lists:
        rest = _run_fused(func, args, kwargs) if func in OPERANDS else args
        results = [_call(func, plan, *part) for part in _parts(rest, kwargs)]
        for tensor in _written(plan, args, kwargs):
            increment_version(tensor)  # which kernels over lists do not
        joined = [tensor for result in results if result is not None for tensor in result]
        return joined if any(result is not None for result in results) else None
    return _call(func, plan, args, kwargs)


def _without_dtype(tensor: Packed, dtype: torch.dtype) -> Any:
    """Returns the operator of ``tensor.view(dtype)`` for the same dtype; raises for others."""
    if dtype is tensor.dtype:
        return torch.ops.aten.alias.default
    raise RuntimeError(
        f"A packed fp32 master got view({dtype}). It is stored in parts, so a write to such a view "
        "would not reach it. Read the bits of a copy, master.clone().view(dtype); for an optimizer "
        "that writes them (schedulefree's ScheduleFreeWrapper), use master_weights=True."
    )


def _views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    several = False
    rest = args[1:]
    offset = rest[2] if func is torch.ops.aten.as_strided.default and len(rest) > 2 else None

    def of(tensor: Tensor) -> Any:
        nonlocal several, rest
        if offset is not None:
            # From the first element on: either half may be a part of a larger storage.
            rest = (*rest[:2], tensor.storage_offset() + offset)
        result = func(tensor, *rest, **kwargs)
        several = not isinstance(result, Tensor)
        return result if several else [result]

    base = args[0]
    with torch.inference_mode(mode=base.is_inference()):  # like views of plain tensors
        made = [Packed(part) for part in base.viewed(of)]
        if not several and _is_alias(made[0], base):
            # It has the same packing, as the upper half may get other memory later.
            return Packed(base.packing, base.stride())
        base.packing.settle()
        return made if several else made[0]


def _is_alias(view: Packed, base: Packed) -> bool:
    same = view.packing.high.data_ptr() == base.packing.high.data_ptr()
    return same and view.size() == base.size() and view.stride() == base.stride()


def _call(
    func: Any,
    plan: _Plan,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Runs an operator on plain fp32 tensors, and stores those that it wrote."""
    widened: _Widened = {}
    plain_args = [_widen(value, widened) for value in args]
    result = func(*plain_args, **{name: _widen(kwargs[name], widened) for name in kwargs})
    written = _written(plan, args, kwargs)
    if plan.waits and written:
        result[1].wait()
    for tensor in written:
        tensor.packing.begin_write()
        tensor.packing.write(widened[id(tensor)][1], None)
    originals = {id(value): tensor for tensor, value in widened.values()}
    if isinstance(result, list | tuple):
        return type(result)(originals.get(id(each), each) for each in result)
    return originals.get(id(result), result)


_Widened = dict[int, tuple[Packed, Tensor]]
"""Packed tensors by id, with their values in fp32."""


def _widen(value: Any, widened: _Widened) -> Any:
    """Returns an argument with plain tensors in place of packed ones, which ``widened`` gets."""
    if isinstance(value, Packed):
        if id(value) not in widened:
            widened[id(value)] = value, value.widened()
        return widened[id(value)][1]
    return [_widen(each, widened) for each in value] if isinstance(value, list | tuple) else value


def _written(plan: _Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Packed]:
    """Returns the packed tensors that an operator writes to, without duplicates."""
    found: dict[int, Packed] = {}
    for index, name in plan.written:
        given = args[index] if index < len(args) else kwargs.get(name)
        for tensor in given if isinstance(given, list | tuple) else [given]:
            if isinstance(tensor, Packed):
                found[id(tensor)] = tensor
    return list(found.values())


_Arguments = tuple[list[Any], dict[str, Any]]


def _parts(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[_Arguments]:
    """Yields the arguments of a list operator in parts with the elements of about one block."""
    count = len(args[0])
    if count == 0:
        return
    # A tensor of scalars has one per element of the lists.
    if any(isinstance(each, Tensor) and each.dim() == 1 for each in (*args, *kwargs.values())):
        yield list(args), kwargs
        return
    block = blocks.elements(sum(map(Tensor.numel, args[0])), args[0][0].device, BUFFERS)
    start = elements = 0
    for index, tensor in enumerate(args[0]):
        if start < index and elements + tensor.numel() > block:
            yield _part(args, kwargs, count, slice(start, index))
            start, elements = index, 0
        elements += tensor.numel()
    yield _part(args, kwargs, count, slice(start, count))


def _part(args: Sequence[Any], kwargs: dict[str, Any], count: int, which: slice) -> _Arguments:
    def part(value: Any) -> Any:
        of_all = isinstance(value, list | tuple) and len(value) == count
        return list(value[which]) if of_all else value

    return [part(each) for each in args], {name: part(each) for name, each in kwargs.items()}


def _run_fused(func: Any, args: blocks.Lists, kwargs: dict[str, Any]) -> blocks.Lists:
    """Runs a fused optimizer on packed tensors, block by block; returns the lists of the others."""
    alike = blocks.alike(*filter(None, args[: OPERANDS[func]]))
    can_cut = [isinstance(p, Packed) and same for p, same in zip(args[0], alike, strict=True)]
    taken, rest = blocks.divide(args, can_cut)
    if taken[0]:
        packed = [param for param in taken[0] if isinstance(param, Packed)]
        cuts = blocks.cuts(packed, BUFFERS)
        grads = blocks.InPlace(cuts.of_all(taken[1]))
        blocks.run(func, taken, kwargs, cuts, unpacked(cuts, packed), grads)
    return rest


BUFFERS = 2
"""How many buffers :func:`unpacked` allocates."""


def unpacked(cuts: blocks.Cuts, params: Sequence[Packed]) -> blocks.Buffered:
    """Returns packed tensors as an operand: fp32 in a buffer, stored after the kernel."""
    memory = torch.empty(cuts.greatest, dtype=torch.int32, device=params[0].device)
    for param in params:
        param.packing.begin_write()
    packings = cuts.arranged([packing for param in params for packing in param.viewed(cuts.of)])

    def each(block: slice, values: Sequence[Tensor]) -> Iterator[tuple[Packing, Tensor, Tensor]]:
        for packing, value in zip(packings[block], values, strict=True):
            spare = memory[: value.numel()].as_strided(value.size(), value.stride())
            yield packing, value, spare

    def load(block: slice, values: list[Tensor]) -> None:
        for packing, value, spare in each(block, values):
            packing.complete(value.copy_(packing.high), spare)

    def store(block: slice, values: list[Tensor]) -> None:
        for packing, value, spare in each(block, values):
            packing.write(value, spare)

    return blocks.Buffered(cuts, [packing.high for packing in packings], load, store)
