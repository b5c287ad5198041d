"""Mistakes in training loops that raise no error: each is found on the host and warned of once.

Note [How mistakes are found]
    Nothing reads a value on the host. In the first blocks of a session, hooks on the scaled loss
    and on a few parameters detect the passes that run inside a block. At the end of a pass, each
    gradient that it has reached gets a mark: its ``Origin`` and version. A later version means that
    the gradient was written since. From the marks, :func:`origins_of` returns at any moment where
    gradients come from.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from torch import Tensor

from apex._core import dtypes
from apex._engine.backward import BLOCK, BackwardPass
from apex._engine.masters import Mark
from apex._engine.scaler import Scaler
from apex._engine.session import live_optimizers
from apex._torch.autograd import at_end_of_pass, backward_id, leaves_of
from apex._torch.dynamo import untraced

INSPECTED = 32
"""Blocks of a session, and steps of an optimizer, that are inspected; later ones are free."""

_MARK = "_apex_mark"
"""Attribute of a gradient that a block has reached: its origin, and its version then."""

_SAMPLED = 8
"""Parameters whose gradients are inspected."""

_scalers = weakref.WeakValueDictionary[int, Scaler]()
"""The scales of the backward passes from scaled losses, by the passes' ids."""


class Mistake(enum.Enum):
    """A mistake, with what happened, what it does, and the lines to write."""

    UNSCALED_BACKWARD = (
        "A backward pass inside amp.scale_loss did not start at scaled_loss. On exit, the "
        "gradients are divided by the loss scale although they were not multiplied by it: they are "
        "too small by that factor (65536 by default), and the model hardly trains. Write\n" + BLOCK
    )
    LATE_BACKWARD = (
        "scaled_loss.backward() was called after the end of its amp.scale_loss block, where "
        "nothing unscales: the gradients stay multiplied by the loss scale (65536 by default), and "
        "a step ruins the weights. Call it inside the block:\n" + BLOCK
    )
    UNCLEARED_OVERFLOW = (
        "Gradients of a skipped step, which hold inf or NaN, were not cleared before the next "
        "amp.scale_loss block. Whatever is added to them overflows, so every step is skipped and "
        "the model does not train. Call optimizer.zero_grad() in each iteration."
    )
    FORGOTTEN_OPTIMIZER = (
        "optimizer.step() uses gradients of an amp.scale_loss block that did not get this "
        "optimizer. Its parameters belong to no model of amp.initialize, so the gradients are "
        "still multiplied by the loss scale (65536 by default), and the step ruins the weights. "
        "Pass every optimizer to amp.initialize and to scale_loss:\n"
        "    with amp.scale_loss(loss, [optimizer, other]) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
    )
    CLIPPED_INSIDE = (
        "Gradients were changed, or amp.master_params was called, inside amp.scale_loss after the "
        "backward pass. There, gradients are still multiplied by the loss scale (65536 by "
        "default). A mask, a factor or a mean over ranks works, but clipping shrinks them far too "
        f"much. Clip after the block:\n{BLOCK}"
        "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
    )
    ASSIGNED_INSIDE = (
        "Gradients were assigned inside amp.scale_loss. On exit, those from before the block are "
        "added to them. To replace them, write before the block\n    optimizer.zero_grad()"
    )
    SECOND_BACKWARD = (
        "A second backward pass inside amp.scale_loss did not start at scaled_loss. On exit, amp "
        "divides the gradients of both passes by the loss scale (65536 by default). The loss of "
        "the second pass was not multiplied by it. Add up the losses:\n"
        "    with amp.scale_loss(loss + other_loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
    )
    SCALED_HOOK = (
        "A hook on a 16-bit parameter runs in the backward pass of amp.scale_loss, where gradients "
        "are still multiplied by the loss scale (65536 by default), and a gradient that it keeps "
        "elsewhere stays so. A 16-bit mask or a factor works. Anything that depends on the size of "
        "the gradient, or keeps it, belongs after the block, where param.grad is unscaled and "
        "fp32:\n"
        f"{BLOCK}    for param in model.parameters():\n        use(param.grad)"
    )
    FAILED_AFTER_DELAYED = (
        "An exception ended an amp.scale_loss block that adds to the gradients of a block with "
        "delay_unscale=True (or under no_sync). What the failed pass has added stays in them. "
        "Before going on with other batches, write\n    optimizer.zero_grad()"
    )
    GRAD_SCALER = (
        "torch's GradScaler steps an optimizer whose loss amp.scale_loss has scaled: both scales "
        "multiply, so gradients overflow early, and each scaler skips and adapts on its own. "
        "Remove the GradScaler; amp.scale_loss scales, unscales and skips:\n"
        f"{BLOCK}    optimizer.step()"
    )
    NO_SCALE_LOSS = (
        "optimizer.step() got gradients that no amp.scale_loss block computed, such as the "
        "gradients of a plain loss.backward(). In fp16, gradients below 6e-8 become zero without "
        "loss scaling, and no step is skipped if a gradient overflows. Write\n"
        + BLOCK
        + "or use a bf16 level, which needs no loss scaling: opt_level 'O4' instead of 'O1', or "
        "'O5' instead of 'O2'."
    )
    STEP_BEFORE_BACKWARD = (
        "optimizer.step() was called before any backward pass, or after zero_grad(). No parameter "
        "has a gradient, so the step changes nothing. Call it after the backward pass:\n"
        + BLOCK
        + "    optimizer.step()\nIf you did call backward(), its loss does not depend on the "
        "optimizer's parameters: it is another model's, or the model has new parameters since. "
        "Create the optimizer after all that replaces parameters. To backward(inputs=...), pass "
        "those of model.parameters()."
    )
    UNPREPARED_OPTIMIZER = (
        "An optimizer that amp has not prepared steps 16-bit weights of the model itself, not "
        "their fp32 masters. Small updates are lost: bf16 rounds away those below 1/512 of a "
        "weight, fp16 those below 1/4096. Pass every optimizer to amp.initialize:\n"
        "    model, [optimizer, other] = amp.initialize(model, [optimizer, other], ...)\n"
        "or make a new one over the masters: torch.optim.SGD(amp.master_params(optimizer), ...)"
    )
    LOST_WRITE = (
        "The model's 16-bit weights were written in a way that PyTorch does not count, such as "
        "weight.data.clamp_(...), NumPy or an average over ranks by all_reduce(weight.data). "
        "optimizer.step() overwrites them with the fp32 masters, so the write is lost. Write to "
        "the masters instead:\n"
        "    for param in amp.master_params(optimizer):\n"
        "        param.data.clamp_(-c, c)"
    )


