"""The gradients of one backward pass: what makes room for them, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from apex._core import finite, master
from apex._engine.masters import Pair, take
from apex._torch import dtensor, parameters

if TYPE_CHECKING:
    from apex._engine.binding import Binding

_CHUNK = 2**24
"""Elements of which fp32 copies exist beside a sum."""


class PassGradients:
    """The gradients of the optimizers of one pass, each parameter once.

    See Note [One gradient in one place].

    Attributes:
        scaled: Whether the pass has a loss scale.
    """

    def __init__(
        self, bindings: Iterable[Binding], others: Iterable[Binding] = (), *, scaled: bool
    ) -> None:
        """Finds the parameters of ``bindings``; ``others`` may be reached by the pass, too."""
        pairs = {id(pair): pair for binding in bindings for pair in binding.pairs}
        params = {id(param): param for binding in bindings for param in binding.params()}
        self.scaled = scaled
        self._pairs = list(pairs.values())
        self._stepped = list(params.values()) if scaled else []
        self._others = [pair for each in others for pair in each.pairs] if scaled else []
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

    def note_cleared(self, params: Collection[int]) -> None:
        """Drops what was set aside for the parameters with these ids, which were cleared."""
        self._aside = {key: each for key, each in self._aside.items() if key not in params}
        self.mark()

    def leave_out(self, params: Collection[int]) -> None:
        """Leaves out the parameters with these ids, whose gradients have been cleared."""
        self._pairs = [pair for pair in self._pairs if id(pair.master) not in params]
        self._stepped = [param for param in self._stepped if id(param) not in params]

    def receive(self, unscale_: Callable[[list[Tensor]], None]) -> None:
        """Gives what is stepped its unscaled gradients, plus those set aside.

        The model keeps its scaled ones. ``unscale_`` divides dense gradients in place.
        """
        found = [(pair, grad) for pair in self._pairs if (grad := pair.model.grad) is not None]
        own = finite.values_of(self._stepped)  # and of masters that the loss uses themselves
        unscale_(own)
        for chunk in _chunks(found):
            masters = [pair.master for pair, _ in chunk]
            copies = master.fp32_copies([grad for _, grad in chunk], masters)
            unscale_(finite.dense_values(copies))
            _add(masters, copies)
            self._add_aside({*map(id, masters)})
        self._add_aside(set(self._aside))

    def _add_aside(self, params: Collection[int]) -> None:
        """Adds the gradients of the pass to those set aside."""
        added: list[nn.Parameter] = []
        values: list[Tensor] = []
        for param, grad in [self._aside.pop(key) for key in params if key in self._aside]:
            if (value := parameters.grad_of(param)) is not None:
                added.append(param)
                values.append(value)
            parameters.set_grad(param, grad)
        _add(added, values)

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


def _chunks(found: Sequence[tuple[Pair, Tensor]]) -> Iterator[Sequence[tuple[Pair, Tensor]]]:
    chunk: list[tuple[Pair, Tensor]] = []
    elements = 0
    for each in found:
        chunk.append(each)
        elements += each[1].numel()
        if elements >= _CHUNK:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk
