"""apex's ``LossScaler``: a thin view of one loss's scaler under apex's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from apex import _unavailable
from apex._core.scale import ScaleRule
from apex._engine.scaler import INITIAL_SCALE, Scaler, scaler_for
from apex.amp.properties import as_loss_scale

_LOOP = "LossScaler.unscale, or amp_C.multi_tensor_scale and amp_C.multi_tensor_axpby"

__getattr__ = _unavailable.names_instead(
    __name__,
    {"axpby_check_overflow_python": _LOOP, "scale_check_overflow_python": _LOOP},
)


_VIEW = "_apex_view"
"""Attribute of a scaler that holds its view: the two refer to each other, and live as long."""


def _of_rule(name: str) -> Any:
    """Returns a property that reads and sets one value of the scaler's rule."""

    def read(self: LossScaler) -> Any:
        return getattr(self._scaler.rule, name)

    def write(self: LossScaler, value: Any) -> None:
        self._scaler.set_rule(replace(self._scaler.rule, **{name: value}))

    return property(read, write)


class LossScaler:
    """The scale of one loss, with the attributes that scripts for apex read and set.

    Reading a dynamic scaler's ``_loss_scale``, ``_unskipped`` or ``_has_overflow`` synchronizes
    with the device. Setting them does not.

    Attributes:
        dynamic: Whether the scale follows the gradients.
        has_fused_kernel: Always True, as in apex built with its extensions.
        warned_no_fused_kernel: Always False: this package has no such warning.
        warned_unscaling_non_fp32_grad: Always False: this package has no such warning.
    """

    has_fused_kernel = True
    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = INITIAL_SCALE,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        """Creates a scaler outside any ``amp.initialize`` call.

        Args:
            loss_scale: A number, or ``"dynamic"``.
            init_scale: Initial dynamic scale (multiplier).
            scale_factor: Growth factor; its inverse is the backoff factor.
            scale_window: Clean steps before growth.
            min_loss_scale: Smallest scale after a backoff.
            max_loss_scale: Largest scale after growth.
        """
        rule = ScaleRule.symmetric(
            scale_factor, scale_window, min_scale=min_loss_scale, max_scale=max_loss_scale
        )
        scale = as_loss_scale("loss_scale", loss_scale)
        self._view(scaler_for(scale, rule, initial=init_scale))

    @classmethod
    def over(cls, scaler: Scaler) -> LossScaler:
        """Returns the one view of ``scaler``."""
        if _VIEW not in vars(scaler):
            cls.__new__(cls)._view(scaler)
        return cast(LossScaler, vars(scaler)[_VIEW])

    def _view(self, scaler: Scaler) -> None:
        self._scaler = scaler
        vars(scaler)[_VIEW] = self

    def __getstate__(self) -> dict[str, Any]:
        """Returns the values under apex's names, for an independent copy; synchronizes."""
        return {
            "dynamic": self.dynamic,
            "_loss_scale": self._loss_scale,
            "_unskipped": self._unskipped,
            "scale_factor": self._scaler.rule.growth_factor,
            "_scale_seq_len": self._scale_seq_len,
            "_min_loss_scale": self._min_loss_scale,
            "_max_loss_scale": self._max_loss_scale,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Takes the values of a file, also of apex's own scaler."""
        scale = state["_loss_scale"]
        LossScaler.__init__(
            self,
            "dynamic" if state["dynamic"] else scale,
            scale,
            state.get("scale_factor", 2.0),
            state["_scale_seq_len"],
            state["_min_loss_scale"],
            state["_max_loss_scale"],
        )
        self._unskipped = state["_unskipped"]

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows the gradients."""
        return self._scaler.dynamic

    def loss_scale(self) -> float:
        """Returns the current scale."""
        return self._scaler.read_scale()

    _loss_scale = property(loss_scale, lambda self, value: self._scaler.set_scale(value))
    _unskipped = property(
        lambda self: self._scaler.read_growth_tracker(),
        lambda self, value: self._scaler.set_growth_tracker(value),
    )
    _scale_seq_len = _of_rule("growth_interval")
    _min_loss_scale = _of_rule("min_scale")
    _max_loss_scale = _of_rule("max_scale")

    _has_overflow = property(
        lambda self: bool(self._scaler.found_inf),  # sync: for a host number
        lambda self, value: self._scaler.found_inf.fill_(float(value)),
    )

    @property
    def _overflow_buf(self) -> Tensor:
        return self._scaler.found_inf.reshape(1)

    @_overflow_buf.setter
    def _overflow_buf(self, flag: Tensor) -> None:
        self._scaler.found_inf.copy_(flag.reshape(()))

    def clear_overflow_state(self) -> None:
        """Clears the overflow flag."""
        self._scaler.found_inf.zero_()

    @torch.no_grad()
    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Writes ``model_grads / scale`` into ``master_grads``; a dynamic scale checks them.

        Args:
            model_grads: Scaled gradients.
            master_grads: Tensors to write to, of any floating-point dtype; may be the same tensors.
            unused_scale: Ignored; accepted for old callers.
            models_are_masters: Ignored; accepted for old callers.
            scale_override: Divisor to use instead of the scale.
        """
        for master, model in zip(master_grads, model_grads, strict=True):
            master.copy_(model)
        scale = self._scaler.factor() if scale_override is None else scale_override
        self._scaler.unscale_(master_grads, scale)

    @torch.no_grad()
    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Writes ``model_grads / scale + stashed_master_grads`` into ``master_grads``.

        Args:
            model_grads: Scaled gradients.
            stashed_master_grads: Earlier gradients to add.
            master_grads: Tensors to write to; may be the tensors of either list.
            scale_override: The scales of the first, of the second and of the result, instead of
                the scale, 1 and 1.
        """
        scale, stashed_scale, out = scale_override or (None, 1.0, 1.0)
        stashed = [grad * (out / stashed_scale) for grad in stashed_master_grads]
        override = None if scale is None else scale / out
        self.unscale(model_grads, master_grads, scale_override=override)
        torch._foreach_add_(list(master_grads), stashed)

    def unscale_python(
        self, model_grads: Sequence[Tensor], master_grads: Sequence[Tensor], scale: float
    ) -> None:
        """Writes ``model_grads / scale`` into ``master_grads``, as :meth:`unscale`."""
        self.unscale(model_grads, master_grads, scale_override=scale)

    def unscale_with_stashed_python(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        a: float,
        b: float,
    ) -> None:
        """Writes ``a * model_grads + b * stashed_master_grads`` into ``master_grads``."""
        stashed = [grad * b for grad in stashed_master_grads]
        self.unscale_with_stashed(model_grads, stashed, master_grads, (1.0 / a, 1.0, 1.0))

    def update_scale(self) -> bool:
        """Updates the scale by the overflow flag; returns whether to skip the step.

        The flag comes from the last pass, or from a script that wrote to ``_overflow_buf``. Waits
        for the device if the scale is dynamic.
        """
        overflow = self.dynamic and bool(self._scaler.found_inf)  # sync: for a host number
        self._scaler.update()
        return overflow


_METHODS = [LossScaler.unscale, LossScaler.update_scale]


def own_update(scaler: Scaler) -> Callable[[], object] | None:
    """Returns an update that calls a script's ``update_scale`` or ``unscale``; None without one.

    Scripts replace these methods on the class, in a subclass or on one object, to share the
    overflow flag between ranks that hold different parts of a model. The gradients are unscaled by
    then, so ``unscale`` gets empty lists.
    """
    view: Any = vars(scaler).get(_VIEW, LossScaler)
    methods = (view.unscale, view.update_scale)
    if [getattr(method, "__func__", method) for method in methods] == _METHODS:
        return None
    view = LossScaler.over(scaler)

    def update() -> object:
        view.unscale((), ())
        return view.update_scale()

    return update
