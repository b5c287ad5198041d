"""Trains at one level, and records each step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from apex import amp
from apex._core import tree
from apex._core.arguments import kind
from apex.debug.check import FrozenUpdates
from apex.integrations import scales
from apex.tools.compare.results import Level, Stored, Training
from apex.tools.compare.target import Experiment
from apex.tools.errors import InputError

FROZEN_SAMPLES = 8
"""Largest number of steps in which frozen updates are counted."""

LAST_STEPS = 10
"""Number of steps that the final loss is averaged over."""

BytesByAddress = dict[int, int]
"""Sizes of storages; tensors that share a storage count once."""


class Trainer:
    """Trains a model that is prepared for one level.

    Several levels are active while they are timed, and the ambient casts of one level would apply
    to the others' losses. Therefore casts are off, except in ``run``, which turns on the casts of
    its own level.
    """

    def __init__(self, level: Level, experiment: Experiment, device: torch.device) -> None:
        """Moves the experiment's model to ``device`` and prepares it."""
        experiment.model.to(device)
        self.experiment = experiment
        self.device = device
        self._level = level
        self._prepare()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns a function's result under the level's casts."""
        with self._casts(on=self._level.casts):
            return function(*args)

    def _casts(self, *, on: bool) -> torch.autocast:
        device = self.device.type
        return torch.autocast(device, self._level.dtype, enabled=on)

    def backward(self, batch: Any) -> Tensor:
        """Returns the loss (0-d, detached) after its backward pass."""
        experiment = self.experiment
        with self._casts(on=False):
            loss = _checked(self.run(experiment.loss, experiment.model, batch))
            self._backward(loss)
        return loss.detach()

    def step(self) -> None:
        """Steps, unless a gradient overflowed, and clears the gradients."""
        with self._casts(on=False):
            self._step()
        self.experiment.optimizer.zero_grad()

    # -- with amp.initialize and amp.scale_loss --------------------------------------------------

    def _prepare(self) -> None:
        options = self._level.options or {"opt_level": self._level.name}
        experiment = self.experiment
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user did not choose the level
            amp.initialize(experiment.model, experiment.optimizer, verbosity=0, **options)

    def loss_scale(self) -> float:
        """Returns the loss scale (multiplier)."""
        return float(scales.state_dict(self.experiment.optimizer)["loss_scaler0"]["loss_scale"])

    def _backward(self, loss: Tensor) -> None:
        with amp.scale_loss(loss, self.experiment.optimizer) as scaled_loss:
            scaled_loss.backward()  # type: ignore[no-untyped-call]

    def _step(self) -> None:
        self.experiment.optimizer.step()


def _checked(loss: Any) -> Tensor:
    """Returns the loss that the target returned; raises unless a model can learn from it."""
    what = kind(loss)
    if isinstance(loss, Tensor):
        if loss.numel() == 1 and loss.requires_grad:
            return loss
        what = f"a tensor of shape {[*loss.shape]}"
    raise InputError(
        f"loss(model, batch) returned {what}; it must return one number that depends on the "
        "model's parameters, a 0-d tensor with a gradient."
    )


class AutocastTrainer(Trainer):
    """Trains with ``torch.autocast``, which needs no preparation, and in fp16 a ``GradScaler``."""

    def _prepare(self) -> None:
        scaled = self._level.dtype is torch.float16
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    def loss_scale(self) -> float:
        """Returns the loss scale (multiplier)."""
        return float(self._scaler.get_scale())

    def _backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _step(self) -> None:
        self._scaler.step(self.experiment.optimizer)
        self._scaler.update()


# -- training --------------------------------------------------------------------------------------


def train(trainer: Trainer, batches: Sequence[Any]) -> Training:
    """Trains with a new trainer, one step on each batch; returns the record without evaluation."""
    device = trainer.device
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    losses = []
    loss_scales = [trainer.loss_scale()]
    frozen_shares = []
    every = math.ceil(len(batches) / FROZEN_SAMPLES)
    saved: BytesByAddress = {}
    for step, batch in enumerate(batches, start=1):
        with saved_for_backward(saved) if step == 1 else nullcontext():
            loss = trainer.backward(to_device(batch, device))
        losses.append(float(loss))  # sync: every loss is shown
        updates = FrozenUpdates()
        with updates if step % every == 0 else nullcontext():
            trainer.step()
        if updates.wanted:
            frozen_shares.append(updates.share)
        loss_scales.append(trainer.loss_scale())
    experiment = trainer.experiment
    return Training(
        losses=tuple(losses),
        loss_scales=tuple(loss_scales),
        stored=stored(experiment.model, experiment.optimizer),
        frozen=max(frozen_shares, default=None),
        saved_bytes=_new_bytes(saved, storages(experiment.model.parameters())),
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
    )


def evaluated(record: Training, trainer: Trainer) -> Training:
    """Returns the record with the result of the target's ``evaluate``, if it has one."""
    experiment = trainer.experiment
    if experiment.evaluate is None:
        return record
    with torch.no_grad():
        metric = trainer.run(experiment.evaluate, experiment.model)
    return replace(record, evaluation=float(metric))


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns ``batch`` with its tensors and other movable objects on ``device``."""
    return tree.map_leaves(lambda leaf: leaf.to(device), batch)


def stored(model: nn.Module, optimizer: Optimizer) -> Stored:
    """Returns the bytes of parameters, masters and optimizer state; shared storage counts once."""
    weights = storages(model.parameters())
    masters = storages(amp.master_params(optimizer))
    state = storages(tree.tensors([*optimizer.state.values()]))
    return Stored(
        params=sum(map(Tensor.numel, model.parameters())),
        model=sum(weights.values()),
        masters=_new_bytes(masters, weights),
        optimizer=_new_bytes(state, weights | masters),
    )


def storages(tensors: Iterable[Tensor]) -> BytesByAddress:
    """Returns the bytes of the tensors' storages by address."""
    bytes_by_address = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            bytes_by_address[storage.data_ptr()] = storage.nbytes()
    return bytes_by_address


def _new_bytes(used: BytesByAddress, known: BytesByAddress) -> int:
    return sum(size for address, size in used.items() if address not in known)


def saved_for_backward(saved: BytesByAddress) -> saved_tensors_hooks:
    """Returns a context that adds the storages that autograd saves inside to ``saved``."""

    def pack(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def end_loss(losses: Sequence[float]) -> float:
    """Returns the mean loss of the last steps: ten, or the last fifth of a short training."""
    count = max(1, min(LAST_STEPS, len(losses) // 5))
    return fmean(losses[-count:])
