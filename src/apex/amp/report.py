"""The reports on standard output: start-up options and overflows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.param_groups import params_of
from apex._core.policy import Policy
from apex._engine.events import ScaleUpdate
from apex._engine.session import Session
from apex._torch import ranks
from apex._torch.modules import named_tensors
from apex.amp._amp_state import _amp_state, maybe_print
from apex.amp.nonfinite import count_nonfinite, nonfinite_gradients, summary
from apex.amp.properties import DESCRIPTIONS, Properties

SKIPS_BEFORE_WARNING = 50

_NAMED = 3
"""Parameters that a line names."""

_UNREPORTED = ("cast_model_outputs",)
"""Options that the start-up report, whose lines are apex's, leaves out."""


def _emits(record: logging.LogRecord) -> bool:
    return ranks.rank() == 0 or getattr(record, "any_rank", False)


# Every rank logs the same messages, so only rank 0 emits them, except those of one rank alone.
logging.getLogger("apex").addFilter(_emits)


def print_rank0(message: str) -> None:
    """Prints ``message`` on rank 0, unless ``verbosity`` is 0."""
    maybe_print(message, rank0=True)


def lists_gradients() -> bool:
    """Returns whether overflow lines are followed by the nonfinite gradients."""
    return _amp_state.verbosity > 1


def start_up(defaults: Properties, properties: Properties) -> None:
    """Reports the level, its defaults, and the options after the caller's overrides."""
    level = defaults.opt_level
    print_rank0(f"Selected optimization level {level}: {DESCRIPTIONS[level]}\n")
    print_rank0("Defaults for this optimization level are:")
    _print_lines(defaults)
    print_rank0("Processing user overrides (additional kwargs that are not None)...")
    print_rank0("After processing overrides, optimization options are:")
    _print_lines(properties)


def low_precision_models(models: Sequence[nn.Module], policy: Policy, *, trains: bool) -> None:
    """Reports in one line what becomes of models that arrive in 16 bits, wholly or in part.

    Call it before they are prepared; ``trains`` says whether optimizers came with them.
    """
    tensors = [tensor for model in models for tensor in named_tensors(model).values()]
    low = [tensor for tensor in tensors if dtypes.is_low_precision(tensor)]
    if not low:
        return
    found = dict.fromkeys(dtypes.name(tensor.dtype) for tensor in low)
    target = policy.param_dtype or (torch.float32 if policy.compute_dtype else None)
    then = "they stay as they are"
    if trains and policy.master_weights and target is not torch.float32:
        then = "fp32 masters start from their values"
    elif target is not None and [*found] != [dtypes.name(target)]:
        then = f"they become {dtypes.name(target)}"
    kinds = ", ".join(type(model).__name__ for model in models)
    print_rank0(
        f"{kinds}: {len(low)} of {len(tensors)} parameters and buffers arrived in "
        f"{' and '.join(found)}; {then}."
    )


def untrained_parameters(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Reports in one line which parameters of a model that is trained no optimizer steps.

    A layer that was replaced after the optimizer was created is among them.
    """
    if not _amp_state.verbosity:
        return
    known = (binding.trained() for session in _amp_state.sessions() for binding in session.bindings)
    held = {id(param) for params in (*map(params_of, optimizers), *known) for param in params}
    for model in models:
        own = [id(param) for param in model.parameters() if param.requires_grad]
        left = {*own}.difference(held)
        if 0 < len(left) < len(own):
            found = [name for name, param in model.named_parameters() if id(param) in left]
            names = ", ".join(found[:_NAMED]) + (", ..." if len(left) > _NAMED else "")
            print_rank0(
                f"{type(model).__name__}: {len(left)} of {len(own)} parameters that require "
                f"gradients are in no optimizer ({names}). Nothing steps them, and amp.scale_loss "
                "leaves their gradients scaled. Pass them to the optimizer, or freeze them with "
                "requires_grad_(False)."
            )


def scale_update(session: Session, update: ScaleUpdate) -> None:
    """Reports an overflow with one line per skipped step; warns after 50 consecutive skips.

    With ``verbosity=2``, another line names the nonfinite gradients.
    """
    if not update.overflow:
        return
    for _ in range(update.optimizers):
        print_rank0(
            f"Gradient overflow.  Skipping step, loss scaler {update.loss_id} "
            f"reducing loss scale to {update.loss_scale}"
        )
    if update.optimizers and lists_gradients() and ranks.rank() == 0:
        print_rank0(summary(count_nonfinite(nonfinite_gradients(session))))
    if update.skipped_in_row == SKIPS_BEFORE_WARNING:
        warnings.warn(_persistent_skips(session, update), UserWarning, stacklevel=6)


def _print_lines(properties: Properties) -> None:
    for name, value in asdict(properties).items():
        if name not in _UNREPORTED:
            print_rank0(f"{name:26} : {value}")


def _persistent_skips(session: Session, update: ScaleUpdate) -> str:
    text = (
        f"amp has skipped {update.skipped_in_row} steps in a row for loss {update.loss_id}; its "
        f"scale is down to {update.loss_scale:g} and the model is not training. "
    )
    found = next(nonfinite_gradients(session), None)
    if found is None:
        return text + "The gradients of this step are finite or cleared; check the next step."
    name, grad = found
    if bool(torch.isnan(grad).any()):  # sync: a diagnosis of skipped steps
        return text + (
            f"The gradient of {name} holds NaN, which no loss scale can fix. Look for NaN or inf "
            "in the batch, the loss and the forward pass, and for too high a learning rate."
        )
    return text + (
        f"The gradient of {name} holds inf: values exceed the range of "
        f"{session.policy.low_precision or torch.float32} even at this scale. Use a bf16 level "
        "('O4', 'O5'), keep the module in fp32, or lower the learning rate."
    )
