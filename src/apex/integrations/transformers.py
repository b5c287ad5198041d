"""A callback for Hugging Face's ``Trainer`` that reports overflows; needs ``transformers``."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex._core.arguments import integer
from apex._core.foreach import norms
from apex._torch import dtensor, ranks
from apex._torch.dynamo import untraced
from apex.debug.common import preserve_state
from apex.debug.overflow import OverflowTrace, trace_overflow

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "apex.integrations.transformers needs transformers, which could not be imported: "
        f"{error}. Install it: pip install transformers accelerate."
    ) from error

__all__ = ["OverflowCallback"]


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
        integer("after_skips", after_skips, least=1)
        self.trace: OverflowTrace | None = None
        self.path: Path | None = None
        self._after_skips = after_skips
        self._consecutive_bad_steps = 0
        # Arguments, keyword arguments and loss of each forward pass in this step.
        self._calls: list[tuple[Any, Any, Tensor | None]] = []
        self._remove: Any = None  # removes the model's hook

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Starts to watch the model."""
        self._stop()
        self._consecutive_bad_steps = 0
        calls = self._calls

        @untraced
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                loss = _loss_of(output)
                calls.append((args, kwargs, None if loss is None else loss.detach()))

        handle = model.register_forward_hook(keep, with_kwargs=True)
        # Also removes the hook after an exception: the Trainer calls no callback then.
        self._remove = weakref.finalize(self, handle.remove)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Discards the previous step's batches."""
        self._calls.clear()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        """Checks the step's losses and gradients; traces and reports a bad one."""
        if self._remove is None or not self._remove.alive:
            return
        losses = [loss for *_, loss in self._calls if loss is not None]
        finite_losses, finite_grads = _are_finite(losses, model)
        if finite_losses and finite_grads:
            self._consecutive_bad_steps = 0
            return
        self._consecutive_bad_steps += 1
        scaler = getattr(others.get("optimizer"), "scaler", None)
        adjusts = finite_losses and scaler is not None  # the loss scale may be backing off
        if adjusts and self._consecutive_bad_steps < self._after_skips:
            return
        trace = self._traced(model, scaler)
        if adjusts and (trace.first is None or trace.first.cause == "loss scale"):
            self._consecutive_bad_steps = 0
            return
        self.trace = trace
        fault = "gradients are not finite" if finite_losses else "loss is not finite"
        self._report(trace, f"Step {state.global_step + 1}: the {fault}. ", args, state, model)
        self._stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops watching."""
        self._stop()

    def _stop(self) -> None:
        self._calls.clear()
        if self._remove is not None:
            self._remove()

    def _traced(self, model: nn.Module, scaler: Any) -> OverflowTrace:
        """Runs the step's batches again until one shows a fault, then restores the state."""
        trace = trace_overflow(model)
        if _is_sharded(model):
            return trace
        params = [*model.parameters()]
        grads = [param.grad for param in params]
        try:
            for args, kwargs, _ in [*self._calls]:  # the hook adds to them
                for param in params:
                    param.grad = None
                trace = trace_overflow(model, scaler=scaler)
                with preserve_state(model, (args, kwargs)), trace:
                    loss = _loss_of(model(*args, **kwargs))
                    if loss is not None:
                        loss = loss if scaler is None else scaler.scale(loss)
                        loss.backward()
                if trace.first is not None:
                    break
        finally:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        return trace

    def _report(
        self, trace: OverflowTrace, text: str, args: Any, state: Any, model: nn.Module
    ) -> None:
        rank = ranks.rank()
        if trace.first is None and rank != 0:
            return
        if trace.first is None and _is_sharded(model):
            text += (
                "Sharded models are not traced here: go back to an earlier checkpoint and run this "
                "step on all ranks inside amp.debug.trace_overflow(model)."
            )
        else:
            text += f"Its batches, traced with the weights before the step: {trace}"
        suffix = f"-rank{rank}" if ranks.world_size() > 1 else ""
        self.path = Path(args.output_dir) / f"overflow-step-{state.global_step + 1}{suffix}.txt"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"{text}\n", encoding="utf-8")
        self.path.with_suffix(".json").write_text(trace.to_json(), encoding="utf-8")
        logging.getLogger("apex").warning("%s\nThe report is in %s.", text, self.path)


def _are_finite(losses: list[Tensor], model: nn.Module) -> tuple[bool, bool]:
    """Returns whether all losses are finite, and whether all gradients are."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    grads = [dtensor.summed_values(dtensor.local(grad)) for grad in grads]
    if not losses and not grads:
        return True, True
    device = (losses or grads)[0].device
    flags = [norms.any_non_finite(losses, device), norms.any_non_finite(grads, device)]
    # sync: the trace needs the weights before the step
    bad_losses, bad_grads = torch.stack(flags).tolist()
    return not bad_losses, not bad_grads


def _is_sharded(model: nn.Module) -> bool:
    """Returns whether the forward pass communicates, so that a single rank cannot run it."""
    if any(map(dtensor.is_dtensor, model.parameters())):
        return True
    return "FullyShardedDataParallel" in {type(module).__name__ for module in model.modules()}


def _loss_of(output: Any) -> Tensor | None:
    """Returns the loss in a model's output: its ``loss``, or the first item of a tuple."""
    loss = None
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, tuple) and output:
        loss = output[0]
    is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
    return loss if is_loss else None
