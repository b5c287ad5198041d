"""Applies reparameterizations to a module's parameters, one or all, and removes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from apex.reparameterization.reparameterization import (
    Reparameterization,
    attach,
    attached,
    detach,
)
from apex.reparameterization.weight_norm import WeightNorm

M = TypeVar("M", bound=nn.Module)


def apply_weight_norm(module: M, name: str = "", dim: int | None = 0, hook_child: bool = True) -> M:
    """Normalizes weights of ``module`` in place and returns it.

    Args:
        module: The module.
        name: Parameter name, qualified for submodules (``"0.weight"``); empty means every parameter
            with two or more dimensions.
        dim: Dimension whose entries each have a norm; None for one norm of the whole weight.
        hook_child: Has no effect: the weight is computed when it is read.

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
        name: Parameter name, qualified for submodules; empty means all, including those of
            submodules.
        remove_all: Whether to remove all of ``module`` itself, regardless of ``name``.

    Raises:
        ValueError: If the parameter is not normalized.
    """
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: M,
    reparameterization: Callable[[int | None], Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> M:
    """Applies ``reparameterization(dim)`` to weights; for other arguments, see `apply_weight_norm`.

    Raises:
        TypeError: If ``reparameterization`` is not given.
    """
    if reparameterization is None:
        raise TypeError(
            "apply_reparameterization got no reparameterization. Pass a class such as WeightNorm."
        )
    if name:
        _apply(module, name, dim, reparameterization)
        return module
    for found in [found for found, _ in module.named_parameters() if _is_plain(found)]:
        _apply(module, found, dim, reparameterization)
    return module


def remove_reparameterization(
    module: M,
    reparameterization: type[Reparameterization] = Reparameterization,
    name: str = "",
    remove_all: bool = False,
) -> M:
    """Removes reparameterizations of a class; for other arguments, see `remove_weight_norm`."""
    if name and not remove_all:
        owner, own_name = _owner(module, name)
        if not isinstance(attached(owner, own_name), reparameterization):
            raise ValueError(f"{name!r} has no {reparameterization.__name__} in {module}.")
        detach(owner, own_name)
        return module
    for owner in [module] if remove_all else list(module.modules()):
        for own_name in list(getattr(owner, "parametrizations", ())):
            if isinstance(attached(owner, own_name), reparameterization):
                detach(owner, own_name)
    return module


def _apply(
    module: nn.Module,
    name: str,
    dim: int | None,
    reparameterization: Callable[[int | None], Reparameterization],
) -> None:
    owner, own_name = _owner(module, name)
    if attached(owner, own_name) is not None:
        raise ValueError(f"{name!r} is already reparameterized. Remove that first.")
    weight = owner._parameters.get(own_name)
    if weight is None:
        raise ValueError(
            f"{type(owner).__name__} has no parameter {own_name!r}; it has "
            f"{[found for found, _ in owner.named_parameters(recurse=False)]}."
        )
    # Embeddings look up rows, often with sparse gradients.
    if weight.dim() < 2 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return
    if dim is not None and not -weight.dim() <= dim < weight.dim():
        raise ValueError(f"{name!r} has {weight.dim()} dimensions, so dim={dim} is out of range.")
    attach(owner, own_name, reparameterization(None if dim is None else dim % weight.dim()))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own_name = name.rpartition(".")
    return module.get_submodule(path), own_name


def _is_plain(name: str) -> bool:
    """Returns whether a parameter does not belong to a parametrization."""
    return "parametrizations" not in name.split(".")
