"""The gradients of one optimizer across backward passes: set aside, unscaled and accumulated."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from apex._engine.events import Iteration
from apex._engine.masters import clear_grad
from apex._engine.optimizer import deferred, gradient_pass, mirror_gradients, outside_changes
from apex._engine.optimizer.gradient_pass import GradientPass
from apex._engine.optimizer.overflow_flag import OverflowFlag
from apex._engine.tracked_pair import TrackedPair
from apex._torch import parameters
from apex._torch.counted import count_writes, uncount_writes
from apex._torch.dynamo import untraced
from apex._torch.overrides import without_overrides

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding
    from apex._engine.scaler import Scaler


class GradState(enum.Enum):
    """The state of an optimizer's gradients."""

    READY = enum.auto()
    """Unscaled and ready for the optimizer, or absent."""
    LOCAL = enum.auto()
    """As ``READY``, but accumulated under ``no_sync`` and not yet reduced across ranks."""
    OPEN = enum.auto()
    """A ``scale_loss`` block is computing them."""
    DELAYED = enum.auto()
    """Left scaled by ``delay_unscale``; a later pass adds to them and unscales the sum."""


class OpenPass(Protocol):
    """A backward pass whose gradients are not unscaled yet."""

    @property
    def is_open(self) -> bool:
        """Whether its block has been entered and not left."""

    @property
    def delayed(self) -> bool:
        """Whether its block has ended, so that a later pass may continue it."""

    @property
    def bindings(self) -> Sequence[Binding]:
        """The optimizers whose gradients the pass computes."""

    def continues(self, bindings: Sequence[Binding], scaler: Scaler) -> bool:
        """Returns whether a pass of these optimizers may add to its gradients."""

    def finish(self) -> None:
        """Unscales them now; idempotent."""


