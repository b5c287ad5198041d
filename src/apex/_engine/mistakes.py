"""Mistakes in training loops that raise no error: each is found on the host and warned of once."""

from __future__ import annotations

import enum
import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from apex._torch import ranks
from apex._torch.counted import count_writes, uncount_writes
from apex._torch.dynamo import untraced

_INSPECTED_BLOCKS = 32
"""Blocks of a session that are inspected: a mistake shows in the first, and later ones are free."""

_SENTINELS = 8
"""Parameters whose gradients are inspected."""

BLOCK = "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"


class Mistake(enum.Enum):
    """A mistake, with what happened, what it does, and the lines to write."""

    UNSCALED_BACKWARD = (
        "A backward pass inside amp.scale_loss did not start at scaled_loss. On exit, the "
        "gradients are divided by the loss scale although they were not multiplied by it: they are "
        "too small by that factor (65536 at first), and the model hardly trains. Write\n" + BLOCK
    )
    LATE_BACKWARD = (
        "scaled_loss.backward() was called after the end of its amp.scale_loss block, where "
        "nothing unscales: the gradients stay multiplied by the loss scale (65536 at first), and a "
        "step ruins the weights. Call it inside the block:\n" + BLOCK
    )
    OTHER_OPTIMIZER = (
        "The backward pass inside amp.scale_loss reached no parameter of the optimizer that "
        "scale_loss got, but those of another one. Nothing unscales them: their gradients stay "
        "multiplied by the loss scale (65536 at first), and a step ruins the weights. Pass "
        "scale_loss the optimizers of the parameters that the loss trains:\n" + BLOCK
    )
    FORGOTTEN_OPTIMIZER = (
        "optimizer.step() got gradients of a pass inside amp.scale_loss, which did not get this "
        "optimizer. Nothing has unscaled them: they are multiplied by the loss scale (65536 at "
        "first), and the step ruins the weights. Clear them before the optimizer's own pass, or "
        "pass scale_loss every optimizer that steps with them:\n"
        "    with amp.scale_loss(loss, [optimizer, other]) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
    )
    CLIPPED_INSIDE = (
        "Gradients were changed inside amp.scale_loss, after the backward pass, while they are "
        "still multiplied by the loss scale. Clipping there clips far too much: to the norm "
        "divided by the loss scale (65536 at first). Clip after the block:\n"
        + BLOCK
        + "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
    )
    MASTERS_INSIDE = (
        "amp.master_params was called inside amp.scale_loss, where the fp32 masters do not have "
        "the gradients of this backward pass yet. Clipping them there changes nothing. Clip after "
        "the block:\n"
        + BLOCK
        + "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
    )
    NO_SCALE_LOSS = (
        "optimizer.step() got the gradients of a plain loss.backward(), without amp.scale_loss. In "
        "fp16, gradients below 6e-8 become zero without loss scaling, and no step is skipped if a "
        "gradient overflows. Write\n"
        + BLOCK
        + "or use a bf16 level, which needs no loss scaling: opt_level 'O4' instead of 'O1', or "
        "'O5' instead of 'O2'."
    )
    STEP_BEFORE_BACKWARD = (
        "optimizer.step() was called before any backward pass, or after zero_grad(). No parameter "
        "has a gradient, so the step changes nothing. Call it after the backward pass:\n"
        + BLOCK
        + "    optimizer.step()"
    )
    UNPREPARED_OPTIMIZER = (
        "An optimizer that amp has not prepared steps 16-bit weights of the model itself, not "
        "their fp32 masters. Small updates are lost: bf16 rounds away those below 1/512 of a "
        "weight, fp16 those below 1/4096. Pass every optimizer to amp.initialize:\n"
        "    model, [optimizer, other] = amp.initialize(model, [optimizer, other], ...)\n"
        "or make a new one over the masters: torch.optim.SGD(amp.master_params(optimizer), ...)"
    )


class Mistakes:
    """The mistakes found in one session.

    Attributes:
        blocks_left: ``scale_loss`` blocks still to be inspected.
    """

    def __init__(self) -> None:
        self._warned: set[Mistake] = set()
        self._scaled: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._averaged = False
        self.blocks_left = _INSPECTED_BLOCKS

    @property
    def has_blocks(self) -> bool:
        """Whether the session has scaled a loss in a ``scale_loss`` block."""
        return self.blocks_left < _INSPECTED_BLOCKS

    @property
    def has_ranks(self) -> bool:
        """Whether gradients may be averaged over ranks, which writes them."""
        return self._averaged or ranks.is_running()

    def note_average(self) -> None:
        """Records that an optimizer averages gradients without ``torch.distributed``."""
        self._averaged = True

    def note_scaled(self, param: Tensor) -> None:
        """Records that the gradient of ``param`` stays scaled when its block ends."""
        if param.grad is not None:
            self._scaled[id(param)] = weakref.ref(param.grad), param.grad._version

    def any_scaled(self, params: Callable[[], Iterable[Tensor]]) -> bool:
        """Returns whether a recorded gradient of ``params()`` is still there, as it was."""
        for param in params() if self._scaled else ():
            grad, version = self._scaled.get(id(param), (None, 0))
            if grad is not None and grad() is param.grad is not None:
                return bool(param.grad._version == version)
        return False

    def warn(self, mistake: Mistake) -> None:
        """Warns of a mistake, once per session, at the user's line."""
        if mistake not in self._warned:
            self._warned.add(mistake)
            warnings.warn(mistake.value, UserWarning, stacklevel=_level_of_user())


