"""The gradients of one backward pass: what makes room for them, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from apex._core import finite, master
from apex._engine.masters import MasterPair, take
from apex._engine.scaler import Scaler
from apex._torch import dtensor, parameters


class PassGradients:
    """The gradients of the optimizers of one pass, each parameter once.

    See Note [One gradient in one place].

    Attributes:
        scaled: Whether the pass has a loss scale.
    """

    def __init__(
        self,
        pairs: Iterable[MasterPair],
        params: Iterable[nn.Parameter],
        others: Iterable[MasterPair] = (),
        *,
        scaled: bool,
    ) -> None:
        """Stores what the optimizers of the pass step.

        Args:
            pairs: Model parameters with their masters.
            params: All that is stepped, masters included.
            others: Those of other optimizers, which the pass may reach, too.
            scaled: Whether the pass has a loss scale.
        """
        self.scaled = scaled
        self._pairs = list({id(pair): pair for pair in pairs}.values())
        self._stepped = list({id(each): each for each in params}.values()) if scaled else []
        self._others = list(others) if scaled else []
        self._aside: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def make_room(self) -> None:
        """Moves what waits on models to the masters; with a scale, sets that of masters aside."""
        take(self._pairs)
        for param in self._stepped:
            if (grad := parameters.grad_of(param)) is not None:
                self._aside[id(param)] = param, _kept(grad)
        for param, _ in self._aside.values():
            parameters.set_grad(param, None)
        for pair in self._pairs:
            if pair.scaled:
                pair.model.grad = None
        self.mark()
        for pair in self._others:
            # What reaches them is scaled by a scale that their optimizer's own pass does not know.
            pair.scaled = pair.scaled or pair.model.grad is None

    def mark(self) -> None:
        """Records that gradients which arrive on models are those of the pass."""
        for pair in self._pairs:
            pair.scaled = self.scaled

    def note_cleared(self, params: set[int]) -> None:
        """Drops what was set aside for the parameters with these ids, which were cleared."""
        self._aside = {key: each for key, each in self._aside.items() if key not in params}
        self.mark()

    def leave_out(self, params: set[int]) -> None:
        """Leaves out the parameters with these ids, whose gradients have been cleared."""
        self._pairs = [pair for pair in self._pairs if id(pair.master) not in params]
        self._stepped = [param for param in self._stepped if id(param) not in params]

    def receive(self, scaler: Scaler, scale: Tensor | float) -> None:
        """Gives what is stepped its unscaled gradients, plus those set aside.

        The model keeps its own, which are multiplied by ``scale``.
        """
        # Also those of masters that the loss uses themselves.
        scaler.unscale_(finite.values_of(self._stepped), scale)
        found = [(pair, grad) for pair in self._pairs if (grad := pair.model.grad) is not None]
        masters = [pair.master for pair, _ in found]
        copies = master.fp32_copies([grad for _, grad in found], masters)
        scaler.unscale_(finite.dense_values(copies), scale)
        _add(masters, copies)
        aside, self._aside = list(self._aside.values()), {}
        arrived = [(p, value) for p, _ in aside if (value := parameters.grad_of(p)) is not None]
        for param, grad in aside:
            parameters.set_grad(param, grad)
        _add([param for param, _ in arrived], [value for _, value in arrived])

    def restore(self) -> None:
        """Drops the gradients of a pass that failed, and returns those that were set aside."""
        for pair in self._pairs:
            pair.model.grad, pair.scaled = None, False
        for param in self._stepped:
            parameters.set_grad(param, None)
        for param, grad in self._aside.values():
            parameters.set_grad(param, grad)
        self._aside = {}


def _kept(grad: Tensor) -> Tensor:
    """Returns a gradient that the next pass leaves alone: of a view of a bucket, a copy."""
    strided = grad.layout is torch.strided and not dtensor.is_dtensor(grad)
    shares = strided and grad.untyped_storage().nbytes() != grad.nbytes
    return grad.clone() if shares else grad


def _add(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Adds gradients, which are not needed again, to those of parameters."""
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for param, value in zip(params, values, strict=True):
        total = parameters.grad_of(param)
        if total is None:
            parameters.set_grad(param, value)
        elif total.layout is not torch.strided or value.layout is not torch.strided:
            # torch adds sparse to dense, not dense to sparse.
            both = total + value if value.is_sparse else value + total
            parameters.set_grad(param, both)
        elif total.requires_grad or value.requires_grad:
            parameters.set_grad(param, total + value)
        else:
            totals.append(total)
            added.append(value)
    if totals:
        torch._foreach_add_(finite.dense_values(totals), finite.dense_values(added))
