"""What a session tells its observer, who changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from torch import Tensor, nn

NOTHING = nullcontext()
"""The block of what is not watched."""


class Observer:
    """Hears what happens in one session; this one does nothing.

    The arguments are a ``BackwardPass``, a ``PreparedOptimizer`` and a ``ModelState``.
    """

    def optimizer_prepared(self, prepared: Any) -> None:
        """An optimizer has become one of the session."""

    def block_begins(self, block: Any, scaled_loss: Tensor) -> None:
        """A block begins; earlier gradients are still in place."""

    def pass_ends(self, block: Any) -> None:
        """The gradients of a block are about to be unscaled. Told again at the block's exit."""

    def block_ends(self, block: Any) -> None:
        """A block has done its work, or has failed."""

    def step_begins(self, prepared: Any) -> None:
        """A step is about to change masters."""

    def gradients_used(self, prepared: Any) -> None:
        """A step uses the gradients of now."""

    def other_step(self, params: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """An optimizer that amp has not prepared has stepped ``params``.

        It has written ``weights``, which are of 16 bits, and of the session's models.
        """

    def masters_read(self, prepared: Any) -> None:
        """A script iterates over masters."""

    def model_used(self, state: Any, reader: FrameType | None) -> None:
        """A model begins a forward pass, or ``reader`` reads one of its methods."""

    def forward(
        self, model: nn.Module, state: Any, forward: Any, given: Any, cast: Any
    ) -> AbstractContextManager[None]:
        """Returns the block around a call of a model's own ``forward``, which gets ``cast``."""
        return NOTHING

    def loading(self, state: Any) -> None:
        """A state dict is loaded into a module of a model."""

    def converted(self, model: nn.Module, before: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A model was converted; its tensors come with their values from before."""
