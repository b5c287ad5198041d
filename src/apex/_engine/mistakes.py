"""Mistakes in training loops that raise no error: each is found on the host and warned of once.

Note [How mistakes are found]
    Nothing reads a value on the host. Hooks on the scaled loss and on a few parameters tell which
    passes run inside a block. Version counters and identity of a few gradients tell who wrote them:
    a block marks those that it leaves multiplied by a loss scale with their version.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from apex._core.dtypes import is_low_precision
from apex._torch import ranks
from apex._torch.autograd import at_end_of_pass
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import PreparedOptimizer
    from apex._engine.session import Session

_INSPECTED_BLOCKS = 32
"""Blocks of a session that are inspected: a mistake shows in the first, and later ones are free."""

_LEFT = "_apex_left_by"
"""Attribute of a gradient: which block left it multiplied by a loss scale, and at which version."""

_SAMPLED = 8
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
        "too small by that factor (initially 65536), and the model hardly trains. Write\n" + BLOCK
    )
    LATE_BACKWARD = (
        "scaled_loss.backward() was called after the end of its amp.scale_loss block, where "
        "nothing unscales: the gradients stay multiplied by the loss scale (initially 65536), and "
        "a step ruins the weights. Call it inside the block:\n" + BLOCK
    )
    FORGOTTEN_OPTIMIZER = (
        "An optimizer holds gradients from an amp.scale_loss block that this optimizer was not "
        "passed to. They are still multiplied by the loss scale (initially 65536). The step ruins "
        "the weights, or with fp32 masters ignores the gradients. Call optimizer.zero_grad() "
        "before this optimizer's own backward pass, or pass every optimizer to scale_loss:\n"
        "    with amp.scale_loss(loss, [optimizer, other]) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
    )
    CLIPPED_INSIDE = (
        "Gradients were changed, or amp.master_params was called, inside amp.scale_loss after the "
        "backward pass. At that point, gradients are still multiplied by the loss scale (initially "
        "65536), and the fp32 masters have not received them. Clipping therefore shrinks them far "
        f"too much, or has no effect. Clip after the block:\n{BLOCK}"
        "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
    )
    SECOND_BACKWARD = (
        "A second backward pass inside amp.scale_loss did not start at scaled_loss. On exit, the "
        "gradients of both are divided by the loss scale (initially 65536), so those of the second "
        "pass are lost. Add up the losses:\n"
        "    with amp.scale_loss(loss + other_loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
    )
    CLIPPED_DELAYED = (
        "Gradients were clipped or changed after an amp.scale_loss block with delay_unscale=True. "
        "They are still multiplied by the loss scale (initially 65536), and the fp32 masters have "
        "not received them. Clipping therefore shrinks them far too much, or has no effect. Leave "
        f"delay_unscale out of the last block of the step, and clip after it:\n{BLOCK}"
        "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
    )
    CHANGED_MODEL_GRADS = (
        "The gradients of the model's 16-bit parameters were changed between amp.scale_loss and "
        "optimizer.step(), by clip_grad_norm_(model.parameters()) or another backward pass. The "
        "step ignores them: it uses the gradients of the fp32 masters. The model's are still "
        "multiplied by the loss scale (initially 65536), so their norm is far too large, and "
        "clipping by it freezes the parameters that are fp32 in the model, such as those of batch "
        "norm. Write\n"
        "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
    )
    IGNORED_BACKWARD = (
        "The model's 16-bit parameters have the gradients of a plain loss.backward(). At a level "
        "with a loss scale, only amp.scale_loss gives gradients to the fp32 masters that the "
        "optimizer steps: these gradients are ignored. Write\n"
        + BLOCK
        + "or use a bf16 level, which needs no loss scaling: opt_level 'O5' instead of 'O2'."
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
    RESTORED_OVERFLOW = (
        "amp.restore was called between an overflow and the step that amp would have skipped. It "
        "dropped the gradients, which hold inf or NaN: the next optimizer.step() changes nothing. "
        "To train on, compute them anew: loss.backward()"
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
        + "    optimizer.step()\nIf you did call backward(), the optimizer holds parameters that "
        "the model no longer has. Call fully_shard, and anything else that replaces parameters, "
        "before creating the optimizer."
    )
    UNPREPARED_OPTIMIZER = (
        "An optimizer that amp has not prepared steps 16-bit weights of the model itself, not "
        "their fp32 masters. Small updates are lost: bf16 rounds away those below 1/512 of a "
        "weight, fp16 those below 1/4096. Pass every optimizer to amp.initialize:\n"
        "    model, [optimizer, other] = amp.initialize(model, [optimizer, other], ...)\n"
        "or make a new one over the masters: torch.optim.SGD(amp.master_params(optimizer), ...)"
    )


class _Left(NamedTuple):
    """Who left a gradient multiplied by a loss scale.

    Attributes:
        version: The gradient's version then; another one means that it was written since.
        by_other: Whether the block was not one of the optimizer that steps with the gradient.
    """

    version: int
    by_other: bool


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

    def warn_of_ignored_grads(self) -> None:
        """Warns of gradients that no block has given to masters, unless their cause was told."""
        if Mistake.LATE_BACKWARD not in self._warned:
            self.warn(Mistake.IGNORED_BACKWARD)

    def mark_scaled_grads(
        self, prepared_optimizers: Iterable[PreparedOptimizer], *, delayed: bool
    ) -> None:
        """Marks gradients that a block leaves scaled: if delayed all, otherwise the scratch."""
        for prepared in prepared_optimizers:
            params = _sample(prepared.trained_params()) if delayed else _scratch_of(prepared)
            for grad in _grads_of(params):
                vars(grad)[_LEFT] = _Left(grad._version, by_other=False)

    def inspect_delayed(self, prepared_optimizers: Iterable[PreparedOptimizer]) -> None:
        """Before they are added to or unscaled: warns if a script has written such gradients."""
        if ranks.world_size() > 1:
            return  # where scripts may average them
        for prepared in prepared_optimizers:
            marks = _marks_of(_sample(prepared.trained_params()))
            if any(mark.by_other and is_current for mark, is_current in marks):
                self.warn(Mistake.FORGOTTEN_OPTIMIZER)
            elif marks and not _averages(prepared) and not any(current for _, current in marks):
                self.warn(Mistake.CLIPPED_DELAYED)


_GradVersion = tuple[Tensor, Tensor | None, int]
"""A parameter, its gradient, and the gradient's version."""


