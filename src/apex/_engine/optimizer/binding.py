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

from apex._core import dtypes, master
from apex._core.master import Pair
from apex._engine.autocast.region import no_casts
from apex._engine.autocast.thread_casts import backward_id
from apex._engine.optimizer.gradient_pass import PassGradients
from apex._pickle import empty
from apex._torch import dtensor
from apex._torch.dynamo import untraced

CastsOff = Callable[[], AbstractContextManager[None]]

_Untried = tuple[Pair, Tensor, Tensor | None]
"""A pair, the parameter's values when its master was made, and the exact ones it waits for."""


class Owner(Protocol):
    """The session of a binding."""

    def register(self, binding: Binding) -> None:
        """Takes in a binding that was made or copied."""

    def forget(self, binding: Binding) -> None:
        """Lets go of a binding that was released."""

    def convert_late(self, params: Iterable[Tensor]) -> Mapping[int, Tensor]:
        """Casts what was added to a model, and returns the values of ``params`` before, by id."""


class Binding(PassGradients):
    """What amp adds to one optimizer.

    Attributes:
        pairs: Low-precision model parameters with the fp32 masters that ``param_groups`` holds.
        owner: The session, kept alive; ``None`` in an optimizer that was unpickled.
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
        exact_later: bool = False,
    ) -> None:
        """Puts masters into the optimizer's groups, with its state.

        Args:
            optimizer: Any optimizer; its group dicts and lists keep their identity.
            master_weights: Whether low-precision parameters get fp32 masters.
            casts_off: Context without op casts, for the step.
            owner: The session.
            exact: Fp32 values that parameters had before they were rounded, by ``id``.
            exact_later: Masters begin with the rounded values, and get the exact ones only where
                the first pass shares them with the other ranks.
        """
        super().__init__()
        self.attach(optimizer)
        self.master_weights = master_weights
        self.casts_off = casts_off
        self.owner = owner
        self.inner_step: Callable[..., Any] | None = None
        self.view: object = None
        self._frozen: list[nn.Parameter] = []
        self._untried: list[_Untried] = []
        self._exact_later = exact_later
        self._versions: list[int] | None = None
        self.adopt(optimizer.param_groups, exact or {})

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

    def adopt(self, groups: Iterable[dict[str, Any]], exact: Mapping[int, Tensor]) -> None:
        """Replaces the groups' low-precision parameters by fp32 masters; all of them or none.

        Each in its group's own list. A frozen one stays, and gets its master when it is unfrozen.
        """
        if not self.master_weights:
            return
        masters = {id(pair.model): pair.master for pair in self.pairs}
        made: list[_Untried] = []
        replaced: list[tuple[list[nn.Parameter], int, nn.Parameter]] = []
        frozen: list[nn.Parameter] = []
        for group in groups:
            for index, param in enumerate(group["params"]):
                if not dtypes.is_low_precision(param):
                    continue
                known = id(param) in masters  # a tied weight that is listed twice
                if not known and not param.requires_grad:
                    frozen.append(param)
                    continue
                if not known:
                    made.append(self._pair(param, exact.get(id(param))))
                    masters[id(param)] = made[-1][0].master
                replaced.append((group["params"], index, masters[id(param)]))
        self._take_up(made)  # from here on nothing allocates, so nothing fails
        for params, index, new in replaced:
            params[index] = new
        self._frozen += frozen

    def adopt_unfrozen(self) -> None:
        """Gives a master to every parameter that was frozen and no longer is; all or none."""
        late = [p for p in self._frozen if p.requires_grad and p.grad is not None]
        if not any(param.requires_grad for param in self._frozen):
            return
        grads = dict(zip(map(id, late), master.fp32_grads(late), strict=True))
        known = len(self.pairs)
        self.adopt(self.optimizer.param_groups, {})
        still = {id(param): param for param in self._frozen if not param.requires_grad}
        self._frozen = list(still.values())
        for pair in self.pairs[known:]:
            pair.master.grad = grads.get(id(pair.model))

    def waits(self, param: Tensor) -> bool:
        """Returns whether ``param`` is frozen, and gets its master when it is unfrozen."""
        return any(each is param for each in self._frozen)

    @property
    def untried(self) -> bool:
        """Whether masters wait for the first pass, to take over what was written until then."""
        return bool(self._untried)

    @untraced
    def take_over_changes(self, shared: Container[int] = ()) -> None:
        """Brings what was written into the model before its first pass to the masters.

        DistributedDataParallel's broadcast, and weights that a script initializes late: from the
        first pass on it is the masters that are written into the model. Until then a copy of each
        low-precision parameter tells what has changed; what a script wrote into a master stays.

        Args:
            shared: Ids of model parameters whose masters the caller sends to all ranks next: these
                masters get their exact values, where they wait for them.
        """
        while self._untried:
            pair, before, exact = self._untried[0]
            if exact is not None and id(pair.model) in shared:
                master.take_exact(pair, before, exact)
            master.follow_model(pair, before)
            del self._untried[0]  # after a failure above the rest still waits

    def exact(self) -> dict[int, Tensor]:
        """Returns the fp32 value behind each low-precision parameter, by ``id`` of that."""
        if self._versions is not None:
            self.follow_writes()  # a join may have ended, with no pass since
        values: dict[int, Tensor] = {id(pair.model): pair.master for pair in self.pairs}
        for pair, before, exact in self._untried:
            if exact is not None:
                values[id(pair.model)] = torch.where(pair.master == before, exact, pair.master)
        return values

    def forget_exact(self, params: Container[int]) -> None:
        """Drops the values that masters of these parameters wait for: others were loaded."""
        self._untried = [
            (pair, before, None if id(pair.model) in params else exact)
            for pair, before, exact in self._untried
        ]

    def follow_writes(self) -> None:
        """Starts the masters anew where something else than the step has written into the model.

        For the end of a ``join``, where torch sends the last rank's weights to all: low bits that
        ranks do not share would let them drift apart. The first call begins to watch.
        """
        versions = [pair.model._version for pair in self.pairs]
        if self._versions is not None and self._versions != versions:
            for pair in self.pairs:
                pair.master.data.copy_(pair.model.data)
        self._versions = versions

    def owns(self, param: Tensor) -> bool:
        """Returns whether ``param`` is a model parameter that already has its master here."""
        return any(pair.model is param for pair in self.pairs)

    def _pair(self, param: nn.Parameter, exact: Tensor | None) -> _Untried:
        # Each rank has its own part of a DTensor, which nobody sends round.
        waits = self._exact_later and not dtensor.is_dtensor(param)
        later = exact if waits else None
        new = master.make_master(param, None if waits else exact)
        return Pair(param, new), param.detach().clone(), later

    def _take_up(self, made: list[_Untried]) -> None:
        state = self.optimizer.state
        for pair, _, _ in made:
            self.pairs.append(pair)
            if pair.model in state:
                state[pair.master] = state.pop(pair.model)
        self._untried += made

    def release(self) -> None:
        """Puts the model's own parameters back into the groups, with state and gradients."""
        self.settle()
        grads = [(pair.model, _grad_for(pair)) for pair in self.pairs]
        self.withdraw()
        for param, grad in grads:
            param.grad = grad

    def withdraw(self) -> None:
        """Puts the model's own parameters back into the groups, with the optimizer's state.

        Allocates nothing: it works when memory has run out.
        """
        originals = {id(pair.master): pair for pair in self.pairs}
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                pair = originals.get(id(param))
                if pair is None:
                    continue
                params[index] = pair.model
                if param in optimizer.state:
                    optimizer.state[pair.model] = optimizer.state.pop(param)
        self.pairs = []

    # -- one backward pass -------------------------------------------------------------------

    def begin(
        self, *, identity: bool, sent_with: Tensor | float | None = 1.0, keeps: bool = True
    ) -> None:
        """Makes room for the gradients of one backward pass, as :class:`PassGradients` says.

        What was written into the model, and parameters that were unfrozen, are taken up before.
        """
        if self._untried:
            self.take_over_changes()
        if self._frozen:
            self.adopt_unfrozen()
        super().begin(identity=identity, sent_with=sent_with, keeps=keeps)

    @untraced
    def settle(self) -> None:
        """Brings every gradient to where the optimizer finds it: unscaled, on the masters."""
        if self.open_pass is not None:
            if backward_id() == -1:
                self.open_pass.finish()
            else:
                self._begin_step_in_backward()
        if self._untried:
            self.take_over_changes()
        if self._frozen:
            self.adopt_unfrozen()
        if self.pairs:
            self._gather_left_over()

    def _begin_step_in_backward(self) -> None:
        if self._model_scaled:
            raise RuntimeError(
                "optimizer.step() was called during the backward pass of amp.scale_loss (by a "
                "hook), where the gradients are still scaled. Step after the pass, or use a loss "
                "scale of 1 (loss_scale=1.0; the default of O0, O3, O4 and O5)."
            )
        self.gathered = False  # what the pass has brought so far goes into the step

    # -- after the step ----------------------------------------------------------------------

    def end_step(self) -> None:
        """Clears what the step has used up."""
        super().end_step()
        if self._versions is not None:
            self._versions = [pair.model._version for pair in self.pairs]

    # -- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """Copies pairs and flags; the copy belongs to the same session.

        Deep-copied together with its model, the optimizer steps the model's copy.
        """
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        new.owner, new.casts_off = self.owner, self.casts_off
        if new.owner is not None:
            new.owner.register(new)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to this process: the optimizer, the session, an open pass."""
        state = self.__dict__.copy()
        del state["_optimizer"]
        state.update(owner=None, open_pass=None, inner_step=None, view=None)
        state.update(_stash=[], _versions=None, casts_off=None)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its kind; see :mod:`apex._pickle`."""
        return empty, ("binding",), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over everything but the optimizer, which attaches itself."""
        self.__dict__.update(state)
        self.casts_off = no_casts


def _grad_for(pair: Pair) -> Tensor | None:
    grad = pair.master.grad
    return None if grad is None else grad.to(pair.model.dtype)
