"""The ``FP16_Optimizer`` of 2019: masters and loss scale around an optimizer of a 16-bit model."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core.arguments import clipping, flag
from apex._core.scale import checked_static
from apex._engine.host_scale import HostScale
from apex._engine.master_wrapper import MasterWrapper, check_state, dynamic_options, forwarded

_LOG = logging.getLogger("apex")
_REQUIRED = "dynamic_loss_scale", "cur_scale", "cur_iter"
_SCALE_STATE = (*_REQUIRED, "last_overflow_iter", "scale_factor", "scale_window")
_DYNAMIC = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000}


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Trains a 16-bit model with fp32 masters and a loss scale; skips steps that overflow.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``. Wraps any optimizer; its groups hold
    the masters. Waits for the device once per step.

    Attributes:
        optimizer: The wrapped optimizer.
        fp16_groups: The model's own parameters, per group.
        overflow: Whether the last gradients held inf or NaN.
        verbose: Whether skipped steps are logged.
    """

    _adopts_frozen: ClassVar[bool] = True
    _masters_key: ClassVar[str] = "fp32_groups_flat"

    cur_scale = forwarded("loss_scaler", "cur_scale", "The loss scale (multiplier).")
    cur_iter = forwarded("loss_scaler", "cur_iter", "Steps so far, skipped ones included.")
    last_overflow_iter = forwarded(
        "loss_scaler", "last_overflow_iter", "Last skipped step; -1 for none."
    )
    scale_factor = forwarded("loss_scaler", "scale_factor", "Growth factor; its inverse backs off.")
    scale_window = forwarded("loss_scaler", "scale_window", "Clean steps before growth.")

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, float] | None = None,
        verbose: bool = True,
    ) -> None:
        """Replaces the 16-bit parameters in the optimizer's groups by masters.

        Args:
            init_optimizer: An optimizer over the model's parameters.
            static_loss_scale: The scale (multiplier) unless it is dynamic.
            dynamic_loss_scale: Whether the scale follows the gradients.
            dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window`` of a dynamic
                scale.
            verbose: Whether skipped steps are logged.

        Raises:
            TypeError: If ``init_optimizer`` is not a torch optimizer, a flag is no bool, or
                ``dynamic_loss_args`` has an unknown key.
            ValueError: For a scale that is not positive.
            RuntimeError: If ``amp.initialize`` has prepared the optimizer.
        """
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(
                f"FP16_Optimizer got {type(init_optimizer).__name__}; it wraps a "
                "torch.optim.Optimizer, such as apex.optimizers.FusedAdam(params)."
            )
        dynamic_loss_scale = flag("dynamic_loss_scale", dynamic_loss_scale)
        options = {**_DYNAMIC, **dynamic_options(dynamic_loss_args, _DYNAMIC)}
        scale: Any = options["init_scale"] if dynamic_loss_scale else static_loss_scale
        scaler = HostScale(scale, options["scale_factor"], options["scale_window"])
        scaler.dynamic = dynamic_loss_scale
        self.fp16_groups = [list(group["params"]) for group in init_optimizer.param_groups]
        super().__init__(init_optimizer, scaler, verbose=verbose)
        self._received = False

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

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float | Tensor:
        """Clips the masters' gradients to a global norm.

        Returns:
            The norm before clipping; -1 if a gradient overflowed.
        """
        norms = clipping("FP16_Optimizer.clip_master_grads", max_norm, norm_type)
        self._receive()
        if self.overflow:
            return -1
        return nn.utils.clip_grad_norm_(self._stepped(), *norms)

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
        for pair in self._all_pairs():
            pair.master.grad = None
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
        return [_flat_memory(group["params"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns loss scale, optimizer and masters."""
        return {
            **{name: getattr(self, name) for name in _SCALE_STATE},
            "optimizer_state_dict": self.optimizer.state_dict(),
            **self._saved_masters(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned; the model gets the rounded masters.

        Raises:
            ValueError: If the state or its masters do not fit; nothing has changed then.
        """
        check_state(state_dict, (*_REQUIRED, "optimizer_state_dict", self._masters_key))
        scale = checked_static(state_dict["cur_scale"], "cur_scale")
        masters = self._masters_from(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self._load_masters(list(self._stepped()), masters)
        for name in _SCALE_STATE:
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        self.cur_scale = scale

    def _saved_masters(self) -> dict[str, Any]:
        flat = [
            torch.cat([param.detach().flatten() for param in group["params"]])
            for group in self.optimizer.param_groups
        ]
        return {self._masters_key: flat}

    def _masters_from(self, state_dict: dict[str, Any]) -> list[Tensor]:
        """Returns the saved masters, one for each parameter."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        sizes = [[param.numel() for param in params] for params in groups]
        flats: list[Tensor] = state_dict[self._masters_key]
        given, expected = [flat.numel() for flat in flats], [sum(own) for own in sizes]
        if given != expected:
            raise ValueError(
                f"The state dict holds masters of {given} elements per group; this optimizer's "
                f"groups have {expected}. Build model and groups as they were when it was saved."
            )
        pieces = [torch.split(flat, own) for flat, own in zip(flats, sizes, strict=True)]
        return [
            piece.view(param.shape)
            for param, piece in zip(self._stepped(), (p for ps in pieces for p in ps), strict=True)
        ]


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