class Gradients:
    """The gradients of one optimizer, and their state between passes.

    A pass calls :meth:`absorb_changes` and :meth:`begin`, runs autograd, then calls
    ``current.accumulate`` followed by :meth:`commit` or :meth:`roll_back`; or else :meth:`delay` or
    :meth:`abort`.

    Attributes:
        state: The state of the gradients.
        current: What the open pass sets aside and receives; idle without one.
        open_pass: The backward pass still to be finished, if any.
        overflow: Whether a present gradient overflowed, so that the next step is skipped.
        used: Whether a pass has begun.
        stepping: Whether the optimizer is in its step.
    """

    def __init__(self, stepped: Binding) -> None:
        self._stepped = weakref.ref(stepped)
        self._pairs = stepped.pairs  # the same list
        self.state = GradState.READY
        self.open_pass: OpenPass | None = None
        self.overflow = OverflowFlag()
        self.used = self.stepping = False
        self._steps = 0
        self.current = GradientPass(GradState.READY)
        self._sentinel: tuple[nn.Parameter, int | None, TensorWeakRef | None] | None = None
        self._in_buckets = False
        self._modified = False

    @property
    def _optimized(self) -> Binding:
        stepped = self._stepped()
        if stepped is None:
            raise RuntimeError("The optimizer of these gradients has been deleted.")
        return stepped

    @property
    def unfinished(self) -> bool:
        """Whether a block is computing the gradients, or ``delay_unscale`` left them scaled."""
        # A script that clears gradients inside a block makes them READY while its pass goes on.
        scaled = self.state in (GradState.OPEN, GradState.DELAYED)
        return scaled or self.open_pass is not None

    @property
    def iteration(self) -> Iteration:
        """Identifies the passes that lead to the next step."""
        return Iteration(id(self), self._steps)

    # -- one backward pass -------------------------------------------------------------------

    def begin(
        self,
        opened: OpenPass | None = None,
        *,
        identity: bool,
        sent_with: Tensor | float | None = 1.0,
        keeps: bool = True,
        begun: set[int] | None = None,
    ) -> None:
        """Prepares the gradients for one backward pass, after :meth:`absorb_changes`.

        Unscaled gradients are set aside, so that the pass starts without any; scaled ones
        (``delay_unscale``) stay and accumulate. Unreduced ones (``LOCAL``) are scaled and returned
        to the tensors in which the pass accumulates, so that they are reduced with its own.

        Args:
            opened: The pass.
            identity: Whether the loss scale is exactly 1 and unchecked, so that parameters without
                a master accumulate in place.
            sent_with: The scale of the gradients that this pass reduces across ranks; ``None`` if
                it reduces none.
            keeps: Whether a gradient set aside keeps its values; False if its memory is a DDP
                bucket.
            begun: Ids of parameters that another optimizer of the pass has prepared, which this one
                skips; extended by its own. ``None`` if the pass has one optimizer.
        """
        optimized = self._optimized
        if not keeps:
            self.settle()
        pairs: Sequence[TrackedPair] = optimized.pairs
        params = optimized.params() if begun is not None or not identity else []
        if begun is not None:
            pairs = [pair for pair in pairs if id(pair.master) not in begun]
            params = [param for param in params if id(param) not in begun]
            begun.update(map(id, params))
        delayed = self.state is GradState.DELAYED
        new = self.current
        if delayed:
            new.scaled, new.pairs = not identity, pairs
        else:
            new = GradientPass(self.state, identity=identity)
            new.pairs = pairs
            returns = self.state is GradState.LOCAL
            if pairs or params:
                new.set_aside(pairs, params, sent_with=sent_with if returns else None, keeps=keeps)
        # Nothing below can fail, and what abort() reads is set before any gradient.
        self.current = new
        self._in_buckets = not keeps
        self.used = True
        self.open_pass = opened
        if not delayed:
            self.state = GradState.OPEN
            new.make_room()

    def delay(self) -> None:
        """Leaves the gradients of the pass scaled, for a later pass to unscale."""
        self.state = GradState.DELAYED

    def settle(self) -> None:
        """Computes every fp32 gradient that was deferred."""
        for pair in self._pairs:
            each = deferred.of(pair.master)
            if each is not None:
                each.settle()

    def commit(self, *, sent: bool = True) -> None:
        """Installs the gradients that ``current.accumulate`` computed. Cannot fail.

        Args:
            sent: Whether the gradients are reduced across ranks, or need not be.
        """
        self.current.install()
        if self._pairs:
            mirror_gradients.mark(self._pairs)
        self._end_pass(GradState.READY if sent else GradState.LOCAL)
        if self.overflow.checked:
            self.watch_writes()

    def roll_back(self) -> None:
        """Discards a pass that could not be unscaled, and the delayed passes before it.

        Restores the gradients from before the first of them; at a scale of exactly 1, see
        :meth:`abort`.
        """
        self.state = GradState.OPEN
        self.abort(self.open_pass)

    def abort(self, aborted: OpenPass | None = None, earlier: OpenPass | None = None) -> None:
        """Discards the pass and restores the gradients that were set aside.

        A pass that accumulated in place (scale 1, or gradients still scaled) leaves what it added,
        as plain autograd does.

        Args:
            aborted: The pass; nothing happens unless it is the open one.
            earlier: The delayed pass before it, still to be finished.
        """
        if aborted is not self.open_pass:
            return
        if self.state is GradState.DELAYED:
            self.open_pass = earlier
            return
        current = self.current
        current.restore(self._optimized)
        self._end_pass(current.before)
        self.open_pass = earlier
        mirror_gradients.write_again(current.unmirrored)

    def _end_pass(self, state: GradState) -> None:
        self.current, self.state = GradientPass(state), state
        self.open_pass = None

    # -- outside of passes -------------------------------------------------------------------

    @untraced
    def absorb_raw(self) -> None:
        """Applies gradient changes made outside passes to the masters."""
        if self.unfinished:
            return
        if self._pairs and outside_changes.absorb(
            self._pairs, in_buckets=self._in_buckets, defers=self._optimized.defers
        ):
            self._modified = True
        if (self.overflow.checked or self.state is GradState.LOCAL) and not self.has_grads():
            self.reset()

    def absorb_changes(self) -> None:
        """Applies every gradient change made since the last pass, before the next begins.

        Works on the device, without a host sync.
        """
        self.absorb_raw()
        if self.state is GradState.DELAYED:
            return
        if self._modified or (self._sentinel is not None and _is_written(*self._sentinel)):
            own, *others = [each.params() for each in self._optimized.sharing()]
            self.overflow.recheck(own, [param for params in others for param in params])
        self._modified = False

    def take_mirrors(self) -> list[TrackedPair]:
        """Leaves gradients on the masters alone; returns the pairs whose models mirrored them."""
        if self.unfinished:
            return []
        self.absorb_changes()
        self.settle()
        mirrored = [pair for pair in self._pairs if pair.mirrors_grad]
        for pair in mirrored:
            pair.model.grad, pair.mirrors_grad = None, False
        return mirrored

    def absorb_partial(self) -> None:
        """Moves the gradients so far of an open pass at scale 1, for a step during the pass."""
        received = gradient_pass.received(self._pairs, set())
        outside_changes.add([pair for pair, _ in received])

    @property
    def is_scaled(self) -> bool:
        """Whether the open pass scales gradients by a factor other than exactly 1."""
        return self.current.scaled

    def zero(self, *, set_to_none: bool) -> None:
        """Clears the gradients of all pairs, model and master, and any pending overflow."""
        for pair in self._pairs:
            if set_to_none:
                pair.model.grad = pair.master.grad = None
                pair.mirrors_grad = False
            else:
                clear_grad(pair.model, set_to_none=False)
                clear_grad(pair.master, set_to_none=False)
                mirror_gradients.mark_again(pair)
        self.reset()

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """A context in which the optimizer's own ``zero_grad`` clears what it steps, or some of it.

        Afterwards the models' gradients follow.
        """
        self._optimized.regroup()
        self.absorb_raw()
        params = self._optimized.params()
        with without_overrides():
            before = [(param, parameters.grad_of(param), _version(param)) for param in params]
        yield
        with without_overrides(), torch.no_grad():
            kept = {
                id(param)
                for param, grad, version in before
                if version is not None and not _is_changed(param, version, grad)
            }
            zeroed: list[tuple[TrackedPair, Tensor]] = []
            for pair in self._pairs:
                if id(pair.master) in kept:
                    continue
                grad = pair.master.grad
                if grad is None:
                    pair.model.grad, pair.mirrors_grad = None, False
                else:
                    zeroed.append((pair, grad))
            if zeroed:
                mirror_gradients.write(*zip(*zeroed, strict=True))
                mirror_gradients.mark(pair for pair, _ in zeroed)
            if not kept:
                self.reset()

    def on_cleared(self, models: Container[int]) -> None:
        """Drops a pending overflow and open passes if no other parameter has a gradient.

        Args:
            models: Ids of the models' parameters whose gradients were just cleared.
        """
        pairs = {id(pair.master): id(pair.model) for pair in self._pairs}
        for pair in self._pairs:
            if id(pair.model) in models:
                mirror_gradients.mark_again(pair)

        params = self._optimized.params()
        cleared = {id(p) for p in params if pairs.get(id(p), id(p)) in models}
        self.current.drop_aside(cleared)
        if all(id(p) in cleared or not deferred.has_grad(p) for p in params):
            self.reset()

    def reset(self) -> None:
        """Drops delayed passes and a pending overflow.

        The pass of a block that is still open goes on without gradients to add to: what it computes
        from now on is scaled, and has to be unscaled by a step inside the block, too.
        """
        self._steps += 1
        optimized = self._optimized
        for binding in () if optimized.owner is None else optimized.owner.others([optimized]):
            current = binding.gradients.current
            if current.aside:  # perhaps the gradient of a parameter that both optimizers step
                current.drop_aside(set(map(id, optimized.params())))
        opened, before = self.open_pass, self.current
        if opened is not None or self.state is not GradState.READY:
            self._end_pass(GradState.READY)
        if opened is not None and not opened.delayed:
            self.open_pass = opened
            self.current.scaled, self.current.pairs = before.scaled, before.pairs
        self._sentinel = None
        self.overflow.clear()

    def begin_step(self) -> None:
        """Assigns the passes that follow to the next step; hands the optimizer plain gradients."""
        self.stepping = True
        self._steps += 1
        if self._sentinel is not None:
            _count_writes(self._sentinel[0], False)

    def end_step(self) -> None:
        """Notices again what a script writes into gradients; idempotent."""
        self.stepping = False
        if self._sentinel is not None:
            _count_writes(self._sentinel[0], True)

    def watch_writes(self) -> None:
        """Has writes to the first gradient tell that a script changes them."""
        first = self._first_with_grad()
        self._sentinel = None
        if first is not None:
            grad = parameters.grad_of(first)
            self._sentinel = first, _version(first), None if grad is None else TensorWeakRef(grad)
            _count_writes(first, True)

    def mark_scaled(self, scaled: bool) -> None:
        """Sets whether the gradients are still scaled, for scripts that set apex's flag."""
        self.state = GradState.DELAYED if scaled else GradState.READY

    def has_grads(self) -> bool:
        """Returns whether a stepped parameter has a gradient, without computing a deferred one."""
        return self._first_with_grad() is not None

    def _first_with_grad(self) -> nn.Parameter | None:
        groups = self._optimized.optimizer.param_groups
        present = (p for group in groups for p in group["params"] if deferred.has_grad(p))
        return next(present, None)


def _version(param: nn.Parameter) -> int | None:
    """Returns what changes if the gradient of ``param`` is written; the same on all ranks.

    Reading a deferred gradient computes it, which changes nothing.
    """
    if deferred.of(param) is not None:
        return -1
    grad = param.grad
    if grad is None:
        return None
    return -1 if deferred.is_as_computed(grad) else grad._version


def _is_changed(param: nn.Parameter, version: int | None, grad: Tensor | None) -> bool:
    """Returns whether the gradient of ``param``, once ``grad``, was written or replaced.

    A deferred gradient has no tensor to compare.
    """
    if _version(param) != version:
        return True
    return version != -1 and parameters.grad_of(param) is not grad


def _is_written(param: nn.Parameter, version: int | None, grad: TensorWeakRef | None) -> bool:
    return _is_changed(param, version, None if grad is None else grad())


def _count_writes(param: nn.Parameter, counts: bool) -> None:
    """Has writes into the gradient of ``param`` count, or no longer."""
    waiting = deferred.of(param)
    if waiting is not None:
        waiting.counts = counts
    elif (grad := param.grad) is not None:
        (count_writes if counts else uncount_writes)(grad)
