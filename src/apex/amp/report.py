"""The reports on standard output: start-up options and overflows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core.param_groups import params_of
from apex._core.project import TRACE
from apex._core.user_files import warn_at_caller
from apex._engine.backward import BackwardPass
from apex._engine.masters import pair_of_master
from apex._engine.optimizer.prepared import optimizers_of
from apex._engine.session import Session
from apex._torch import dtensor, ranks
from apex.amp._amp_state import maybe_print
from apex.amp.properties import Properties, opt_levels

SKIPS_BEFORE_WARNING = 50

_log = logging.getLogger("apex")

_NAMED = 3
"""Gradients that a warning names."""

_UNREPORTED = "cast_model_outputs"
"""An option that apex's start-up report does not print, so ours does not either."""


def _emits(record: logging.LogRecord) -> bool:
    return ranks.rank() == 0 or getattr(record, "any_rank", False)


# Every rank logs the same messages, so only rank 0 emits them, except messages about one rank.
_log.addFilter(_emits)


def start_up(defaults: Properties, properties: Properties) -> None:
    """Reports the level, its defaults, and the options after the caller's overrides."""
    level = defaults.opt_level
    for line in (
        f"Selected optimization level {level}: {opt_levels[level].description}\n",
        "Defaults for this optimization level are:",
        *_lines(defaults),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *_lines(properties),
    ):
        maybe_print(line, rank0=True)


def _lines(properties: Properties) -> list[str]:
    options = properties.options.items()
    return [f"{name:26} : {value}" for name, value in options if name != _UNREPORTED]


def overflow(ended: BackwardPass) -> None:
    """Reports overflows with one line per optimizer; warns after 50 consecutive skips."""
    loss_id = ended.scaler.loss_id
    for update in ended.updates:
        if not update.overflow:
            continue
        for _ in ended.prepared_optimizers:
            maybe_print(
                f"Gradient overflow.  Skipping step, loss scaler {loss_id} "
                f"reducing loss scale to {update.loss_scale}",
                rank0=True,
            )
        if update.skipped_in_row == SKIPS_BEFORE_WARNING:
            warn_at_caller(
                f"amp has skipped {update.skipped_in_row} steps in a row for loss {loss_id}; "
                f"its scale is down to {update.loss_scale:g} and the model is not training. "
                f"{_summary(ended.session)} No loss scale repairs a NaN, nor an inf that is not "
                f"the scale's. {TRACE}; a bf16 level ('O4', 'O5') has fp32's range."
            )


@dataclass(frozen=True)
class NonfiniteGradient:
    """One parameter whose gradient holds inf or NaN.

    Attributes:
        name: Qualified name of the parameter in its model.
        inf: Number of infinite elements, of either sign.
        nan: Number of NaN elements.
        elements: Number of elements.
    """

    name: str
    inf: int
    nan: int
    elements: int

    def __str__(self) -> str:
        counts = []
        if self.inf:
            counts.append(f"{self.inf} inf")
        if self.nan:
            counts.append(f"{self.nan} nan")
        return f"{self.name} ({', '.join(counts)} of {self.elements})"


def nonfinite_gradients(
    optimizer: Optimizer, models: Iterable[nn.Module]
) -> list[NonfiniteGradient]:
    """Returns the gradients of an optimizer that hold inf or NaN. Waits for the device.

    Args:
        optimizer: The optimizer, prepared or plain.
        models: Models with the parameters' names.
    """
    names: dict[int, str] = {}
    for model in models:
        for name, param in model.named_parameters():
            names[id(param)] = name
    nonfinite = []
    for index, param in enumerate(params_of(optimizer)):
        pair = pair_of_master(param)
        weight = param if pair is None else pair.model
        if weight.grad is None:
            continue
        inf, nan, elements = count(weight.grad)
        if inf or nan:
            name = names.get(id(weight), f"parameter {index}")
            nonfinite.append(NonfiniteGradient(name, inf, nan, elements))
    return nonfinite


def count(tensor: Tensor) -> tuple[int, int, int]:
    """Returns how many elements are inf, how many NaN, and how many there are.

    Counts a sparse tensor's values and this rank's part of a sharded one. Waits for the device.
    """
    values = dtensor.summed_values(dtensor.local(tensor))
    counts = torch.stack([torch.isinf(values).sum(), torch.isnan(values).sum()])
    inf, nan = counts.tolist()  # sync: a diagnosis
    return inf, nan, values.numel()


def _summary(session: Session) -> str:
    """Returns a sentence that names the first nonfinite gradients. Waits for the device."""
    names: list[str] = []
    for prepared in optimizers_of(session):
        names += map(str, nonfinite_gradients(prepared.optimizer, session.models))
    first = ", ".join(names[:_NAMED]) or "cleared since, or of another rank"
    return f"Nonfinite gradients ({len(names)}): {first}."
