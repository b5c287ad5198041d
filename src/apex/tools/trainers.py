"""One experiment under one variant, with the same interface for amp and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex import amp
from apex._engine.autocast.region import CastRegion
from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.session import Session
from apex.tools.targets import Experiment
from apex.tools.variants import Variant

INITIAL_SCALE = 2.0**16


class Trainer(Protocol):
    """Trains one model.

    Attributes:
        model: Prepared for the variant.
        optimizer: Prepared for the variant.
    """

    model: nn.Module
    optimizer: Optimizer

    def backward(self, batch: Any) -> Tensor:
        """Returns the loss (0-d, detached) and leaves gradients on the stepped parameters."""

    def unscale(self) -> None:
        """Unscales these gradients if they are scaled; call at most once per step."""

    def step(self) -> None:
        """Steps unless a gradient overflowed, then clears the gradients."""

    def loss_scale(self) -> float:
        """Returns the current loss scale (multiplier). Waits for the device."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns ``function(*args)`` under the variant's casts."""


def prepare(
    variant: Variant,
    experiment: Experiment,
    device: torch.device,
    *,
    loss_scale: float = INITIAL_SCALE,
) -> Trainer:
    """Moves the experiment's model to ``device``, prepares it and returns the trainer.

    A dynamic scale starts at ``loss_scale``.
    """
    experiment.model.to(device)
    if variant.engine == "amp":
        return _AmpTrainer(variant, experiment, loss_scale)
    return _AutocastTrainer(variant, experiment, device, loss_scale)


class _AmpTrainer:
    """Trains with ``amp.initialize`` and ``amp.scale_loss``."""

    def __init__(self, variant: Variant, experiment: Experiment, loss_scale: float) -> None:
        self._loss = experiment.loss
        options = {"opt_level": variant.name, **variant.options}
        self.model, self.optimizer = amp.initialize(
            experiment.model, experiment.optimizer, verbosity=0, **options
        )
        binding = binding_of(self.optimizer)
        if binding is None or not isinstance(binding.owner, Session):
            raise RuntimeError("amp.initialize returned an optimizer without a session.")
        self._session = binding.owner
        self._scaler = self._session.scalers[0]
        if self._scaler.dynamic:
            self._scaler.set_scale(loss_scale)
        # Several levels are alive at once while they are timed. Their ambient casts would apply to
        # one another's losses, so each forward enters the casts of its own session instead.
        if isinstance(self._session.region, CastRegion):
            self._session.region.leave_ambient()

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
        return self._scaler.read_scale()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._session.region.run(function, *args)


class _AutocastTrainer:
    """Trains with ``torch.autocast`` and, in fp16, with ``GradScaler``."""

    def __init__(
        self, variant: Variant, experiment: Experiment, device: torch.device, loss_scale: float
    ) -> None:
        self._loss = experiment.loss
        self.model, self.optimizer = experiment.model, experiment.optimizer
        self._dtype, self._device = variant.dtype, device
        scaled = variant.dtype is torch.float16
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
