"""Finds non-finite values in tensors, and the tensors that an operator reads and writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from apex._core import dtypes, tree
from apex._torch import dtensor, ranks
from apex._torch.copies import capturing
from apex._torch.dispatch_modes import receives, written_arguments
from apex._torch.sparse import stored_values, with_memory

Kind = Literal["inf", "nan"]

_IN_DOUBLE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64, torch.complex128), torch.complex128),
}
"""The dtypes of values that are checked, and the widest of their kind."""

SAVES_INFINITIES = ("_ctc_loss", "_scaled_dot_product", "_flash_attention", "_efficient")
"""How operators begin whose outputs after the first, saved for backward, may hold infinities."""

EXCHANGES = ("c10d", "_c10d", "symm_mem", "_dtensor")
"""How the namespaces begin whose operators take part in what several processes compute."""

_LOCAL = ("aten.", "torchvision.")
"""Namespaces whose operators compute in this process alone."""

_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "uniform_", "normal_"}
_OVERWRITES |= {"recv_", "recv_any_source_"}
# They write the running mean and variance, which their schemas do not say.
_WRITES_RUNNING_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}


@dataclass(frozen=True)
class Values:
    """The finite values of one tensor.

    Attributes:
        dtype: Name of its dtype.
        shape: Its shape.
        low: Least finite value; 0 if there is none. For complex numbers, of their parts.
        high: Largest finite value; 0 if there is none.
        smallest: Least absolute value other than 0; 0 if there is none.
        nonfinite: Number of elements that are inf or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    smallest: float
    nonfinite: int

    def __str__(self) -> str:
        """Returns, for instance, ``"float16 [2, 3] from -1 to 400"``."""
        bad = f", {self.nonfinite} not finite" if self.nonfinite else ""
        span = f"from {self.low:.4g} to {self.high:.4g}"
        span = f"{self.low:.4g}" if self.low == self.high else span
        return f"{self.dtype} {list(self.shape)} {span}{bad}"


class Traits(NamedTuple):
    """What an operator's schema says.

    Attributes:
        name: Namespace and operator, such as ``"aten.exp"``.
        view: Whether it returns a view of its input and writes nothing.
        writes: Positions (names if keyword-only) of the arguments that it writes.
        reads_written: Whether the result depends on the previous values of these arguments.
        exchanges: Whether other processes take part. What such a call writes and returns may come
            later, and a second call would wait for theirs.
    """

    name: str
    view: bool
    writes: tuple[int | str, ...]
    reads_written: bool
    exchanges: bool


class OperatorCall(NamedTuple):
    """One call of an operator: the overload, what its schema says, and the arguments."""

    func: Any
    traits: Traits
    args: Any
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Runs the operator."""
        return self.func(*self.args, **self.kwargs)

    @property
    def may_communicate(self) -> bool:
        """Whether other processes may take part: a library's operator hides what it calls."""
        known = self.traits.name.startswith(_LOCAL) or ranks.world_size() == 1
        return self.traits.exchanges or not known

    @property
    def arguments(self) -> list[Any]:
        """All arguments, positional ones first."""
        return [*self.args, *self.kwargs.values()]

    def mapped(
        self,
        values_of: Callable[[Tensor], Tensor],
        dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
    ) -> OperatorCall:
        """Returns the call with other tensors and, where given, other dtypes as arguments.

        A tensor that is given twice, as in ``x.mul_(x)``, is one tensor there, too.
        """

        def other(value: Any) -> Any:
            return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

        args, kwargs = tree.map_arguments(values_of, self.args, self.kwargs)
        named = {name: other(value) for name, value in kwargs.items()}
        return self._replace(args=tuple(map(other, args)), kwargs=named)

    def written(self) -> list[Tensor]:
        """Returns the floating-point tensors that the call writes."""
        return list(floating(self.overwritten()))

    def overwritten(self) -> list[Any]:
        """Returns the arguments that the call writes, of any dtype."""
        return [
            self.kwargs.get(place) if isinstance(place, str) else self.args[place]
            for place in self.traits.writes
            if isinstance(place, str) or place < len(self.args)
        ]


