"""The gradients of one optimizer through a backward pass: set aside, unscaled, added up, kept."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from apex._core import finite, master
from apex._core.master import Pair
from apex._torch import dtensor
from apex._torch.dynamo import untraced

_Grads = list[tuple[nn.Parameter, Tensor]]


class OpenPass(Protocol):
    """A backward pass whose gradients are not unscaled yet."""

    def finish(self) -> None:
        """Unscales them now; later calls do nothing."""


class PassGradients:
    """Gradients of the parameters that one optimizer trains, in whatever state a pass leaves them.

    A pass is :meth:`begin`, autograd, :meth:`add_up`, and :meth:`keep` or :meth:`drop`; or
    :meth:`abort`.

    Attributes:
        pairs: Low-precision model parameters with their fp32 masters.
        found_inf: 0-d fp32 flag: a gradient since the last step held inf or NaN; ``None`` until
            a checked backward pass.
        checked: Whether a pass since the last step has set the flag.
        gathered: Whether the model's gradients are in those of the masters.
        scaled_gradients: Whether gradients were left scaled, for a later pass to unscale.
        open_pass: The backward pass still to be finished, if any.
        unsent: Whether gradients accumulated under ``no_sync`` wait to be sent to other ranks.
    """

    def __init__(self) -> None:
        """Starts without pairs and gradients."""
        self.pairs: list[Pair] = []
        self.found_inf: Tensor | None = None
        self.checked = False
        self.gathered = False
        self.scaled_gradients = False
        self.open_pass: OpenPass | None = None
        self.unsent = False
        self._stash: _Grads = []
        self._fresh: _Grads = []
        self._in_place = True
        self._returned = False
        self._model_scaled = False
        self._model_shows = False

    def params(self) -> list[nn.Parameter]:
        """Returns every parameter that the optimizer steps, masters included."""
        raise NotImplementedError

    def trained(self) -> list[nn.Parameter]:
        """Returns the models' parameters that the optimizer trains, by a master or themselves."""
        return [*(pair.model for pair in self.pairs), *self.direct()]

    def direct(self) -> list[nn.Parameter]:
        """Returns the parameters that are stepped themselves, without a master."""
        masters = {id(pair.master) for pair in self.pairs}
        return [param for param in self.params() if id(param) not in masters]

    # -- one backward pass -------------------------------------------------------------------

    def begin(
        self, *, identity: bool, sent_with: Tensor | float | None = 1.0, keeps: bool = True
    ) -> None:
        """Makes room for the gradients of one backward pass.

        Gradients that are already unscaled are set aside, so that the pass starts from none; ones
        that are still scaled (``delay_unscale``) stay and accumulate. Ones that other ranks still
        miss go back to where the pass accumulates, so that they are sent with its own.

        Args:
            identity: Whether the loss scale is exactly 1 and unchecked: then the parameters
                without a master accumulate in place.
            sent_with: The scale of the gradients that this pass sends to other ranks; ``None``
                where it sends none.
            keeps: Whether a gradient that is set aside keeps its values; False where its memory is
                a bucket of messages.
        """
        self._notice_cleared()
        returned = self.unsent and sent_with is not None
        aside: _Grads = []
        back: _Grads = []
        if not self.scaled_gradients:
            if self.pairs:
                self._gather_left_over()
            if returned:
                aside, back = self._unsent(1.0 if sent_with is None else sent_with, identity)
            elif not identity:
                aside = self._present(keeps=keeps)
        # Nothing below fails: a pass that does not begin leaves no trace.
        self._in_place = identity or self.scaled_gradients
        self._model_scaled = not identity
        if self.scaled_gradients:
            return
        self._returned = returned
        self._model_shows = False
        for pair in self.pairs:
            pair.model.grad = None
        for param, _ in aside:
            param.grad = None
        for param, grad in back:
            param.grad = grad
        self._stash += aside

    def _present(self, *, keeps: bool) -> _Grads:
        # Masters too: a loss may use them directly, and then they get scaled gradients.
        present = {id(p): (p, grad) for p in self.params() if (grad := p.grad) is not None}
        return [(param, grad if keeps else grad.clone()) for param, grad in present.values()]

    def _unsent(self, scale: Tensor | float, identity: bool) -> tuple[_Grads, _Grads]:
        """Returns gradients that other ranks miss, and them scaled where the pass accumulates."""
        places = {id(pair.master): (pair.master, pair.model) for pair in self.pairs}
        if not identity:
            places.update((id(param), (param, param)) for param in self.direct())
        aside = [(own, grad) for own, _ in places.values() if (grad := own.grad) is not None]
        back = [
            (target, (grad * scale).to(target.dtype))
            for own, target in places.values()
            if (grad := own.grad) is not None
        ]
        return aside, back

    def unscale(
        self, unscale_: Callable[[list[Tensor]], None] | None, done: set[int] | None = None
    ) -> None:
        """Turns the scaled gradients of the pass into unscaled fp32 ones, added to earlier ones.

        Args:
            unscale_: Divides dense gradients by the loss scale in place; ``None`` for a
                scale of exactly 1.
            done: Ids of parameters that another optimizer of the pass has unscaled; those of this
                one are added.
        """
        self.add_up(unscale_, done)
        self.keep()

    def add_up(
        self, unscale_: Callable[[list[Tensor]], None] | None, done: set[int] | None = None
    ) -> None:
        """Does the work of :meth:`unscale`; until :meth:`keep`, :meth:`drop` takes it back.

        The sums are made in the memory of the fresh gradients: those set aside are as they were.
        """
        pairs = [pair for pair in self.pairs if pair.model.grad is not None]
        fresh = master.fp32_grads([pair.model for pair in pairs])
        if unscale_ is not None:
            done = set() if done is None else done
            present = {id(param): param for param in self.params() if param.grad is not None}
            own = {k: p for k, p in present.items() if k not in done} if done else present
            done.update(own)
            unscale_(finite.dense_values(fresh + _grads(list(own.values()))))
        # A loss may use masters directly, too.
        fresh = master.sums(fresh, [pair.master.grad for pair in pairs])
        self._fresh = [(pair.master, grad) for pair, grad in zip(pairs, fresh, strict=True)]
        if self._stash and not self._returned:
            self._add_stash()

    def _add_stash(self) -> None:
        known = {id(param) for param, _ in self._fresh}
        params = [param for param, _ in self._stash if id(param) not in known]
        self._fresh += [(param, grad) for param in params if (grad := param.grad) is not None]
        earlier = {id(param): grad for param, grad in self._stash}
        added = [earlier.get(id(param)) for param, _ in self._fresh]
        total = master.sums([grad for _, grad in self._fresh], added)
        self._fresh = [(param, grad) for (param, _), grad in zip(self._fresh, total, strict=True)]

    def keep(self) -> None:
        """Makes what :meth:`add_up` computed the gradients. Cannot fail."""
        earlier = [] if self._returned else self._stash  # the pass has added to returned ones
        for param, grad in (*earlier, *self._fresh):
            param.grad = grad
        self._stash, self._fresh = [], []
        self._model_shows = bool(self.pairs)
        self.gathered = True
        self.scaled_gradients = False

    def drop(self) -> None:
        """Forgets a pass that could not be unscaled, and those that it was to close.

        The gradients are those from before the first of them; at a scale of exactly 1 as
        :meth:`abort` says.
        """
        self._fresh = []
        self.scaled_gradients = False
        self._in_place = not self._model_scaled
        self.abort()

    def raise_flag(self, found_inf: Tensor) -> None:
        """Makes the next step skip where ``found_inf`` (0-d) is set."""
        if self.found_inf is None or self.found_inf.device != found_inf.device:
            self.found_inf = torch.zeros_like(found_inf)
            self.checked = False
        if self.checked:
            finite.raise_flag_(self.found_inf, found_inf)
        else:
            self.found_inf.copy_(found_inf)
        self.checked = True

    def abort(self, earlier: OpenPass | None = None) -> None:
        """Forgets the pass: the gradients are those from before it, where they were set aside.

        A pass that accumulated in place (scale 1, or gradients still scaled) leaves what it added,
        as plain autograd does.

        Args:
            earlier: The pass before it that delayed, still to be finished.
        """
        self.open_pass = earlier
        if self.scaled_gradients:
            return
        self._model_shows = False
        for pair in self.pairs:
            pair.model.grad = None
        if not self._in_place:
            for param in self.params():
                param.grad = None
        for param, grad in self._stash:
            param.grad = grad
        self._stash = []

    def _gather_left_over(self) -> None:
        """Takes gradients of a plain ``loss.backward()``, which nobody scaled, to the masters."""
        if not self.gathered:
            self.gathered = self._gather_raw(self.pairs)

    def _gather_raw(self, pairs: Iterable[Pair]) -> bool:
        raw = [pair for pair in pairs if pair.model.grad is not None]
        if raw:
            fresh = master.fp32_grads([pair.model for pair in raw])
            master.add_grads_([pair.master for pair in raw], fresh)
        return bool(raw)

    # -- after the step ----------------------------------------------------------------------

    @untraced
    def end_step(self) -> None:
        """Clears what the step has used up."""
        # Nobody else clears the masters' gradients when the model's own are zeroed by
        # ``model.zero_grad()`` under a wrapper, so they go once they are used.
        for pair in self.pairs:
            pair.master.grad = None
        # The model's gradients stay; a plain backward after them is to be found, unless they are
        # scaled: those must not be taken for unscaled ones.
        self.gathered = self._model_scaled
        self.checked = False

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears the gradients of all pairs, model and master, and forgets any overflow."""
        for pair in self.pairs:
            _clear(pair.model, set_to_none=set_to_none)
            _clear(pair.master, set_to_none=set_to_none)
        self._forget()

    def clear(self, models: Container[int], *, set_to_none: bool) -> None:
        """Clears the masters' gradients of the model parameters with these ids.

        Once no master has a gradient, the binding is as after :meth:`zero_grad`.
        """
        for pair in self.pairs:
            if id(pair.model) in models:
                _clear(pair.master, set_to_none=set_to_none)
        if self.pairs and all(pair.master.grad is None for pair in self.pairs):
            self._forget()

    def _notice_cleared(self) -> None:
        if self._model_shows and all(pair.model.grad is None for pair in self.pairs):
            # A module around the model, by its zero_grad, could not reach those of the masters.
            for pair in self.pairs:
                pair.master.grad = None
            self._model_shows = self.gathered = False
            if all(param.grad is None for param in self.params()):
                self._forget()
        if self.unsent and all(param.grad is None for param in (*self.params(), *self.trained())):
            self.unsent = self.checked = False  # dropped: what one rank alone knows goes with them

    def _forget(self) -> None:
        self._stash = []
        self._model_shows = False
        self.open_pass = None
        self.checked = self.gathered = self.scaled_gradients = self.unsent = False


def _clear(param: nn.Parameter, *, set_to_none: bool) -> None:
    if set_to_none:
        param.grad = None
    elif param.grad is not None:
        if param.grad.grad_fn is not None:
            param.grad = param.grad.detach()  # not in place: it may be a view of a bucket
        param.grad.requires_grad_(False).zero_()


def _grads(params: list[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients that there are, made whole.

    Duplicate rows of sparse ones are summed, and DTensors that are parts of a sum over ranks.
    """
    if dtensor.any_dtensor(params):
        for param in params:
            if param.grad is not None:
                param.grad = dtensor.laid_out_as(param, param.grad)
    grads = [grad for param in params if (grad := param.grad) is not None]
    if {grad.layout for grad in grads} <= {torch.strided}:
        return grads
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
    return [grad for param in params if (grad := param.grad) is not None]
