"""amp's state for one optimizer: the masters in its groups and the state of its gradients."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.param_groups import is_trained, params_in, params_of
from apex._engine import tracked_pair
from apex._engine.masters import Masters
from apex._engine.mistakes import Mistakes
from apex._engine.optimizer import one_pass, other_steps
from apex._engine.optimizer.exchange import exchange
from apex._engine.optimizer.gradients import Gradients
from apex._engine.tracked_pair import TrackedPair
from apex._engine.undo import Undo, all_or_nothing
from apex._pickle import empty
from apex._torch.autograd import backward_id
from apex._torch.dynamo import untraced


class Owner(Protocol):
    """The session of a binding."""

    @property
    def masters(self) -> Masters:
        """The session's masters."""

    @property
    def bindings(self) -> Sequence[Binding]:
        """Those of the session's optimizers."""

    @property
    def mistakes(self) -> Mistakes:
        """The mistakes found in the session."""

    @property
    def needs_scale(self) -> bool:
        """Whether gradients are fp16 and losses are scaled."""

    @property
    def can_skip(self) -> bool:
        """Whether an overflow may skip a step: whether any loss scale is dynamic."""

    def register(self, binding: Binding) -> None:
        """Adds a new or copied binding."""

    def forget(self, binding: Binding) -> None:
        """Removes a closed binding."""

    def sharers(self, bindings: Sequence[Binding]) -> Sequence[Binding]:
        """Returns every other optimizer that trains a parameter of ``bindings``."""

    def others(self, bindings: Sequence[Binding]) -> Sequence[Binding]:
        """Returns the session's optimizers that are not in ``bindings``."""

    def convert_late(self, params: Iterable[Tensor]) -> None:
        """Converts modules added to the models since ``initialize`` that hold ``params``."""


