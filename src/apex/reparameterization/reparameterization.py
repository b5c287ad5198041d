"""A parameter computed from others: apex's classes on torch's parametrizations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle


class Reparameterization:
    """Base class of rules that compute a weight from several parameters.

    A subclass defines `reparameterize` and `compute_weight`. The parameters are attributes such as
    ``module.weight_g``. State dicts of apex, and of torch's older weight norm, use these names and
    can be loaded. The weight is computed when it is read.

    Args:
        name: The weight's name, qualified if it belongs to a submodule of ``module``.
        dim: Dimension of the weight that norms preserve; None for one norm of the whole weight.
        module: The module.
        retain_forward: Has no effect.

    Attributes:
        reparameterization_names: Names of the parameters; empty until the rule is applied.
    """

    # Of the hook that loads state dicts with apex's parameter names, once the rule is applied.
    _loading: RemovableHandle

    def __init__(
        self, name: str, dim: int | None, module: nn.Module, retain_forward: bool = True
    ) -> None:
        self.name = name
        self.dim = dim
        self.module = module
        self.retain_forward = retain_forward
        self.reparameterization_names: list[str] = []

    def compute_weight(self, module: Any = None, name: str | None = None) -> Tensor:
        """Returns the weight, computed from the parameters that are attributes of ``module``.

        Args:
            module: The module; by default the one from the constructor. While the weight is read,
                an object with the attributes of the module that has the weight.
            name: The weight's name; by default the one from the constructor.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define compute_weight(module, name)."
        )

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[Sequence[str], Sequence[Tensor]]:
        """Returns names and values of the parameters from which ``weight`` can be computed."""
        raise NotImplementedError(
            f"{type(self).__name__} must define reparameterize(name, weight, dim)."
        )

    @staticmethod
    def apply(
        module: nn.Module,
        name: str,
        dim: int | None,
        reparameterization: Callable[..., Reparameterization] | None = None,
        hook_child: bool = True,
    ) -> Reparameterization | None:
        """Replaces a parameter and returns its rule; None if the parameter is left unchanged.

        Embeddings and parameters with fewer than two dimensions are left unchanged.

        Args:
            module: The module.
            name: Parameter name, qualified for submodules.
            dim: Dimension whose entries each have a norm; None for one norm of the whole weight.
            reparameterization: The rule's class.
            hook_child: Whether the rule's ``module`` is the submodule that has the parameter.

        Raises:
            AttributeError: If the submodule does not exist.
            TypeError: If no class is given.
            ValueError: If the parameter does not exist, is already reparameterized, or does not
                have ``dim``.
        """
        found = Reparameterization.find(module, name, dim)
        if reparameterization is None:
            raise TypeError(
                "apply_reparameterization got no reparameterization. Pass a class such as "
                "WeightNorm."
            )
        if found is None:
            return None
        owner, own_name, weight = found
        if dim is not None:
            dim %= weight.dim()
        if hook_child:
            rule = reparameterization(own_name, dim, owner)
        else:
            rule = reparameterization(name, dim, module)
        # torch also calls this, but would ignore a NotImplementedError.
        names, _ = rule.reparameterize(own_name, weight, dim)
        rule.reparameterization_names = list(names)
        computed = _Computed(rule, own_name)
        parametrize.register_parametrization(owner, own_name, computed, unsafe=True)
        # torch has given this module a separate class, so the properties affect no other module.
        for index, part in enumerate(names):
            read_part = attrgetter(f"parametrizations.{own_name}.original{index}")
            setattr(type(owner), part, property(read_part))

        def rename_parts(_: object, state_dict: dict[str, Any], prefix: str, *__: object) -> None:
            """Renames keys such as ``weight_g`` of a state dict to the parametrization's."""
            old_keys = [f"{prefix}{part}" for part in names]
            if state_dict.keys() >= set(old_keys):
                for index, key in enumerate(old_keys):
                    new_key = f"{prefix}parametrizations.{own_name}.original{index}"
                    state_dict[new_key] = state_dict.pop(key)

        rule._loading = owner.register_load_state_dict_pre_hook(rename_parts)
        return rule

    @staticmethod
    def find(module: Any, name: str, dim: int | None) -> tuple[Any, str, Tensor] | None:
        """Returns the submodule, name and value of a parameter to reparameterize.

        Changes nothing. Returns None for a vector, an embedding or an empty name. Raises the errors
        of :meth:`apply`.
        """
        owner, own_name = Reparameterization.get_module_and_name(module, name)
        if owner is None:
            return None
        if attached(owner, own_name) is not None:
            raise ValueError(f"{name!r} is already reparameterized. Remove that first.")
        weight = owner._parameters.get(own_name)
        if weight is None:
            raise ValueError(
                f"{type(owner).__name__} has no parameter {own_name!r}; it has "
                f"{[known for known, _ in owner.named_parameters(recurse=False)]}."
            )
        # Embeddings look up rows, often with sparse gradients.
        if weight.dim() < 2 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            return None
        accepted = range(-weight.dim(), weight.dim())
        if dim is not None and dim not in accepted:
            raise ValueError(
                f"{name!r} has {weight.dim()} dimensions, so dim={dim!r} is out of range. Pass one "
                f"of {accepted[0]} to {accepted[-1]}, or None for one norm of the whole weight."
            )
        return owner, own_name, weight

    @staticmethod
    def get_module_and_name(module: Any, name: str) -> tuple[Any, Any]:
        """Returns the submodule of a qualified parameter name, and the name in this submodule.

        Both are None for an empty name.

        Raises:
            AttributeError: If the submodule does not exist.
        """
        if not name:
            return None, None
        path, _, own_name = name.rpartition(".")
        if path:
            module = module.get_submodule(path)
        return module, own_name

    def get_params(self, module: nn.Module) -> list[Tensor]:
        """Returns the parameters from which the weight of ``module`` itself is computed."""
        return [getattr(module, name) for name in self.reparameterization_names]

    def remove(self, module: nn.Module) -> None:
        """Turns the weight back into a parameter with its current value.

        Args:
            module: The rule's ``module``.

        Raises:
            ValueError: If the weight also has other parametrizations.
        """
        detach(*self.get_module_and_name(module, self.name))

    def backward_hook(self, module: nn.Module, grad_input: object, grad_output: object) -> None:
        """Does nothing: each read computes the weight."""


