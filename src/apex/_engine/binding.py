"""One optimizer under amp: fp32 masters, gradients in, the skip, values back into the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes, finite, master
from apex._core.master import Pair

CastsOff = Callable[[], AbstractContextManager[None]]


class OpenPass(Protocol):
    """A backward pass whose gradients are not unscaled yet."""

    def finish(self) -> None:
        """Unscales them now; later calls do nothing."""


class Owner(Protocol):
    """The session of a binding."""

    def register(self, binding: Binding) -> None:
        """Takes in a binding that was made or copied."""

    def forget(self, binding: Binding) -> None:
        """Lets go of a binding that was released."""


class Binding:
    """What amp adds to one optimizer.

    Attributes:
        pairs: Low-precision model parameters with the fp32 masters that ``param_groups`` holds.
        found_inf: 0-d fp32 flag: a gradient since the last step held inf or NaN; ``None`` until
            a checked backward pass.
        owner: The session, kept alive; ``None`` in an optimizer that was unpickled.
        open_pass: The backward pass still to be finished, if any.
        inner_step: The ``step`` that the instance had before (an LR scheduler's wrapper).
        view: Space for the compatibility view of this binding.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        master_weights: bool,
        casts_off: CastsOff,
        owner: Owner | None = None,
        exact: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Puts masters into the optimizer's groups, with its state.

        Args:
            optimizer: Any optimizer; its group dicts and lists keep their identity.
            master_weights: Whether low-precision parameters get fp32 masters.
            casts_off: Context without op casts, for the step.
            owner: The session.
            exact: Fp32 values that parameters had before they were rounded, by ``id``.
        """
        self.attach(optimizer)
        self.master_weights = master_weights
        self.casts_off = casts_off
        self.owner = owner
        self.pairs: list[Pair] = []
        self.found_inf: Tensor | None = None
        self.checked = False
        self.gathered = False
        self.scaled_gradients = False
        self.open_pass: OpenPass | None = None
        self.inner_step: Callable[..., Any] | None = None
        self.view: object = None
        self._frozen: list[nn.Parameter] = []
        self._stash: list[tuple[nn.Parameter, Tensor]] = []
        self._in_place = True
        self._model_scaled = False
        self._untried: list[tuple[Pair, Tensor]] = []
        for group in optimizer.param_groups:
            self.adopt(group, exact or {})

    # -- parameters --------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("The optimizer of this amp state has been deleted.")
        return optimizer

    def attach(self, optimizer: Optimizer) -> None:
        """Makes ``optimizer`` the one that this binding serves."""
        self._optimizer = weakref.ref(optimizer)

    def params(self) -> list[nn.Parameter]:
        """Returns every parameter that the optimizer steps, masters included."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def direct(self) -> list[nn.Parameter]:
        """Returns the parameters that are stepped themselves, without a master."""
        masters = {id(pair.master) for pair in self.pairs}
        return [param for param in self.params() if id(param) not in masters]

    def adopt(self, group: dict[str, Any], exact: Mapping[int, Tensor]) -> None:
        """Replaces the low-precision parameters of ``group`` by fp32 masters, in its own list.

        A frozen parameter stays, and gets its master when it is unfrozen.
        """
        if not self.master_weights:
            return
        params = group["params"]
        for index, param in enumerate(params):
            if not dtypes.is_low_precision(param):
                continue
            if param.requires_grad:
                params[index] = self._pair(param, exact.get(id(param)))
            else:
                self._frozen.append(param)

    def adopt_unfrozen(self) -> None:
        """Gives a master to every parameter that was frozen and no longer is."""
        if any(param.requires_grad for param in self._frozen):
            self._frozen = []
            known = {id(pair.model) for pair in self.pairs}
            for group in self.optimizer.param_groups:
                self.adopt(group, {})
            self._gather_raw(pair for pair in self.pairs if id(pair.model) not in known)

    def take_over_changes(self) -> None:
        """Brings what was written into the model before its first pass to the masters.

        DistributedDataParallel's broadcast, and weights that a script initializes late: from the
        first pass on it is the masters that are written into the model. Until then a copy of each
        low-precision parameter tells what has changed; what a script wrote into a master stays.
        """
        untried, self._untried = self._untried, []
        for pair, before in untried:
            master.follow_model(pair, before)

    def owns(self, param: Tensor) -> bool:
        """Returns whether ``param`` is a model parameter that already has its master here."""
        return any(pair.model is param for pair in self.pairs)

    def _pair(self, param: nn.Parameter, exact: Tensor | None) -> nn.Parameter:
        new = master.make_master(param, exact)
        pair = Pair(param, new)
        self.pairs.append(pair)
        self._untried.append((pair, param.detach().clone()))
        state = self.optimizer.state
        if param in state:
            state[new] = state.pop(param)
        return new

    def release(self) -> None:
        """Puts the model's own parameters back into the groups, with the optimizer's state."""
        self.settle()
        originals = {id(pair.master): pair for pair in self.pairs}
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                pair = originals.get(id(param))
                if pair is None:
                    continue
                params[index] = pair.model
                pair.model.grad = _grad_for(pair)
                if param in optimizer.state:
                    optimizer.state[pair.model] = optimizer.state.pop(param)
        self.pairs = []

    # -- one backward pass -------------------------------------------------------------------

    def begin(self, *, identity: bool) -> None:
        """Makes room for the gradients of one backward pass.

        Gradients that are already unscaled are set aside, so that the pass starts from none; ones
        that are still scaled (``delay_unscale``) stay and accumulate.

        Args:
            identity: Whether the loss scale is exactly 1 and unchecked: then the parameters
                without a master accumulate in place.
        """
        if self._untried:
            self.take_over_changes()
        if self._frozen:
            self.adopt_unfrozen()
        self._in_place = identity or self.scaled_gradients
        self._model_scaled = not identity
        if self.scaled_gradients:
            return
        if self.pairs:
            self._gather_left_over()
            for pair in self.pairs:
                pair.model.grad = None
        if not identity:
            # Masters too: a loss may use them directly, and then they get scaled gradients.
            for param in self.params():
                grad = param.grad
                if grad is not None:
                    self._stash.append((param, grad))
                    param.grad = None

    def unscale(self, unscale_: Callable[[list[Tensor]], None] | None) -> None:
        """Turns the scaled gradients of the pass into unscaled fp32 ones, added to earlier ones.

        Args:
            unscale_: Divides dense gradients by the loss scale in place; ``None`` for a
                scale of exactly 1.
        """
        fresh_pairs = [pair for pair in self.pairs if pair.model.grad is not None]
        fresh = master.fp32_grads([pair.model for pair in fresh_pairs])
        if unscale_ is not None:
            unscale_(finite.dense_values(fresh + _grads(self.params())))
        master.add_grads_([pair.master for pair in fresh_pairs], fresh)
        self._merge_stash()
        self.gathered = True
        self.scaled_gradients = False

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
        if not self.scaled_gradients:
            for pair in self.pairs:
                pair.model.grad = None
        if not self._in_place:
            for param in self.params():
                param.grad = None
            for param, grad in self._stash:
                param.grad = grad
            self._stash = []

    def _merge_stash(self) -> None:
        stash, self._stash = self._stash, []
        if not stash:
            return
        fresh = [param.grad for param, _ in stash]
        for param, grad in stash:
            param.grad = grad
        kept = [(param, grad) for (param, _), grad in zip(stash, fresh, strict=True)]
        with_fresh = [(param, grad) for param, grad in kept if grad is not None]
        master.add_grads_([p for p, _ in with_fresh], [g for _, g in with_fresh])

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

    def settle(self) -> None:
        """Brings every gradient to where the optimizer finds it: unscaled, on the masters."""
        if self.open_pass is not None:
            self.open_pass.finish()
        if self._untried:
            self.take_over_changes()
        if self._frozen:
            self.adopt_unfrozen()
        if self.pairs:
            self._gather_left_over()

    # -- after the step ----------------------------------------------------------------------

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

    def _forget(self) -> None:
        self._stash = []
        self.open_pass = None
        self.checked = self.gathered = self.scaled_gradients = False

    # -- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """Copies pairs and flags; the copy belongs to the same session.

        Deep-copied together with its model, the optimizer steps the model's copy.
        """
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        new.owner = self.owner
        if new.owner is not None:
            new.owner.register(new)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to this process: the optimizer, the session, an open pass."""
        state = self.__dict__.copy()
        del state["_optimizer"]
        state.update(owner=None, open_pass=None, inner_step=None, view=None, _stash=[])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over everything but the optimizer, which attaches itself."""
        self.__dict__.update(state)


def _clear(param: nn.Parameter, *, set_to_none: bool) -> None:
    if set_to_none:
        param.grad = None
    elif param.grad is not None:
        param.grad.detach_().zero_()


def _grads(params: list[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients that there are, sparse ones with their duplicate rows summed."""
    grads = [grad for param in params if (grad := param.grad) is not None]
    if all(grad.layout is torch.strided for grad in grads):
        return grads
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
    return [grad for param in params if (grad := param.grad) is not None]


def _grad_for(pair: Pair) -> Tensor | None:
    grad = pair.master.grad
    return None if grad is None else grad.to(pair.model.dtype)
