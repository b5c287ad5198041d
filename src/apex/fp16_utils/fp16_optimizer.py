"""``FP16_Optimizer``: fp32 masters and loss scaling around any optimizer, for old scripts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from apex._core import dtypes, finite, master
from apex._core.master import Pair
from apex.fp16_utils import checks
from apex.fp16_utils.fp16util import clip_grad_norm
from apex.fp16_utils.host_scale import HostScale

_log = logging.getLogger("apex")


class FP16_Optimizer:  # noqa: N801 - apex's name
    """Steps fp32 masters of a model's 16-bit parameters, with a static or dynamic loss scale.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``; the rest of the loop stays. New
    scripts use :func:`apex.amp.initialize` at level O2.

    Attributes:
        optimizer: The optimizer inside, whose groups hold the masters.
        loss_scaler: The scale: ``loss_scale()``, ``dynamic``.
        overflow: Whether the last backward pass overflowed; the step is skipped then.
        fp16_groups: The model's 16-bit parameters of each group.
        fp32_from_fp16_groups: Their masters.
        fp32_from_fp32_groups: The fp32 parameters of each group, stepped themselves.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Puts masters into the optimizer's groups, with its state.

        Args:
            init_optimizer: An optimizer over fp16, bf16 and fp32 parameters.
            static_loss_scale: The scale (multiplier), when it is not dynamic.
            dynamic_loss_scale: Whether the scale follows the gradients.
            dynamic_loss_args: ``init_scale, scale_factor, scale_window, min_loss_scale,
                max_loss_scale`` of a dynamic scale.
            verbose: Whether overflows are logged.

        Raises:
            TypeError: If it is no optimizer, holds parameters of other dtypes, or
                ``dynamic_loss_args`` has other keys. Nothing is changed then.
            ValueError: If a scale is out of range.
        """
        checks.check_optimizer(init_optimizer)
        if dynamic_loss_scale:
            self.loss_scaler = HostScale(**checks.checked_args(dynamic_loss_args))
        else:
            self.loss_scaler = HostScale(static_loss_scale)
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        self.fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp32_groups: list[list[nn.Parameter]] = []
        # What the gradients in the model are multiplied by now: a backward pass adds its own only
        # to gradients of the same scale.
        self._scale_of_fp16 = self._scale_of_fp32 = 1.0
        self._pending = False
        for group in init_optimizer.param_groups:
            self._adopt(group)

    def _adopt(self, group: dict[str, Any]) -> None:
        fp16: list[nn.Parameter] = []
        masters: list[nn.Parameter] = []
        fp32: list[nn.Parameter] = []
        for index, param in enumerate(group["params"]):
            if not param.requires_grad:
                continue
            if not dtypes.is_low_precision(param):
                fp32.append(param)
                continue
            new = master.make_master(param)
            group["params"][index] = new
            fp16.append(param)
            masters.append(new)
            self._move_state(param, new)
        self.fp16_groups.append(fp16)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(fp32)

    def _move_state(self, param: nn.Parameter, new: nn.Parameter) -> None:
        if param in self.optimizer.state:
            state = self.optimizer.state.pop(param)
            self.optimizer.state[new] = {
                key: dtypes.cast(value, torch.float32) if _is_like(value, param) else value
                for key, value in state.items()
            }

    # -- parameters --------------------------------------------------------------------------

    @property
    def all_fp16_params(self) -> list[nn.Parameter]:
        """The model's 16-bit parameters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[nn.Parameter]:
        """Their masters, in the same order."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[nn.Parameter]:
        """The fp32 parameters, stepped themselves."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    def _pairs(self) -> list[Pair]:
        params, masters = self.all_fp16_params, self.all_fp32_from_fp16_params
        return [Pair(*pair) for pair in zip(params, masters, strict=True)]

    def _stepped(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _master_params_to_model_params(self) -> None:
        master.copy_to_model(self._pairs())

    # -- gradients ---------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False, set_to_none: bool = False) -> None:  # noqa: N803 - apex's name
        """Clears the gradients of masters and model.

        Args:
            set_grads_to_None: Remove them; else they become zero.
            set_to_none: The same, in torch's word.
        """
        for param in (*self._stepped(), *self.all_fp16_params):
            if param.grad is None:
                continue
            if set_grads_to_None or set_to_none:
                param.grad = None
            else:
                param.grad.detach_()
                param.grad.zero_()
        self._pending = False

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the backward pass of the scaled loss and gives the masters their gradients.

        Gradients that are there add up, unscaled, over several calls.

        Args:
            loss: The loss; scaled in fp32.
            update_master_grads: False puts the masters' gradients off to a call of
                ``update_master_grads``, after the last of several losses.
            retain_graph: As in ``Tensor.backward``.
        """
        scale = self.loss_scaler.loss_scale()
        _rescale_(self.all_fp16_params, scale / self._scale_of_fp16)
        _rescale_(self.all_fp32_from_fp32_params, scale / self._scale_of_fp32)
        self._scale_of_fp16 = self._scale_of_fp32 = scale
        self._pending = True
        (loss.float() * scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copies the model's gradients to the masters, divided by the scale, and checks them.

        Waits for the device with a dynamic scale: ``overflow`` is a host value.
        """
        received = [pair for pair in self._pairs() if pair.model.grad is not None]
        fresh = master.fp32_grads([pair.model for pair in received])
        for param in self.all_fp32_from_fp16_params:
            param.grad = None
        for pair, grad in zip(received, fresh, strict=True):
            pair.master.grad = grad
        direct = _dense_or_coalesced(self.all_fp32_from_fp32_params)
        self.overflow = self._unscale_(fresh, self._scale_of_fp16)
        self.overflow |= self._unscale_(direct, self._scale_of_fp32)
        self._scale_of_fp32 = 1.0
        self._pending = False
        self.loss_scaler.update(overflow=self.overflow)

    def _unscale_(self, grads: list[Tensor], scale: float) -> bool:
        """Divides gradients by ``scale`` in place; returns whether a dynamic scale overflowed."""
        values = finite.dense_values(grads)
        if not values:
            return False
        if not self.loss_scaler.dynamic:
            if scale != 1.0:
                finite.unscale_(values, 1.0 / scale)
            return False
        found_inf = torch.zeros((), device=values[0].device)
        finite.unscale_and_check_(values, torch.full_like(found_inf, 1.0 / scale), found_inf)
        return bool(found_inf)  # sync: apex's `overflow` is a host value

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the gradients of the optimizer's parameters by their total norm.

        Args:
            max_norm: Greatest norm.
            norm_type: Which norm; ``"inf"`` for the largest magnitude.

        Returns:
            The norm before, or -1 after an overflow.
        """
        if self.overflow:
            return -1
        return self.clip_grad_norm(list(self._stepped()), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns the gradients of each group's parameters; ``None`` after an overflow."""
        if self.overflow:
            _log.warning("inspect_master_grad_data: the gradients overflowed; returning None.")
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    # -- the step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the masters and rounds them into the model; skips after an overflow.

        Args:
            closure: Clears the gradients, computes the loss, calls ``backward`` of this object
                and returns the loss. It is called again as long as its gradients overflow.

        Raises:
            RuntimeError: If gradients wait for ``update_master_grads``, or a closure overflows at
                the least loss scale.
        """
        if closure is not None:
            return self._step_with_closure(closure)
        if self._pending:
            raise RuntimeError(
                "FP16_Optimizer.step got gradients that the masters do not have yet. Call "
                "update_master_grads() after the last backward(..., update_master_grads=False)."
            )
        if self.overflow:
            self._report("Gradient overflow.  Skipping step")
            return None
        result = self.optimizer.step()
        self._master_params_to_model_params()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                self._master_params_to_model_params()  # the optimizer has moved the masters
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                self._report("Gradient overflow within the closure.  Calling it again")
                if self.loss_scaler.at_floor:
                    raise RuntimeError(
                        "The gradients of the closure overflow even at the least loss scale, "
                        f"{self.loss_scale:g}: they hold NaN or inf that no scale mends. Look at "
                        "the batch and the loss."
                    )
                loss = closure()
            return loss

        self.first_closure_call_this_step = True
        try:
            result = self.optimizer.step(evaluate)
            self._master_params_to_model_params()
        finally:
            self.first_closure_call_this_step = True
        return result

    def _report(self, message: str) -> None:
        if self.verbose:
            _log.warning("%s, reducing loss scale to %s", message, self.loss_scale)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns masters, loss scale and the optimizer's state, in apex's keys."""
        return {
            "loss_scaler": self.loss_scaler.state(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [param.detach() for param in group] for group in self.fp32_from_fp16_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what ``state_dict`` gave, or apex's own: the masters and, rounded, the model.

        Raises:
            ValueError: If it does not fit this optimizer; nothing is changed then.
        """
        checks.check_state(state_dict, self.fp32_from_fp16_groups)
        before = self.loss_scaler.state()
        self.loss_scaler.load(state_dict["loss_scaler"])
        try:
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        except BaseException:
            self.loss_scaler.load(before)
            raise
        self.dynamic_loss_scale = bool(state_dict["dynamic_loss_scale"])
        self.loss_scaler.dynamic = self.dynamic_loss_scale
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        saved = [param for group in state_dict["fp32_from_fp16"] for param in group]
        with torch.no_grad():
            for param, value in zip(self.all_fp32_from_fp16_params, saved, strict=True):
                param.copy_(value)
        self._master_params_to_model_params()

    def __getstate__(self) -> NoReturn:
        """Refuses pickling, as apex did."""
        raise RuntimeError("FP16_Optimizer is saved by its state_dict(), not by pickle.")

    def __setstate__(self, state: object) -> NoReturn:
        """Refuses unpickling, as apex did."""
        raise RuntimeError("FP16_Optimizer is restored by load_state_dict(), not by pickle.")

    @property
    def loss_scale(self) -> float:
        """The present loss scale (multiplier)."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The optimizer's groups, which hold the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value


def _is_like(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape


def _dense_or_coalesced(params: list[nn.Parameter]) -> list[Tensor]:
    """Returns the parameters' gradients, sparse ones with each row once."""
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
    return [param.grad for param in params if param.grad is not None]


@torch.no_grad()
def _rescale_(params: list[nn.Parameter], factor: float) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    if grads and factor != 1.0:
        finite.unscale_(finite.dense_values(grads), factor)
