"""``explain``: the dtype of each operator of a model, the reason for it, and its cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes, finite, tree
from apex._core.scale import checked_static
from apex.debug.arguments import (
    check_loss,
    check_loss_fn,
    check_scaler,
    checked_model,
    floating_outputs,
)
from apex.debug.attribution import CallTracker, DtypeRules
from apex.debug.clock import clock_for
from apex.debug.explanation import Explanation
from apex.debug.module_tracker import ModuleTracker, active_autocast
from apex.debug.preserve_state import casts_off, preserve_state
from apex.debug.recording import Recorder
from apex.debug.records import GradientRow, OpRow

Loss = Callable[[Any], Tensor]


def explain(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Loss | None = None,
    backward: bool = True,
    loss_scale: float | None = None,
    scaler: Any = None,
    **keywords: Any,
) -> Explanation:
    """Returns the dtypes of each operator of a model, what decided them, and what they cost.

    Runs the model forward and backward as a training step would. The model may be prepared by
    ``amp.initialize``, called inside ``torch.autocast``, or plain. For every module and operator,
    the result lists calls, input and output dtypes, casts made for it (bytes), share of the time,
    FLOPs, largest value, and the row of the op table that decided. Its totals are the share of
    FLOPs in low precision, redundant round-trip casts, the headroom of activations in their dtype,
    and the values lost to underflow and overflow, gradients included.

    Changes nothing: gradients, buffers (batch norm's statistics), random number generators, inputs,
    mode, hooks, loss scale and weight cache are preserved, also after an error. Compiled parts run
    eagerly, and data-parallel wrappers are bypassed.

    Cost: the model runs twice. The first pass warms up kernels and is only timed; the second
    inspects every result. Measured: 7 to 17 times the time of a step, at least 1 ms per operator,
    and once per process the import of torch's compiler, which any dispatch mode triggers (2 s).
    Memory: that of a step, plus one set of gradients and a copy of the buffers and inputs. The time
    of an operator is the shorter of the two passes, measured around it alone: wall time on a CPU,
    events on CUDA and XPU.

    Args:
        model: The model, as called in training.
        *inputs: Positional arguments of the model.
        loss_fn: Computes the loss (a one-element floating-point tensor) from the model's output; by
            default the sum of the floating-point tensors in the output.
        backward: Whether to run the backward pass too.
        loss_scale: Multiplier on the loss; by default the current scale of the session's first
            loss, or that of ``scaler``, or 1.
        scaler: The ``torch.amp.GradScaler`` of a plain loop.
        **keywords: Keyword arguments of the model.

    Raises:
        TypeError: If ``model`` is not a module, ``scaler`` not a ``GradScaler``, or the loss not a
            tensor.
        ValueError: If the inputs contain no tensor, the model has lazy or meta parameters, or the
            loss is not one floating-point number or does not require gradients.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> from apex.debug import explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(dim=-1))
        >>> model = amp.initialize(model, opt_level="O4", verbosity=0)
        >>> found = explain(model, torch.randn(2, 8), backward=False)
        >>> for row in found.ops[:2]:
        ...     print(row.op, row.dtypes_in, row.dtype_out, "|", row.decided_by)
        aten.addmm ('bfloat16',) bfloat16 | low precision list (linear)
        aten._softmax ('float32',) float32 | fp32 list (softmax)
        >>> found.totals.low_precision_share
        1.0
    """
    check_scaler("explain", scaler)
    check_loss_fn("explain", loss_fn)
    given = inputs, keywords
    inner = checked_model("explain", model, given)
    tracker, calls = ModuleTracker(inner), CallTracker()
    rules = DtypeRules(tracker, calls)
    scale = _scale(loss_scale, scaler, rules)
    clock = clock_for(_device(inner, given))
    recorder = Recorder(tracker, rules, clock)

    def run() -> tuple[GradientRow, ...]:
        clock.begin()
        with preserve_state(inner, given), torch.set_grad_enabled(backward), tracker:
            with recorder, calls:
                loss = inner(*inputs, **keywords)
                if loss_fn is not None or backward:
                    loss = (loss_fn or _sum_of)(loss)
            return _gradients(inner, given, loss, scale, recorder) if backward else ()

    run()
    recorder.inspects = True
    gradients = run()
    ops = recorder.records()
    notes = [f"Time is {clock.measures}, the shorter of two passes."]
    if loss_fn is None and backward:
        notes.append("Without loss_fn, the loss is the sum of the floating-point outputs.")
    if recorder.without_formula:
        names = ", ".join(sorted(recorder.without_formula))
        notes.append(f"torch has no FLOP formula for {names}: counted as 0.")
    return Explanation(
        model=type(inner).__name__,
        level=_level(rules, inner, ops),
        loss_scale=scale,
        ops=ops,
        round_trips=recorder.round_trips(),
        weight_casts=recorder.weight_casts(),
        gradients=gradients,
        kinds={name: type(module).__name__ for module, name in tracker.names.items()},
        notes=tuple(notes),
    )


def _gradients(
    model: nn.Module, given: object, loss: Any, scale: float, recorder: Recorder
) -> tuple[GradientRow, ...]:
    """Runs the backward pass; returns one record per parameter's gradient.

    ``scale`` is the multiplier on the loss.
    """
    check_loss("explain", loss, instead=" Pass backward=False to run only the forward pass.")
    with casts_off():
        # As amp.scale_loss does, scale the loss in fp32, which can hold the scale.
        scaled = loss if loss.dtype is torch.float64 else loss.float()
        scaled = scaled if scale == 1.0 else scaled * scale
        start = torch.ones_like(scaled)
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        targets = [*params.values(), *(t for t in tree.tensors(given) if t.requires_grad)]
        with recorder:
            # Unlike backward(), grad() neither writes .grad nor runs its hooks.
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(
                scaled, targets, start, allow_unused=True
            )
    # strict=False: the gradients of inputs follow those of parameters
    pairs = zip(params, grads, strict=False)
    return tuple(_gradient(name, grad) for name, grad in pairs if grad is not None)


def _level(rules: DtypeRules, model: nn.Module, ops: tuple[OpRow, ...]) -> str:
    """Returns what set the dtypes; of a plain model known only after the run."""
    if rules.session is not None:
        return rules.session.policy.opt_level
    if rules.prepared:
        return "a copy of a prepared model"
    # The model may enter autocast itself, as accelerate's do.
    entered = any(row.decided_by.startswith("torch.autocast") for row in ops)
    if entered or active_autocast() is not None:
        return "torch.autocast"
    low = {dtypes.name(p.dtype) for p in model.parameters() if dtypes.is_low_precision(p)}
    return f"{', '.join(sorted(low))} parameters" if low else "none"


def _sum_of(output: Any) -> Tensor:
    floating = floating_outputs("explain", output, instead=" or backward=False")
    sums = (t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in floating)
    return functools.reduce(torch.add, sums)


def _gradient(name: str, grad: Tensor) -> GradientRow:
    values = finite.summed_values(grad)
    half = values.half()
    size = half.abs()
    masks = (
        values == 0.0,
        (values != 0.0) & (size == 0.0),
        (size != 0.0) & (size < torch.finfo(torch.float16).smallest_normal),
        ~torch.isfinite(half),
    )
    counts = [int(mask.count_nonzero()) for mask in masks]  # sync: a report, after the run
    return GradientRow(name, dtypes.name(grad.dtype), values.numel(), *counts)


def _device(model: nn.Module, given: object) -> torch.device:
    tensors = (*model.parameters(), *model.buffers(), *tree.tensors(given))
    devices = (tensor.device for tensor in tensors)
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _scale(given: float | str | None, scaler: Any, rules: DtypeRules) -> float:
    if given == "dynamic":
        raise ValueError(
            "explain got loss_scale='dynamic'; it takes the multiplier on the loss, a number. "
            "Leave it out for the current scale of amp, or pass a GradScaler as scaler=."
        )
    if given is not None:
        return checked_static(given)
    if scaler is not None:
        return float(scaler.get_scale())
    scalers = [] if rules.session is None else rules.session.scalers
    return scalers[0].read_scale() if scalers else 1.0
