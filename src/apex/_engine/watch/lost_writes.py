"""Writes to 16-bit weights that torch does not count, and the next step overwrites.

Note [Lost writes]
    A model's weight is its rounded master, bit for bit, unless a script has written it. torch does
    not count writes through ``weight.data``, so a sample of the weights is compared with the
    masters at the step. Scripts also move weights and put them back, as for finite differences,
    which leaves roundings. So the sample is compared whenever the model is used, too: if a weight
    was farther from its master since the last step, the script has put it back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex._core.samples import sample
from apex._engine.masters import MasterPair
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._torch import dtensor
from apex._torch.autograd import is_transformed
from apex._torch.copies import capturing
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.parameters import without_overrides

_COMPARED = 8
"""Weights that are compared with their masters at a time."""

_USES = 16
"""Uses of the model between two steps at which they are compared."""


class WeightWatch:
    """Compares some weights of an optimizer with their masters, from one step to the next.

    Never waits for a device.
    """

    def __init__(self, prepared: PreparedOptimizer, turn: int) -> None:
        """Selects weights on one device; ``turn`` selects others."""
        start = _COMPARED * turn % len(prepared.pairs)
        pairs = prepared.pairs[start:] + prepared.pairs[:start]
        self._pairs = pairs[:_COMPARED]
        self._device = pairs[0].model.device
        self._turn = turn
        self._uses = 0
        # The greatest distance since the last step.
        self._farthest: dict[MasterPair, Tensor] = {}

    @suspend_modes()  # a trace would list these operators as the model's
    def look(self) -> None:
        """Compares the weights where the model is used."""
        if self._uses < _USES:
            self._uses += 1
            for pair, distance in self._distances().items():
                earlier = self._farthest.get(pair, distance)
                self._farthest[pair] = torch.maximum(earlier, distance)

    @suspend_modes()
    def lost(self) -> Tensor | None:
        """Returns whether the step overwrites a written weight, as a flag; None if unknown."""
        flags: list[Tensor] = []
        for pair, distance in self._distances().items():
            if pair.model.grad is None:  # the step does not write it
                continue
            is_lost = distance > 0.0
            if pair in self._farthest:
                is_lost &= distance >= self._farthest[pair]
            flags.append(is_lost)
        return torch.stack(flags).any().reshape(1).float() if flags else None

    @torch.no_grad()
    def _distances(self) -> dict[MasterPair, Tensor]:
        """Returns how far weights are from their rounded masters.

        Only of weights without a counted write, which the step copies to its master whole, and not
        of those that have moved, or whose masters have.
        """
        # torch.func wraps what is computed inside a transform, which must not outlive it.
        if capturing(self._device) or is_transformed():
            return {}
        distances: dict[MasterPair, Tensor] = {}
        with without_overrides():
            for pair in self._pairs:
                is_here = pair.model.device == pair.master.device == self._device
                if is_here and pair.counts_as_synced:
                    weight = sample(dtensor.local(pair.model), self._turn)
                    master = sample(dtensor.local(pair.master), self._turn)
                    difference = master.to(weight.dtype).float() - weight.float()
                    distances[pair] = difference.abs().sum()
        return distances