class BlockInspection:
    """Finds the mistakes of one ``scale_loss`` block whose loss is scaled.

    Hooks on the scaled loss and on a few parameters tell whether gradients came from the scaled
    loss, and gradients' version counters tell whether they were changed afterwards.
    """

    def __init__(
        self, mistakes: Mistakes, params: Iterable[nn.Parameter], others: Iterable[nn.Parameter]
    ) -> None:
        """Starts observing the gradients of some parameters; ends with :meth:`close`.

        Args:
            mistakes: Those of the session.
            params: The parameters of the optimizers of the block.
            others: Those of the session's other optimizers.
        """
        mistakes.blocks_left -= 1
        self._mistakes = mistakes
        self._from_loss: list[Tensor] | None = None
        self._loss: Tensor | None = None
        self._written: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._found: list[Mistake] = []
        self._handles: list[Any] = []
        self._params = self._hook(params, self._note)
        self._elsewhere = False
        own = set(map(id, self._params))
        self._hook([param for param in others if id(param) not in own], self._note_elsewhere)

    def _hook(
        self, params: Iterable[nn.Parameter], note: Callable[[Tensor], None]
    ) -> list[nn.Parameter]:
        """Calls ``note`` for each gradient of a few parameters; returns all that may have one."""
        leaves = [param for param in params if param.requires_grad and param.is_leaf]
        for param in leaves[:: max(1, len(leaves) // _SENTINELS)]:
            handle: Any = param.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        return leaves

    def observe(self, scaled_loss: Tensor) -> None:
        """Observes whether backward passes start at ``scaled_loss``."""
        if scaled_loss.requires_grad:
            self._from_loss, self._loss = [], scaled_loss
            handle: Any = scaled_loss.register_hook(self._from_loss.append)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    @untraced
    def _note(self, param: Tensor) -> None:
        if param.grad is not None and isinstance(param, nn.Parameter):
            count_writes(param.grad)
            self._written[param] = (param.grad, param.grad._version)

    @untraced
    def _note_elsewhere(self, param: Tensor) -> None:
        self._elsewhere = True
        self._mistakes.note_scaled(param)

    def end_of_gradients(self, *, delayed: bool = False) -> None:
        """Inspects the gradients of the block, before they are unscaled.

        Args:
            delayed: Whether a later pass unscales them, with what is added until then.
        """
        written = [
            grad._version != version
            for param, (grad, version) in self._written.items()
            if param.grad is grad
        ]
        if self._written and self._from_loss == []:
            self._found.append(Mistake.UNSCALED_BACKWARD)
        # Averaging gradients over ranks writes them, in wrappers even with a single rank.
        if written and all(written) and not self._mistakes.has_ranks:
            self._found.append(Mistake.CLIPPED_INSIDE)
        if self._is_for_others() and not self._mistakes.has_ranks:
            self._found.append(Mistake.OTHER_OPTIMIZER)
        if self._loss is not None and not (self._from_loss or self._written or delayed):
            late: Any = functools.partial(_warn_of_late_backward, self._mistakes)
            self._loss.register_hook(late)  # type: ignore[no-untyped-call]
        self.close()

    def _is_for_others(self) -> bool:
        reached = self._written or any(param.grad is not None for param in self._params)
        return self._elsewhere and bool(self._params) and not reached

    def close(self) -> None:
        """Removes the hooks; idempotent."""
        while self._handles:
            self._handles.pop().remove()
        for grad, _ in self._written.values():
            uncount_writes(grad)
        self._written.clear()
        self._params.clear()
        self._from_loss = self._loss = None

    def warn(self) -> None:
        """Warns of the mistakes that were found, once the block has done its work."""
        while self._found:
            self._mistakes.warn(self._found.pop())


@untraced
def _warn_of_late_backward(mistakes: Mistakes, _: Tensor) -> None:
    mistakes.warn(Mistake.LATE_BACKWARD)


def inspect_step(
    mistakes: Mistakes,
    params: Callable[[], Iterable[Tensor]],
    has_grads: Callable[[], bool],
    groups: Sequence[dict[str, Any]],
    *,
    needs_scale: bool,
) -> None:
    """Warns of an optimizer's first step, or one that no ``scale_loss`` block has used yet.

    Args:
        mistakes: Those of the session.
        params: Returns the models' parameters that the optimizer trains.
        has_grads: Returns whether a parameter that is stepped has a gradient.
        groups: The optimizer's groups.
        needs_scale: Whether gradients are fp16, losses scaled, and no block has used the optimizer.
    """
    if not has_grads():
        mistakes.warn(Mistake.STEP_BEFORE_BACKWARD)
    elif mistakes.any_scaled(params):
        mistakes.warn(Mistake.FORGOTTEN_OPTIMIZER)
    elif needs_scale and not mistakes.has_blocks and any(_is_learning(group) for group in groups):
        mistakes.warn(Mistake.NO_SCALE_LOSS)


def _is_learning(group: dict[str, Any]) -> bool:
    # torch.distributed.checkpoint makes optimizer state by a step with a learning rate of 0.
    lr = group.get("lr", 1.0)
    return (isinstance(lr, Tensor) and lr.device.type != "cpu") or bool(lr)


_APEX = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _level_of_user() -> int:
    """Returns the caller's ``stacklevel`` for the innermost frame of the user's code."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_APEX, _TORCH)) and not name.endswith("contextlib.py"):
            return level
        frame, level = frame.f_back, level + 1
    return 1
