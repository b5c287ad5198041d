"""One variant's whole training, recorded step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import tree
from apex._core.arguments import kind
from apex.debug.frozen import frozen_updates
from apex.debug.storages import Storages
from apex.tools import memory
from apex.tools.errors import TargetError
from apex.tools.results import Distance, Sample, Training
from apex.tools.targets import Experiment
from apex.tools.trainers import Trainer

FROZEN_SAMPLES = 8
"""Number of steps at which frozen updates are counted."""

LAST_STEPS = 10
"""Number of steps that the final loss is averaged over."""

State = Mapping[str, Tensor]

States = Mapping[int, State]
"""States of a model, by the number of steps before each."""


def train(
    trainer: Trainer,
    batches: Sequence[Any],
    *,
    device: torch.device,
    keep_at: Sequence[int],
    on_step: Callable[[], object],
) -> tuple[Training, States]:
    """Trains on each of ``batches`` and returns the record.

    Args:
        trainer: Freshly prepared.
        batches: One per step.
        device: Where the model is.
        keep_at: Step numbers after which to keep the weights; the final ones are always kept.
        on_step: Called after each step.

    Returns:
        The record, without evaluation and distance from fp32, and the weights that were kept.
    """
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[float] = []
    scales = [trainer.loss_scale()]
    frozen: list[Sample] = []
    samples = _spread(len(batches), FROZEN_SAMPLES)
    weights: dict[int, State] = {}
    for step, batch in enumerate(batches, start=1):
        loss = trainer.backward(to_device(batch, device))
        losses.append(float(loss))  # sync: every loss is shown
        frozen += _step(trainer, step, count=step in samples)
        scales.append(trainer.loss_scale())
        if step in keep_at or step == len(batches):
            weights[step] = snapshot(trainer.model)
        on_step()
    record = Training(
        losses=tuple(losses),
        loss_scales=tuple(scales),
        frozen=tuple(frozen),
        stored=memory.stored(trainer.model, trainer.optimizer),
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        peak_from="device" if on_cuda else None,
    )
    return record, weights


def evaluated(record: Training, trainer: Trainer, experiment: Experiment) -> Training:
    """Returns the record with the result of the target's ``evaluate``, if it has one.

    Raises:
        TargetError: If the result is not one number.
    """
    if experiment.evaluate is None:
        return record
    with torch.no_grad():
        found: Any = trainer.run(experiment.evaluate, trainer.model)
        try:
            return replace(record, evaluation=float(found))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TargetError(
                f"evaluate(model) returned {kind(found)}; it must return one number"
            ) from error


def with_peak(record: Training, trainer: Trainer, batch: Any, *, device: torch.device) -> Training:
    """Returns the record with the peak of one more iteration on a CPU, whose events are counted.

    Nothing that was measured changes, but the model does: call it last.
    """
    if device.type != "cpu":
        return record

    def iteration() -> None:
        trainer.backward(batch)
        trainer.step()

    grown = memory.growth(iteration, device)
    if grown is None:
        return record
    held = Storages()
    held.add(trainer.model.buffers())
    stored = memory.stored(trainer.model, trainer.optimizer)
    return replace(record, peak_bytes=stored.bytes + held.total + grown, peak_from="events")


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns ``batch`` with its tensors and other movable objects on ``device``."""
    return tree.map_tensors(lambda tensor: tensor.to(device), batch, lambda o: o.to(device))


def with_distance(
    record: Training, weights: States, baseline: Training, fp32_weights: States
) -> Training:
    """Returns ``record`` with its distance from the fp32 run after as many steps."""
    steps = len(record.losses)
    fp32 = end_loss(baseline.losses[:steps])
    return replace(
        record,
        distance=Distance(
            steps=steps,
            weights=_relative(weights[steps], fp32_weights[steps]),
            loss=(end_loss(record.losses) - fp32) / abs(fp32) if fp32 else math.nan,
        ),
    )


def end_loss(losses: Sequence[float]) -> float:
    """Returns the mean loss of the last steps: ten, or the last fifth of a short training."""
    return fmean(last(losses))


def last(losses: Sequence[float]) -> Sequence[float]:
    """Returns the losses of the last steps."""
    return losses[-max(1, min(LAST_STEPS, len(losses) // 5)) :]


@torch.no_grad()
def snapshot(model: nn.Module) -> State:
    """Returns a copy of a model's state in fp32, on the CPU; at O2 and O5 the masters' values."""
    return {
        name: value.detach().to("cpu", copy=True)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _step(trainer: Trainer, step: int, *, count: bool) -> list[Sample]:
    """Steps and, if ``count``, counts frozen updates for optimizers that allow it."""
    if not count:
        trainer.step()
        return []
    trainer.unscale()
    with ExitStack() as stack:
        try:
            updates = stack.enter_context(frozen_updates(trainer.optimizer))
        except Exception:  # noqa: BLE001 - it cannot be copied, or needs a closure
            updates = None
        trainer.step()
    return [(step, updates.share)] if updates is not None and updates.wanted else []


def _relative(state: State, fp32: State) -> float:
    names = [name for name, value in fp32.items() if value.is_floating_point() and name in state]
    difference = sum(_square(state[name].double() - fp32[name].double()) for name in names)
    size = sum(_square(fp32[name].double()) for name in names)
    return math.sqrt(difference / size) if size else 0.0


def _square(value: Tensor) -> float:
    return float(value.square().sum())  # sync: on the CPU already


def _spread(steps: int, count: int) -> frozenset[int]:
    """Returns ``count`` steps from 1 to ``steps``, evenly apart, the last among them."""
    count = min(count, steps)
    return frozenset(round(steps * at / count) for at in range(1, count + 1))
