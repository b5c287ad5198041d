"""Notices writes to a model's weights that torch does not count, in an optimizer's first steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core import dtypes
from apex._engine.readback import Readback
from apex._engine.tracked_pair import TrackedPair
from apex._torch import dtensor
from apex._torch.copies import capturing
from apex._torch.dispatch_modes import suspend_modes

_STEPS, _WEIGHTS, _PER_DIMENSION = 16, 8, 16
"""Steps that look, weights that each looks at, and elements along each dimension of these."""


class UnseenWrites:
    """Tells whether weights differ from their rounded masters as a step begins.

    Masters follow every write that torch counts before, so a script has written them in another
    way, and the step overwrites that. Differences like those of rounding are none: scripts that
    add a perturbation and subtract it again leave them.
    """

    def __init__(self) -> None:
        self._left = _STEPS
        self._readback: Readback[None] = Readback()

    def look(self, pairs: Sequence[TrackedPair]) -> bool:
        """Returns whether one has been found since the last call, without waiting for a device."""
        if self._left:
            self._left -= 1
            stride = -(-len(pairs) // _WEIGHTS)
            found: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
            with torch.no_grad(), suspend_modes():
                for pair in pairs[self._left % stride :: stride]:
                    flag = _differs(pair)
                    if flag is not None:
                        found[flag.device].append(flag)
                for same in found.values():
                    self._readback.send(None, torch.stack(same).float())
        return any(any(values) for _, values in self._readback.poll())


def _differs(pair: TrackedPair) -> Tensor | None:
    """Returns whether some elements of a weight differ from the rounded master's: 0-d bool.

    ``None`` if the two are not in sync, or cannot be compared.
    """
    if pair.new or pair.master_written or pair.model_written:
        return None
    weight, own = dtensor.local(pair.model.detach()), dtensor.local(pair.master.detach())
    if type(weight) is not Tensor or not weight.numel() or not dtypes.is_low_precision(weight):
        return None
    if capturing(weight.device):  # the graph would compare at every replay
        return None
    some = tuple(slice(None, None, max(1, size // _PER_DIMENSION)) for size in weight.shape)
    limits = torch.finfo(weight.dtype)
    known = own[some].to(weight.device, weight.dtype).float()
    largest = torch.linalg.vector_norm(known, torch.inf).clamp(min=limits.smallest_normal)
    apart: Tensor = (known - weight[some].float()).abs() > 4 * limits.eps * largest
    return apart.any()
