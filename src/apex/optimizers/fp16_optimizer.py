"""The ``FP16_Optimizer`` of 2019: masters and loss scale around an optimizer of a 16-bit model."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import finite, master
from apex._core.dtypes import is_low_precision
from apex._core.master import Pair

_LOG = logging.getLogger("apex")
_DYNAMIC = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000}


class FP16_Optimizer:  # noqa: N801 - apex's name
    """Trains a model that is in 16 bits: fp32 masters, a loss scale, steps that overflow skipped.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``. Any optimizer may be inside; its
    groups hold the masters. Waits for the device once per step.

    Attributes:
        optimizer: The optimizer inside.
        fp16_groups: The model's own parameters, group by group.
        overflow: Whether the last gathered gradients held inf or NaN.
        dynamic_loss_scale: Whether the scale follows the gradients.
        cur_scale: The loss scale.
        cur_iter: Steps so far, skipped ones included.
        last_overflow_iter: The last skipped one, -1 for none.
        scale_factor: What a dynamic scale grows and shrinks by.
        scale_window: Steps without overflow before it grows.
        verbose: Whether skipped steps are logged.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, float] | None = None,
        verbose: bool = True,
    ) -> None:
        """Puts fp32 masters into the optimizer's groups.

        Args:
            init_optimizer: An optimizer of the model's parameters.
            static_loss_scale: A scale that stays.
            dynamic_loss_scale: Whether the scale follows the gradients instead.
            dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window`` of that.
            verbose: Whether skipped steps are logged.

        Raises:
            TypeError: If ``init_optimizer`` is no torch optimizer.
            ValueError: For an unknown key, or a scale that is not positive.
        """
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(
                f"FP16_Optimizer got {type(init_optimizer).__name__}; it wraps a "
                "torch.optim.Optimizer, such as apex.optimizers.FusedAdam(params)."
            )
        options = _dynamic_options(dynamic_loss_args)
        scale = options["init_scale"] if dynamic_loss_scale else static_loss_scale
        if not scale > 0:
            raise ValueError(f"The loss scale is {scale!r}; it must be a positive number.")
        self.optimizer = init_optimizer
        self.fp16_groups = [list(group["params"]) for group in init_optimizer.param_groups]
        self.overflow = False
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_scale = scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = options["scale_factor"]
        self.scale_window = options["scale_window"]
        self.verbose = verbose
        self._gathered = False
        self._pairs = [pair for group in init_optimizer.param_groups for pair in self._adopt(group)]

    def _adopt(self, group: dict[str, Any]) -> list[Pair]:
        pairs = []
        for index, param in enumerate(group["params"]):
            if not is_low_precision(param):
                continue
            pair = Pair(param, master.make_master(param))
            group["params"][index] = pair.master
            if param in self.optimizer.state:
                self.optimizer.state[pair.master] = self.optimizer.state.pop(param)
            pairs.append(pair)
        return pairs

    # -- one step ----------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The loss scale."""
        return self.cur_scale

    def zero_grad(self, set_grads_to_None: bool = True) -> None:  # noqa: N803 - apex's name
        """Clears the gradients of model and masters."""
        self._gathered = False
        for pair in self._pairs:
            pair.master.grad = None
        for group in self.fp16_groups:
            for param in group:
                if set_grads_to_None:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.detach_().zero_()

    def backward(self, loss: Tensor) -> None:
        """Runs backward on the loss in fp32, times the scale; several calls accumulate.

        Raises:
            RuntimeError: Between ``clip_master_grads`` and ``step``.
        """
        if self._gathered:
            raise RuntimeError(
                "FP16_Optimizer.backward was called between clip_master_grads and step. "
                "Accumulate first, then clip, then step."
            )
        torch.autograd.backward(loss.float() * self.cur_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float | Tensor:
        """Clips the masters' gradients to a global norm.

        Returns:
            The norm before clipping; -1 if a gradient overflowed.
        """
        self._gather()
        if self.overflow:
            return -1
        return nn.utils.clip_grad_norm_(self._masters(), max_norm, norm_type)

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
        self._gather()
        if not self.overflow:
            self.optimizer.step()
            master.copy_to_model(self._pairs)
        self._gathered = False
        for pair in self._pairs:
            pair.master.grad = None
        self._update_scale(self.overflow)

    def _masters(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @torch.no_grad()
    def _gather(self) -> None:
        """Brings unscaled fp32 gradients to the masters and looks for inf and NaN."""
        if self._gathered:
            return
        fresh = [pair for pair in self._pairs if pair.model.grad is not None]
        grads = master.fp32_grads([pair.model for pair in fresh])
        for pair, grad in zip(fresh, grads, strict=True):
            pair.master.grad = grad
        values = [param.grad for param in self._masters() if param.grad is not None]
        self._gathered = True
        self.overflow = False
        if values:
            device = values[0].device
            found_inf = torch.zeros((), device=device)
            inverse = torch.full((), 1.0 / self.cur_scale, device=device)
            finite.unscale_and_check_(finite.dense_values(values), inverse, found_inf)
            self.overflow = bool(found_inf)  # sync: decides on the host whether to step, as ever

    def _update_scale(self, skip: bool) -> None:
        if skip and self.verbose:
            _LOG.info(
                "Gradient overflow at iteration %d with loss scale %g; the step is skipped.",
                self.cur_iter,
                self.cur_scale,
            )
        if self.dynamic_loss_scale:
            self._move_scale(skip)
        self.cur_iter += 1

    def _move_scale(self, skip: bool) -> None:
        if skip:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor

    # -- the optimizer's own -----------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns loss scale, optimizer and masters."""
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "scale_factor": self.scale_factor,
            "scale_window": self.scale_window,
            "optimizer_state_dict": self.optimizer.state_dict(),
            **self._saved_masters(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned; the model gets the rounded masters.

        Raises:
            ValueError: If the masters do not fit; nothing has been changed then.
        """
        masters = self._loaded_masters(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            for param, saved in zip(self._masters(), masters, strict=True):
                param.copy_(saved)
        master.copy_to_model(self._pairs)
        for name in ("dynamic_loss_scale", "cur_scale", "cur_iter"):
            setattr(self, name, state_dict[name])
        for name in ("last_overflow_iter", "scale_factor", "scale_window"):
            setattr(self, name, state_dict.get(name, getattr(self, name)))

    def _saved_masters(self) -> dict[str, Any]:
        flat = [
            torch.cat([param.detach().flatten() for param in group["params"]])
            for group in self.optimizer.param_groups
        ]
        return {"fp32_groups_flat": flat}

    def _loaded_masters(self, state_dict: dict[str, Any]) -> list[Tensor]:
        groups = [group["params"] for group in self.optimizer.param_groups]
        expected = [sum(param.numel() for param in params) for params in groups]
        flats: list[Tensor] = state_dict["fp32_groups_flat"]
        given = [flat.numel() for flat in flats]
        if given != expected:
            raise ValueError(
                f"The state dict holds masters of {given} elements per group; this optimizer's "
                f"groups have {expected}. Make model and groups as they were when it was saved."
            )
        return [
            piece.view(param.shape)
            for params, flat in zip(groups, flats, strict=True)
            for param, piece in zip(params, _pieces(flat, params), strict=True)
        ]


def _pieces(flat: Tensor, params: list[nn.Parameter]) -> tuple[Tensor, ...]:
    return torch.split(flat, [param.numel() for param in params])


def _dynamic_options(given: dict[str, float] | None) -> dict[str, Any]:
    unknown = sorted(set(given or {}) - set(_DYNAMIC))
    if unknown:
        raise ValueError(
            f"dynamic_loss_args got {', '.join(unknown)}; it takes {', '.join(_DYNAMIC)}."
        )
    return {**_DYNAMIC, **(given or {})}