class Origin(enum.Enum):
    """Where a gradient comes from."""

    PLAIN = enum.auto()
    """No block has reached it."""
    OWN = enum.auto()
    """The pass of an open block of its optimizer made it; it is unchanged since."""
    OTHER = enum.auto()
    """A block that did not get its optimizer left it scaled; it is unchanged since."""
    CHANGED = enum.auto()
    """It was written since."""


class BlockInspection:
    """Finds the mistakes of one ``scale_loss`` block whose loss is scaled, and those before it.

    Attributes:
        found: The mistake in the block, to warn of once it has done its work.
    """

    def __init__(
        self,
        warn: Callable[[Mistake], None],
        block: BackwardPass,
        scaled_loss: Tensor,
        *,
        may_change: bool,
    ) -> None:
        """Begins; ends with :meth:`end`.

        Args:
            warn: Warns of a mistake now.
            block: The block, whose earlier gradients are still in place.
            scaled_loss: Where the backward pass is to start.
            may_change: Whether other code may average the scaled gradients over ranks.
        """
        self.found: Mistake | None = None
        self._warn = warn
        self._params: list[Tensor] = []
        self._made: list[Tensor] = []  # whose gradients passes from the scaled loss have made
        self._scaler = block.scaler
        self._stashes = [prepared.stash for prepared in block.prepared_optimizers]
        self._others_reached: list[Tensor] = []
        self._may_change = may_change
        self._pass_id: int | None = None  # of the last pass from the scaled loss
        self._is_running = False
        self._has_stray = False  # whether another pass has reached the block's parameters
        self._ended = False
        self._hooks = ExitStack()  # removes them
        if not scaled_loss.requires_grad:
            return
        scaled_loss.register_hook(self._begin_pass)  # type: ignore[no-untyped-call]
        trained: list[Tensor] = []
        for prepared in block.prepared_optimizers:
            params = prepared.trained_params()
            trained += params
            self._params += some_of(params)
        if any(map(_has_hook, trained)):
            self._warn(Mistake.SCALED_HOOK)
        add_hooks(self._hooks, self._params, self._reach_own)
        lenders, unowned = block.borrowable()
        own = {*trained, *unowned}  # where a master is its parameter
        for prepared in live_optimizers:
            begun = prepared.unfinished_pass
            is_open = begun is not None and begun.is_open  # a block around this one
            if is_open or prepared in lenders:
                own.update(prepared.trained_params())
        others = [leaf for leaf in leaves_of(scaled_loss) if leaf not in own]
        add_hooks(self._hooks, others, self._reach_other)

    @untraced
    def _begin_pass(self, _: Tensor) -> None:
        if self._ended:
            if self._pass_id is None:  # after one inside, this may be one for inputs alone
                self._warn(Mistake.LATE_BACKWARD)
            return
        self._pass_id = backward_id()
        _scalers[self._pass_id] = self._scaler
        self._is_running = True
        at_end_of_pass(self._end_pass)

    @untraced
    def _reach_own(self, param: Tensor) -> None:
        if self._is_running:
            return
        if _scalers.get(backward_id()) is self._scaler:  # the pass of a block inside this one
            self._made.append(param)
            _mark([param], Origin.OWN)
        else:
            self._has_stray = True

    @untraced
    def _reach_other(self, param: Tensor) -> None:
        if backward_id() == self._pass_id:  # another thread may run a pass, too
            self._others_reached.append(param)

    @untraced
    def _end_pass(self) -> None:
        self._is_running = False
        for param in self._params:
            if param.grad is not None:
                self._made.append(param)
        _mark(self._made, Origin.OWN)
        _mark(self._others_reached, Origin.OTHER)

    def end(self) -> None:
        """Removes the hooks, and inspects gradients before they are unscaled; idempotent."""
        if self._ended:
            return
        self._ended = True
        self._hooks.close()
        if self._has_stray:
            if self._pass_id is None:
                self.found = Mistake.UNSCALED_BACKWARD
            elif not self._others_reached:  # from such a leaf, the other pass may go on
                self.found = Mistake.SECOND_BACKWARD
        elif not self._may_change:
            if origins_of(self._made) == {Origin.CHANGED}:
                self.found = Mistake.CLIPPED_INSIDE
            elif any(map(self._adds_to_assigned, self._params)):
                self.found = Mistake.ASSIGNED_INSIDE

    def _adds_to_assigned(self, param: Tensor) -> bool:
        """Returns whether earlier gradients are put aside for one that no pass has made."""
        is_made = any(param is made for made in self._made)
        is_assigned = param.grad is not None and not is_made
        return is_assigned and any(param in stash for stash in self._stashes)


