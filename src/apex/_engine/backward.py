"""One ``scale_loss`` block: scales the loss, unscales the gradients, updates the scale."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain, compress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from apex._engine.autocast.blocks import PassCasts
from apex._engine.mistakes import BLOCK, BlockInspection, Mistakes
from apex._engine.optimizer.gradients import GradState
from apex._torch.dynamo import untraced
from apex._torch.overrides import without_overrides

if TYPE_CHECKING:
    from apex._core.op_table import CastSpec
    from apex._engine.events import ScaleUpdate
    from apex._engine.optimizer.binding import Binding, Owner
    from apex._engine.optimizer.gradients import OpenPass
    from apex._engine.scaler import Scaler
    from apex._torch.ddp import Communication

_checked = operator.attrgetter("gradients.overflow.checked")
_state_before = operator.attrgetter("gradients.current.before")
_iteration = operator.attrgetter("gradients.iteration")


class BackwardPass(ExitStack):
    """Context of one backward pass: returns the scaled loss and leaves unscaled gradients.

    Op casts inside are those of the thread, as in apex; in the pass itself, see Note [Casts in a
    backward pass].

    The ExitStack runs every exit callback, even if a Ctrl-C interrupts one; the last closes
    whatever is still open.
    """

    def __init__(
        self,
        loss: Tensor,
        bindings: Sequence[Binding],
        scaler: Scaler,
        *,
        communication: Callable[[Binding], Communication],
        ended: Callable[[Sequence[ScaleUpdate], bool], None],
        owners: Iterable[Owner] = (),
        flagged: Sequence[Binding] | None = None,
        casts: CastSpec | None = None,
        mistakes: Mistakes | None = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        """Stores the arguments; the pass begins on entry.

        Args:
            loss: The unscaled loss.
            bindings: The optimizers whose gradients the pass computes.
            scaler: The loss's scale.
            communication: Returns whether and how a binding's gradients are sent to other ranks.
            ended: Called with the scale updates that are readable on the host by now, and whether
                an exception ended the pass; not after a pass that defers its scale update.
            owners: The sessions whose other optimizers may get gradients that stay scaled.
            flagged: The optimizers whose next step an overflow skips; ``None`` for ``bindings``.
            casts: The casts of Python code inside the pass that mixes dtypes; ``None`` for the
                thread's.
            mistakes: Those found in the session, for a pass to add to.
            delay_unscale: Leave the gradients scaled, for a later pass to unscale.
            delay_overflow_check: Leave the scale update to a later pass.
        """
        super().__init__()
        self._loss = loss
        self._bindings = bindings
        self._scaler = scaler
        self._communication = communication
        self._ended = ended
        self._owners = owners
        self._flagged = bindings if flagged is None else flagged
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        self._casts = PassCasts(casts)
        self._finished = False
        self._delayed = self._left = self._moves_scale = False
        self._earlier: list[OpenPass | None] = []
        self._sends: list[bool] = []
        self._mistakes = mistakes
        self._inspection: BlockInspection | None = None

    @untraced
    def __enter__(self) -> Any:
        """Sets earlier gradients aside and returns the scaled loss (fp32).

        Raises:
            RuntimeError: Inside another block for one of the same optimizers, whose gradients would
                mix before either is unscaled.
        """
        for binding in self._bindings:
            opened = binding.gradients.open_pass
            # While a pass continues delayed ones, the state of its gradients is theirs.
            if binding.gradients.state is GradState.OPEN or (opened is not None and opened.is_open):
                raise RuntimeError(
                    "amp.scale_loss was entered inside another amp.scale_loss block of the same "
                    "optimizer. Close the first block before the second, or add up the losses in "
                    "one."
                )
        self._finish_others()
        self.push(self._leave)
        self.push(self._end)
        try:
            with without_overrides():
                self._begin_all()
            self._casts.__enter__()
            self._scaler.open_blocks.add(self)
            scaled_loss = self._scaler.scale(self._loss)
            mistakes = None if self._scaler.is_identity else self._mistakes
            if mistakes is not None and mistakes.blocks_left:
                self._inspect(mistakes, scaled_loss)
            self._scaled_by = self._scaler.factor()
            return scaled_loss
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Raises: this is the context of the pass, and its loss is what ``with`` yields."""
        raise RuntimeError(f"amp.scale_loss returns a context, not the scaled loss. Write\n{BLOCK}")

    @property
    def delayed(self) -> bool:
        """Whether the block has ended and left its gradients scaled."""
        return self._delayed

    @property
    def is_open(self) -> bool:
        """Whether the block has been entered and not left."""
        return self in self._scaler.open_blocks

    @property
    def waits(self) -> bool:
        """Whether gradients are still to be divided by the scale."""
        return any(binding.gradients.open_pass is self for binding in self._bindings)

    @property
    def bindings(self) -> Sequence[Binding]:
        """The optimizers whose gradients the pass computes."""
        return self._bindings

    def continues(self, bindings: Sequence[Binding], scaler: Scaler) -> bool:
        """Returns whether a pass may add to the gradients that this one left scaled.

        They need one scale, and one answer to which parameters are scaled. The factor is another
        object once a pass in between has updated the scale.
        """
        same_scale = self._scaler is scaler and self._scaled_by is scaler.factor()
        return (
            same_scale
            and len(self._bindings) == len(bindings)
            and all(binding.gradients.open_pass is self for binding in bindings)
        )

    def _finish_others(self) -> None:
        """Unscales what earlier passes left scaled, unless this one continues it."""
        waiting: dict[int, OpenPass] = {}
        for binding in self._flagged:
            opened = binding.gradients.open_pass
            if opened is not None and opened.delayed:
                waiting[id(opened)] = opened
        for delayed in waiting.values():
            if len(waiting) == 1 and delayed.continues(self._bindings, self._scaler):
                # In their order: of those that share a parameter, the first set its gradient aside.
                self._bindings = delayed.bindings
            else:
                delayed.finish()

    def _inspect(self, mistakes: Mistakes, scaled_loss: Tensor) -> None:
        params = [param for binding in self._bindings for param in binding.trained()]
        siblings = chain.from_iterable(owner.bindings for owner in self._owners)
        others = chain.from_iterable(b.trained() for b in siblings if b not in self._bindings)
        self._inspection = BlockInspection(mistakes, params, others)
        self._inspection.observe(scaled_loss)

    def _begin_all(self) -> None:
        # All before any begins: gradients that one sets aside would look cleared to another.
        prepared = list(zip(self._bindings, map(self._prepared, self._bindings), strict=True))
        begun: set[int] | None = None
        if len(prepared) > 1:
            # First those with gradients that other ranks miss: whichever optimizer begins
            # first makes room for a shared parameter's gradient, and has to send it again.
            prepared.sort(key=lambda pair: pair[0].gradients.state is not GradState.LOCAL)
            self._bindings = [binding for binding, _ in prepared]
            begun = set()
        for binding, communication in prepared:
            self._begin(binding, communication, begun)

    def _prepared(self, binding: Binding) -> Communication:
        if binding.master_weights:
            binding.regroup()
        communication = self._communication(binding)
        if binding.master_weights:
            binding.read_model()
        binding.gradients.absorb_changes()
        return communication

    def _begin(
        self, binding: Binding, communication: Communication, begun: set[int] | None
    ) -> None:
        self._earlier.append(binding.gradients.open_pass)
        self._sends.append(communication.sends)
        scale = self._scaler.factor()
        binding.gradients.begin(
            self,
            identity=self._scaler.is_identity,
            # Delayed gradients stay in place until they are reduced.
            sent_with=scale if communication.sends or self._delay_unscale else None,
            keeps=not communication.in_buckets,
            begun=begun,
        )

    @untraced
    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Unscales the gradients; after an exception, restores the earlier ones."""
        try:
            self._scaler.open_blocks.discard(self)
            if error is not None:
                self._abort()
            elif not self._delay_unscale:
                self.finish()
            elif not self._finished:  # else a step inside the block has unscaled them already
                if self._inspection is not None:
                    self._inspection.end_of_gradients(delayed=True)
                self._delayed = True
                self._scaler.delayed_blocks.add(self)
                for binding in self._bindings:
                    binding.gradients.delay()
            if self._inspection is not None:
                self._inspection.warn()
        finally:
            self._leave()

    @untraced
    def _leave(self, *error: object) -> None:
        """Closes whatever is still open; idempotent."""
        if self._left:
            return
        self._scaler.open_blocks.discard(self)
        if self._inspection is not None:
            self._inspection.close()
        self._casts.__exit__()
        for binding in reversed(self._bindings):
            gradients = binding.gradients
            if gradients.state is GradState.OPEN and gradients.open_pass is self:
                gradients.abort(self)
        self._left = True

    def finish(self) -> None:
        """Unscales the gradients and updates the scale, once; all or nothing.

        A pass that was delayed leaves out optimizers whose gradients have been cleared.
        """
        if self._finished:
            return
        if self._delayed:
            self._scaler.delayed_blocks.discard(self)
            self._keep([binding.gradients.open_pass is self for binding in self._bindings])
        if self._inspection is not None:
            self._inspection.end_of_gradients()
        before = self._scaler.pass_state, list(map(_checked, self._flagged))
        try:
            self._finished = True
            with without_overrides():
                self._unscale()
        except BaseException:
            self._scaler.pass_state = before[0]
            for binding, checked in zip(self._flagged, before[1], strict=True):
                binding.gradients.overflow.checked = checked
            # In reverse: of optimizers that share a parameter, the first set its gradient aside.
            for binding in reversed(self._bindings):
                binding.gradients.roll_back()
            raise
        with without_overrides():
            for binding, sends in zip(self._bindings, self._sends, strict=True):
                binding.gradients.commit(sent=sends)
        if self._moves_scale:
            self._ended(self._scaler.read_updates(), False)

    def _keep(self, kept: Sequence[bool]) -> None:
        """Leaves out every optimizer for which ``kept`` is False."""
        if all(kept):
            return
        left = {id(b) for b, keep in zip(self._bindings, kept, strict=True) if not keep}
        self._bindings = list(compress(self._bindings, kept))
        self._sends = list(compress(self._sends, kept))
        self._flagged = [binding for binding in self._flagged if id(binding) not in left]

    def _unscale(self) -> None:
        """Does everything that can fail; ``Gradients.roll_back`` reverts it."""
        scaler = self._scaler
        scaler.begin_pass(continues=GradState.LOCAL in map(_state_before, self._bindings))
        inverse = None if scaler.is_identity else scaler.inverse(self._scaled_by)
        unscale_ = None if inverse is None else functools.partial(scaler.unscale_, inverse=inverse)
        factors = () if inverse is None else (inverse,)
        done: set[int] | None = set() if len(self._bindings) > 1 else None
        for binding in self._bindings:
            current = binding.gradients.current
            current.accumulate(binding, unscale_, done, factors, checks=scaler.dynamic)
        # Without communication each rank knows its own overflows only; their scales would diverge.
        self._moves_scale = all(self._sends) and not self._delay_overflow_check
        own = scaler.own_update if self._moves_scale else None
        if scaler.dynamic:
            scaler.share_overflow([*chain.from_iterable(b.params() for b in self._bindings)])
            if own is not None:
                scaler.found_inf.fill_(float(bool(own())))
            for binding in self._flagged:
                binding.gradients.overflow.raise_by(scaler.found_inf)
        if not all(self._sends):
            scaler.hold_update()
        elif self._moves_scale:
            scaler.update(map(_iteration, self._bindings), own=own is not None)

    def _abort(self) -> None:
        if not self._finished:
            self._finished = True
            begun = list(zip(self._bindings, self._earlier, strict=False))
            for binding, earlier in reversed(begun):  # as in finish()
                binding.gradients.abort(self, earlier)
            self._ended((), True)
