"""``FP16_Optimizer``: fp32 masters and loss scaling around any optimizer, for old scripts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from apex._core import arguments
from apex._core.param_groups import params_of
from apex._core.scale import checked_static
from apex.fp16_utils.loss_scaler import DynamicLossScaler
from apex.fp16_utils.master_wrapper import MasterWrapper


class _Scale(DynamicLossScaler):
    """The loss scale under the names that ``apex.amp`` uses."""

    def loss_scale(self) -> float:  # type: ignore[override] # amp's form
        """Returns the current scale (multiplier)."""
        return self.cur_scale

    @property
    def _loss_scale(self) -> float:
        return self.cur_scale

    @property
    def _unskipped(self) -> int:
        return self.growth_tracker


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Updates fp32 masters of a model's 16-bit parameters, with a static or dynamic loss scale.

    Masters get their gradients in ``backward``. The class of 2019,
    :class:`apex.optimizers.FP16_Optimizer`, copies the gradients in ``step``.
    """

    clip_grad_norm = staticmethod(nn.utils.clip_grad_norm_)
    first_closure_call_this_step = True
    _with_frozen = False
    _checks_static = False
    _masters_key = "fp32_from_fp16"
    _keys = ("loss_scaler", "dynamic_loss_scale", "optimizer_state_dict")
    _scale_type = _Scale
    _scale_options: ClassVar[dict[str, Any]] = {
        **MasterWrapper._scale_options,
        "scale_window": 2000,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    }

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 - apex's name
        """Clears the gradients of masters and model; removes them with ``set_grads_to_None``."""
        super().zero_grad(set_grads_to_None)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the backward pass of the loss times the scale, in fp32; several calls accumulate.

        Args:
            loss: The loss.
            update_master_grads: Pass False to call ``update_master_grads`` yourself, after the
                last of several losses.
            retain_graph: As in ``Tensor.backward``.
        """
        super().backward(loss, retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns the gradients of each group's parameters; ``None`` after an overflow."""
        if self.overflow:
            return None
        grads_by_group = []
        for params in self._stepped():
            grads = [param.grad for param in params]
            grads_by_group.append(grads)
        return grads_by_group

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the gradients of the optimizer's parameters by their total norm.

        Args:
            max_norm: Greatest norm.
            norm_type: Order of the norm; ``"inf"`` for the largest magnitude.

        Returns:
            The norm before clipping, or -1 after an overflow.
        """
        norms = arguments.clipping("FP16_Optimizer.clip_master_grads", max_norm, norm_type)
        if self.overflow:
            return -1
        return self.clip_grad_norm(params_of(self.optimizer), *norms)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the masters and rounds them into the model; does nothing after an overflow.

        Args:
            closure: Clears the gradients, computes the loss, calls ``backward`` of this object
                and returns the loss. It is called again while its gradients overflow.

        Raises:
            RuntimeError: If the masters lack gradients because neither ``update_master_grads`` nor
                ``backward`` was called, or if a closure overflows at the smallest loss scale.
        """
        if closure is not None:
            self.overflow = False
            return self._step_masters(functools.partial(self._evaluate, closure))
        lacks_grads = self._pending
        for param, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            if param.grad is not None and master.grad is None:
                lacks_grads = True
        if lacks_grads:
            raise RuntimeError(
                "FP16_Optimizer.step got gradients that the masters do not have yet. Call "
                "update_master_grads() after the last backward(..., update_master_grads=False), "
                "and optimizer.backward(loss) in place of loss.backward()."
            )
        return self._step_masters()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Calls the closure until its gradients do not overflow; returns its last result."""
        self._master_params_to_model_params()  # the optimizer may have updated the masters
        loss = closure()
        while self.overflow:
            if self.loss_scale <= self.loss_scaler.rule().least:
                raise RuntimeError(
                    "The gradients of the closure overflow even at the smallest loss scale, "
                    f"{self.loss_scale:g}: they hold NaN or inf at any scale. Check the batch "
                    "and the loss."
                )
            self.maybe_print(f"Overflow within the closure; loss scale {self.loss_scale}.")
            loss = closure()
        return loss

    def _saved_scale(self) -> dict[str, Any]:
        scale = self.loss_scaler
        return {
            # Plain numbers, which every `torch.load` reads.
            "loss_scaler": {
                "dynamic": scale.dynamic,
                "_loss_scale": scale.cur_scale,
                "_unskipped": scale.growth_tracker,
                "_scale_seq_len": scale.scale_window,
            },
            "dynamic_loss_scale": scale.dynamic,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
        }

    def _loaded_scale(self, state: Mapping[str, Any]) -> dict[str, Any]:
        saved = state["loss_scaler"]
        if isinstance(saved, dict):
            value_of: Any = saved.get
        else:  # apex's files hold a scaler object: apex.amp's, or an older one
            value_of = functools.partial(getattr, saved)
        scale = value_of("_loss_scale", None) or value_of("cur_scale", None)
        updates = value_of("cur_iter", 0)
        window = value_of("scale_window", self.loss_scaler.scale_window)
        return {
            "dynamic": bool(state["dynamic_loss_scale"]),
            "cur_scale": checked_static(scale, "loss_scaler"),
            "cur_iter": int(value_of("_unskipped", updates)),
            "last_overflow_iter": int(value_of("last_overflow_iter", -1)),
            "scale_window": int(value_of("_scale_seq_len", window)),
        }

    def _saved_groups(self) -> list[list[nn.Parameter]]:
        return self.fp32_from_fp16_groups
