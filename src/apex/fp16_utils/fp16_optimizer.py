"""``FP16_Optimizer``: fp32 masters and loss scaling around any optimizer, for old scripts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._core.scale import checked_static
from apex._engine.host_scale import HostScale
from apex._engine.master_wrapper import MasterWrapper, check_keys

_log = logging.getLogger("apex")

_KEYS = (
    *("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step"),
    *("optimizer_state_dict", "fp32_from_fp16"),
)


class _Scale(HostScale):
    """The loss scale under the names that ``apex.amp`` uses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic:
            rule = self.rule()
            self.cur_scale = min(max(self.cur_scale, rule.least), rule.greatest)

    def loss_scale(self) -> float:
        """Returns the current scale (multiplier)."""
        return self.cur_scale

    @property
    def _loss_scale(self) -> float:
        return self.cur_scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.cur_scale = checked_static(value)

    @property
    def _unskipped(self) -> int:
        return self.clean_steps


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Steps fp32 masters of a model's 16-bit parameters, with a static or dynamic loss scale.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``; the rest of the loop stays. New
    scripts use :func:`apex.amp.initialize` at level O2.

    Attributes:
        optimizer: The wrapped optimizer, whose groups hold the masters.
        loss_scaler: The loss scale: ``loss_scale()``, ``dynamic``.
        overflow: Whether the last backward pass overflowed; if so, the step is skipped.
        fp32_from_fp16_groups: The masters of ``fp16_groups``.
        fp32_from_fp32_groups: The fp32 parameters of each group, stepped directly.
    """

    _scale_type: ClassVar[type[HostScale]] = _Scale
    _scale_options: ClassVar[dict[str, Any]] = {
        "init_scale": 2.0**16,
        "scale_factor": 2.0,
        "scale_window": 2000,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    }
    first_closure_call_this_step = True

    def _check_optimizer(self, optimizer: Any) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list) or isinstance(optimizer, MasterWrapper):
            raise TypeError(
                f"FP16_Optimizer got {type(optimizer).__name__}; it wraps an optimizer, such as "
                "torch.optim.SGD(model.parameters(), lr=0.1)."
            )
        accepted = (*dtypes.LOW_PRECISION, torch.float32)
        for param in (param for group in groups for param in group["params"]):
            if param.requires_grad and param.dtype not in accepted:
                raise TypeError(
                    f"FP16_Optimizer got a parameter of {param.dtype} and shape "
                    f"{tuple(param.shape)}; it takes float16, bfloat16 and float32."
                )

    @cached_property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's 16-bit parameters, per group."""
        return self._low_groups

    # -- gradients ---------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False, set_to_none: bool = False) -> None:  # noqa: N803 - apex's name
        """Clears the gradients of masters and model.

        Args:
            set_grads_to_None: Whether to remove them; by default they become zero.
            set_to_none: The same, under torch's name.
        """
        self._clear_grads(set_to_none=set_grads_to_None or set_to_none)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the backward pass of the scaled loss and gives the masters their gradients.

        Gradients of several calls add up, unscaled.

        Args:
            loss: The loss; scaled in fp32.
            update_master_grads: Pass False to call ``update_master_grads`` yourself, after the
                last of several losses.
            retain_graph: As in ``Tensor.backward``.
        """
        self._backward(loss, retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copies the model's gradients to the masters, divided by the scale, and checks them.

        With a dynamic scale this waits for the device, because ``overflow`` is a host value.
        """
        self._give_masters_grads(check=self.loss_scaler.dynamic)
        self.loss_scaler.update_scale(self.overflow)

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
        """Steps the masters and rounds them into the model; does nothing after an overflow.

        Args:
            closure: Clears the gradients, computes the loss, calls ``backward`` of this object
                and returns the loss. It is called again while its gradients overflow.

        Raises:
            RuntimeError: If the masters lack gradients because ``update_master_grads`` was not
                called, nor ``backward``, or a closure overflows at the smallest loss scale.
        """
        if closure is not None:
            return self._step_with_closure(closure)
        pairs = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        if self._pending or any(own.grad is not None and m.grad is None for own, m in pairs):
            raise RuntimeError(
                "FP16_Optimizer.step got gradients that the masters do not have yet. Call "
                "update_master_grads() after the last backward(..., update_master_grads=False), "
                "and optimizer.backward(loss) in place of loss.backward()."
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
                self._require_lower_scale()
                loss = closure()
            return loss

        self.first_closure_call_this_step = True
        try:
            result = self.optimizer.step(evaluate)
            self._master_params_to_model_params()
        finally:
            self.first_closure_call_this_step = True
        return result

    def _require_lower_scale(self) -> None:
        if self.loss_scale <= self.loss_scaler.rule().least:
            raise RuntimeError(
                "The gradients of the closure overflow even at the smallest loss scale, "
                f"{self.loss_scale:g}: they hold NaN or inf at any scale. Check the batch and "
                "the loss."
            )

    def _report(self, message: str) -> None:
        if self.verbose:
            _log.warning("%s, reducing loss scale to %s", message, self.loss_scale)

    def maybe_print(self, msg: object) -> None:
        """Logs ``msg`` (logger ``apex``) where ``verbose`` is set."""
        if self.verbose:
            _log.info("%s", msg)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns masters, loss scale and the optimizer's state, under apex's keys."""
        return {
            # Plain numbers, which every `torch.load` reads.
            "loss_scaler": {
                "dynamic": self.loss_scaler.dynamic,
                "_loss_scale": self.loss_scaler.cur_scale,
                "_unskipped": self.loss_scaler.clean_steps,
            },
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [param.detach() for param in group] for group in self.fp32_from_fp16_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned, here or in apex; the model gets rounded masters.

        Raises:
            ValueError: If it does not fit this optimizer; nothing has changed then.
        """
        check_keys(state_dict, _KEYS)
        self._load(
            state_dict["optimizer_state_dict"],
            self.fp32_from_fp16_groups,
            state_dict["fp32_from_fp16"],
            {"dynamic": bool(state_dict["dynamic_loss_scale"])}
            | _scale_attributes(state_dict["loss_scaler"]),
        )
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])

    def __getstate__(self) -> NoReturn:
        """Refuses pickling, as apex did."""
        raise RuntimeError("FP16_Optimizer is saved by its state_dict(), not by pickle.")

    def __setstate__(self, state: object) -> NoReturn:
        """Refuses unpickling, as apex did."""
        raise RuntimeError("FP16_Optimizer is restored by load_state_dict(), not by pickle.")


def _scale_attributes(saved: Any) -> dict[str, Any]:
    """Returns the attributes of a saved scale: of this package, or a scaler that apex pickled."""
    values = saved if isinstance(saved, dict) else getattr(saved, "__dict__", {})
    # The scaler of `apex.amp`, and the older ones of `apex.fp16_utils`.
    scale = values.get("_loss_scale", values.get("cur_scale"))
    if scale is None:
        raise ValueError(
            f"The state's loss_scaler is {saved!r}; it must be what "
            "FP16_Optimizer.state_dict() returned, or a loss scaler of apex."
        )
    unskipped = values.get("_unskipped")
    last_overflow = values.get("last_overflow_iter", -1) if unskipped is None else -1
    return {
        "cur_scale": checked_static(scale),
        "cur_iter": int(values.get("cur_iter", 0) if unskipped is None else unskipped),
        "last_overflow_iter": int(last_overflow),
    }
