"""How masters and sums of gradients are stored, and what models show of them."""

from dataclasses import dataclass, field

import torch

from tests.support.reference.loops import LEVELS
from tests.support.reference.rounding import half_up, neighbours


@dataclass(frozen=True)
class Store:
    """One way to store what training by hand has in fp32.

    Attributes:
        level: The level.
        options: What else ``amp.initialize`` takes.
        shares: Whether a master shares its weight's memory.
        at_random: Whether what is written to a master is rounded up or down at random.
        sums_low: Whether gradients add up in the model's dtype.
    """

    level: str
    options: dict = field(default_factory=dict)
    shares: bool = False
    at_random: bool = False
    sums_low: bool = False

    def shown(self, weight, dtype):
        """Returns what a model of ``dtype`` shows of a weight."""
        up = self.shares and not self.at_random and weight.dtype is not dtype
        return half_up(weight) if up else weight.to(dtype)

    def loaded(self, weight, dtype):
        """Returns what is kept of a weight that the model is set to."""
        return weight.to(dtype).to(weight.dtype) if self.at_random else weight


STORES = {level: Store(level) for level in LEVELS} | {
    "O2 sums": Store("O2", {"grad_accum_dtype": torch.float16}, sums_low=True),
    "O5 sums": Store("O5", {"grad_accum_dtype": torch.bfloat16}, sums_low=True),
}


def can_be_rounded(value, exact):
    """Returns whether ``value`` is ``exact``, each element rounded up or down to bf16."""
    below, above = neighbours(exact)
    return bool(((value == below) | (value == above)).all())