class BlockInspection:
    """Finds the mistakes of one ``scale_loss`` block whose loss is scaled."""

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
            others: All other optimizers.
            scaled_loss: Where the backward pass is to start.
        """
        self._mistakes = mistakes
        self._prepared_optimizers = prepared_optimizers
        self._found: list[Mistake] = []
        # The others' gradients before the pass, and the block's own ones after it.
        self._before = _versions_of(others)
        self._after_pass: list[_GradVersion] = []
        self._started = False
        self._is_running = False
        self._is_late = False
        self._ended = not scaled_loss.requires_grad
        self._hooks: list[RemovableHandle] = []
        for prepared in prepared_optimizers:
            _inspect_grads_before(prepared, mistakes)
        if self._ended:
            return
        scaled_loss.register_hook(self._mark_start)  # type: ignore[no-untyped-call]
        for prepared in prepared_optimizers:
            for param in _sample(prepared.trained_params()):
                if param.requires_grad:
                    hook = param.register_hook(self._mark_gradient)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    @untraced
    def _mark_start(self, _: Tensor) -> None:
        if self._is_late:
            self._mistakes.warn(Mistake.LATE_BACKWARD)
        elif not self._ended:
            self._started = True
            self._is_running = True
            # Twice, to come after what DistributedDataParallel writes at the end of its pass.
            at_end_of_pass(lambda: at_end_of_pass(self._mark_end))

    @untraced
    def _mark_gradient(self, _: Tensor) -> None:
        if not (self._is_running or self._ended):
            self._found.append(Mistake.SECOND_BACKWARD)

    def _mark_end(self) -> None:
        self._is_running = False
        self._after_pass = _versions_of(self._prepared_optimizers)

    def end_of_gradients(self) -> None:
        """Inspects the gradients of the block, before they are unscaled; idempotent."""
        self.close()
        if self._ended:
            return
        self._ended = True
        reached = any(map(_is_reached, self._prepared_optimizers))
        if reached and not self._started:
            self._found = [Mistake.UNSCALED_BACKWARD]
        if not self._found and self._all_written():
            self._found.append(Mistake.CLIPPED_INSIDE)
        if self._started:
            self._mark_others()
        self._is_late = not (self._started or reached)
        self._prepared_optimizers = ()
        self._before = []
        self._after_pass = []

    def _mark_others(self) -> None:
        """Marks gradients of other optimizers that the pass has reached."""
        for param, before, version in self._before:
            grad = param.grad
            if grad is not None and (grad is not before or grad._version != version):
                vars(grad)[_LEFT] = _Left(grad._version, by_other=True)

    def _all_written(self) -> bool:
        """Returns whether all gradients were written between the end of the pass and now."""
        if any(map(_averages, self._prepared_optimizers)):
            return False
        written: list[bool] = []
        for param, grad, version in self._after_pass:
            if grad is not None and param.grad is grad:
                written.append(grad._version != version)
        return bool(written) and all(written)

    def close(self) -> None:
        """Removes the hooks on parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    def warn(self) -> None:
        """Warns of the mistakes that were found, once the block has done its work."""
        for mistake in self._found:
            self._mistakes.warn(mistake)


