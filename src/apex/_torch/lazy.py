"""A tensor that is settled before the first operation that would notice a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import increment_version

from apex._torch.counted import data_of, set_data_of
from apex._torch.dispatch_modes import arguments
from apex._torch.overrides import without_overrides
from apex._torch.parameters import set_data


class Source(Protocol):
    """What a lazy tensor stands for.

    Attributes:
        values: The plain tensor whose memory the lazy one shares.
        pending: Whether ``values`` are not yet those to be read.
    """

    values: Tensor

    @property
    def pending(self) -> bool:
        """See the attributes."""

    def settle(self) -> None:
        """Makes ``values`` those to be read, and ready to be written; idempotent."""


class LazyTensor(Tensor):
    """A plain tensor that settles its source before it is written, aliased or, if pending, read.

    Operators of every caller go through ``__torch_dispatch__``, also those that autograd and
    DistributedDataParallel call in C++. To copies and files it is a plain tensor.
    """

    source: Source

    @property
    def data(self) -> Tensor:
        """The values, sharing memory and version counter; settled, as a script may write them."""
        return data_of(_settled(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        values = _settled(self)
        set_data_of(values, _settled(value))  # a model that is moved may set it to itself
        with without_overrides():
            set_data(self, values)

    def detach_(self) -> Tensor:
        """Does nothing, for loops that zero gradients by ``detach_`` and ``zero_``, as torch did.

        Autograd knows nothing of the tensor, but takes it for a view, which torch refuses.
        """
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``func``, on the plain tensor if it reads memory past the dispatcher."""
        if getattr(func, "__name__", "") in _MEMORY or func in _GETTERS:
            args = tuple(map(_settled, args))
        with without_overrides():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operator on the plain tensors."""
        kwargs = kwargs or {}
        lazy: dict[int, LazyTensor] = {}
        written: list[Tensor] = []
        for alias, value in arguments(func, args, kwargs):
            listed = isinstance(value, list | tuple)
            for tensor in value if listed else (value,):
                if not isinstance(tensor, LazyTensor):
                    continue
                if alias is not None or tensor.source.pending:
                    tensor.source.settle()
                lazy[id(tensor.source.values)] = tensor
                if listed and alias is not None and alias.is_write:
                    written.append(tensor.source.values)
        result = func(*map(_plain, args), **{name: _plain(kwargs[name]) for name in kwargs})
        if written:  # torch's foreach kernels do not count their writes
            increment_version(written)
        return lazy.get(id(result), result)


def make(source: Source) -> LazyTensor:
    """Returns a lazy tensor of ``source``, whose values require no gradient."""
    with without_overrides():
        made = source.values.as_subclass(LazyTensor)
    made.source = source
    return made


_MEMORY = frozenset(
    {
        *("numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"),
        *("__deepcopy__", "__reduce_ex__", "__repr__", "share_memory_"),
    }
)
"""Methods that read or hand out a tensor's memory without an operator."""

_data: Any = Tensor.data
_GETTERS = frozenset({_data.__get__, _data.__set__})


def _plain(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.source.values
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _settled(value: Any) -> Any:
    if not isinstance(value, LazyTensor):
        return value
    value.source.settle()
    return value.source.values
