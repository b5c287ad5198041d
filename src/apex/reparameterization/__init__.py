"""Weight normalization of a module's parameters, based on torch's parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from apex._core import arguments
from apex.reparameterization.reparameterization import Reparameterization, attached, detach
from apex.reparameterization.weight_norm import WeightNorm

__all__ = [
    "Reparameterization",
    "WeightNorm",
    "apply_reparameterization",
    "apply_weight_norm",
    "remove_reparameterization",
    "remove_weight_norm",
]

M = TypeVar("M", bound=nn.Module)


def apply_weight_norm(module: M, name: str = "", dim: int | None = 0, hook_child: bool = True) -> M:
    """Normalizes weights of ``module`` in place and returns it.

    Args:
        module: The module.
        name: Parameter name, qualified for submodules (``"0.weight"``); empty means every parameter
            with two or more dimensions.
        dim: Dimension whose entries each have a norm; None for one norm of the whole weight.
        hook_child: Whether the rule's ``module`` is the submodule that has the parameter.

    Embeddings and parameters with fewer than two dimensions stay unchanged.

    Raises:
        AttributeError: If the submodule does not exist.
        ValueError: If the parameter does not exist, is already normalized, or does not have
            ``dim``.
    """
    return apply_reparameterization(module, WeightNorm, name, dim, hook_child)


def remove_weight_norm(module: M, name: str = "", remove_all: bool = False) -> M:
    """Turns normalized weights of ``module`` back into parameters in place and returns it.

    Existing optimizers still hold the parts; pass them the new parameters.

    Args:
        module: The module.
        name: Parameter name, qualified for submodules; empty means all, also in
            submodules.
        remove_all: Whether to remove all of ``module`` itself, regardless of ``name``.

    Raises:
        ValueError: If the parameter is not normalized.
    """
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: M,
    reparameterization: Callable[..., Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> M:
    """Applies a class of rules to weights; for other arguments, see `apply_weight_norm`.

    Raises:
        TypeError: If ``module`` is not a module, or ``reparameterization`` is not given.
    """
    arguments.module("apply_reparameterization", module)
    names = [name]
    if not name:
        names = [path for path, _ in module.named_parameters() if "parametrizations." not in path]
    for path in names:  # validates every weight before the first one changes
        Reparameterization.find(module, path, dim)
    for path in names:
        Reparameterization.apply(module, path, dim, reparameterization, hook_child)
    return module


def remove_reparameterization(
    module: M,
    reparameterization: type[Reparameterization] = Reparameterization,
    name: str = "",
    remove_all: bool = False,
) -> M:
    """Removes reparameterizations of a class; for other arguments, see `remove_weight_norm`."""
    arguments.module("remove_reparameterization", module)
    if name and not remove_all:
        owner, weight = Reparameterization.get_module_and_name(module, name)
        if not isinstance(attached(owner, weight), reparameterization):
            raise ValueError(f"{name!r} has no {reparameterization.__name__} in {module}.")
        detach(owner, weight)
        return module
    for owner in [module] if remove_all else module.modules():
        for weight in [*getattr(owner, "parametrizations", ())]:
            if isinstance(attached(owner, weight), reparameterization):
                detach(owner, weight)
    return module
