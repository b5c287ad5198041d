"""The ``FP16_Optimizer`` of 2019: masters and loss scale around an optimizer of a 16-bit model."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core.flat import unflatten
from apex._core.scale import checked_static
from apex._engine.master_wrapper import MasterWrapper, check_keys, check_sizes, forwarded

_LOG = logging.getLogger("apex")
_REQUIRED = "dynamic_loss_scale", "cur_scale", "cur_iter"
_SCALE_STATE = (*_REQUIRED, "last_overflow_iter", "scale_factor", "scale_window")


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Trains a 16-bit model with fp32 masters and a loss scale; skips steps that overflow.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``. Wraps any optimizer; its groups hold
    the masters. Waits for the device once per step.

    Attributes:
        optimizer: The wrapped optimizer.
        overflow: Whether the last gradients held inf or NaN.
        verbose: Whether skipped steps are logged.
    """

    _adopts_frozen: ClassVar[bool] = True
    _scale_options: ClassVar[dict[str, Any]] = {
        "init_scale": 2.0**16,
        "scale_factor": 2.0,
        "scale_window": 1000,
    }
    _masters_key: ClassVar[str] = "fp32_groups_flat"
    _received = False

    cur_scale = forwarded("loss_scaler", "cur_scale", "The loss scale (multiplier).")
    cur_iter = forwarded("loss_scaler", "cur_iter", "Steps so far, skipped ones included.")
    last_overflow_iter = forwarded(
        "loss_scaler", "last_overflow_iter", "Last skipped step; -1 for none."
    )
    scale_factor = forwarded("loss_scaler", "scale_factor", "Growth factor; its inverse backs off.")
    scale_window = forwarded("loss_scaler", "scale_window", "Clean steps before growth.")

    def _check_optimizer(self, optimizer: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"FP16_Optimizer got {type(optimizer).__name__}; it wraps a "
                "torch.optim.Optimizer, such as apex.optimizers.FusedAdam(params)."
            )

    @cached_property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's own parameters, per group."""
        own = dict(zip(self.all_fp32_from_fp16_params, self.all_fp16_params, strict=True))
        return [[own.get(param, param) for param in params] for params in self._stepped()]

    # -- one step ----------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = True) -> None:  # noqa: N803 - apex's name
        """Clears the gradients of model and masters."""
        self._received = False
        self._clear_grads(set_to_none=set_grads_to_None)

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of the loss times the scale, in fp32; several calls accumulate.

        Raises:
            RuntimeError: Between ``clip_master_grads`` and ``step``.
        """
        if self._received:
            raise RuntimeError(
                "FP16_Optimizer.backward was called between clip_master_grads and step. "
                "Accumulate first, then clip, then step."
            )
        self._backward(loss)

    def step(self, closure: None = None) -> None:
        """Steps the masters and rounds them into the model, unless a gradient overflowed.

        Raises:
            RuntimeError: For a closure.
        """
        if closure is not None:
            raise RuntimeError(
                "FP16_Optimizer.step takes no closure. Call optimizer.backward(loss), then "
                "optimizer.step()."
            )
        self._receive()
        if not self.overflow:
            self.optimizer.step()
            self._master_params_to_model_params()
        elif self.verbose:
            _LOG.info(
                "Gradient overflow at iteration %d with loss scale %g; the step is skipped.",
                self.cur_iter,
                self.cur_scale,
            )
        self._received = False
        for param in self.all_fp32_from_fp16_params:
            param.grad = None
        self.loss_scaler.update_scale(self.overflow)

    def _receive(self) -> None:
        """Gives the masters their gradients, once per step."""
        if not self._received:
            self._give_masters_grads(check=True)
            self._received = True

    # -- checkpoints -------------------------------------------------------------------------

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """What the optimizer steps, one flat tensor per group; writes to it reach the masters.

        The first read moves the masters and fp32 parameters of each group into one memory.
        """
        return [_flat_memory(params) for params in self._stepped()]

    def state_dict(self) -> dict[str, Any]:
        """Returns loss scale, optimizer and masters."""
        return {
            **{name: getattr(self, name) for name in _SCALE_STATE},
            "optimizer_state_dict": self.optimizer.state_dict(),
            self._masters_key: self._saved_masters(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned; the model gets the rounded masters.

        Raises:
            ValueError: If the state or its masters do not fit; nothing has changed then.
        """
        check_keys(state_dict, (*_REQUIRED, "optimizer_state_dict", self._masters_key))
        scale = {name: state_dict[name] for name in _SCALE_STATE if name in state_dict}
        scale["cur_scale"] = checked_static(scale["cur_scale"], "cur_scale")
        scale["dynamic"] = scale.pop("dynamic_loss_scale")
        masters = self._by_parameter(state_dict[self._masters_key])
        self._load(state_dict["optimizer_state_dict"], self._stepped(), masters, scale)

    def _saved_masters(self) -> list[Any]:
        groups = self._stepped()
        return [torch.cat([param.detach().flatten() for param in params]) for params in groups]

    def _by_parameter(self, saved: list[Any]) -> list[list[Tensor]]:
        """Returns each group's saved masters, one for each parameter."""
        groups = self._stepped()
        own = [sum(param.numel() for param in params) for params in groups]
        check_sizes([flat.numel() for flat in saved], own)
        return [unflatten(*both) for both in zip(saved, groups, strict=True)]


@torch.no_grad()
def _flat_memory(params: list[nn.Parameter]) -> Tensor:
    """Returns the memory of ``params`` as one tensor; moves them together unless they are."""
    if not params:
        return torch.empty(0)
    start, end = params[0].untyped_storage().data_ptr(), params[0].storage_offset()
    together = True
    for param in params:
        own = param.untyped_storage().data_ptr(), param.storage_offset()
        together, end = together and own == (start, end), end + param.numel()
    size = sum(param.numel() for param in params)
    if together:
        return params[0].detach().as_strided((size,), (1,))
    flat = torch.cat([param.flatten() for param in params])
    parts = torch.split(flat, [param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        # A fused step reads the state in the layout of its parameter.
        strides = torch.empty_like(param).stride()
        own_part = part.as_strided(param.shape, strides, part.storage_offset())
        param.data = own_part.copy_(param)
    return flat
