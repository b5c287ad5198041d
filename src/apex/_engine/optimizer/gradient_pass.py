"""The gradients of one optimizer across backward passes: set aside, unscaled and accumulated."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from apex._core import finite, master
from apex._engine.events import Iteration
from apex._engine.masters import TrackedPair, clear_grad
from apex._engine.optimizer import deferred, low_sums, mirror_gradients
from apex._engine.optimizer.deferred import Deferred, Factor
from apex._torch import dtensor
from apex._torch.copies import HostCopy, capturing
from apex._torch.counted import without_counting
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding

_Grads = list[tuple[nn.Parameter, Tensor]]


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

    def finish(self) -> None:
        """Unscales them now; idempotent."""


class Gradients:
    """The gradients of one optimizer, and their state between passes.

    A pass calls :meth:`absorb_changes` and :meth:`begin`, runs autograd, then calls
    :meth:`accumulate` followed by :meth:`commit` or :meth:`roll_back`; or else :meth:`delay` or
    :meth:`abort`.

    Attributes:
        state: The state of the gradients.
        open_pass: The backward pass still to be finished, if any.
        found_inf: Whether a present gradient held inf or NaN when it was unscaled, 0-d fp32;
            ``None`` before the first checked pass.
        checked: Whether ``found_inf`` is valid for the present gradients.
        used: Whether a pass has begun.
        skipped: Whether the last step was skipped: known on the host, or a 0-d fp32 flag.
        steps: Steps so far, skipped ones included.
    """

    def __init__(self, stepped: Binding) -> None:
        self._stepped = weakref.ref(stepped)
        self.state = GradState.READY
        self.open_pass: OpenPass | None = None
        self.found_inf: Tensor | None = None
        self.checked = False
        self.used = False
        self.skipped: Tensor | bool = False
        self.steps = 0
        self._skip_copy: HostCopy | None = None
        self._spare_flag: Tensor | None = None
        self._steps = 0
        self._before = GradState.READY
        self._aside: _Grads = []
        self._fresh: _Grads = []
        self._deferred: list[Deferred] = []
        self._sums: dict[int, Deferred | None] = {}
        self._mirrors: _Grads = []
        self._sentinel: tuple[nn.Parameter, int | None] | None = None
        self._unmirrored: list[TrackedPair] = []
        self._in_place = True
        self._in_buckets = False
        self._returned = False
        self._scaled = False
        self._modified = False

    @property
    def _optimized(self) -> Binding:
        stepped = self._stepped()
        if stepped is None:
            raise RuntimeError("The optimizer of these gradients has been deleted.")
        return stepped

    @property
    def continues_local(self) -> bool:
        """Whether the open pass, or a delayed pass that it completes, began in state ``LOCAL``."""
        return self._before is GradState.LOCAL

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
        scale: Tensor | float | None = None,
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
            scale: The scale of the pass, for sums in 16 bits; ``None`` if it is not known yet, so
                that they continue in fp32.
            sent_with: The scale of the gradients that this pass reduces across ranks; ``None`` if
                it reduces none.
            keeps: Whether a gradient set aside keeps its values; False if its memory is a DDP
                bucket.
            begun: Ids of parameters that another optimizer of the pass has prepared, which this one
                skips; extended by its own. ``None`` if the pass has one optimizer.
        """
        sums_low = self._optimized.sums_low and scale is not None
        if not (keeps or sums_low):
            self.settle()
        returned = self.state is GradState.LOCAL and sent_with is not None
        aside: _Grads = []
        back: _Grads = []
        delayed = self.state is GradState.DELAYED
        pairs, params = (
            self._optimized.pairs,
            self._optimized.params() if begun is not None or not identity else [],
        )
        if begun is not None:
            pairs = [pair for pair in pairs if id(pair.master) not in begun]
            params = [param for param in params if id(param) not in begun]
            begun.update(map(id, params))
        sums: list[low_sums.Sum] = []
        if sums_low and not delayed:
            sums = self._sums_so_far(pairs, scale)
            summed = {id(pair.master) for pair, _ in sums}
            pairs = [pair for pair in pairs if id(pair.master) not in summed]
            params = [param for param in params if id(param) not in summed]
        if returned:
            by = 1.0 if sent_with is None else sent_with
            aside, back = _unreduced(pairs, params, by, identity)
        elif not (delayed or identity):
            aside = _present(params, keeps=keeps)
        # Nothing below can fail, and the state that abort() reads is set before any gradient.
        self._in_place = identity or delayed
        self._in_buckets = not keeps
        self._scaled = not identity
        self.used = True
        self.open_pass = opened
        if delayed:
            return
        self._unmirrored = [pair for pair in pairs if pair.mirrors_grad]
        self._aside, self._returned, self._before = aside, returned, self.state
        self.state = GradState.OPEN
        self._sums = low_sums.give_back(sums)
        for pair in self._unmirrored:  # after absorb_raw() no other model parameter has a gradient
            pair.model.grad, pair.mirrors_grad = None, False
        for param, _ in aside:
            param.grad = None
        for param, grad in back:
            param.grad = grad

    def _sums_so_far(
        self, pairs: Iterable[TrackedPair], scale: Tensor | float | None
    ) -> list[low_sums.Sum]:
        """Returns the sums in 16 bits that the pass that begins adds to, at its scale."""
        # An overflow that no other rank knows of yet is sent to them, as inf in the sum.
        known = self.checked and self.state is not GradState.LOCAL
        by = 1.0 if scale is None else scale
        return low_sums.scaled_by(pairs, by, self.found_inf if known else None)

    def delay(self) -> None:
        """Leaves the gradients of the pass scaled, for a later pass to unscale."""
        self.state = GradState.DELAYED

    def accumulate(
        self,
        unscale_: Callable[[list[Tensor]], None] | None,
        done: set[int] | None = None,
        factors: Sequence[Factor] | None = None,
        *,
        checks: bool = False,
    ) -> None:
        """Computes the unscaled fp32 gradients of the pass, plus earlier ones.

        :meth:`roll_back` reverts it until :meth:`commit`: the sums use the memory of the fresh
        gradients and leave those set aside unchanged.

        Args:
            unscale_: Divides dense gradients by the loss scale in place; ``None`` for a scale of
                exactly 1.
            done: Ids of parameters that another optimizer of the pass has processed; extended by
                this one's.
            factors: What ``unscale_`` multiplies by, for gradients that stay in 16 bits; ``None``
                if none may.
            checks: Whether ``unscale_`` checks gradients for inf and NaN.
        """
        done = set() if done is None else done
        reached = self._reached(done)
        done.update(id(pair.model) for pair, _ in reached)
        in_model = not self._returned or self._optimized.sums_low
        if factors is not None and in_model and self._optimized.defers():
            reached = self._defer(reached, factors, unscale_ if checks else None)
        pairs = [pair for pair, _ in reached]
        own = [pair.master for pair in pairs]
        # In the masters' memory layout: a model moved to channels_last has another.
        models = [pair.model for pair in pairs]
        fresh = master.fp32_copies([grad for _, grad in reached], models, own)
        if unscale_ is not None:
            unscale_(finite.dense_values(fresh) + self._own_values(done))
        # Masters hold gradients if the loss uses them directly, or from earlier passes at scale 1.
        earlier = [param.grad for param in own]
        adds = any(grad is not None for grad in earlier)
        if adds:
            fresh = master.sums(fresh, earlier)
        self._fresh = list(zip(own, fresh, strict=True))
        if self._aside and not self._returned:
            self._add_aside()
        if pairs and (adds or self._scaled):
            self._mirror_sums(pairs, earlier)
        if self._unmirrored:
            self._mirrors += self._unreached_mirrors()

    def _defer(
        self,
        reached: Sequence[tuple[TrackedPair, Tensor]],
        factors: Sequence[Factor],
        check: Callable[[list[Tensor]], None] | None,
    ) -> list[tuple[TrackedPair, Tensor]]:
        """Leaves gradients in 16 bits; returns those that cannot stay so."""
        aside = {id(param) for param, _ in self._aside}
        rest: list[tuple[TrackedPair, Tensor]] = []
        for pair, grad in reached:
            if id(pair.master) in aside or not deferred.can_defer(pair, grad):
                rest.append((pair, grad))
                continue
            earlier = self._sums.get(id(pair.master))
            if earlier is not None and earlier.values is dtensor.local(grad):
                each, each.factors = earlier, tuple(factors)
            else:
                each = Deferred(pair, grad, factors)
            self._deferred.append(each)
            self._mirrors.append((pair.model, each.mirror(pair.model)))
        if check is not None:
            deferred.in_fp32(self._deferred, check, scaled=True)
        return rest

    def settle(self) -> None:
        """Computes every fp32 gradient that was deferred."""
        for pair in self._optimized.pairs:
            each = deferred.of(pair.master)
            if each is not None:
                each.settle()

    def _reached(self, done: set[int]) -> list[tuple[TrackedPair, Tensor]]:
        """Returns the pairs whose model parameter received a gradient, and that gradient."""
        return [
            (pair, grad)
            for pair in self._optimized.pairs
            if (grad := pair.model.grad) is not None
            and not (pair.mirrors_grad and mirror_gradients.is_included(grad))
            and not (done and id(pair.model) in done)
        ]

    def _own_values(self, done: set[int]) -> list[Tensor]:
        """Returns the dense gradients of stepped parameters that are not in ``done``; adds them."""
        params = self._optimized.params()
        ids = {*map(id, params)}
        if done or len(ids) < len(params):
            params = list({id(p): p for p in params if id(p) not in done}.values())
        done |= ids
        return _dense(params)

    def _add_aside(self) -> None:
        known = {id(param) for param, _ in self._fresh}
        params = [param for param, _ in self._aside if id(param) not in known]
        self._fresh += [(param, grad) for param in params if (grad := param.grad) is not None]
        earlier = {id(param): grad for param, grad in self._aside}
        added = [earlier.get(id(param)) for param, _ in self._fresh]
        total = master.sums([grad for _, grad in self._fresh], added)
        self._fresh = [(param, grad) for (param, _), grad in zip(self._fresh, total, strict=True)]

    def _mirror_sums(self, pairs: Sequence[TrackedPair], earlier: Sequence[Tensor | None]) -> None:
        """Rounds unscaled sums into the model's gradients, which are still those of the pass."""
        sums = {id(param): grad for param, grad in self._fresh}
        changed = [
            pair
            for pair, before in zip(pairs, earlier, strict=True)
            if self._scaled or before is not None
        ]
        mirror_gradients.write(changed, [sums[id(pair.master)] for pair in changed])

    def _unreached_mirrors(self) -> _Grads:
        """Returns the model's copies of master gradients that the pass did not reach."""
        aside = {id(param): grad for param, grad in self._aside}
        mirrors: _Grads = []
        for pair in self._unmirrored:
            if pair.model.grad is not None:
                continue
            waiting = deferred.of(pair.master)
            if waiting is not None:
                mirrors.append((pair.model, waiting.mirror(pair.model)))
            elif (grad := aside.get(id(pair.master), pair.master.grad)) is not None:
                mirrors.append((pair.model, mirror_gradients.rounded(grad, pair.model)))
        return mirrors

    def commit(self, *, sent: bool = True) -> None:
        """Installs the gradients that :meth:`accumulate` computed. Cannot fail.

        Args:
            sent: Whether the gradients are reduced across ranks, or need not be.
        """
        earlier = [] if self._returned else self._aside  # the sums include returned ones
        for param, grad in (*earlier, *self._fresh, *self._mirrors):
            param.grad = grad
        for each in self._deferred:
            each.install()
        for pair in self._optimized.pairs:
            mirror_gradients.mark(pair)
        self._end_pass(GradState.READY if sent else GradState.LOCAL)
        if self.checked:
            groups = self._optimized.optimizer.param_groups
            present = (p for group in groups for p in group["params"] if deferred.has_grad(p))
            first = next(present, None)
            self._sentinel = None if first is None else (first, _version(first))

    def roll_back(self) -> None:
        """Discards a pass that could not be unscaled, and the delayed passes before it.

        Restores the gradients from before the first of them; at a scale of exactly 1, see
        :meth:`abort`.
        """
        self.state = GradState.OPEN
        self._in_place = not self._scaled
        self.abort(self.open_pass)

    def abort(self, aborted: OpenPass | None = None, earlier: OpenPass | None = None) -> None:
        """Discards the pass and restores the gradients that were set aside.

        A pass that accumulated in place (scale 1, or gradients still scaled) leaves what it added,
        as plain autograd does. Sums in 16 bits are zeroed, and the next step is skipped; see
        Note [Sums in 16 bits].

        Args:
            aborted: The pass; nothing happens unless it is the open one.
            earlier: The delayed pass before it, still to be finished.
        """
        if aborted is not self.open_pass:
            return
        if self.state is GradState.DELAYED:
            self.open_pass = earlier
            return
        spoiled = low_sums.spoiled(self._optimized.pairs, self._sums)
        for pair in self._optimized.pairs:
            pair.model.grad = None
        if not self._in_place:
            for param in self._optimized.params():
                param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        for pair, grad in spoiled:
            pair.model.grad = grad
        if spoiled:
            self.raise_flag(torch.ones((), device=spoiled[0][1].device))
        unmirrored = self._unmirrored
        self._end_pass(self._before)
        self.open_pass = earlier
        self._mirror_again(unmirrored)

    def _end_pass(self, state: GradState) -> None:
        self._aside, self._fresh, self._mirrors, self._unmirrored = [], [], [], []
        self._deferred, self._sums = [], {}
        self._before = self.state = state
        self.open_pass = None

    def _mirror_again(self, pairs: Iterable[TrackedPair]) -> None:
        for pair in pairs:
            grad = pair.master.grad
            if grad is None or pair.model.grad is not None:
                continue
            try:
                pair.model.grad = mirror_gradients.rounded(grad, pair.model)
            except RuntimeError:  # out of memory: the model has no mirror, but no gradient is lost
                continue
            mirror_gradients.mark(pair)

    # -- outside of passes -------------------------------------------------------------------

    @untraced
    def absorb_raw(self) -> None:
        """Applies gradient changes made outside passes to the masters.

        These are gradients from a plain ``loss.backward()``, and the model's gradients that a
        script cleared, clipped or wrote in another way; see :mod:`.mirror_gradients`.
        """
        if self.state in (GradState.OPEN, GradState.DELAYED):
            return
        if self._optimized.pairs:
            self._absorb_models()
        if (self.checked or self.state is GradState.LOCAL) and not self.has_grads():
            self.reset()

    def _absorb_models(self) -> None:
        raw: list[TrackedPair] = []
        modified: list[TrackedPair] = []
        with without_counting():
            for pair in self._optimized.pairs:
                grad = pair.model.grad
                if grad is None:
                    if pair.mirrors_grad:  # cleared
                        pair.master.grad, pair.mirrors_grad = None, False
                elif not pair.mirrors_grad:
                    raw.append(pair)
                elif mirror_gradients.is_modified(grad, in_buckets=self._in_buckets):
                    modified.append(pair)
            self._absorb(self._left_low(raw))
            self._carry_over(modified)

    def _left_low(self, raw: list[TrackedPair]) -> list[TrackedPair]:
        """Leaves gradients of a plain backward pass in 16 bits; returns those that cannot stay so.

        What DistributedDataParallel's next pass would overwrite cannot: a view of its buckets.
        """
        if not raw or not self._optimized.defers():
            return raw
        rest: list[TrackedPair] = []
        for pair in raw:
            grad = pair.model.grad
            if grad is None or not (_owns_storage(grad) and deferred.can_defer(pair, grad)):
                rest.append(pair)
                continue
            each = Deferred(pair, grad, ())
            pair.model.grad = each.mirror(pair.model)
            each.install()
            mirror_gradients.mark(pair)
        return rest

    def _absorb(self, raw: Sequence[TrackedPair]) -> None:
        """Adds gradients of a plain backward pass to the masters'."""
        if not raw:
            return
        grads = [grad for pair in raw if (grad := pair.model.grad) is not None]
        own = [pair.master for pair in raw]
        fresh = master.fp32_copies(grads, [pair.model for pair in raw], own)
        earlier = [param.grad for param in own]
        totals = master.sums(fresh, earlier)
        added = [i for i, grad in enumerate(earlier) if grad is not None]
        mirror_gradients.write([raw[i] for i in added], [totals[i] for i in added])
        for pair, grad in zip(raw, totals, strict=True):
            pair.master.grad = grad
            mirror_gradients.mark(pair)

    def _carry_over(self, modified: Sequence[TrackedPair]) -> None:
        """Applies changes of mirror gradients to the masters'."""
        if not modified:
            return
        dense: list[TrackedPair] = []
        for pair in modified:
            mirror, own = pair.model.grad, pair.master.grad
            if mirror is None or own is None or mirror.is_sparse or own.is_sparse:
                pair.master.grad = None  # replaced as a whole
            else:
                dense.append(pair)
        self._absorb([pair for pair in modified if pair.master.grad is None])
        mirror_gradients.carry_over(dense)
        for pair in dense:
            mirror_gradients.mark(pair)
        self._modified = True

    def absorb_changes(self) -> None:
        """Applies every gradient change made since the last pass, before the next begins.

        Works on the device, without a host sync.
        """
        self.absorb_raw()
        if self.state is GradState.DELAYED:
            return
        sentinel = self._sentinel
        if self._modified or (sentinel is not None and _version(sentinel[0]) != sentinel[1]):
            self._recheck()
        self._modified = False

    @torch.no_grad()
    def _recheck(self) -> None:
        """Sets the flag from the present gradients."""
        if not self.checked or self.found_inf is None:
            return
        grads = [grad for param in self._optimized.params() if (grad := param.grad) is not None]
        flag = self._flag_to_write(self.found_inf)
        flag.zero_()
        finite.unscale_and_check_(finite.dense_values(grads), torch.ones_like(flag), flag)

    def absorb_partial(self) -> None:
        """Moves the gradients so far of an open pass at scale 1, for a step during the pass."""
        self._absorb([pair for pair, _ in self._reached(set())])

    @property
    def is_scaled(self) -> bool:
        """Whether the open pass scales gradients by a factor other than exactly 1."""
        return self._scaled

    def raise_flag(self, found_inf: Tensor) -> None:
        """Makes steps skip if ``found_inf`` (0-d) is set, until the gradients are cleared."""
        if self.found_inf is None or self.found_inf.device != found_inf.device:
            self.found_inf = torch.zeros_like(found_inf)
            self.checked = False
        flag = self._flag_to_write(self.found_inf)
        if self.checked:
            finite.raise_flag_(flag, found_inf)
        else:
            flag.copy_(found_inf)
        self.checked = True

    def _flag_to_write(self, flag: Tensor) -> Tensor:
        """Returns the flag; keeps its value elsewhere if it tells whether the last step skipped.

        The flag itself stays in place, for CUDA graphs.
        """
        if flag is self.skipped:
            spare = self._spare_flag
            if spare is None or spare.device != flag.device:
                spare = self._spare_flag = torch.empty_like(flag)
            self.skipped = spare.copy_(flag)
        return flag

    @untraced
    def note_step(self, *, skipped: Tensor | bool) -> None:
        """Records whether a step that begins is skipped."""
        self.skipped, self._skip_copy = skipped, None
        self.steps += 1

    def skipped_on_host(self) -> bool | None:
        """Returns whether the last step was skipped, None until the answer has arrived."""
        skipped = self.skipped
        if isinstance(skipped, bool):
            return skipped
        if self._skip_copy is None:
            if capturing(skipped.device):
                return None
            self._skip_copy = HostCopy(skipped)
        copy = self._skip_copy
        return bool(copy.wait().tolist()) if copy.arrived else None  # sync: none, it has arrived

    def zero(self, *, set_to_none: bool) -> None:
        """Clears the gradients of all pairs, model and master, and any pending overflow."""
        for pair in self._optimized.pairs:
            if set_to_none:
                pair.model.grad = pair.master.grad = None
                pair.mirrors_grad = False
            else:
                clear_grad(pair.model, set_to_none=False)
                clear_grad(pair.master, set_to_none=False)
                mirror_gradients.mark_again(pair)
        self.reset()

    def on_cleared(self, models: Container[int]) -> None:
        """Drops a pending overflow and open passes if no other parameter has a gradient.

        Args:
            models: Ids of the models' parameters whose gradients were just cleared.
        """
        pairs = {id(pair.master): id(pair.model) for pair in self._optimized.pairs}
        for pair in self._optimized.pairs:
            if id(pair.model) in models:
                mirror_gradients.mark_again(pair)
        if all(
            pairs.get(id(p), id(p)) in models or not deferred.has_grad(p)
            for p in self._optimized.params()
        ):
            self.reset()

    def reset(self) -> None:
        """Drops open passes and a pending overflow."""
        self.end_iteration()
        self._end_pass(GradState.READY)
        self.checked, self._sentinel = False, None

    def end_iteration(self) -> None:
        """Assigns the passes that follow to the next step."""
        self._steps += 1

    def mark_scaled(self, scaled: bool) -> None:
        """Sets whether the gradients are still scaled, for scripts that set apex's flag."""
        self.state = GradState.DELAYED if scaled else GradState.READY

    def has_grads(self) -> bool:
        """Returns whether a stepped parameter has a gradient, without computing a deferred one."""
        return any(map(deferred.has_grad, self._optimized.params()))


