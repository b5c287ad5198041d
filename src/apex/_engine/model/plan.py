"""The dtypes of a converted model's parts, and the protocols that a conversion relies on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from apex._core import dtypes
from apex._engine.model.kept_buffers import KeptBuffer
from apex._pickle import rebuild
from apex._torch.modules import named_modules, non_persistent, own_tensors

Cast = Callable[[Any, torch.dtype], Any]
"""Casts the floating tensors in a value to a dtype."""


WIDE = (torch.float32, torch.float64)

Rule = type[nn.Module] | str
"""A module type, or an ``fnmatch`` pattern over qualified names."""

Parts = Collection[tuple[str, nn.Module]]
"""Modules of a model with their qualified names."""


class Region(Protocol):
    """Runs a model's own forward with op casts on or off; picklable and deep-copyable."""

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns ``fn(*args, **kwargs)``, called inside the region."""

    def run_eagerly(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`run`, for a caller that knows that no compiler traces it."""


class MasterSource(Protocol):
    """A source of fp32 masters for low-precision parameters."""

    def master_of(self, param: Tensor) -> Tensor | None:
        """Returns the fp32 master of ``param``, or the fp32 value kept for it, or ``None``."""

    def masters_of(self, params: Iterable[Tensor]) -> list[Tensor | None]:
        """Returns :meth:`master_of` of each of many tensors."""

    def set_exact(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets masters from pairs of a low-precision parameter and its newly loaded fp32 value."""

    def expect(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets masters as :meth:`set_exact` does, just before their parameters are loaded."""

    def write_back(self) -> None:
        """Rounds written masters into their model parameters."""

    def note_copy(self, model: nn.Module, copied: nn.Module) -> None:
        """Adds a deep copy of ``model``."""

    def write_back_before_each_run(self) -> None:
        """Has the code that is being traced do so each time before it runs."""

    def clear_grads(self, params: Iterable[Tensor], *, set_to_none: bool) -> None:
        """Clears the gradients of the masters of ``params``."""

    def cast_gradients(self) -> AbstractContextManager[None]:
        """Returns a context in which parameters change their dtype, and their gradients follow."""

    def runs_under(self, wrapper: DistributedDataParallel, *, traced: bool = False) -> None:
        """Records that the model's forward pass begins, or is traced, under ``wrapper``."""


@dataclass(frozen=True)
class ModelPlan:
    """The dtypes of a converted model; ``None`` leaves a dtype unchanged.

    Attributes:
        param_dtype: Dtype of parameters and buffers; see :func:`is_kept` for exceptions.
        input_dtype: Dtype of every floating tensor passed to ``forward``.
        output_dtype: Dtype of every floating tensor that ``forward`` returns.
        keep_batchnorm_fp32: Whether batch norm layers stay in fp32. Their inputs are not cast, and
            their output has the dtype of their input.
        fp32_modules: Module types and ``fnmatch`` patterns over qualified names. Matching modules
            and their submodules stay and compute in fp32: their inputs are cast to fp32, their
            outputs back to ``param_dtype``.
        cast: Replaces amp's own cast of inputs and outputs; ``None`` for that.
        widen_low: Whether 16-bit parameters and buffers become fp32 if ``param_dtype`` is ``None``.

    Raises:
        TypeError: If ``fp32_modules`` holds anything other than module types and strings.
        ValueError: If ``fp32_modules`` is given without a low-precision ``param_dtype``.
    """

    param_dtype: torch.dtype | None
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    keep_batchnorm_fp32: bool = False
    fp32_modules: tuple[Rule, ...] = ()
    cast: Cast | None = None
    widen_low: bool = False

    def __post_init__(self) -> None:
        """Checks ``fp32_modules`` as far as possible without a model."""
        given: object = self.fp32_modules
        if isinstance(given, str):
            raise TypeError(
                f"fp32_modules is the string {given!r}; it takes a sequence of module types and "
                f"name patterns. Write fp32_modules=({given!r},)."
            )
        for rule in self.fp32_modules:
            is_type = isinstance(rule, type) and issubclass(rule, nn.Module)
            if not (isinstance(rule, str) or is_type):
                raise TypeError(
                    f"fp32_modules holds {rule!r}; it takes module types, such as "
                    "torch.nn.LayerNorm, and name patterns, such as 'decoder.*.norm'."
                )
        if self.fp32_modules and not self.casts_down:
            raise ValueError(
                "fp32_modules names modules that stay in fp32 while the rest of the model is cast, "
                "but this level does not cast parameters to a 16-bit type. Use it at O2, O3 or O5, "
                "or leave it out."
            )

    @property
    def casts_down(self) -> bool:
        """Whether parameters are cast to a 16-bit type."""
        return self.param_dtype in dtypes.LOW_PRECISION

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by value; see :mod:`apex._pickle`."""
        return rebuild, ("plan", *(getattr(self, field.name) for field in fields(self)))


def topmost_fp32_modules(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    """Returns the outermost modules that match ``plan.fp32_modules``, each once."""
    if not plan.fp32_modules:
        return []
    chosen: dict[int, nn.Module] = {}
    parents: list[str] = []
    for name, module in named_submodules(model):
        if any(name.startswith(parent) for parent in parents):
            continue
        if any(matches(rule, name, module) for rule in plan.fp32_modules):
            parents.append(name + ".")
            chosen[id(module)] = module
    return list(chosen.values())


def fp32_modules(model: nn.Module, plan: ModelPlan, parts: Parts | None = None) -> set[nn.Module]:
    """Returns every module, of ``parts`` or the model, whose own tensors stay in fp32."""
    if not plan.casts_down:
        return set()
    tops = topmost_fp32_modules(model, plan)
    if plan.keep_batchnorm_fp32:
        modules = named_modules(model).items() if parts is None else parts
        tops += [module for _, module in modules if isinstance(module, _BatchNorm)]
    return {module for top in tops for module in top.modules()}


class Planned(NamedTuple):
    """What a plan does to one parameter or buffer.

    Attributes:
        name: Its qualified name.
        tensor: The parameter or buffer.
        dtype: Its planned dtype.
        yields: Whether it is a buffer that stays in fp32 in a module that does not; see
            Note [Kept buffers].
    """

    name: str
    tensor: Tensor
    dtype: torch.dtype
    yields: bool = False


def planned_dtypes(
    model: nn.Module, plan: ModelPlan, parts: Parts | None = None
) -> Iterator[Planned]:
    """Yields every parameter and buffer, of ``parts`` or the model, once, with its planned dtype.

    Skips those that the plan does not cast. A tensor shared by an fp32 module and another is
    planned as fp32 (``check`` raises for it).
    """
    if plan.param_dtype is None and not plan.widen_low:
        return
    casts_down = plan.casts_down
    apart = fp32_modules(model, plan, parts)
    if parts is None:
        parts = named_modules(model).items()
    seen: set[int] = set()
    # fp32 modules first, because the first to yield a shared tensor decides.
    for part in (True, False) if apart else (False,):
        for name, module in parts:
            if (module in apart) is not part:
                continue
            for key, tensor in own_tensors(module, name):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if plan.param_dtype is not None:
                    yields = casts_down and not part and is_kept(module, key, tensor)
                    dtype = torch.float32 if part or yields else plan.param_dtype
                    yield Planned(key, tensor, dtype, yields)
                elif dtypes.is_low_precision(tensor):
                    yield Planned(key, tensor, torch.float32)


def is_kept(module: nn.Module, name: str, tensor: Tensor) -> bool:
    """Returns whether a tensor of a module is a buffer that stays in fp32 where weights are cast.

    Those are the non-persistent buffers in fp32 or fp64, which a model computes and relies on, and
    the frequencies of rotary embeddings, which older ones register as persistent.
    """
    kept = type(tensor) in (Tensor, KeptBuffer) and tensor.dtype in WIDE and tensor.numel() > 0
    if not kept:
        return False
    own_name = name.rpartition(".")[2]
    return own_name == "inv_freq" or own_name in non_persistent(module)


def named_submodules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the submodules of ``model`` under each of their names, parents first."""
    for name, module in model.named_modules(remove_duplicate=False):
        if name:  # keeping the model itself in fp32 would convert nothing
            yield name, module


def matches(rule: Rule, name: str, module: nn.Module) -> bool:
    """Returns whether an entry of ``fp32_modules`` matches a module."""
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    return isinstance(module, rule)
