"""What wraps or shards a model, and shares its gradients among ranks: one file for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from apex._engine.masters import MasterTable


class Wrapper(Protocol):
    """What a session asks of one kind of wrapper around its models.

    Questions do not communicate; :meth:`share_masters` does.
    """

    def sends(self, params: Sequence[Tensor]) -> bool:
        """Returns whether ranks share these gradients in a pass that begins now, or need not."""
        ...

    def share_masters(self, masters: MasterTable, params: Sequence[Tensor]) -> None:
        """Makes the masters of these parameters equal on all ranks, once.

        All ranks call this in one order.
        """
        ...

    def reuses_grad(self, param: Tensor) -> bool:
        """Returns whether the next pass writes a parameter's gradient to the same memory."""
        ...
