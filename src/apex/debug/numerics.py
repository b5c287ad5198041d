"""Finds tensors of a model that hold inf or NaN, and measures the headroom of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import arguments, dtypes, finite
from apex._core.param_groups import params_of
from apex._engine.optimizer.optimizer_class import binding_of
from apex._torch import copies, dtensor
from apex.debug import tensors
from apex.debug.arguments import inner

_COUNT = "state step"
"""Role of the tensor in which torch's optimizers count steps."""

_MAX_LISTED = 10
"""Number of non-finite tensors that ``str`` lists."""


@dataclass(frozen=True)
class TensorNumerics:
    """A summary of one tensor's values.

    Attributes:
        name: Qualified name of the parameter or buffer in the model.
        role: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"master"`` or ``"state NAME"``.
        dtype: Name of the dtype, such as ``"float16"``.
        inf: Number of infinite elements, of either sign.
        nan: Number of NaN elements.
        elements: Number of elements; of a sharded tensor, those on this rank.
        largest: Largest finite absolute value; of complex numbers, of their parts.
        limit: Largest finite value of the dtype.
        mask: Whether it is a buffer whose infinities are those of a mask: all of one sign, among
            numbers that are all equal.
    """

    name: str
    role: str
    dtype: str
    inf: int
    nan: int
    elements: int
    largest: float
    limit: float
    mask: bool = False

    @property
    def finite(self) -> bool:
        """Whether it holds neither inf nor NaN, except for the infinities of a mask."""
        return self.mask or not (self.inf or self.nan)

    @property
    def headroom(self) -> float:
        """Powers of two from the largest value to ``limit``; inf if all values are 0."""
        return math.log2(self.limit / self.largest) if self.largest else math.inf

    def __str__(self) -> str:
        counts = [f"{n} {kind}" for n, kind in ((self.inf, "inf"), (self.nan, "nan")) if n]
        what = f"{', '.join(counts)} of {self.elements}" if counts else f"up to {self.largest:.3g}"
        return f"{self.name} ({self.role}, {self.dtype}): {what}"


class Numerics(tuple[TensorNumerics, ...]):
    """The result of :func:`check_numerics`: a tuple, true if all tensors are finite."""

    __slots__ = ()

    @property
    def nonfinite(self) -> list[TensorNumerics]:
        """The tensors that hold inf or NaN."""
        return [item for item in self if not item.finite]

    @property
    def least_headroom(self) -> TensorNumerics | None:
        """The finite tensor with the least headroom, apart from counts of steps; None if none."""
        values = (item for item in self if item.finite and item.role != _COUNT)
        return min(values, key=lambda item: item.headroom, default=None)

    def __bool__(self) -> bool:
        return not self.nonfinite

    def __str__(self) -> str:
        """Returns the tensors that are not finite, or else the one closest to overflow."""
        bad = self.nonfinite
        if bad:
            more = [f"and {len(bad) - _MAX_LISTED} more"] if len(bad) > _MAX_LISTED else []
            return "Not finite:\n" + "\n".join(f"  {line}" for line in [*bad[:_MAX_LISTED], *more])
        close = self.least_headroom
        if close is None:
            return "No floating-point tensor."
        return f"All {len(self)} tensors finite; closest to overflow: {close}."


def check_numerics(model: nn.Module, optimizer: Any = None) -> Numerics:
    """Finds inf and NaN in parameters, buffers, gradients, masters and optimizer state.

    Call it between two steps to locate a persistent NaN: one in the optimizer's state returns at
    every step, whatever the batch. Waits for the device once, at the end.

    Args:
        model: Any model, prepared or not.
        optimizer: Its optimizer, prepared by ``amp.initialize`` or plain, to check masters and
            state too, under the names of the model's parameters.

    Raises:
        TypeError: If ``model`` is not a module, or ``optimizer`` is not an optimizer.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> bool(amp.debug.check_numerics(model))
        True
        >>> model.weight.data[0, 1] = torch.nan
        >>> print(amp.debug.check_numerics(model))
        Not finite:
          weight (parameter, float32): 1 nan of 2
    """
    arguments.module("amp.debug.check_numerics", model)
    held = [
        (name, role, finite.summed_values(dtensor.local(tensor.detach())))
        for name, role, tensor in _named(model, optimizer)
        if tensors.is_checked(tensor)
    ]
    held = [item for item in held if item[2].numel()]
    counts = _counted([values for _, _, values in held])
    return Numerics(
        TensorNumerics(
            name=name,
            role=role,
            dtype=dtypes.name(values.dtype),
            inf=int(inf),
            nan=int(nan),
            elements=values.numel(),
            largest=largest,
            limit=torch.finfo(values.dtype).max,
            mask=role == "buffer" and 0 < inf < values.numel() and tensors.is_mask(values),
        )
        for (name, role, values), (inf, nan, largest) in zip(held, counts, strict=True)
    )


def _named(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, str, Tensor]]:
    for name, param in model.named_parameters():
        yield name, "parameter", param
        if param.grad is not None:
            yield name, "gradient", param.grad
    for name, buffer in model.named_buffers():
        yield name, "buffer", buffer
    if optimizer is None:
        return
    own = inner(optimizer)
    binding = binding_of(own)
    names = {id(param): name for name, param in model.named_parameters()}
    masters = {} if binding is None else {id(pair.master): pair.model for pair in binding.pairs}
    for param in params_of(own):
        weight = masters.get(id(param))
        name = names.get(id(param if weight is None else weight), "(a parameter of another model)")
        if weight is not None:
            yield name, "master", param
            if param.grad is not None:
                yield name, "gradient of the master", param.grad
        for key, value in own.state.get(param, {}).items():
            if isinstance(value, Tensor):
                yield name, f"state {key}", value


@torch.no_grad()
def _counted(held: list[Tensor]) -> list[list[float]]:
    """Returns, for each tensor, the counts of inf and NaN and the largest finite magnitude."""
    found = [
        torch.stack(
            [
                torch.isinf(values).sum().double(),
                torch.isnan(values).sum().double(),
                torch.where(torch.isfinite(parts), parts, 0.0).abs().max().double(),
            ]
        )
        for values, parts in zip(held, map(tensors.real, held), strict=True)
    ]
    return [counts.tolist() for counts in copies.fetched(found)]  # sync: a diagnosis, asked for
