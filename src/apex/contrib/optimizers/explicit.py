"""Steps with explicit gradients and output tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from apex._core.foreach.working import math_dtype, store
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
        given = self._by_param("grads", grads)
        outputs = self._by_param("output_params", output_params)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._norms = None if grad_norms is None else [norm / scale for norm in grad_norms]
        if grads is not None or scale != 1.0:
            used = {p: given.get(p, p.grad) for p in params_of(self)}
            # In fp32 or wider: in 16 bits the quotients would be rounded before the step.
            self._grads = {
                p: grad.detach().to(math_dtype(grad)) / scale
                for p, grad in used.items()
                if grad is not None
            }
        try:
            super().step(**scaling)
        finally:
            self._norms = self._grads = None
        with torch.no_grad():
            store(list(outputs.values()), list(outputs))
        return loss

    def _gradient(self, param: Tensor) -> Tensor | None:
        return super()._gradient(param) if self._grads is None else self._grads.get(param)

    def _by_param(self, name: str, given: GivenTensors | None) -> dict[Tensor, Tensor]:
        """Returns the tensors that are given, by their parameters."""
        if given is None:
            return {}
        lists: Any = list(given)
        nested = lists if lists and isinstance(lists[0], list) else [lists]
        groups = [group["params"] for group in self.param_groups]
        found, sizes = list(map(len, nested)), list(map(len, groups))
        if found != sizes:
            raise ValueError(
                f"step got {name} of {found} tensors per group; the groups hold {sizes} "
                "parameters. Pass a list for each group with one tensor (or None) for each "
                "parameter."
            )
        pairs = zip(chain(*groups), chain(*nested), strict=True)
        return {param: tensor for param, tensor in pairs if tensor is not None}
