"""What amp adds to one optimizer: masters in its groups, and the gradients that it steps by."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._engine import masters
from apex._engine.autocast.region import no_casts
from apex._engine.masters import Masters, TrackedPair
from apex._engine.optimizer.gradient_pass import Gradients
from apex._engine.undo import Undo, all_or_nothing
from apex._pickle import empty
from apex._torch.autograd import backward_id
from apex._torch.dynamo import untraced

CastsOff = Callable[[], AbstractContextManager[None]]


class Owner(Protocol):
    """The session of a binding."""

    @property
    def masters(self) -> Masters:
        """The session's masters."""

    @property
    def can_skip(self) -> bool:
        """Whether an overflow may skip a step: whether any loss scale is dynamic."""

    def register(self, binding: Binding) -> None:
        """Takes in a binding that was made or copied."""

    def forget(self, binding: Binding) -> None:
        """Lets go of a binding that was closed."""

    def convert_late(self, params: Iterable[Tensor]) -> None:
        """Converts modules that were added to a model, where ``params`` are among theirs."""


class Binding:
    """What amp adds to one optimizer.

    Attributes:
        pairs: Low-precision model parameters whose masters ``param_groups`` holds, in order.
        gradients: The gradients of its parameters, and where a pass has left them.
        owner: The session, kept alive; ``None`` in an optimizer that was unpickled.
        master_weights: Whether low-precision parameters get fp32 masters.
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
        source: Masters | None = None,
    ) -> None:
        """Puts masters into the optimizer's groups, with its state.

        Args:
            optimizer: Any optimizer; its group dicts and lists keep their identity.
            master_weights: Whether low-precision parameters get fp32 masters.
            casts_off: Context without op casts, for the step.
            owner: The session.
            source: Where masters are made and found; ``None`` for the owner's, or new ones.
        """
        self.attach(optimizer)
        self.pairs: list[TrackedPair] = []
        self.gradients = Gradients(self)
        self.master_weights = master_weights
        self.casts_off = casts_off
        self.owner = owner
        self.inner_step: Callable[..., Any] | None = None
        self.view: object = None
        self._source = source or (Masters() if owner is None else owner.masters)
        self._frozen: list[nn.Parameter] = []
        with all_or_nothing() as undo:
            self.adopt(optimizer.param_groups, undo)

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
        own = {id(pair.master) for pair in self.pairs}
        return [param for param in self.params() if id(param) not in own]

    def trained(self) -> list[nn.Parameter]:
        """Returns the models' parameters that the optimizer trains, by a master or themselves."""
        return [*(pair.model for pair in self.pairs), *self.direct()]

    def owns(self, param: Tensor) -> bool:
        """Returns whether the optimizer steps the master of ``param``, a model's parameter."""
        return any(pair.model is param for pair in self.pairs)

    def waits(self, param: Tensor) -> bool:
        """Returns whether ``param`` is frozen, and gets its master when it is unfrozen."""
        return any(each is param for each in self._frozen)

    def adopt(self, groups: Iterable[dict[str, Any]], undo: Undo) -> None:
        """Replaces the groups' low-precision parameters by their masters, each in its own list.

        A frozen one stays, and gets its master when it is unfrozen.

        Args:
            groups: Groups of the optimizer.
            undo: Receives how to put the model's parameters back.
        """
        if not self.master_weights:
            return
        owned = {id(pair.model) for pair in self.pairs}
        waiting = {id(param) for param in self._frozen}
        replaced: list[tuple[list[nn.Parameter], int, nn.Parameter]] = []
        undo.push(self._give_back, len(self.pairs), len(self._frozen), replaced)
        for group in groups:
            params = group["params"]
            for index, param in enumerate(params):
                if not dtypes.is_low_precision(param) or id(param) in waiting:
                    continue
                if not (param.requires_grad or id(param) in owned):
                    self._frozen.append(param)
                    waiting.add(id(param))
                    continue
                pair = self._source.make(param, self)
                if id(param) not in owned:  # a tied weight may be listed twice
                    owned.add(id(param))
                    self.pairs.append(pair)
                    _move_state(self.optimizer, param, pair.master)
                replaced.append((params, index, param))
                params[index] = pair.master

    def _give_back(
        self,
        pairs: int,
        frozen: int,
        replaced: Sequence[tuple[list[nn.Parameter], int, nn.Parameter]],
    ) -> None:
        """Takes back what :meth:`adopt` did since there were so many pairs and frozen ones."""
        for params, index, param in replaced:
            params[index] = param
        for pair in self.pairs[pairs:]:
            _move_state(self.optimizer, pair.master, pair.model)
        del self.pairs[pairs:], self._frozen[frozen:]

    def adopt_unfrozen(self) -> None:
        """Gives a master to every parameter that was frozen and no longer is; all or none."""
        if not any(param.requires_grad for param in self._frozen):
            return
        with all_or_nothing() as undo:
            before = self._frozen
            undo.push(setattr, self, "_frozen", before)
            self._frozen = [param for param in before if not param.requires_grad]
            self.adopt(self.optimizer.param_groups, undo)

    def close(self) -> None:
        """Puts the model's own parameters back into the groups, with the optimizer's state.

        Allocates nothing: it works when memory has run out.
        """
        originals = {id(pair.master): pair.model for pair in self.pairs}
        for group in self.optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                if id(param) in originals:
                    params[index] = originals[id(param)]
        for pair in self.pairs:
            _move_state(self.optimizer, pair.master, pair.model)
        self.pairs = []

    # -- before a pass or a step -------------------------------------------------------------

    def read_model(self) -> None:
        """Brings what was written into the model to the masters, and adopts what was unfrozen."""
        masters.read_model(self.pairs)
        if self._frozen:
            self.adopt_unfrozen()

    @untraced
    def settle(self) -> None:
        """Brings every gradient to where the optimizer finds it: unscaled, on the masters."""
        gradients = self.gradients
        if gradients.open_pass is not None:
            if backward_id() == -1:
                gradients.open_pass.finish()
            else:
                self._begin_step_in_backward()
        self.read_model()
        gradients.take_raw()

    def _begin_step_in_backward(self) -> None:
        if self.gradients.scaled_now:
            raise RuntimeError(
                "optimizer.step() was called during the backward pass of amp.scale_loss (by a "
                "hook), where the gradients are still scaled. Step after the pass, or use a loss "
                "scale of 1 (loss_scale=1.0; the default of O0, O3, O4 and O5)."
            )
        self.gradients.take_unfinished()

    # -- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """Copies pairs and gradients' state; the copy belongs to the same session.

        Deep-copied together with its model, the optimizer steps the model's copy.
        """
        masters.write_back(self.pairs)
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.owner, new.casts_off = self.owner, self.casts_off
        if new.owner is not None:
            new._source = new.owner.masters
            new.owner.register(new)
        new._source.hold(new.pairs, new)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to this process: the optimizer, the session, an open pass."""
        masters.write_back(self.pairs)
        state = self.__dict__.copy()
        for name in ("_optimizer", "_source", "gradients", "casts_off"):
            del state[name]
        state.update(owner=None, inner_step=None, view=None)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its kind; see :mod:`apex._pickle`."""
        return empty, ("binding",), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over everything but the optimizer, which attaches itself."""
        self.__dict__.update(state)
        self._source = Masters()
        self.gradients = Gradients(self)  # copies and files leave gradients out
        self.casts_off = no_casts


def _move_state(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)
