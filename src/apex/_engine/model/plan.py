"""What a conversion does to a model, and what it needs from its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from apex._core import dtypes

Cast = Callable[[Any, torch.dtype], Any]
"""Returns a value with the floating tensors in it in a dtype."""


class Region(Protocol):
    """Runs a model's own forward with op casts on or off; picklable and deep-copyable."""

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns ``fn(*args, **kwargs)``, called inside the region."""


class MasterSource(Protocol):
    """Knows the fp32 masters of a model's low-precision parameters."""

    def exact(self) -> Mapping[int, Tensor]:
        """Returns the fp32 value of each parameter with a master, by ``id(parameter)``."""

    def set_exact(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets masters: pairs of a low-precision parameter and the fp32 value behind it."""

    def clear_grads(self, params: Iterable[Tensor], *, set_to_none: bool) -> None:
        """Clears the gradients of the masters of ``params``."""

    def write_back(self) -> None:
        """Brings what was written into masters to the models."""

    def runs_under(self, wrapper: DistributedDataParallel, *, traced: bool = False) -> None:
        """Takes note that the model's forward pass begins, or is traced, under ``wrapper``."""


@dataclass(frozen=True)
class ModelPlan:
    """The dtypes of a converted model; ``None`` leaves what it names as it is.

    Attributes:
        param_dtype: Of parameters and buffers.
        input_dtype: Of every floating tensor that goes into ``forward``.
        output_dtype: Of every floating tensor that comes out of it.
        keep_batchnorm_fp32: Whether batch norm layers stay in fp32. They take low-precision inputs
            as they are, and their output has the dtype of their input.
        fp32_modules: Module types and ``fnmatch`` patterns over qualified names. Matching modules
            and all below them stay in fp32, and compute in fp32: their inputs are cast up, their
            outputs back to ``param_dtype``.
        cast: Casts inputs and outputs in place of the project's own walk; ``None`` for that.

    Raises:
        TypeError: If ``fp32_modules`` holds something else than module types and strings.
        ValueError: If ``fp32_modules`` is given without a low-precision ``param_dtype``.
    """

    param_dtype: torch.dtype | None
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    keep_batchnorm_fp32: bool = False
    fp32_modules: tuple[type[nn.Module] | str, ...] = ()
    cast: Cast | None = None

    def __post_init__(self) -> None:
        """Checks ``fp32_modules``, as far as that takes no model."""
        given: object = self.fp32_modules
        if isinstance(given, str):
            raise TypeError(
                f"fp32_modules is the string {given!r}; it takes a sequence of module types and "
                f"name patterns. Write fp32_modules=({given!r},)."
            )
        for rule in self.fp32_modules:
            if not (isinstance(rule, str) or _is_module_type(rule)):
                raise TypeError(
                    f"fp32_modules holds {rule!r}; it takes module types, such as "
                    "torch.nn.LayerNorm, and name patterns, such as 'decoder.*.norm'."
                )
        if self.fp32_modules and not self.casts_down:
            raise ValueError(
                "fp32_modules names parts of a model that stay in fp32 while the rest is cast, "
                "but here the model's parameters are not cast to a 16-bit type. Use it at the "
                "levels O2, O3 and O5, or leave it out."
            )

    @property
    def casts_down(self) -> bool:
        """Whether parameters go to a 16-bit type."""
        return self.param_dtype in dtypes.LOW_PRECISION


def _is_module_type(rule: object) -> bool:
    return isinstance(rule, type) and issubclass(rule, nn.Module)