# -- gradients of a few parameters ----------------------------------------------------------------


def add_hooks(hooks: ExitStack, params: Iterable[Tensor], hook: Callable[[Tensor], None]) -> None:
    """Calls ``hook`` whenever autograd has added to the gradient of one of the parameters.

    ``hooks`` receives what removes them.
    """
    for param in params:
        if param.requires_grad:
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            hooks.callback(handle.remove)


def some_of(params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the parameters whose gradients are inspected."""
    return params[:: max(1, len(params) // _SAMPLED)]


@untraced  # dynamo cannot trace a tensor's attributes
def _mark(params: Iterable[Tensor], origin: Origin) -> None:
    for param in params:
        grad = param.grad
        if grad is not None:
            vars(grad)[_MARK] = Mark([origin, grad._version])


@untraced
def origins_of(params: Iterable[Tensor]) -> set[Origin]:
    """Returns where the gradients of parameters come from."""
    origins: set[Origin] = set()
    for param in params:
        grad = param.grad
        if grad is not None:
            unmarked = Origin.PLAIN, grad._version
            origin, version = vars(grad).get(_MARK) or unmarked
            origins.add(origin if version == grad._version else Origin.CHANGED)
    return origins


def _has_hook(param: Tensor) -> bool:
    """Returns whether a script has a hook on the gradient of a 16-bit parameter."""
    if not dtypes.is_low_precision(param):
        return False
    for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            function = getattr(hook, "func", hook)  # of a partial one
            module = str(getattr(function, "__module__", ""))
            if not module.startswith(("apex.", "torch.")):
                return True
    return False
