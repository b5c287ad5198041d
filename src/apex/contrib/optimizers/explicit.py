"""Steps with explicit gradients and output tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from apex._core.dtypes import math_dtype
from apex._optimizer_rules.working import store
from apex.optimizers.fused_optimizer import FusedOptimizer

GivenTensors = Iterable[Tensor] | list[list[Tensor]]


class ExplicitOptimizer(FusedOptimizer):
    """An optimizer whose ``step`` accepts gradients, their scale, and 16-bit outputs."""

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: GivenTensors | None = None,
        output_params: GivenTensors | None = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Takes one step.

        Args:
            closure: Recomputes the loss; called once, before the step.
            grads: Gradients to use instead of the parameters' own; one list, or a list per group.
            output_params: Tensors that receive the rounded parameters, in the same form.
            scale: Divisor of the gradients.
            grad_norms: The 2-norm of each group's scaled gradients, if known.

        Returns:
            The result of the closure.

        Raises:
            ValueError: If the lists do not match the groups.
        """
        self._given = self._by_param("grads", grads)
        outputs = self._by_param("output_params", output_params)
        self._scale = scale
        self._norms = None
        if grad_norms is not None:
            self._norms = [norm / scale for norm in grad_norms]
        try:
            loss = super().step(closure)
            increment_version(self._given)  # torch's fused kernels count no writes
        finally:
            del self._given, self._scale, self._norms
        params = list(outputs)
        receivers = list(outputs.values())
        with torch.no_grad():
            store(receivers, params)
        return loss

    def _gradient(self, param: Tensor) -> Tensor | None:
        grad = self._given.get(param, param.grad)
        if grad is None:
            return None
        if grad is param.grad and self._scale == 1.0:
            return grad
        # In fp32 or wider, because 16 bits would round the quotient before the step.
        wide = grad.detach().to(math_dtype(grad))
        return wide / self._scale

    def _by_param(self, name: str, given: GivenTensors | None) -> dict[Tensor, Tensor]:
        """Returns the tensors of the argument ``name``, by parameter."""
        if given is None:
            return {}
        lists: Any = list(given)
        if not lists or not isinstance(lists[0], list):
            lists = [lists]
        groups = [group["params"] for group in self.param_groups]
        counts = [*map(len, lists)]
        expected_counts = [*map(len, groups)]
        if counts != expected_counts:
            raise ValueError(
                f"step got {name} in lists of {counts} tensors; it takes as many as parameters, "
                f"{expected_counts}, in one list per group."
            )
        params = chain(*groups)
        tensors = chain(*lists)
        pairs = zip(params, tensors, strict=True)
        by_param = {param: tensor for param, tensor in pairs if tensor is not None}
        for param, tensor in by_param.items():
            if tensor.numel() != param.numel():  # kernels would read or write foreign memory
                raise ValueError(
                    f"step got {name} of shape {tuple(tensor.shape)} for a parameter of shape "
                    f"{tuple(param.shape)}."
                )
        return by_param
