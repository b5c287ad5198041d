"""MLP: linear layers, each followed by the same activation, including the last."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex._core import arguments

Activation = Literal["none", "relu", "sigmoid"]

_NAMES = get_args(Activation)
_ACTIVATIONS = (nn.Identity(), torch.relu, torch.sigmoid)


class MlpFunction(torch.autograd.Function):
    """`mlp_function` as an autograd function; DLRM calls its methods."""

    @staticmethod
    def forward(ctx: Any, bias: int, activation: int, *args: Tensor) -> Tensor:
        """Returns the result of `mlp_function`."""
        ctx.save_for_backward(*args)
        ctx.bias = bias
        ctx.activation = activation
        return mlp_function(bias, activation, *args)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> Any:
        """Returns None for ``bias`` and ``activation``, then the gradients of the tensors.

        Recomputes the result, so that the gradients are differentiable with ``create_graph=True``.
        """
        create_graph = torch.is_grad_enabled()
        args = ctx.saved_tensors
        with torch.enable_grad():
            # Views, as one tensor may be several arguments, and an argument depend on another.
            inputs = [arg.view_as(arg) for arg in args]
            output = mlp_function(ctx.bias, ctx.activation, *inputs)
            trainable = [view for view in inputs if view.requires_grad]
            grad_output = grad_o.to(output.dtype)
            grads = torch.autograd.grad(output, trainable, grad_output, create_graph=create_graph)
        remaining = iter(grads)
        all_grads = [next(remaining) if arg.requires_grad else None for arg in args]
        return None, None, *all_grads


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Returns the output of a stack of linear layers, ``[*, last size]``.

    Args:
        bias: 1 with biases, 0 without.
        activation: Activation after every layer: 0 for none, 1 for ReLU, 2 for sigmoid.
        *args: The input, then the weights ``[out, in]`` of all layers, then the biases ``[out]``.

    Raises:
        ValueError: If the tensors do not consist of one input and as many biases as weights, or if
            the activation is invalid.
    """
    tensors_per_layer = 2 if bias else 1
    layers, remainder = divmod(len(args) - 1, tensors_per_layer)
    if layers < 1 or remainder or activation not in range(len(_ACTIVATIONS)):
        raise ValueError(
            f"mlp_function got {len(args)} tensors with bias={bias} and activation={activation!r}; "
            "it takes the input, all weights, then (with bias=1) as many biases, and activation 0 "
            "(none), 1 (relu) or 2 (sigmoid)."
        )
    activate = _ACTIVATIONS[activation]
    hidden, *parameters = args
    for layer in range(layers):
        weight = parameters[layer]
        layer_bias = parameters[layers + layer] if bias else None
        hidden = activate(F.linear(hidden, weight, layer_bias))
    return hidden


class MLP(nn.Module):
    """Linear layers, each followed by an activation.

    Parameters are ``weight_0`` (``[sizes[1], sizes[0]]``), ``bias_0``, ``weight_1``, ... Their
    initial distribution is normal, with variance ``2 / (in + out)`` for weights and ``1 / out`` for
    biases.

    Args:
        mlp_sizes: Sizes from the input's last dimension to the output's; at least two.
        bias: Whether the layers have biases.
        activation: ``"none"``, ``"relu"`` or ``"sigmoid"``, after every layer including the last.

    Raises:
        TypeError: If the activation is invalid, or the sizes are not a sequence.
        ValueError: If there are fewer than two sizes, or one is not a positive integer.
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: Activation = "relu"
    ) -> None:
        super().__init__()
        if activation not in _NAMES:
            raise TypeError(
                f"MLP got activation={activation!r}; it takes 'none', 'relu' or 'sigmoid'."
            )
        self.mlp_sizes = [arguments.integer("mlp_sizes", size, least=1) for size in mlp_sizes]
        if len(self.mlp_sizes) < 2:
            raise ValueError(f"mlp_sizes is {self.mlp_sizes}; it must have at least 2 items.")
        self.num_layers = len(self.mlp_sizes) - 1
        self.bias = int(arguments.flag("bias", bias))
        self.activation = _NAMES.index(activation)
        for layer, (before, after) in enumerate(itertools.pairwise(self.mlp_sizes)):
            weight = nn.Parameter(torch.empty(after, before))
            self.register_parameter(f"weight_{layer}", weight)
            if self.bias:
                layer_bias = nn.Parameter(torch.empty(after))
                self.register_parameter(f"bias_{layer}", layer_bias)
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weights, first layer first."""
        return [getattr(self, f"weight_{layer}") for layer in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The biases, first layer first; empty without biases."""
        if not self.bias:
            return []
        return [getattr(self, f"bias_{layer}") for layer in range(self.num_layers)]

    def reset_parameters(self) -> None:
        """Reinitializes weights and biases."""
        for weight in self.weights:
            variance = 2.0 / sum(weight.shape)
            nn.init.normal_(weight, 0.0, math.sqrt(variance))
        for bias in self.biases:
            variance = 1.0 / bias.numel()
            nn.init.normal_(bias, 0.0, math.sqrt(variance))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - apex's and torch's name
        """Returns ``[*, mlp_sizes[-1]]`` for an input ``[*, mlp_sizes[0]]``."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Returns sizes, bias and activation."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
