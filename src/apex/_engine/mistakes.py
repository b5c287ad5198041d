"""Mistakes in training loops that raise no error: each is found on the host and warned of once."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apex._torch.autograd import at_end_of_pass
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import PreparedOptimizer

_INSPECTED_BLOCKS = 32
"""Blocks of a session that are inspected: a mistake shows in the first, and later ones are free."""

_SENTINELS = 8
"""Parameters whose gradients are inspected."""

_LIBRARIES = (
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,
)

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
    FORGOTTEN_OPTIMIZER = (
        "optimizer.step() got gradients of a pass inside amp.scale_loss, which did not get this "
        "optimizer. Nothing has unscaled them: they are multiplied by the loss scale (65536 at "
        "first), and the step ruins the weights. Clear them before the optimizer's own pass, or "
        "pass scale_loss every optimizer that steps with them:\n"
        "    with amp.scale_loss(loss, [optimizer, other]) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
    )
    CLIPPED_INSIDE = (
        "Gradients were changed, or amp.master_params was called, inside amp.scale_loss after the "
        "backward pass. There, gradients are still multiplied by the loss scale (65536 at first), "
        "and fp32 masters have none of this pass yet: clipping clips far too much, or nothing. "
        f"Clip after the block:\n{BLOCK}"
        "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
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
        + "    optimizer.step()\nIf there was one, the model no longer has the optimizer's "
        "parameters: call fully_shard, and what else replaces them, before making the optimizer."
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
        self.blocks_left = _INSPECTED_BLOCKS

    @property
    def has_blocks(self) -> bool:
        """Whether the session has scaled a loss in a ``scale_loss`` block."""
        return self.blocks_left < _INSPECTED_BLOCKS

    def warn(self, mistake: Mistake) -> None:
        """Warns of a mistake at the user's line, once per session."""
        if mistake in self._warned:
            return
        self._warned.add(mistake)
        frame: FrameType | None = sys._getframe()
        level = 1
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
            level += 1
        # Python 3.12 has skip_file_prefixes for this.
        warnings.warn(mistake.value, UserWarning, stacklevel=level)


class BlockInspection:
    """Finds the mistakes of one ``scale_loss`` block whose loss is scaled.

    A hook on the scaled loss tells whether gradients came from it, and the version counters of a
    few gradients whether they were changed between the end of the pass and that of the block.
    """

    def __init__(
        self,
        mistakes: Mistakes,
        prepared_optimizers: Sequence[PreparedOptimizer],
        others: Iterable[PreparedOptimizer],
        scaled_loss: Tensor,
    ) -> None:
        """Begins; ends with :meth:`end_of_gradients`.

        Args:
            mistakes: Those of the session.
            prepared_optimizers: The optimizers of the block.
            others: The sessions' other optimizers.
            scaled_loss: Where the backward pass is to start.
        """
        mistakes.blocks_left -= 1
        self._mistakes, self._prepared_optimizers = mistakes, prepared_optimizers
        self._others = [each for each in others if not _reached(each)]
        self._found: list[Mistake] = []
        self._seen: list[tuple[Tensor, Tensor, int]] = []
        self._started = self._is_late = False
        self._ended = not scaled_loss.requires_grad
        if not self._ended:
            scaled_loss.register_hook(self._note_start)  # type: ignore[no-untyped-call]

    @untraced
    def _note_start(self, _: Tensor) -> None:
        if self._is_late:
            self._mistakes.warn(Mistake.LATE_BACKWARD)
        elif not self._ended:
            self._started = True
            # Twice, to come after what DistributedDataParallel writes at the end of its pass.
            at_end_of_pass(lambda: at_end_of_pass(self._note_end))

    def _note_end(self) -> None:
        params = [param for prepared in self._prepared_optimizers for param in prepared.trained()]
        self._seen = [
            (param, grad, grad._version)
            for param in params[:: max(1, len(params) // _SENTINELS)]
            if (grad := param.grad) is not None
        ]

    def end_of_gradients(self) -> None:
        """Inspects the gradients of the block, before they are unscaled; idempotent."""
        if self._ended:
            return
        self._ended = True
        reached = any(map(_reached, self._prepared_optimizers))
        if reached and not self._started:
            self._found.append(Mistake.UNSCALED_BACKWARD)
        written = [grad._version != old for param, grad, old in self._seen if param.grad is grad]
        # Horovod's and BytePS's optimizers average gradients there.
        averages = any(getattr(b.optimizer, "synchronize", None) for b in self._prepared_optimizers)
        if written and all(written) and not averages:
            self._found.append(Mistake.CLIPPED_INSIDE)
        for each in self._others if self._started else ():
            each.got_scaled = _reached(each)
        self._is_late = not (self._started or reached)
        self._prepared_optimizers, self._others, self._seen = (), [], []

    def warn(self) -> None:
        """Warns of the mistakes that were found, once the block has done its work."""
        for mistake in self._found:
            self._mistakes.warn(mistake)


def _reached(prepared: PreparedOptimizer) -> bool:
    """Returns whether a backward pass has given a parameter that autograd knows a gradient."""
    return any(param.grad is not None for param in prepared.trained())


@untraced
def inspect_step(prepared: PreparedOptimizer, *, in_closure: bool = False) -> None:
    """Warns of an optimizer's first step, or one that no ``scale_loss`` block has used yet."""
    owner = prepared.session
    if owner is None or (prepared.used and (in_closure or prepared.steps)):
        return
    # Of several optimizers that a block names, one may have no gradient yet.
    stepped = owner.prepared_optimizers if prepared.used else [prepared]
    if prepared.got_scaled:
        owner.mistakes.warn(Mistake.FORGOTTEN_OPTIMIZER)
    elif not any(each.has_grads() or _reached(each) for each in stepped):
        if not (in_closure or prepared.steps):
            owner.mistakes.warn(Mistake.STEP_BEFORE_BACKWARD)
    elif (
        owner.needs_scale
        and not (prepared.used or owner.mistakes.has_blocks)
        and any(map(_is_learning, prepared.optimizer.param_groups))
    ):
        owner.mistakes.warn(Mistake.NO_SCALE_LOSS)


def _is_learning(group: dict[str, Any]) -> bool:
    # torch.distributed.checkpoint makes optimizer state by a step with a learning rate of 0.
    lr = group.get("lr", 1.0)
    return (isinstance(lr, Tensor) and lr.device.type != "cpu") or bool(lr)
