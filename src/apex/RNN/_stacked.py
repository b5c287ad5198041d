"""A stack of cells, run step by step."""

# ruff: noqa: A001, A002, N801, N803 - apex's names

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex.RNN._cell import RNNCell

Hiddens = Sequence[Any]
"""Tensors ``[layers, batch, features]`` per hidden state; lists of them with ``collect_hidden``."""


class Stateful(nn.Module):
    """A module whose ``rnns`` keep hidden states."""

    rnns: nn.ModuleList

    def reset_parameters(self) -> None:
        """Reinitializes all parameters."""
        for each in self._stateful():
            each.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Creates zero states for a batch of ``bsz``; keeps states of that size."""
        for each in self._stateful():
            each.init_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """Does as :meth:`init_hidden`."""
        self.init_hidden(bsz)

    def reset_hidden(self, bsz: int) -> None:
        """Resets all states to zeros for a batch of ``bsz``."""
        for each in self._stateful():
            each.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Detaches all states from their graph."""
        for each in self._stateful():
            each.detach_hidden()

    def _stateful(self) -> list[RNNCell | Stateful]:
        return [each for each in self.rnns if isinstance(each, RNNCell | Stateful)]


class stackedRNN(Stateful):
    """A stack of cells, run step by step.

    Args:
        inputRNN: The first cell, on which the others are modelled, or a list of all cells.
        num_layers: Number of cells.
        dropout: Dropout probability between layers, in training.
        batch_first: Whether inputs and outputs are ``[batch, steps, features]``.

    Raises:
        TypeError: If ``inputRNN`` is neither a cell nor a list of cells.
        ValueError: If the list has a different length, or ``dropout`` is not a probability.
    """

    __module__ = "apex.RNN.RNNBackend"  # the public name, which pickles store

    def __init__(
        self,
        inputRNN: RNNCell | list[RNNCell],
        num_layers: int = 1,
        dropout: float = 0,
        *,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= dropout <= 1:
            raise ValueError(f"RNN got dropout={dropout!r}; it takes a probability from 0 to 1.")
        self.dropout = dropout
        self.batch_first = batch_first
        self.rnns = nn.ModuleList(_layers(inputRNN, num_layers))
        self.nLayers = len(self.rnns)

    def forward(
        self, input: Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[Tensor, Hiddens]:
        """Runs the cells over all steps.

        Args:
            input: ``[steps, batch, features]``.
            collect_hidden: Whether to return the states of every step instead of only the last.
            reverse: Whether to process the steps from last to first.

        Returns:
            Outputs ``[steps, batch, output_size]`` in the input's order, and the states.

        Raises:
            ValueError: If the input has a wrong shape or no steps.
        """
        self._check(input)
        steps = list(input.unbind(1 if self.batch_first else 0))
        if reverse:
            steps.reverse()
        by_step = [self._step(step) for step in steps]
        outputs = [layers[-1][0] for layers in by_step]
        if reverse:
            outputs.reverse()
        output = torch.stack(outputs, dim=1 if self.batch_first else 0)
        if not collect_hidden:
            return output, _by_state(by_step[-1])
        if reverse:
            by_step.reverse()
        return output, [list(states) for states in zip(*map(_by_state, by_step), strict=True)]

    def _step(self, input: Tensor) -> list[tuple[Tensor, ...]]:
        """Returns the states of every layer after one step."""
        states: list[tuple[Tensor, ...]] = []
        for layer, cell in enumerate(self.rnns):
            if layer and self.dropout:
                input = F.dropout(input, self.dropout, self.training)
            states.append(cell(input))
            input = states[-1][0]
        return states

    def _check(self, input: Tensor) -> None:
        features: Any = self.rnns[0].input_size
        steps_dim = 1 if self.batch_first else 0
        if input.dim() != 3 or input.shape[-1] != features or not input.shape[steps_dim]:
            order = "batch, steps" if self.batch_first else "steps, batch"
            raise ValueError(
                f"RNN got an input of shape {list(input.shape)}; it takes [{order}, {features}] "
                "with at least one step."
            )


def _layers(first: RNNCell | list[RNNCell], num_layers: int) -> list[RNNCell]:
    if isinstance(first, RNNCell):
        return [first, *(first.new_like(first.output_size) for _ in range(num_layers - 1))]
    if not isinstance(first, list):
        raise TypeError(
            f"stackedRNN got {type(first).__name__}; it takes an RNNCell or a list of RNNCells."
        )
    if len(first) != num_layers:
        raise ValueError(f"stackedRNN got {len(first)} cells for num_layers={num_layers}.")
    return first


def _by_state(layers: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """Stacks the states of all layers: one ``[layers, batch, features]`` per hidden state."""
    return [torch.stack(states) for states in zip(*layers, strict=True)]
