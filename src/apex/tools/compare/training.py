"""One level's whole training, recorded step by step."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex import amp
from apex._core import tree
from apex._core.arguments import kind
from apex._engine.autocast.region import CastRegion
from apex._engine.optimizer_class import binding_of
from apex.debug import frozen_updates
from apex.debug.common import Storages
from apex.integrations import scales
from apex.tools.compare.results import Level, Stored, Training
from apex.tools.compare.target import Experiment
from apex.tools.errors import TargetError

INITIAL_SCALE = 2.0**16

FROZEN_SAMPLES = 8
"""Number of steps at which frozen updates are counted."""

LAST_STEPS = 10
"""Number of steps that the final loss is averaged over."""

State = Mapping[str, Tensor]


def prepare(
    level: Level, experiment: Experiment, device: torch.device, *, loss_scale: float = INITIAL_SCALE
) -> Trainer:
    """Moves the experiment's model to ``device``, prepares it and returns the trainer.

    A dynamic scale starts at ``loss_scale``.
    """
    experiment.model.to(device)
    if level.autocast:
        return _AutocastTrainer(level, experiment, device, loss_scale)
    return _AmpTrainer(level, experiment, loss_scale)


class _AmpTrainer:
    """Trains with ``amp.initialize`` and ``amp.scale_loss``.

    ``backward`` returns the loss (0-d, detached), ``run`` a function's result under the level's
    casts; ``step`` steps unless a gradient overflowed, and clears the gradients.
    """

    def __init__(self, level: Level, experiment: Experiment, loss_scale: float) -> None:
        self._loss = experiment.loss
        options = {"opt_level": level.name, **level.options}
        with _quiet():
            self.model, self.optimizer = amp.initialize(
                experiment.model, experiment.optimizer, verbosity=0, **options
            )
        if self.loss_scale() not in (1.0, loss_scale):
            entry = {"loss_scale": loss_scale, "unskipped": 0}
            scales.load_state_dict(self.optimizer, {"loss_scaler0": entry})
        # Several levels are alive at once while they are timed. Their ambient casts would apply to
        # one another's losses, so each forward enters the casts of its own session instead.
        binding: Any = binding_of(self.optimizer)
        self._region = binding.owner.region
        if isinstance(self._region, CastRegion):
            self._region.leave_ambient()

    def backward(self, batch: Any) -> Tensor:
        loss: Tensor = self.run(self._loss, self.model, batch)
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def unscale(self) -> None:
        """Does nothing: ``scale_loss`` already unscaled them."""

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss_scale(self) -> float:
        return float(scales.state_dict(self.optimizer)["loss_scaler0"]["loss_scale"])

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._region.run(function, *args)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what amp says of a level, which the user did not choose."""
    logger = logging.getLogger("apex")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


class _AutocastTrainer:
    """Trains with ``torch.autocast`` and, in fp16, with ``GradScaler``."""

    def __init__(
        self, level: Level, experiment: Experiment, device: torch.device, loss_scale: float
    ) -> None:
        self._loss = experiment.loss
        self.model, self.optimizer = experiment.model, experiment.optimizer
        self._dtype, self._device = level.dtype, device
        scaled = level.dtype is torch.float16
        self._scaler = torch.amp.GradScaler(device.type, init_scale=loss_scale, enabled=scaled)

    def backward(self, batch: Any) -> Tensor:
        loss: Tensor = self.run(self._loss, self.model, batch)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def unscale(self) -> None:
        self._scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()

    def loss_scale(self) -> float:
        return float(self._scaler.get_scale())

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        with torch.autocast(self._device.type, self._dtype):
            return function(*args)


Trainer = _AmpTrainer | _AutocastTrainer
"""Trains a model that is prepared for one level."""


# -- training --------------------------------------------------------------------------------------