def detach(module: nn.Module, name: str) -> None:
    """Turns the weight ``name`` of ``module`` itself back into a parameter with its current value.

    Raises:
        ValueError: If the weight also has other parametrizations.
    """
    rule = attached(module, name)
    if rule is None or len(module.parametrizations[name]) > 1:  # type: ignore[index]
        raise ValueError(
            f"{name!r} of {type(module).__name__} has parametrizations other than apex's. Remove "
            "them together with torch.nn.utils.parametrize.remove_parametrizations."
        )
    rule._loading.remove()
    for part in rule.reparameterization_names:
        delattr(type(module), part)
    value = getattr(module, name)
    parametrize.remove_parametrizations(module, name)
    if not value.requires_grad:  # torch turns a frozen weight into a buffer
        delattr(module, name)
        setattr(module, name, nn.Parameter(value, requires_grad=False))


def attached(module: nn.Module, name: str) -> Reparameterization | None:
    """Returns the rule of the weight ``name`` of ``module`` itself, or None."""
    if parametrize.is_parametrized(module, name):
        for parametrization in module.parametrizations[name]:  # type: ignore[index]
            if isinstance(parametrization, _Computed):
                return parametrization.rule
    return None


class _Computed(nn.Module):
    """A rule in the form of a torch parametrization."""

    def __init__(self, rule: Reparameterization, name: str) -> None:
        super().__init__()
        self.rule = rule
        self.name = name

    def forward(self, *parts: Tensor) -> Tensor:
        """Returns the weight computed from its parts."""
        rule = self.rule
        owner, _ = rule.get_module_and_name(rule.module, rule.name)
        parts_by_name = dict(zip(rule.reparameterization_names, parts, strict=True))
        return rule.compute_weight(_WithParts(owner, parts_by_name), self.name)

    def right_inverse(self, weight: Tensor) -> Sequence[Tensor]:
        """Returns the parts of a weight."""
        _, parts = self.rule.reparameterize(self.name, weight, self.rule.dim)
        return parts


class _WithParts:
    """A view of a module with the parts that torch passes in, such as the parts of a replica."""

    def __init__(self, module: nn.Module, parts: dict[str, Tensor]) -> None:
        vars(self).update(parts, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
