"""Weight normalization of a module's parameters, as a parametrization of torch.

Source: Salimans and Kingma, "Weight Normalization", arXiv:1602.07868.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from apex import _unavailable
from apex._core import arguments

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
    norms = [(path, _new_norm(module, path, dim)) for path in names]
    for path, norm in norms:
        if norm is not None:
            owner, own_name = _owner(module, path)
            parametrize.register_parametrization(owner, own_name, norm, unsafe=True)
            # torch has given this module a separate class, so these affect no other module.
            for part, original in norm.parts.items():
                setattr(type(owner), part, property(attrgetter(original)))
            norm.loading = owner.register_load_state_dict_pre_hook(norm.rename)
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
    for owner in [module] if remove_all else module.modules():
        for own_name in _norms_of(owner):
            _remove(owner, own_name)
    return module


class _WeightNorm(nn.Module):
    """``w = g * v / |v|`` for a magnitude ``g`` and a direction ``v``.

    Args:
        name: The weight's name in its module.
        dim: Dimension whose entries each have a norm; -1 for one norm of the whole weight, as in
            torch's function.

    Attributes:
        parts: apex's names of the weight's parts, with their paths in torch.
        loading: Handle of the hook that loads state dicts with apex's names.
    """

    loading: Any

    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        self.dim = dim
        path = f"parametrizations.{name}.original"
        self.parts = {f"{name}_g": f"{path}0", f"{name}_v": f"{path}1"}

    def forward(self, magnitude: Tensor, direction: Tensor) -> Tensor:
        """Returns the weight."""
        return torch._weight_norm(direction, magnitude, self.dim)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns magnitude and direction of a weight."""
        return torch.norm_except_dim(weight, 2, self.dim), weight

    def rename(self, _: nn.Module, state_dict: dict[str, Any], prefix: str, *__: object) -> None:
        """Renames a state dict's keys such as ``weight_g`` to torch's."""
        for part, path in self.parts.items():
            if prefix + part in state_dict:
                state_dict[prefix + path] = state_dict.pop(prefix + part)


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """Returns the submodule of a qualified parameter name, and the name in this submodule."""
    path, _, own_name = name.rpartition(".")
    return module.get_submodule(path), own_name


def _new_norm(module: nn.Module, name: str, dim: int | None) -> _WeightNorm | None:
    """Returns a rule for a parameter; None for a vector or an embedding. Changes nothing."""
    owner, own_name = _owner(module, name)
    params = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    if own_name not in params:
        raise ValueError(
            f"{type(owner).__name__} has no parameter {own_name!r}; it has {list(params)}. If it "
            "is already parametrized, remove that first."
        )
    dims = params[own_name].dim()
    # Embeddings look up rows, often with sparse gradients.
    if dims < 2 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return None
    if dim is None:
        return _WeightNorm(own_name, -1)
    if not -dims <= dim < dims:
        raise ValueError(
            f"{name!r} has {dims} dimensions, so dim={dim!r} is out of range. Pass one of {-dims} "
            f"to {dims - 1}, or None for one norm of the whole weight."
        )
    return _WeightNorm(own_name, dim % dims)


def _norms_of(owner: nn.Module) -> dict[str, _WeightNorm]:
    """Returns the rules of a module's own weights, by name."""
    parametrizations: Any = getattr(owner, "parametrizations", {})
    norms = {}
    for name, rules in parametrizations.items():
        if isinstance(rules[0], _WeightNorm):  # later rules have one part
            norms[name] = rules[0]
    return norms


@torch.enable_grad()  # without gradients, a weight would not seem trainable
def _remove(owner: Any, name: str) -> None:
    """Turns a weight back into a parameter with its current value."""
    norm = _norms_of(owner).get(name)
    if norm is None:
        raise ValueError(f"{name!r} has no weight norm in {owner}.")
    if len(owner.parametrizations[name]) > 1:
        raise ValueError(
            f"{name!r} of {type(owner).__name__} has parametrizations other than apex's. Remove "
            "them together with torch.nn.utils.parametrize.remove_parametrizations."
        )
    norm.loading.remove()
    weight = getattr(owner, name)
    parametrize.remove_parametrizations(owner, name)
    # torch makes a frozen weight a buffer.
    setattr(owner, name, nn.Parameter(weight, weight.requires_grad))
