"""A parameter computed from others: a torch parametrization with apex's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle


class Reparameterization(nn.Module):
    """Base class of parametrizations that compute a weight from several parameters.

    A subclass names the parts in ``suffixes`` and defines ``forward(*parts)`` and
    ``right_inverse(weight)``. The parts are attributes such as ``module.weight_g``, and state dicts
    of apex or of torch's older weight norm, which use these names, can be loaded.

    Attributes:
        dim: Dimension of the weight that norms preserve; None for one norm of the whole weight.
        loading: Handle of the hook that loads state dicts with the parts' names.
    """

    suffixes: tuple[str, ...] = ()

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim
        self.loading: RemovableHandle | None = None

    def forward(self, *parts: Tensor) -> Tensor:
        """Returns the weight computed from its parts."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(*parts).")

    def right_inverse(self, weight: Tensor) -> Sequence[Tensor]:
        """Returns the parts of a weight, in the order of ``suffixes``."""
        raise NotImplementedError(f"{type(self).__name__} must define right_inverse(weight).")


def attach(module: nn.Module, name: str, reparameterization: Reparameterization) -> None:
    """Replaces the parameter ``name`` of ``module`` itself with ``reparameterization``."""
    parametrize.register_parametrization(module, name, reparameterization, unsafe=True)
    # torch has given this module its own class, so the properties affect no other module.
    for index, suffix in enumerate(reparameterization.suffixes):
        setattr(type(module), name + suffix, property(_part(name, index)))
    hook = _OldNames(name, reparameterization.suffixes)
    register: Callable[..., RemovableHandle] = module.register_load_state_dict_pre_hook
    reparameterization.loading = register(hook)


def detach(module: nn.Module, name: str) -> None:
    """Turns the weight ``name`` of ``module`` itself back into a parameter with its current value.

    Raises:
        ValueError: If the weight has other parametrizations too.
    """
    reparameterization = attached(module, name)
    if reparameterization is None or len(_parametrizations(module, name)) > 1:
        raise ValueError(
            f"{name!r} of {type(module).__name__} has parametrizations other than apex's. Remove "
            "them together with torch.nn.utils.parametrize.remove_parametrizations."
        )
    if reparameterization.loading is not None:
        reparameterization.loading.remove()
    for suffix in reparameterization.suffixes:
        delattr(type(module), name + suffix)
    trainable = getattr(module, name).requires_grad
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    if not trainable:  # torch turns a frozen weight into a buffer
        value = getattr(module, name)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def attached(module: nn.Module, name: str) -> Reparameterization | None:
    """Returns the reparameterization of the weight ``name`` of ``module`` itself, or None."""
    for parametrization in _parametrizations(module, name):
        if isinstance(parametrization, Reparameterization):
            return parametrization
    return None


def _parametrizations(module: nn.Module, name: str) -> Sequence[nn.Module]:
    if not parametrize.is_parametrized(module, name):
        return ()
    return list(module.parametrizations[name])  # type: ignore[index]


def _part(name: str, index: int) -> Callable[[nn.Module], Tensor]:
    def part(module: nn.Module) -> Tensor:
        return getattr(module.parametrizations[name], f"original{index}")  # type: ignore[index, no-any-return]

    return part


@dataclass(frozen=True)
class _OldNames:
    """Renames ``weight_g`` and ``weight_v`` of a state dict to the parametrization's names."""

    name: str
    suffixes: tuple[str, ...]

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        old = [f"{prefix}{self.name}{suffix}" for suffix in self.suffixes]
        if all(key in state_dict for key in old):
            for index, key in enumerate(old):
                new = f"{prefix}parametrizations.{self.name}.original{index}"
                state_dict[new] = state_dict.pop(key)