@functools.cache
def traits(func: Any) -> Traits:
    """Returns the traits of an operator overload."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    written = [
        (argument.name if argument.kwarg_only else place, argument.is_out)
        for place, argument in written_arguments(func)
    ]
    if name in _WRITES_RUNNING_STATISTICS:
        written = [(3, False), (4, False)]
    if name == "set_":  # gives the tensor other memory: a loaded file's, a worker process's
        written = []
    if name == "all_gather_copy_in":  # FSDP2's, to memory of which a part is this rank's
        names = [argument.name for argument in schema.arguments]
        written = [(place, False) for place, n in enumerate(names) if n == "all_gather_output"]
    view = not written and any(result.alias_info is not None for result in schema.returns)
    reads = name not in _OVERWRITES and not any(out for _, out in written)
    if receives(func) and "Tensor" in str(schema.arguments[1].type):  # what it sends
        reads = False
    exchanges = namespace.startswith(EXCHANGES) and name != "wait_tensor"
    places = tuple(place for place, _ in written)
    return Traits(f"{namespace}.{name}", view, places, reads, exchanges)


def floating(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point and complex tensors in nested lists, tuples and dicts."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor) and is_checked(leaf))


def has_infinite_number(value: Any) -> bool:
    """Returns whether nested arguments contain a Python float that is infinite or NaN."""
    return any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def is_checked(tensor: Tensor) -> bool:
    """Returns whether a tensor has floating-point or complex values, of at least 16 bits."""
    has_values = tensor.device.type != "meta" and not is_lazy(tensor)
    return tensor.dtype in _IN_DOUBLE and has_values


def is_plain(kind: type[Tensor]) -> bool:
    """Returns whether tensors of a class have memory of their own, as quantized ones do not."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def real(values: Tensor) -> Tensor:
    """Returns a real view of complex values; others unchanged."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def dense(tensor: Tensor) -> Tensor:
    """Returns the values stored on this rank: the tensor, a sparse tensor's values, or a shard."""
    tensor = dtensor.local(tensor)
    if tensor.layout is torch.strided:
        return with_memory(tensor.detach())
    if tensor.layout is torch.sparse_coo:
        return stored_values(tensor.detach())
    return tensor.detach().values()


def kind_of(tensor: Tensor) -> Kind | None:
    """Returns ``"nan"`` if a tensor holds any, else ``"inf"`` if it does, else None. Syncs.

    Also returns None while a CUDA graph is captured, when nothing has been computed yet.
    ``aminmax`` makes one pass without a copy and keeps NaN: 10 to 60 times as fast as ``isfinite``.
    """
    values = dense(tensor)
    if values.numel() == 0 or capturing(values.device):
        return None
    values = real(values)
    found = [float(extreme) for extreme in torch.aminmax(values)]  # sync: tracing is a diagnosis
    if all(map(math.isfinite, found)):
        return None
    return "nan" if any(map(math.isnan, found)) else "inf"


def values_of(tensor: Tensor) -> Values:
    """Returns the range of a tensor's finite values. Syncs."""
    values = real(dense(tensor))
    values = values if values.dtype is torch.float64 else values.float()
    finite = values[torch.isfinite(values)]
    sizes = finite[finite != 0.0].abs()
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    return Values(
        dtypes.name(tensor.dtype),
        tuple(tensor.shape),
        low,
        high,
        float(sizes.min()) if sizes.numel() else 0.0,  # sync: tracing is a diagnosis
        values.numel() - finite.numel(),
    )


def largest(tensors: Sequence[Tensor]) -> float:
    """Returns the largest finite absolute value in all tensors; 0 if there is none. Syncs."""
    result = 0.0
    for tensor in tensors:
        sizes = dense(tensor).abs()
        if sizes.numel():
            # nan_to_num would replace infinities by the largest finite number.
            wide = sizes if sizes.dtype is torch.float64 else sizes.float()
            finite = torch.where(torch.isfinite(wide), wide, 0.0)
            result = max(result, float(finite.amax()))  # sync: tracing is a diagnosis
    return result


def is_mask(tensor: Tensor) -> bool:
    """Returns whether a tensor's infinities look deliberate, as in a mask.

    In a mask, all infinities have the same sign, there is no NaN, and all finite values are equal.
    A mask is real.
    """
    values = dense(tensor)
    if values.is_complex():
        return False
    infinite = torch.isinf(values)
    finite = values[torch.isfinite(values)]
    if bool(torch.isnan(values).any()):  # sync: tracing is a diagnosis
        return False
    one_sign = len(torch.unique(values[infinite])) == 1
    return one_sign and (finite.numel() == 0 or bool((finite == finite[0]).all()))  # sync: as above


def storage_key(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, shared by its views; 0 if it has none."""
    return dense(tensor).untyped_storage().data_ptr()


def covers_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor covers its whole storage."""
    values = dense(tensor)
    return values.numel() * values.element_size() >= values.untyped_storage().nbytes()


def largest_in_double(call: OperatorCall) -> float | None:
    """Returns the largest absolute result of an operator recomputed in float64.

    ``inf`` if the result is infinite or NaN in float64 too; None if the operator cannot be rerun.
    The arguments are as they were before the call.
    """
    if call.may_communicate or torch.Tag.nondeterministic_seeded in call.func.tags:
        return None
    try:
        wide = call.mapped(_doubled, _IN_DOUBLE)
        # autocast is off in a dispatch mode. Ending a block of it here would wait for itself: torch
        # holds the lock of its weight cache while it casts a weight.
        with torch.no_grad():
            result = wide.run()
    except (RuntimeError, NotImplementedError, TypeError):  # some kernels and devices lack float64
        return None
    results = [*floating(result), *wide.written()]
    if any(kind_of(tensor) for tensor in results):
        return math.inf
    return largest(results)


def _doubled(tensor: Tensor) -> Tensor:
    wide = _IN_DOUBLE.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(wide) if tensor.layout is torch.strided else tensor