def _version(param: nn.Parameter) -> int | None:
    """Returns what changes if the gradient of ``param`` is written; the same on all ranks."""
    if deferred.of(param) is not None:
        return -1  # reading computes it
    return None if param.grad is None else param.grad._version


def _present(params: Iterable[nn.Parameter], *, keeps: bool) -> _Grads:
    # Masters included: a loss that uses them directly gives them scaled gradients.
    present = [(param, grad) for param in params if (grad := param.grad) is not None]
    once = {id(param): (param, grad) for param, grad in present}
    return [(param, grad if keeps else grad.clone()) for param, grad in once.values()]


def _unreduced(
    pairs: Sequence[TrackedPair],
    params: Iterable[nn.Parameter],
    scale: Tensor | float,
    identity: bool,
) -> tuple[_Grads, _Grads]:
    """Returns the unreduced gradients, and scaled copies for the tensors that accumulate."""
    places = {id(pair.master): (pair.master, pair.model) for pair in pairs}
    if not identity:
        places = {id(param): places.get(id(param), (param, param)) for param in params}
    aside = [(own, grad) for own, _ in places.values() if (grad := own.grad) is not None]
    back = [
        (target, (grad * scale).to(device=target.device, dtype=target.dtype))
        for own, target in places.values()
        if (grad := own.grad) is not None
    ]
    return aside, back


def _owns_storage(grad: Tensor) -> bool:
    own = dtensor.local(grad)
    return own.layout is torch.strided and own.untyped_storage().nbytes() == own.nbytes


def _dense(params: list[nn.Parameter]) -> list[Tensor]:
    """Returns the values of the gradients, after sparse ones coalesced and partial ones reduced."""
    grads = [grad for param in params if (grad := param.grad) is not None]
    if finite.are_plain(grads):
        return grads
    for param in params:
        if param.grad is not None:
            param.grad = dtensor.laid_out_as(param, param.grad)
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()
    return finite.dense_values([grad for param in params if (grad := param.grad) is not None])
