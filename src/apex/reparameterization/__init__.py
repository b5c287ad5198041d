"""Weight normalization of a module's parameters, as a parametrization of torch.

Source: Salimans and Kingma, "Weight Normalization", arXiv:1602.07868.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from apex import _unavailable
from apex._core import arguments
from apex._torch.modules import modules_in

__all__ = ["apply_weight_norm", "remove_weight_norm"]

__getattr__ = _unavailable.names_instead(__name__, {}, others=_unavailable.PARAMETRIZATION)

M = TypeVar("M", bound=nn.Module)


def apply_weight_norm(module: M, name: str = "", dim: int | None = 0, hook_child: bool = True) -> M:
    """Normalizes weights of ``module`` in place and returns it.

    The parts of a weight are attributes: ``module.weight_g`` and ``module.weight_v``. State dicts
    of apex, and of torch's older weight norm, use these names and can be loaded. The weight is
    computed when it is read.

    Embeddings and parameters with fewer than two dimensions stay unchanged.

    Args:
        module: The module.
        name: Parameter name, qualified for submodules (``"0.weight"``); empty means every parameter
            with two or more dimensions.
        dim: Dimension whose entries each have a norm; None for one norm of the whole weight.
        hook_child: Has no effect.

    Raises:
        AttributeError: If the submodule does not exist.
        TypeError: If ``module`` is not a module.
        ValueError: If there is no such parameter, as when it is already parametrized, or if it
            does not have ``dim``.
    """
    arguments.module("apply_weight_norm", module)
    names = [name]
    if not name:
        names = [path for path, _ in module.named_parameters() if "parametrizations." not in path]
    # Validates every weight before the first one changes.
    dims = [(path, _checked_dim(module, path, dim)) for path in names]
    for path, own_dim in dims:
        if own_dim is not None:
            owner, own_name = _owner(module, path)
            parametrizations.weight_norm(owner, own_name, own_dim)
            parts = owner.parametrizations[own_name]
            # The hook by which torch loads state dicts with apex's names.
            parts.apex_hook = next(reversed(owner._load_state_dict_pre_hooks))
            # torch has given this module a separate class, so these affect no other module.
            original = f"parametrizations.{own_name}.original"
            setattr(type(owner), f"{own_name}_g", property(attrgetter(f"{original}0")))
            setattr(type(owner), f"{own_name}_v", property(attrgetter(f"{original}1")))
    return module


def remove_weight_norm(module: M, name: str = "", remove_all: bool = False) -> M:
    """Turns normalized weights of ``module`` back into parameters in place and returns it.

    Existing optimizers still hold the parts; pass them the new parameters.

    Args:
        module: The module.
        name: Parameter name, qualified for submodules; empty means all, also in submodules.
        remove_all: Whether to remove all of ``module`` itself, regardless of ``name``.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If the parameter is not normalized, or has other parametrizations too.
    """
    arguments.module("remove_weight_norm", module)
    if name and not remove_all:
        _remove(*_owner(module, name))
        return module
    for owner in [module] if remove_all else modules_in(module):
        for own_name in _normalized(owner):
            _remove(owner, own_name)
    return module


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """Returns the submodule of a qualified parameter name, and the name in this submodule."""
    path, _, own_name = name.rpartition(".")
    return module.get_submodule(path), own_name


def _checked_dim(module: nn.Module, name: str, dim: int | None) -> int | None:
    """Returns torch's number of the dimension whose entries of a weight each have a norm.

    This is -1 for one norm of the whole weight. Returns None for a vector or an embedding.
    """
    owner, own_name = _owner(module, name)
    params = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    if own_name not in params:
        raise ValueError(
            f"{type(owner).__name__} has no parameter {own_name!r}; it has {list(params)}. If it "
            "is already parametrized, remove that first."
        )
    dims: int = params[own_name].dim()
    # Embeddings look up rows, often with sparse gradients.
    if dims < 2 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return None
    if dim is None:
        return -1
    if not -dims <= dim < dims:
        raise ValueError(
            f"{name!r} has {dims} dimensions, so dim={dim!r} is out of range. Pass one of {-dims} "
            f"to {dims - 1}, or None for one norm of the whole weight."
        )
    return dim % dims


def _normalized(owner: nn.Module) -> list[str]:
    """Returns the names of a module's own weights that are normalized."""
    parts_by_name: Any = getattr(owner, "parametrizations", {})
    return [name for name, parts in parts_by_name.items() if hasattr(parts, "apex_hook")]


@torch.enable_grad()  # without gradients, a weight would not seem trainable
def _remove(owner: Any, name: str) -> None:
    """Turns a weight back into a parameter with its current value."""
    if name not in _normalized(owner):
        raise ValueError(f"{name!r} has no weight norm in {owner}.")
    parts = owner.parametrizations[name]
    if len(parts) > 1:
        raise ValueError(
            f"{name!r} of {type(owner).__name__} has parametrizations other than apex's. Remove "
            "them together with torch.nn.utils.parametrize.remove_parametrizations."
        )
    # torch would leave it there, and a module with a local function cannot be pickled.
    del owner._load_state_dict_pre_hooks[parts.apex_hook]
    weight = getattr(owner, name)
    parametrize.remove_parametrizations(owner, name)
    # torch makes a frozen weight a buffer.
    setattr(owner, name, nn.Parameter(weight, weight.requires_grad))
