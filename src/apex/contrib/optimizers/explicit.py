"""Steps with explicit gradients and output tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from apex._core.foreach.working import store
from apex._core.param_groups import params_of
from apex.optimizers.fused_optimizer import FusedOptimizer

GivenTensors = Iterable[Tensor] | list[list[Tensor]]


class ExplicitOptimizer(FusedOptimizer):
    """An optimizer whose ``step`` accepts gradients, their scale, and 16-bit outputs."""

    _norms: list[Any] | None = None
    _grads: dict[Tensor, Tensor] | None = None

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: GivenTensors | None = None,
        output_params: GivenTensors | None = None,
        scale: float = 1.0,
        grad_norms: Any = None,
        **scaling: Any,
    ) -> Any:
        """Takes one step.

        Args:
            closure: Recomputes the loss; called once, before the step.
            grads: Gradients to use instead of the parameters' own; one list, or a list per group.
            output_params: Tensors that receive the rounded parameters, in the same form.
            scale: Divisor of the gradients.
            grad_norms: The 2-norm of each group's scaled gradients, if known.
            **scaling: ``grad_scaler``, as :class:`apex.optimizers.FusedAdam` takes it.

        Returns:
            The result of the closure.

        Raises:
            ValueError: If the lists do not match the groups.
        """
        params = params_of(self)
        given = self._per_param("grads", grads, params)
        outputs = self._per_param("output_params", output_params, params)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._norms = None if grad_norms is None else [norm / scale for norm in grad_norms]
        if grads is not None or scale != 1.0:
            pairs = zip(params, given, strict=True)
            used = {p: p.grad if grad is None else grad for p, grad in pairs}
            # In fp32 or wider: in 16 bits the quotients would be rounded before the step.
            self._grads = {
                p: grad.detach().to(torch.promote_types(grad.dtype, torch.float32)) / scale
                for p, grad in used.items()
                if grad is not None
            }
        try:
            super().step(**scaling)
        finally:
            self._norms = self._grads = None
        written = [(o, p) for o, p in zip(outputs, params, strict=True) if o is not None]
        with torch.no_grad():
            store([output for output, _ in written], [param for _, param in written])
        return loss

    def _gradient(self, param: Tensor) -> Tensor | None:
        return super()._gradient(param) if self._grads is None else self._grads.get(param)

    def _per_param(
        self, name: str, given: GivenTensors | None, params: list[Any]
    ) -> list[Tensor | None]:
        """Returns one tensor per parameter, in group order."""
        if given is None:
            return [None] * len(params)
        lists: Any = list(given)
        nested = lists if lists and isinstance(lists[0], list) else [lists]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(tensors) for tensors in nested] != sizes:
            raise ValueError(
                f"step got {name} of {[len(tensors) for tensors in nested]} tensors per group; the "
                f"groups hold {sizes} parameters. Pass a list for each group with one tensor (or "
                "None) for each parameter."
            )
        return [tensor for tensors in nested for tensor in tensors]