# -- gradients of a few parameters ----------------------------------------------------------------


def _sample(params: Sequence[Tensor]) -> Sequence[Tensor]:
    return params[:: max(1, len(params) // _SAMPLED)]


def _versions_of(prepared_optimizers: Iterable[PreparedOptimizer]) -> list[_GradVersion]:
    versions: list[_GradVersion] = []
    for prepared in prepared_optimizers:
        for param in _sample(prepared.trained_params()):
            grad = param.grad
            versions.append((param, grad, 0 if grad is None else grad._version))
    return versions


def _scratch_of(prepared: PreparedOptimizer) -> Sequence[Tensor]:
    """Returns a few 16-bit parameters whose gradients no step uses, and no wrapper replaces."""
    models = [pair.model for pair in prepared.pairs if not pair.lazy]
    params = _sample([model for model in models if is_low_precision(model)])
    session = prepared.session
    if session is None or not session.ddp_tracker.wrappers:
        return params
    return [param for param in params if not session.ddp_tracker.owns_buffer(param)]


def _counted_of(prepared: PreparedOptimizer) -> Sequence[Tensor]:
    """Returns a few of the models' parameters whose own gradients the step uses."""
    lazy = [pair.model for pair in prepared.pairs if pair.lazy]
    return _sample([*lazy, *prepared.direct_params()])


def _grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _marks_of(params: Iterable[Tensor]) -> list[tuple[_Left, bool]]:
    """Returns marks of blocks on gradients, and whether each gradient is unchanged since then."""
    marks: list[tuple[_Left, bool]] = []
    for grad in _grads_of(params):
        mark: _Left | None = vars(grad).get(_LEFT)
        if mark is not None:
            marks.append((mark, mark.version == grad._version))
    return marks


def _holds_scaled(params: Iterable[Tensor]) -> bool:
    """Returns whether another optimizer's block has left a gradient scaled, unchanged since."""
    return any(mark.by_other and is_current for mark, is_current in _marks_of(params))


def _averages(prepared: PreparedOptimizer) -> bool:
    """Returns whether the optimizer averages gradients inside blocks: Horovod's, BytePS's."""
    return getattr(prepared.optimizer, "synchronize", None) is not None


def _is_reached(prepared: PreparedOptimizer) -> bool:
    """Returns whether a backward pass has given a parameter that autograd knows a gradient."""
    return any(param.grad is not None for param in prepared.trained_params())


def _inspect_grads_before(prepared: PreparedOptimizer, mistakes: Mistakes) -> None:
    """At the begin of a block: warns of other blocks' gradients, and of those of plain passes."""
    if _holds_scaled(_counted_of(prepared)):
        mistakes.warn(Mistake.FORGOTTEN_OPTIMIZER)
    if _judges_scratch(prepared):
        grads = _grads_of(_scratch_of(prepared))
        if any(_LEFT not in vars(grad) for grad in grads):
            mistakes.warn_of_ignored_grads()


def _judges_scratch(prepared: PreparedOptimizer) -> bool:
    """Returns whether every block that could reach the model's gradients was inspected."""
    session = prepared.session
    return session is not None and all(other.mistakes.blocks_left for other in session.live)


# -- at the step ----------------------------------------------------------------------------------


@untraced
def inspect_step(prepared: PreparedOptimizer, *, in_closure: bool = False) -> None:
    """Warns of gradients that are not the step's, and of a first step without gradients."""
    session = prepared.session
    if session is None or not session.mistakes.blocks_left:
        return
    mistakes = session.mistakes
    opened = prepared.open_pass
    if opened is not None:
        if opened.scaled and not opened.is_open:
            mistakes.inspect_delayed([prepared])
    elif _holds_scaled(_counted_of(prepared)):
        mistakes.warn(Mistake.FORGOTTEN_OPTIMIZER)
        return
    elif _inspect_scratch(prepared, mistakes):
        return
    is_first = not (in_closure or prepared.steps)
    if is_first or not prepared.had_block:
        _inspect_first_step(prepared, session, is_first=is_first)


def _inspect_first_step(prepared: PreparedOptimizer, session: Session, *, is_first: bool) -> None:
    # Of several optimizers that a block names, one may have no gradient yet.
    stepped = session.prepared_optimizers if prepared.had_block else [prepared]
    if not any(other.has_grads() or _is_reached(other) for other in stepped):
        if is_first:
            session.mistakes.warn(Mistake.STEP_BEFORE_BACKWARD)
        return
    needs_scale = not session.masters.lazy and session.policy.low_precision is torch.float16
    is_without_blocks = not (prepared.had_block or session.mistakes.has_blocks)
    learns = any(map(_is_learning, prepared.optimizer.param_groups))
    if needs_scale and is_without_blocks and learns:
        session.mistakes.warn(Mistake.NO_SCALE_LOSS)


def _inspect_scratch(prepared: PreparedOptimizer, mistakes: Mistakes) -> bool:
    """Warns of gradients on the model that no master gets; returns whether there are some."""
    params = _scratch_of(prepared)
    grads = _grads_of(params)
    if not grads or not _judges_scratch(prepared):
        return False
    marks = _marks_of(params)
    unchanged = sum(is_current for _, is_current in marks)
    if not prepared.has_only_scratch_grads():
        # A later block of another optimizer may reach them, as a generator's does a discriminator:
        # the masters' gradients are right.
        if unchanged == 0:
            mistakes.warn(Mistake.CHANGED_MODEL_GRADS)
        return unchanged == 0
    if unchanged < len(grads):
        mistakes.warn_of_ignored_grads()
        return True
    if _holds_scaled(params):
        mistakes.warn(Mistake.FORGOTTEN_OPTIMIZER)
        return True
    return False


def inspect_grad_scaler(prepared: PreparedOptimizer) -> None:
    """Judges a GradScaler that is about to step the optimizer.

    Raises:
        RuntimeError: If the gradients are those of a plain backward pass, which reach no master.
    """
    session = prepared.session
    if prepared.overflow.pending is None and prepared.has_only_scratch_grads():
        raise RuntimeError(
            "torch's GradScaler got an optimizer with fp32 master weights (O2, O5). It does "
            "not unscale the gradients of a plain backward pass there, which reach no master. "
            f"Remove the GradScaler; amp.scale_loss scales, unscales and skips:\n{BLOCK}"
            "    optimizer.step()"
        )
    if session is not None and not session.masters.lazy and session.mistakes.has_blocks:
        session.mistakes.warn(Mistake.GRAD_SCALER)


def _is_learning(group: dict[str, Any]) -> bool:
    # torch.distributed.checkpoint makes optimizer state by a step with a learning rate of 0.
    lr = group.get("lr", 1.0)
    return (isinstance(lr, Tensor) and lr.device.type != "cpu") or bool(lr)
