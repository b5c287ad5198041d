"""A callback for Hugging Face's ``Trainer`` that reports overflows; needs ``transformers``."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import tree
from apex._core.arguments import integer
from apex._core.foreach import norms
from apex._torch import dtensor, ranks
from apex._torch.dynamo import untraced
from apex._torch.modules import modules_in
from apex.debug.common import loss_of, preserve_state
from apex.debug.overflow import OverflowTrace, trace_overflow

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "apex.integrations.transformers needs transformers, which could not be imported: "
        f"{error}. Install it: pip install transformers accelerate."
    ) from error

__all__ = ["OverflowCallback"]

_BAD_GRADIENTS = "the gradients are not finite"


class OverflowCallback(TrainerCallback):
    """Names the operator at fault when a step's loss or gradients are not finite.

    Works with the Trainer's own ``bf16=True``, ``fp16=True`` or fp32, without ``amp.initialize``:

        Trainer(..., callbacks=[OverflowCallback()])

    Before each optimizer step, the callback checks the loss and the gradients. If one is not
    finite, it runs the step's batches again inside :func:`apex.debug.trace_overflow`, before the
    weights change. It writes the report to ``overflow-step-N.txt`` and ``.json`` in ``output_dir``,
    and logs it as a warning to the logger ``apex``. Then it stops checking. Tracing does not change
    gradients, buffers or random numbers.

    Under ``fp16=True``, the ``GradScaler`` skips the first steps until its scale has backed off.
    Therefore non-finite gradients are traced only after ``after_skips`` consecutive bad steps. They
    are not reported if only the loss scale makes them overflow. A non-finite loss is reported
    immediately.

    Each check takes a few kernels and a host sync, like the Trainer's own check of the loss. The
    callback keeps a step's inputs until the next step.

    With several processes, each traces its own batches, and file names end in ``-rankR``. Processes
    that find no fault write nothing, except rank 0.

    Args:
        after_skips: Consecutive bad steps before a trace, under a ``GradScaler``; at least 1.

    Attributes:
        trace: The trace of the reported step; None before a report.
        path: The report's text file, if this process has written one.

    Raises:
        ValueError: If ``after_skips`` is less than 1.
    """

    def __init__(self, after_skips: int = 3) -> None:
        self.trace: OverflowTrace | None = None
        self.path: Path | None = None
        self._after_skips = integer("after_skips", after_skips, least=1)
        self._consecutive_bad_steps = 0
        # Arguments, keyword arguments and loss of each forward pass in this step.
        self._calls: list[tuple[Any, Any, Tensor | None]] = []
        # Removes the hook on the model; None before training.
        self._remove: Any = None

    def on_train_begin(self, *_: Any, model: Any, **others: Any) -> None:
        """Starts to watch the model."""
        self.on_train_end()
        self._consecutive_bad_steps = 0
        calls = self._calls  # the hook must not keep the callback alive

        @untraced
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                loss = _loss_of(output)
                if loss is not None:
                    loss = loss.detach()
                calls.append((args, kwargs, loss))

        handle = model.register_forward_hook(keep, with_kwargs=True)
        # Also removes the hook after an exception: the Trainer calls no callback then.
        self._remove = weakref.finalize(self, handle.remove)

    def on_step_begin(self, *_: Any, **others: Any) -> None:
        """Discards the previous step's batches."""
        self._calls.clear()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **others: Any
    ) -> None:
        """Checks the step's losses and gradients; traces and reports a bad one."""
        if self._remove is None or not self._remove.alive:
            return
        losses = [loss for *_, loss in self._calls if loss is not None]
        fault = _fault(losses, model)
        if not fault:
            self._consecutive_bad_steps = 0
            return
        self._consecutive_bad_steps += 1
        scaler = getattr(others.get("optimizer"), "scaler", None)
        # Whether the loss scale may be too large, and about to back off.
        may_back_off = fault == _BAD_GRADIENTS and scaler is not None
        if may_back_off and self._consecutive_bad_steps < self._after_skips:
            return
        trace = self._traced(model, scaler)
        is_only_scale = trace.first is None or trace.first.cause == "loss scale"
        if may_back_off and is_only_scale:
            self._consecutive_bad_steps = 0
            return
        self.trace = trace
        step = state.global_step + 1
        stem = Path(args.output_dir, f"overflow-step-{step}")
        self._report(f"Step {step}: {fault}.", trace, model, stem)
        self.on_train_end()

    def on_train_end(self, *_: Any, **others: Any) -> None:
        """Stops watching."""
        self._calls.clear()
        if self._remove is not None:
            self._remove()

    def _traced(self, model: nn.Module, scaler: Any) -> OverflowTrace:
        """Runs the step's batches again until one shows a fault, then restores the state."""
        trace = trace_overflow(model)
        if _is_sharded(model):
            return trace
        for args, kwargs, _ in [*self._calls]:  # a copy, because the hook appends to the list
            trace = trace_overflow(model, scaler=scaler)
            with preserve_state(model, (args, kwargs)), trace:
                output = model(*args, **kwargs)
                loss = _loss_of(output)
                trained = [tensor for tensor in tree.tensors(output) if tensor.requires_grad]
                if loss is None and trained:  # the Trainer's own: any other goes the same way back
                    loss = loss_of("OverflowCallback", trained, None)
                if loss is not None:
                    scaled_loss = loss if scaler is None else scaler.scale(loss)
                    scaled_loss.backward()
            if trace.first is not None:
                break
        return trace

    def _report(self, fault: str, trace: OverflowTrace, model: nn.Module, stem: Path) -> None:
        """Writes the report to ``stem`` with the rank and a suffix, and logs it."""
        rank = ranks.rank()
        if trace.first is None and rank != 0:
            return
        text = f"{fault} Its batches, traced with the weights before the step: {trace}"
        if _is_sharded(model):
            text = (
                f"{fault} Sharded models are not traced here: go back to an earlier checkpoint and "
                "run this step on all ranks inside amp.debug.trace_overflow(model)."
            )
        name = stem.name
        if ranks.world_size() > 1:
            name += f"-rank{rank}"
        self.path = stem.with_name(f"{name}.txt")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"{text}\n", encoding="utf-8")
        data = self.path.with_suffix(".json")
        data.write_text(trace.to_json(), encoding="utf-8")
        logging.getLogger("apex").warning("%s\nThe report is in %s.", text, self.path)


def _fault(losses: list[Tensor], model: nn.Module) -> str:
    """Returns which values are not finite; empty if all are."""
    grads = []
    for param in model.parameters():
        if param.grad is not None:
            local = dtensor.local(param.grad)
            grads.append(dtensor.summed_values(local))
    tensors = losses + grads
    if not tensors:
        return ""
    device = tensors[0].device
    bad_losses = norms.any_non_finite(losses, device)
    bad_grads = norms.any_non_finite(grads, device)
    # sync: the trace needs the weights before the step
    has_bad_losses, has_bad_grads = torch.stack([bad_losses, bad_grads]).tolist()
    if has_bad_losses:
        return "the loss is not finite"
    if has_bad_grads:
        return _BAD_GRADIENTS
    return ""


def _is_sharded(model: nn.Module) -> bool:
    """Returns whether the forward pass communicates, so that a single rank cannot run it."""
    if any(map(dtensor.is_dtensor, model.parameters())):
        return True
    class_names = [type(module).__name__ for module in modules_in(model)]
    return "FullyShardedDataParallel" in class_names


def _loss_of(output: Any) -> Tensor | None:
    """Returns the loss in a model's output: its ``loss``, or the first item of a tuple."""
    loss = None
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, tuple) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad:
        return loss
    return None
