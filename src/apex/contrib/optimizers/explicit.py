"""Steps with explicit gradients and output tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.foreach.working import store
from apex._core.param_groups import params_of
from apex.optimizers.fused_optimizer import FusedOptimizer

GivenTensors = Iterable[Tensor] | list[list[Tensor]]


class ExplicitOptimizer(FusedOptimizer):
    """An optimizer whose ``step`` accepts gradients, their scale, and 16-bit outputs."""

    def step(  # type: ignore[override]  # apex's order
        self,
        closure: Callable[[], Any] | None = None,
        grads: GivenTensors | None = None,
        output_params: GivenTensors | None = None,
        scale: float = 1.0,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Takes one step.

        Args:
            closure: Recomputes the loss; called once, before the step.
            grads: Gradients to use instead of the parameters' own; one list, or a list per group.
            output_params: Tensors that receive the rounded parameters, in the same form.
            scale: Divisor of the gradients.
            grad_norms: The 2-norm of each group's scaled gradients, if known.
            grad_scaler: The ``torch.amp.GradScaler`` that scaled the gradients, for a call without
                ``GradScaler.step``.

        Returns:
            The result of the closure.

        Raises:
            ValueError: If the lists do not match the groups.
        """
        groups = self.param_groups
        given = _per_group("grads", grads, groups)
        outputs = _per_group("output_params", output_params, groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = params_of(self)
        self._norms = None if grad_norms is None else [norm / scale for norm in grad_norms]
        if given is not None or scale != 1.0:
            self._grads = _divided(params, given, scale)
        try:
            super().step(grad_scaler=grad_scaler)
        finally:
            self._norms = self._grads = None
        if outputs is not None:
            pairs = [(o, p) for o, p in zip(outputs, params, strict=True) if o is not None]
            with torch.no_grad():
                store([output for output, _ in pairs], [param for _, param in pairs])
        return loss

    def _gradient(self, param: Tensor) -> Tensor | None:
        return super()._gradient(param) if self._grads is None else self._grads.get(param)

    _norms: list[Any] | None = None
    _grads: dict[Tensor, Tensor] | None = None


def _divided(
    params: Sequence[Tensor], given: list[Tensor | None] | None, scale: float
) -> dict[Tensor, Tensor]:
    """Returns the gradients divided, in fp32 or wider; a parameter's own where none is given."""
    result = {}
    for index, param in enumerate(params):
        grad = None if given is None else given[index]
        grad = param.grad if grad is None else grad
        if grad is not None:
            wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
            result[param] = wide / scale
    return result


def _per_group(
    name: str, given: GivenTensors | None, groups: list[dict[str, Any]]
) -> list[Tensor | None] | None:
    """Returns one tensor per parameter, in group order."""
    if given is None:
        return None
    lists = list(given)
    nested = bool(lists) and isinstance(lists[0], list)
    per_group: list[Any] = lists if nested else [lists]
    sizes = [len(group["params"]) for group in groups]
    found = [len(tensors) for tensors in per_group]
    if found != sizes:
        raise ValueError(
            f"step got {name} of {found} tensors per group; the groups hold {sizes} parameters. "
            "Pass a list for each group with one tensor (or None) for each parameter."
        )
    return [tensor for tensors in per_group for tensor in tensors]