def train(
    trainer: Trainer,
    batches: Sequence[Any],
    *,
    device: torch.device,
    keep_at: Sequence[int],
) -> tuple[Training, Mapping[int, State]]:
    """Trains a freshly prepared trainer on each of ``batches`` and returns the record.

    Args:
        trainer: Freshly prepared.
        batches: One per step.
        device: Where the model is.
        keep_at: Step numbers after which to keep the weights; the final ones are always kept.

    Returns:
        The record, without evaluation and distance from fp32, and the weights that were kept.
    """
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[float] = []
    loss_scales = [trainer.loss_scale()]
    frozen: list[float] = []
    weights: dict[int, State] = {}
    count = min(FROZEN_SAMPLES, len(batches))
    sampled = {round(len(batches) * at / count) for at in range(1, count + 1)}
    saved, seen = Storages(trainer.model.parameters()), set[torch.dtype]()
    for step, batch in enumerate(batches, start=1):
        with _counted(trainer.model, saved, seen) if step == 1 else nullcontext():
            loss = trainer.backward(to_device(batch, device))
        losses.append(float(loss))  # sync: every loss is shown
        if step in sampled:
            frozen += _count_frozen(trainer)
        else:
            trainer.step()
        loss_scales.append(trainer.loss_scale())
        if step in keep_at or step == len(batches):
            weights[step] = snapshot(trainer.model)
    record = Training(
        losses=tuple(losses),
        loss_scales=tuple(loss_scales),
        stored=stored(trainer.model, trainer.optimizer),
        frozen=max(frozen, default=None),
        saved_bytes=saved.total,
        compute_dtype=min(seen, key=lambda dtype: (dtype.itemsize, str(dtype)), default=None),
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
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


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns ``batch`` with its tensors and other movable objects on ``device``."""
    return tree.map_tensors(lambda tensor: tensor.to(device), batch, lambda o: o.to(device))


def stored(model: nn.Module, optimizer: Optimizer) -> Stored:
    """Returns the bytes of parameters, masters and optimizer state; shared storage counts once."""
    storages = Storages()
    return Stored(
        params=sum(param.numel() for param in model.parameters()),
        model=storages.add(model.parameters()),
        masters=storages.add(amp.master_params(optimizer)),
        optimizer=storages.add(
            tensor for entry in optimizer.state.values() for tensor in tree.tensors(entry)
        ),
    )


def last(losses: Sequence[float]) -> Sequence[float]:
    """Returns the losses of the last steps: ten, or the last fifth of a short training."""
    return losses[-max(1, min(LAST_STEPS, len(losses) // 5)) :]


def end_loss(losses: Sequence[float]) -> float:
    """Returns the mean loss of the last steps."""
    return fmean(last(losses))


@torch.no_grad()
def snapshot(model: nn.Module) -> State:
    """Returns a copy of a model's state in fp32, on the CPU; at O2 and O5 the masters' values."""
    return {
        name: value.detach().to("cpu", copy=True)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def distance(state: State, fp32: State) -> float:
    """Returns the norm of the difference of two models' states, relative to ``fp32``'s."""
    names = [name for name, value in fp32.items() if value.is_floating_point() and name in state]
    difference = sum(_square(state[name].double() - fp32[name].double()) for name in names)
    size = sum(_square(fp32[name].double()) for name in names)
    return math.sqrt(difference / size) if size else 0.0


def _square(value: Tensor) -> float:
    return float(value.square().sum())  # sync: on the CPU already


def _count_frozen(trainer: Trainer) -> list[float]:
    """Steps; returns the share of frozen updates, for optimizers that allow counting them."""
    trainer.unscale()
    with ExitStack() as stack:
        try:
            updates = stack.enter_context(frozen_updates(trainer.optimizer))
        except Exception:  # noqa: BLE001 - it cannot be copied, or needs a closure
            updates = None
        trainer.step()
    return [updates.frozen / updates.wanted] if updates is not None and updates.wanted else []


@contextmanager
def _counted(model: nn.Module, storages: Storages, dtypes: set[torch.dtype]) -> Iterator[None]:
    """Adds what autograd saves inside to ``storages``, and the outputs' dtypes to ``dtypes``."""

    def note(_: nn.Module, __: object, output: Any) -> None:
        dtypes.update(t.dtype for t in tree.tensors(output) if t.is_floating_point())

    # The output of the model itself may have been cast for the caller.
    inner = [m for m in model.modules() if m is not model and not [*m.children()]] or [model]
    handles = [module.register_forward_hook(note) for module in inner]
    try:
        with storages.of_saved_tensors():
            yield
    finally:
        for handle in handles:
            handle.remove()