class Binding:
    """amp's state for one optimizer.

    Attributes:
        pairs: Low-precision model parameters whose masters ``param_groups`` holds, in order.
        gradients: The state of its parameters' gradients.
        owner: The session, kept alive; ``None`` in an unpickled optimizer.
        master_weights: Whether low-precision parameters get fp32 masters.
        inner_step: The ``step`` that the instance had before (an LR scheduler's wrapper).
        view: Space for the compatibility view of this binding.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        master_weights: bool,
        owner: Owner | None = None,
        source: Masters | None = None,
        undo: Undo | None = None,
    ) -> None:
        """Puts masters into the optimizer's groups and moves its state to them.

        Args:
            optimizer: Any optimizer; its group dicts and lists keep their identity.
            master_weights: Whether low-precision parameters get fp32 masters.
            owner: The session.
            source: The registry of masters; ``None`` for the owner's, or a new one without owner.
            undo: Receives the inverse.
        """
        self.attach(optimizer)
        self.pairs: list[TrackedPair] = []
        self._counted = 0, 0
        self.gradients = Gradients(self)
        self.master_weights = master_weights
        self.owner = owner
        self.inner_step: Callable[..., Any] | None = None
        self.view: object = None
        self._source = source or (Masters() if owner is None else owner.masters)
        self._frozen: list[nn.Parameter] = []
        self._owned: set[int] = set()  # ids of the pairs' model parameters
        with all_or_nothing(undo) as steps:
            self.adopt(optimizer.param_groups, steps)
        other_steps.watch(self)

    # -- parameters --------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("The optimizer of this amp state has been deleted.")
        return optimizer

    @property
    def is_live(self) -> bool:
        """Whether the optimizer exists: a pass, or a traceback, may outlive it."""
        return self._optimizer() is not None

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def params(self) -> list[nn.Parameter]:
        """Returns every parameter that the optimizer steps, masters included."""
        return params_of(self.optimizer)

    def direct(self) -> list[nn.Parameter]:
        """Returns the parameters that are stepped without a master."""
        if not self.pairs:
            return self.params()
        own = {id(pair.master) for pair in self.pairs}
        return [param for param in self.params() if id(param) not in own]

    def trained(self) -> list[nn.Parameter]:
        """Returns the models' parameters that the optimizer trains, with or without a master."""
        return [*(pair.model for pair in self.pairs), *self.direct()]

    @property
    def elements(self) -> int:
        """The number of elements of all masters; counted again if their number changes."""
        if self._counted[0] != len(self.pairs):
            self._counted = len(self.pairs), sum(pair.model.numel() for pair in self.pairs)
        return self._counted[1]

    def defers(self) -> bool:
        """Returns whether gradients stay in 16 bits until they are read."""
        return one_pass.takes(self)

    def steps_any(self, params: Iterable[Tensor]) -> bool:
        """Returns whether a group holds the master of one of ``params``, models' parameters."""
        owned = self._owned.intersection(map(id, params))
        if not owned:
            return False
        masters_of = {id(pair.master) for pair in self.pairs if id(pair.model) in owned}
        return not masters_of.isdisjoint(map(id, self.params()))

    def stepped(self, param: Any) -> Any:
        """Returns the master of a model's parameter; anything else as it is."""
        pair = self._source.pair_of(param) if id(param) in self._owned else None
        return param if pair is None else pair.master

    def sharing(self) -> list[Binding]:
        """Returns this one, and the session's others that train one of its parameters."""
        return [self, *(() if self.owner is None else self.owner.sharers([self]))]

    def is_frozen(self, param: Tensor) -> bool:
        """Returns whether ``param`` is frozen and gets its master when unfrozen."""
        return any(each is param for each in self._frozen)

    def adopt(self, groups: list[dict[str, Any]], undo: Undo) -> None:
        """Replaces low-precision parameters in ``groups`` with their masters, in place.

        Also where else the optimizer keeps them. A frozen parameter stays and gets its master when
        unfrozen.

        Args:
            groups: Groups of the optimizer.
            undo: Receives the inverse.
        """
        if not self.master_weights:
            return
        owned, waiting = self._owned, {id(param) for param in self._frozen}
        known = len(self.pairs)
        undo.push(self._undo_adopt, known, len(self._frozen))
        new: dict[int, nn.Parameter] = {}
        for param in params_in(groups):
            which = id(param)
            if which in owned:  # in an earlier group, too
                new[which] = self._source.make(param, self).master
            elif not dtypes.is_low_precision(param) or which in waiting:
                continue
            elif is_trained(param):
                pair = self._source.make(param, self)
                self.pairs.append(pair)
                owned.add(which)
                new[which] = pair.master
            else:
                self._frozen.append(param)
                waiting.add(which)
        if new:
            every = groups is self.optimizer.param_groups
            exchange(self.optimizer, new, None if every else groups)

    def _undo_adopt(self, pairs: int, frozen: int) -> None:
        """Reverts :meth:`adopt`, given the number of pairs and frozen parameters before it."""
        added = self.pairs[pairs:]
        exchange(self.optimizer, {id(pair.master): pair.model for pair in added})
        self._owned.difference_update(id(pair.model) for pair in added)
        del self.pairs[pairs:], self._frozen[frozen:]

    def adopt_unfrozen(self) -> None:
        """Gives a master to every frozen parameter that was unfrozen; all or none."""
        if not any(map(is_trained, self._frozen)):
            return
        with all_or_nothing() as undo:
            before = self._frozen
            undo.push(setattr, self, "_frozen", before)
            self._frozen = [param for param in before if not is_trained(param)]
            self.adopt(self.optimizer.param_groups, undo)

    def close(self) -> None:
        """Puts the model's own parameters back into the groups, with the optimizer's state.

        Allocates nothing, so it works out of memory.
        """
        exchange(self.optimizer, {id(pair.master): pair.model for pair in self.pairs})
        self.pairs.clear()  # gradients hold the same list
        self._owned = set()

    # -- before a pass or a step -------------------------------------------------------------

    def read_written(self) -> None:
        """Copies writes to the model to the masters, for which a script asks."""
        tracked_pair.read_model(self.pairs, asked=True)

    def read_model(self, *, steps: bool = False) -> None:
        """Copies writes to the model to the masters; adopts unfrozen parameters.

        Args:
            steps: Whether masters are stepped next.
        """
        if self.pairs:
            tracked_pair.read_model(self.pairs, steps=steps)
        if self._frozen:
            self.adopt_unfrozen()

    @untraced
    def regroup(self) -> None:
        """Puts the masters of models' parameters into groups that a script has built anew."""
        if not self._owned.isdisjoint(map(id, self.params())):
            with all_or_nothing() as undo:
                self.adopt(self.optimizer.param_groups, undo)

    @untraced
    def settle(self, *, steps: bool = False) -> None:
        """Finishes an open pass, so that the masters hold every gradient unscaled.

        Args:
            steps: Whether masters are stepped or given back next.
        """
        if self._owned:
            self.regroup()
        gradients = self.gradients
        if gradients.open_pass is not None:
            if backward_id() == -1:
                gradients.open_pass.finish()
            else:
                self._begin_step_in_backward()
        if self.master_weights:
            self.read_model(steps=steps)
        gradients.absorb_raw()
        if steps and gradients.overflow.begin_step(self.params):
            gradients.watch_writes()

    def has_plain_gradients(self) -> bool:
        """Whether the model has gradients of a plain backward pass that masters do not have yet."""
        return not self.gradients.overflow.checked and any(
            not pair.mirrors_grad and pair.model.grad is not None for pair in self.pairs
        )

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Around a call that averages gradients over ranks. A context manager.

        While a pass is unfinished, the model's parameters have the gradients; those of masters are
        not unscaled yet. Until then the optimizer keeps them beside its groups.
        """
        if self.owner is not None:
            self.owner.mistakes.note_average()
        unsettled = self.gradients.unfinished or self.has_plain_gradients()
        pairs = [*self.pairs] if unsettled else []
        try:
            exchange(self.optimizer, {id(pair.master): pair.model for pair in pairs}, [])
            yield
        finally:
            exchange(self.optimizer, {id(pair.model): pair.master for pair in pairs}, [])

    def _begin_step_in_backward(self) -> None:
        if self.gradients.is_scaled:
            raise RuntimeError(
                "optimizer.step() was called during the backward pass of amp.scale_loss (by a "
                "hook), while the gradients are still scaled. Step after the pass, or use a loss "
                "scale of 1 (loss_scale=1.0; the default of O0, O3, O4 and O5)."
            )
        self.gradients.absorb_partial()

    # -- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """Copies the pairs, without gradients; the copy belongs to the same session.

        An optimizer deep-copied together with its model steps the model's copy.
        """
        tracked_pair.write_back(self.pairs)
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.owner = self.owner
        if new.owner is not None:
            new._source = new.owner.masters
            new.owner.register(new)
        new._source.hold(new.pairs, new)
        other_steps.watch(new)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to this process: the optimizer, the session, the gradients."""
        tracked_pair.write_back(self.pairs)
        state = self.__dict__.copy()
        for name in ("_optimizer", "_source", "_owned", "gradients"):
            del state[name]
        state.update(owner=None, inner_step=None, view=None)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its kind; see :mod:`apex._pickle`."""
        return empty, ("binding",), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in ("packing", "sums_low"):  # in files of earlier releases
            self.__dict__.pop(name, None)
        self._source = Masters()
        self._owned = {id(pair.model) for pair in self.pairs}
        self.gradients = Gradients(self)  # copies and files hold no gradients
