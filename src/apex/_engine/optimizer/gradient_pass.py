"""What one backward pass sets aside, receives and ends with; :mod:`.gradients` runs it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor, nn

from apex._core import finite, master
from apex._engine.optimizer import deferred, fp32_sums, mirror_gradients, one_pass
from apex._engine.optimizer.deferred import Deferred, Factor
from apex._engine.tracked_pair import TrackedPair

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding
    from apex._engine.optimizer.gradients import GradState

Grads = list[tuple[nn.Parameter, Tensor]]
"""Parameters and their gradients."""

Received = list[tuple[TrackedPair, Tensor]]
"""Pairs and the gradients of their model parameters."""


class GradientPass:
    """One backward pass over the gradients of one optimizer, with delayed ones that continue it.

    What it computes can fail and changes no gradient from before the pass; :meth:`make_room`,
    :meth:`install` and :meth:`restore` cannot fail.

    Attributes:
        before: The state of the gradients before the pass.
        aside: The gradients that were set aside.
        scaled: Whether gradients are scaled by a factor other than exactly 1.
        unmirrored: The pairs whose mirror gradients made room.
        pairs: Those that no other optimizer of the pass has prepared.
    """

    __slots__ = (
        *("aside", "before", "pairs", "scaled", "unmirrored"),
        *("_back", "_deferred", "_fresh", "_mirrors", "_returned", "_totals"),
    )

    def __init__(self, before: GradState, *, identity: bool = True) -> None:
        """Begins a pass that sets nothing aside.

        Args:
            before: The state of the gradients.
            identity: Whether the loss scale is exactly 1 and unchecked.
        """
        self.before = before
        self.scaled = not identity
        self.unmirrored: list[TrackedPair] = []
        self.pairs: Sequence[TrackedPair] = ()
        self.aside: Grads = []
        self._back: Grads = []
        self._returned = False
        self._fresh: Grads = []
        self._deferred: list[Deferred] = []
        self._mirrors: Grads = []
        self._totals: Sequence[fp32_sums.Sums] = ()

    # -- before autograd runs ----------------------------------------------------------------

    def set_aside(
        self,
        pairs: Sequence[TrackedPair],
        params: Sequence[nn.Parameter],
        *,
        sent_with: Tensor | float | None,
        keeps: bool,
    ) -> None:
        """Finds what makes room for the gradients of the pass.

        Args:
            pairs: Those that no other optimizer of the pass has prepared.
            params: The parameters that are stepped; none if their gradients stay in place.
            sent_with: The scale that unreduced gradients return to the pass with; ``None`` if there
                are none.
            keeps: Whether a gradient set aside keeps its values.
        """
        self.unmirrored = [pair for pair in pairs if pair.mirrors_grad]
        if sent_with is not None:
            self._returned = True
            self.aside, self._back = _unreduced(pairs, params, sent_with, identity=not self.scaled)
        elif self.scaled:
            self.aside = _present(params, keeps=keeps)

    def make_room(self) -> None:
        """Sets gradients aside, and gives the model those to which the pass adds."""
        for pair in self.unmirrored:  # after absorb_raw() no other model parameter has a gradient
            pair.model.grad, pair.mirrors_grad = None, False
        for param, _ in self.aside:
            param.grad = None
        for param, grad in self._back:
            param.grad = grad
        self._back = []

    def drop_aside(self, cleared: Container[int]) -> None:
        """Drops what was set aside for the parameters with these ids."""
        self.aside = [(param, grad) for param, grad in self.aside if id(param) not in cleared]

    # -- after autograd has run --------------------------------------------------------------

    def accumulate(
        self,
        optimized: Binding,
        unscale_: Callable[[list[Tensor]], None] | None,
        done: set[int] | None = None,
        factors: Sequence[Factor] | None = None,
        *,
        checks: bool = False,
    ) -> None:
        """Computes the unscaled fp32 gradients of the pass, plus earlier ones.

        The sums use the memory of the fresh gradients and leave those set aside unchanged; see also
        Note [Sums in fp32].

        Args:
            optimized: The optimizer's state.
            unscale_: Divides dense gradients by the loss scale in place; ``None`` for a scale of
                exactly 1.
            done: Ids of parameters that another optimizer of the pass has processed; extended by
                this one's. ``None`` if the pass has one optimizer.
            factors: What ``unscale_`` multiplies by, for gradients that stay in 16 bits; ``None``
                if none may.
            checks: Whether ``unscale_`` checks gradients for inf and NaN.
        """
        if unscale_ is None and not optimized.pairs:
            return  # autograd has accumulated in place
        found = received(optimized.pairs, done)
        if factors is not None and found:
            found = self._keep_low(optimized, found, factors, unscale_ if checks else None)
        direct = [] if unscale_ is None else _direct_values(optimized.params(), done)
        if found:
            self._convert(found, direct, unscale_)
        else:
            if unscale_ is not None:
                unscale_(direct)
            self._add_aside()
        if self.unmirrored:
            self._mirrors += _mirrors_of_unreached(self.unmirrored, self.aside)

    def _convert(
        self,
        found: Received,
        direct: list[Tensor],
        unscale_: Callable[[list[Tensor]], None] | None,
    ) -> None:
        """Computes the gradients that exist in fp32 as a whole; see :meth:`accumulate`.

        Unscales those of parameters without a master, ``direct``, with them.
        """
        pairs = [pair for pair, _ in found]
        own = [pair.master for pair in pairs]
        # In the masters' memory layout: a model moved to channels_last has another.
        models = [pair.model for pair in pairs]
        fresh = master.fp32_copies([grad for _, grad in found], models, own)
        if unscale_ is not None:
            unscale_(finite.dense_values(fresh) + direct)
        # Masters hold gradients if the loss uses them directly, or from earlier passes at scale 1.
        earlier = [param.grad for param in own]
        adds = any(grad is not None for grad in earlier)
        if adds:
            fresh = master.sums(fresh, earlier)
        self._fresh = list(zip(own, fresh, strict=True))
        self._add_aside()
        if adds or self.scaled:
            # The model's gradients are still those of the pass. Sums begin with those of the pairs.
            totals = [grad for _, grad in self._fresh[: len(pairs)]]
            if not self.scaled:
                changed = [i for i, each in enumerate(earlier) if each is not None]
                pairs, totals = [pairs[i] for i in changed], [totals[i] for i in changed]
            mirror_gradients.write(pairs, totals)

    def _add_aside(self) -> None:
        if self.aside and not self._returned:
            self._fresh = _with_aside(self._fresh, self.aside)

    def _keep_low(
        self,
        optimized: Binding,
        found: Received,
        factors: Sequence[Factor],
        check: Callable[[list[Tensor]], None] | None,
    ) -> Received:
        """Takes the gradients that need no fp32 copies as a whole; returns the others.

        Args:
            optimized: The optimizer's state.
            found: What the pass brought.
            factors: What makes a gradient the master's.
            check: Takes fp32 copies, a block at a time.
        """
        kept: list[Deferred] = []
        summed: Sequence[list[fp32_sums.Added]] = ()
        if not self._returned and optimized.defers():
            kept, self._mirrors, found = _left_low(found, factors, self.aside)
            self._deferred = kept
        if found and not self._returned and one_pass.goes_by_blocks(optimized):
            summed, found = fp32_sums.split(found, factors, self.aside)
        if check is not None:
            added = [each.gradient for each in chain.from_iterable(summed)]
            deferred.in_fp32([*kept, *added], check, scaled=True)
        self._totals = [fp32_sums.Sums(each) for each in summed]
        return found

    def install(self) -> None:
        """Installs the gradients that :meth:`accumulate` computed."""
        earlier = [] if self._returned else self.aside  # the sums include returned ones
        for param, grad in (*earlier, *self._fresh, *self._mirrors):
            param.grad = grad
        for each in self._deferred:
            each.install()
        for totals in self._totals:
            totals.add()

    def restore(self, optimized: Binding) -> None:
        """Restores the gradients that were set aside."""
        for pair in self.pairs:
            pair.model.grad = None
        if self.scaled:
            for param in optimized.params():
                param.grad = None
        for param, grad in self.aside:
            param.grad = grad


def _present(params: Iterable[nn.Parameter], *, keeps: bool) -> Grads:
    """Returns the gradients to set aside, copied unless they keep their values."""
    # Masters included: a loss that uses them directly gives them scaled gradients.
    found = [(param, grad) for param in params if (grad := param.grad) is not None]
    once = {id(param): (param, grad) for param, grad in found}
    return [(param, grad if keeps else grad.clone()) for param, grad in once.values()]


def _unreduced(
    pairs: Sequence[TrackedPair],
    params: Iterable[nn.Parameter],
    scale: Tensor | float,
    *,
    identity: bool,
) -> tuple[Grads, Grads]:
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


def received(pairs: Iterable[TrackedPair], done: set[int] | None) -> Received:
    """Returns the pairs whose model parameter received a gradient, and that gradient.

    Leaves out those whose model parameter is in ``done``, by id; adds the others to it.
    """
    found = [
        (pair, grad)
        for pair in pairs
        if (grad := pair.model.grad) is not None
        and not (pair.mirrors_grad and mirror_gradients.is_included(grad))
        and not (done and id(pair.model) in done)
    ]
    if done is not None:
        done.update(id(pair.model) for pair, _ in found)
    return found


def _left_low(
    received: Received, factors: Sequence[Factor], aside: Grads
) -> tuple[list[Deferred], Grads, Received]:
    """Returns the gradients that stay in 16 bits, the models' mirrors of them, and the others.

    Args:
        received: What the pass brought.
        factors: What makes a gradient the master's.
        aside: Gradients that are added.
    """
    added = {id(param) for param, _ in aside}
    low: list[Deferred] = []
    mirrors: Grads = []
    rest: Received = []
    for (pair, grad), values in zip(received, deferred.deferrable(received), strict=True):
        if values is None or id(pair.master) in added:
            rest.append((pair, grad))
            continue
        each = Deferred(pair, values, factors)
        low.append(each)
        mirrors.append((pair.model, each.mirror(pair.model)))
    return low, mirrors, rest


def _direct_values(params: list[nn.Parameter], done: set[int] | None) -> list[Tensor]:
    """Returns the gradients of parameters that are not in ``done``, by id; adds these to it.

    They are dense; see :func:`apex._core.finite.values_of`.
    """
    ids = {*map(id, params)}
    if done or len(ids) < len(params):
        params = list({id(p): p for p in params if not done or id(p) not in done}.values())
    if done is not None:
        done |= ids
    return finite.values_of(params)


def _with_aside(fresh: Grads, aside: Grads) -> Grads:
    """Returns the gradients of a pass plus those set aside; parameters of ``fresh`` come first."""
    known = {id(param) for param, _ in fresh}
    params = [param for param, _ in aside if id(param) not in known]
    fresh = fresh + [(param, grad) for param in params if (grad := param.grad) is not None]
    earlier = {id(param): grad for param, grad in aside}
    added = [earlier.get(id(param)) for param, _ in fresh]
    total = master.sums([grad for _, grad in fresh], added)
    return [(param, grad) for (param, _), grad in zip(fresh, total, strict=True)]


def _mirrors_of_unreached(pairs: Iterable[TrackedPair], aside: Grads) -> Grads:
    """Returns gradients for model parameters without one whose master has one, perhaps aside."""
    earlier = {id(param): grad for param, grad in aside}
    mirrors: Grads = []
    for pair in pairs:
        if pair.model.grad is not None:
            continue
        waiting = deferred.of(pair.master)
        if waiting is not None:
            mirrors.append((pair.model, waiting.mirror(pair.model)))
        elif (grad := earlier.get(id(pair.master), pair.master.grad)) is not None:
            mirrors.append((pair.model, mirror_gradients.rounded(grad, pair.model)))
    return mirrors
