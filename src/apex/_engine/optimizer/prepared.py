"""amp's state for one optimizer: the masters in its groups, its gradients, and its overflow."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes, finite
from apex._core.param_groups import exchange, is_trained, move_state, params_in, params_of
from apex._engine import masters
from apex._engine.masters import LazyMaster, Master, MasterPair, MasterTable
from apex._pickle import empty
from apex._torch import parameters
from apex._torch.autograd import backward_id
from apex._torch.copies import HostCopy, capturing
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.backward import PassGradients
    from apex._engine.session import Session

_dtype = operator.attrgetter("dtype")


class OpenPass(Protocol):
    """A backward pass whose gradients are not unscaled yet."""

    gradients: PassGradients

    @property
    def is_open(self) -> bool: ...
    def finish(self) -> None: ...


class PreparedOptimizer:
    """amp's state for one optimizer.

    Attributes:
        pairs: Low-precision model parameters whose masters ``param_groups`` holds, in order.
        session: Kept alive; ``None`` in an unpickled optimizer.
        master_weights: Whether low-precision parameters get fp32 masters.
        inner_step: The ``step`` that the instance had before (an LR scheduler's wrapper).
        open_pass: The backward pass still to be finished, if any.
        found_inf: Whether a pass since the last step overflowed, 0-d fp32; stays in place, for CUDA
            graphs. ``None`` before the first checked pass.
        checked: Whether there was such a pass.
        skipped: Whether the last step was skipped: known on the host, or a 0-d fp32 flag.
        steps: Steps so far, skipped ones included.
        used: Whether a pass has begun.
        got_scaled: Whether a pass of other optimizers has left scaled gradients.
        stepping: Whether the optimizer is in its step.
        shared: The ids of pairs that other optimizers step, too; set by the step.
    """

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        """Puts masters into the optimizer's groups and moves its state to them.

        Args:
            optimizer: Any optimizer; its group dicts and lists keep their identity.
            session: Has the masters.
        """
        self.attach(optimizer)
        self.pairs: list[MasterPair] = []
        self.master_weights = session.policy.master_weights
        self.session: Session | None = session
        self.inner_step: Callable[..., Any] | None = None
        self._masters = session.masters
        self._begin_anew()
        self.adopt(optimizer.param_groups)

    def _begin_anew(self) -> None:
        self.open_pass: OpenPass | None = None
        self.found_inf: Tensor | None = None
        self.checked = self.used = self.stepping = self.got_scaled = False
        self.skipped: Tensor | bool = False
        self.steps = 0
        self.shared: set[int] = set()
        # Gradients that each replay of a CUDA graph writes anew: those of its last block, of which
        # no step was captured. None without such a graph.
        self._captured: list[tuple[Tensor, Tensor]] | None = None
        self._skip_copy: HostCopy | None = None
        self.own_pass: PassGradients | None = None

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
        own = {id(pair.master) for pair in self.pairs}
        return [param for param in self.params() if id(param) not in own]

    def trained(self) -> list[nn.Parameter]:
        """Returns the models' parameters that the optimizer trains, with or without a master."""
        return [*(pair.model for pair in self.pairs), *self.direct()]

    def is_frozen(self, param: Tensor) -> bool:
        """Returns whether ``param``, in a group, is frozen and gets its master when unfrozen."""
        return self.master_weights and dtypes.is_low_precision(param)

    def steps_any(self, params: Iterable[Tensor]) -> bool:
        """Returns whether a group holds the master of one of ``params``, models' parameters."""
        given = set(map(id, params))
        owned = {id(pair.master) for pair in self.pairs if id(pair.model) in given}
        return not owned.isdisjoint(map(id, self.params()))

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """Puts masters in place of trained low-precision parameters in ``groups``, all or none.

        A frozen parameter stays and gets its master when unfrozen.
        """
        if not self.master_weights:
            return
        params = params_in(groups)
        low = [param for param in params if dtypes.is_low_precision(param) and is_trained(param)]
        made = {id(param): self._masters.make(param, self) for param in low}
        known = {id(pair.model) for pair in self.pairs}
        self.pairs += [pair for key, pair in made.items() if key not in known]
        exchange(self.optimizer, {key: pair.master for key, pair in made.items()})

    @untraced
    def adopt_new(self) -> None:
        """Gives masters to parameters that were unfrozen, or put into groups by a script."""
        if not self.master_weights:
            return
        if not {*map(_dtype, self.params())}.isdisjoint(dtypes.LOW_PRECISION):
            self.adopt(self.optimizer.param_groups)

    def close(self) -> None:
        """Puts the model's own parameters back into the groups, with the optimizer's state."""
        exchange(self.optimizer, {id(pair.master): pair.model for pair in self.pairs})
        self.pairs.clear()

    # -- gradients ---------------------------------------------------------------------------

    @untraced
    def read_masters(self) -> None:
        """Has masters follow written weights, for a script that asks for them or for the step."""
        self.adopt_new()
        if masters.follow(self.pairs):
            move_state(self.optimizer)

    @untraced
    def settle(self) -> None:
        """Finishes an open pass, and gives the masters the values of the model."""
        opened = self.open_pass
        if opened is not None:
            if opened.gradients.scaled and backward_id() != -1:
                raise RuntimeError(
                    "optimizer.step() was called during the backward pass of amp.scale_loss (by a "
                    "hook), while the gradients are still scaled. Step after the pass, or use a "
                    "loss scale of 1 (loss_scale=1.0; the default of O0, O3, O4 and O5)."
                )
            if backward_id() == -1:
                opened.finish()
        self.read_masters()

    def settle_gradients(self) -> None:
        """Does :meth:`settle`, and gives the masters the gradients of the model, too."""
        self.settle()
        masters.take(self.pairs)

    def has_grads(self) -> bool:
        """Returns whether there is a gradient, without computing one."""
        return any(pair.waiting is not None for pair in self.pairs) or any(
            parameters.grad_of(param) is not None for param in self.params()
        )

    def has_plain_gradients(self) -> bool:
        """Whether the model has gradients of a plain backward pass, which masters do not show."""
        waits = (p.waiting is not None and type(p.master) is Master for p in self.pairs)
        return not self.checked and any(waits)

    def zero(self, *, set_to_none: bool) -> None:
        """Clears the gradients of all pairs, model and master."""
        for pair in self.pairs:
            masters.clear_grad(pair, set_to_none=set_to_none)
        self.tell_cleared()

    def tell_cleared(self) -> None:
        """Tells every optimizer of the session that this one's gradients are cleared."""
        prepared_optimizers = [self] if self.session is None else self.session.prepared_optimizers
        told = [
            each for each in prepared_optimizers if each.open_pass is not None or each.got_scaled
        ]
        cleared = {*map(id, self.params())} if told else set()
        for each in told:
            each.note_cleared(cleared)

    def note_cleared(self, params: set[int]) -> None:
        """Forgets gradients that were cleared, of the stepped parameters with these ids.

        What was set aside is dropped, and a delayed pass leaves out an optimizer of them alone.
        """
        opened = self.open_pass
        if params.issuperset(map(id, self.params())):
            self.got_scaled = False
            if opened is not None and not opened.is_open:
                opened.gradients.leave_out(params)
                self.open_pass = None
        if opened is not None:
            opened.gradients.note_cleared(params)

    def keep_captured(self) -> None:
        """Keeps the gradients of a block that a CUDA graph captures, for steps after replays."""
        self._captured = []
        for pair in self.pairs:
            param = pair.master if pair.waiting is None else pair.model
            grad = parameters.grad_of(param)
            if grad is not None:
                self._captured.append((param, grad))

    def _use_captured(self) -> None:
        """Checks, at a step, the gradients that a CUDA graph has captured; a captured step ends it.

        Raises:
            RuntimeError: If they were cleared, so that no replay trains anything.
        """
        if capturing(self.params()[0].device):
            self._captured = None
        elif not self.has_grads():
            raise RuntimeError(
                "optimizer.step() has no gradients, although a CUDA graph has captured a "
                "scale_loss block: they were cleared after the capture, while each replay writes "
                "the same tensors. Call optimizer.zero_grad() before the capture only, or capture "
                "the step, too."
            )

    def _put_captured_back(self) -> None:
        """Gives parameters the gradients that the next replay of a CUDA graph writes."""
        for param, grad in self._captured or ():
            parameters.set_grad(param, grad)
        if self.found_inf is not None:
            self.found_inf.zero_()  # the step has used it
            self.checked = True

    # -- overflow ----------------------------------------------------------------------------

    def note_overflow(self, found_inf: Tensor) -> None:
        """Skips the next step if ``found_inf`` (0-d) or that of an earlier pass is set."""
        if self.found_inf is None or self.found_inf.device != found_inf.device:
            self.found_inf, self.checked = torch.zeros_like(found_inf), False
        if self.checked:
            finite.raise_flag_(self.found_inf, found_inf)
        else:
            self.found_inf.copy_(found_inf)
        self.checked = True

    def overflowed(self) -> bool:
        """Returns whether the next step is skipped."""
        if not self.checked or self.found_inf is None:
            return False
        if capturing(self.found_inf.device):
            raise RuntimeError(
                f"A CUDA graph captures the step of {type(self.optimizer).__name__}, which asks on "
                "the host whether to skip it. Use an optimizer that skips on the device "
                "(fused=True of torch.optim, SGD with momentum after its first step; those of "
                "apex.optimizers), a static loss_scale, or call optimizer.step() outside the graph."
            )
        return bool(self.found_inf.tolist())  # sync: an optimizer in Python needs the answer

    @untraced
    def note_skipped(self, skipped: Tensor | bool) -> None:
        """Records whether the step that has begun is skipped; a tensor is the flag."""
        self.skipped = skipped.clone() if isinstance(skipped, Tensor) else skipped
        self._skip_copy = None

    # -- the step ----------------------------------------------------------------------------

    @untraced
    def begin_step(self, *, closure: bool = False) -> None:
        """Has masters follow the model, and count as written: torch's fused kernels do not count.

        Finishes an open pass, except before a closure, whose own pass may go on with it.
        """
        if self._captured is not None:
            self._use_captured()
        if closure:
            self.read_masters()
        else:
            self.settle()
        self.steps += 1
        sharers = self.session.others([self]) if self.session is not None and self.pairs else ()
        self.shared = {id(pair) for each, shares in sharers if shares for pair in each.pairs}
        masters.drop_unsent_bits(self.pairs)
        for pair in self.pairs:
            pair.mark_written()
        self.stepping = True

    @untraced
    def end_step(self, rounded: Collection[int]) -> None:
        """Rounds the masters into the model and drops their gradients, which end with the step.

        Those with the ids ``rounded`` have been rounded already.
        """
        left = [each for each in self.pairs if id(each) not in rounded or each.master_written]
        masters.round_into_model(left)
        for pair in self.pairs:
            pair.end_step(shared=id(pair) in self.shared)
        self.checked = self.stepping = False
        if self._captured is not None:
            self._put_captured_back()

    def skipped_on_host(self) -> bool | None:
        """Returns whether the last step was skipped, None until the answer has arrived."""
        skipped = self.skipped
        if isinstance(skipped, bool):
            return skipped
        if self._skip_copy is None:
            self._skip_copy = HostCopy(skipped).start()
        copy = self._skip_copy
        return bool(copy.wait().tolist()) if copy.arrived else None  # sync: none, it has arrived

    # -- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedOptimizer:
        """Copies the pairs, without gradients; the copy belongs to the same session.

        An optimizer deep-copied together with its model steps the model's copy.
        """
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.session = self.session
        if new.session is not None:
            new._masters = new.session.masters
            new.session.register(new)
        new._masters.hold(new.pairs, new)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to this process: the optimizer, the session, the gradients."""
        masters.write_back(self.pairs)
        return {"pairs": self.pairs, "master_weights": self.master_weights}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its kind; see :mod:`apex._pickle`."""
        return empty, ("prepared",), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pairs, self.master_weights = state["pairs"], bool(state["master_weights"])
        self.session = self.inner_step = None
        lazy = any(isinstance(pair.master, LazyMaster) for pair in self.pairs)
        self._masters = MasterTable(LazyMaster) if lazy else MasterTable()
        self._masters.hold(self.pairs, self)
        self._begin_anew()
