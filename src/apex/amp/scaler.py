"""apex's ``LossScaler``: a thin view of one loss's scaler under apex's names."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from apex._core.scale import ScaleRule
from apex._engine.scaler import INITIAL_SCALE, Scaler, scaler_for
from apex.amp.properties import as_loss_scale


def _of_rule(name: str) -> Any:
    """Returns a property that reads and sets one value of the scaler's rule."""

    def read(self: LossScaler) -> Any:
        return getattr(self._scaler.rule, name)

    def write(self: LossScaler, value: Any) -> None:
        self._scaler.set_rule(replace(self._scaler.rule, **{name: value}))

    return property(read, write)


class LossScaler:
    """The scale of one loss, with the attributes that scripts for apex read and set.

    Reading a dynamic scaler's ``_loss_scale``, ``_unskipped`` or ``_has_overflow`` waits for the
    device; setting them does not.

    Attributes:
        dynamic: Whether the scale follows the gradients.
        has_fused_kernel: Always True, as in apex built with its extensions.
        warned_no_fused_kernel: Always False: this package has no such warning.
        warned_unscaling_non_fp32_grad: Likewise.
    """

    has_fused_kernel: ClassVar[bool] = True
    warned_no_fused_kernel: ClassVar[bool] = False
    warned_unscaling_non_fp32_grad: ClassVar[bool] = False

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
            scale_factor, scale_window, floor=min_loss_scale, ceiling=max_loss_scale
        )
        scale = as_loss_scale("loss_scale", loss_scale)
        # The default is clamped to the bounds; a value that the caller chose is not.
        initial = None if init_scale == INITIAL_SCALE else init_scale
        self._view(scaler_for(scale, rule, initial=initial))

    @classmethod
    def over(cls, scaler: Scaler) -> LossScaler:
        """Returns the one view of ``scaler``."""
        if not isinstance(scaler.view, LossScaler):
            cls.__new__(cls)._view(scaler)
        return cast(LossScaler, scaler.view)

    def _view(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._assigned_flag: Tensor | None = None
        scaler.view = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies the values into an independent scaler; waits for the device."""
        rule, scale = self._scaler.rule, self._scaler.read_scale()
        if not self.dynamic:
            return type(self), (scale,)
        bounds = rule.growth_interval, rule.floor, rule.ceiling
        return type(self), ("dynamic", scale, rule.growth_factor, *bounds), self._unskipped

    def __setstate__(self, unskipped: int) -> None:
        """Restores the count of clean steps, which the constructor does not take."""
        self._unskipped = unskipped

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows the gradients."""
        return self._scaler.dynamic

    def loss_scale(self) -> float:
        """Returns the current scale."""
        return self._scaler.read_scale()

    @property
    def _loss_scale(self) -> float:
        return self._scaler.read_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._scaler.set_scale(value)

    @property
    def _unskipped(self) -> int:
        return self._scaler.read_clean_steps()

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._scaler.set_clean_steps(value)

    @property
    def _has_overflow(self) -> bool:
        return self._scaler.read_found_inf()

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._assigned_flag = None
        self._scaler.found_inf.fill_(float(value))

    @property
    def _overflow_buf(self) -> Tensor:
        return (
            self._scaler.found_inf.reshape(1)
            if self._assigned_flag is None
            else self._assigned_flag
        )

    @_overflow_buf.setter
    def _overflow_buf(self, flag: Tensor) -> None:
        if not isinstance(flag, Tensor):
            raise TypeError(f"_overflow_buf is {flag!r}; it must be a tensor with one element.")
        if flag.numel() != 1:
            raise ValueError(f"_overflow_buf has shape {tuple(flag.shape)}; it needs one element.")
        self._assigned_flag = flag

    _scale_seq_len = _of_rule("growth_interval")
    _min_loss_scale = _of_rule("floor")
    _max_loss_scale = _of_rule("ceiling")

    def clear_overflow_state(self) -> None:
        """Clears the overflow flag, and a tensor that the script assigned as ``_overflow_buf``."""
        self._scaler.found_inf.zero_()
        if self._assigned_flag is not None:
            self._assigned_flag.zero_()

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
        del unused_scale, models_are_masters
        with torch.no_grad():
            for master, model in zip(master_grads, model_grads, strict=True):
                if master is not model:
                    master.copy_(model)
            scaler = self._scaler
            inverse = None if scale_override is None else scaler.inverse(scale_override)
            scaler.unscale_(list(master_grads), inverse=inverse)

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
            master_grads: Tensors to write to; may be those of either list.
            scale_override: The scales of the first, of the second and of the result, instead of
                the scale, 1 and 1.
        """
        scale, stashed_scale, out = scale_override or (None, 1.0, 1.0)
        with torch.no_grad():
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
        with torch.no_grad():
            stashed = [grad * b for grad in stashed_master_grads]
            self.unscale(model_grads, master_grads, scale_override=1.0 / a)
            torch._foreach_add_(list(master_grads), stashed)

    def update_scale(self) -> bool:
        """Updates the scale by the overflow flag; returns whether to skip the step.

        The flag is that of the last pass, or the tensor that the script assigned as
        ``_overflow_buf``. Waits for the device if the scale is dynamic.
        """
        if self._scaler.dynamic and self._assigned_flag is not None:
            self._scaler.found_inf.copy_(self._assigned_flag.reshape(()))
        overflow = self._scaler.dynamic and self._scaler.read_found_inf()
        self._scaler.update(())
        self._scaler.read_updates()
        return overflow


_UPDATE_SCALE, _UNSCALE = LossScaler.update_scale, LossScaler.unscale


def own_update(scaler: Scaler) -> Callable[[], object] | None:
    """Returns what a script put in place of ``update_scale`` or ``unscale``, ``None`` without it.

    Scripts replace them on the class, in a subclass or on one object, to share the overflow flag
    over ranks that hold different parts of a model. The gradients are unscaled by then, so
    ``unscale`` gets empty lists.
    """
    known = cast(LossScaler | None, scaler.view) or LossScaler
    unscales = getattr(known.unscale, "__func__", known.unscale) is not _UNSCALE
    updates = getattr(known.update_scale, "__func__", known.update_scale) is not _UPDATE_SCALE
    if not (unscales or updates):
        return None
    view = LossScaler.over(scaler)

    def after_unscale() -> bool:
        view.unscale((), ())
        return view.update_scale()

    return after_unscale if unscales else view.update_scale


def scale_check_overflow_python(
    model_grad: Tensor, master_grad: Tensor, scale: float, check_overflow: bool = False
) -> bool:
    """Writes ``scale * model_grad`` into ``master_grad``, unless a check finds inf or NaN.

    Returns:
        Whether ``check_overflow`` is set and ``model_grad`` holds inf or NaN. The check waits for
        the device.
    """
    return axpby_check_overflow_python(
        model_grad, master_grad, master_grad, scale, 0.0, check_overflow
    )


@torch.no_grad()
def axpby_check_overflow_python(
    model_grad: Tensor,
    stashed_grad: Tensor,
    master_grad: Tensor,
    a: float,
    b: float,
    check_overflow: bool = False,
) -> bool:
    """Writes ``a * model_grad + b * stashed_grad``, unless a check finds inf or NaN.

    Returns:
        Whether ``check_overflow`` is set and ``model_grad`` holds inf or NaN. The check waits for
        the device.
    """
    if check_overflow and not bool(torch.isfinite(model_grad).all()):  # sync: the caller asks
        return True
    scaled = model_grad.to(master_grad.dtype) * a
    master_grad.copy_(scaled if b == 0.0 else scaled + stashed_grad * b)
    return False


class LossScalers(MutableSequence[LossScaler]):
    """A session's scalers by ``loss_id``, as a list that scripts may modify."""

    def __init__(self, scalers: list[Scaler]) -> None:
        self._scalers = scalers

    def __len__(self) -> int:
        return len(self._scalers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [LossScaler.over(scaler) for scaler in self._scalers[index]]
        return LossScaler.over(self._scalers[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        several = isinstance(index, slice)
        self._scalers[index] = (
            [_engine_scaler(s) for s in value] if several else _engine_scaler(value)
        )
        self._renumber()

    def __delitem__(self, index: int | slice) -> None:
        del self._scalers[index]
        self._renumber()

    def insert(self, index: int, value: LossScaler) -> None:
        """Inserts a scaler before ``index``."""
        self._scalers.insert(index, _engine_scaler(value))
        self._renumber()

    def _renumber(self) -> None:
        for loss_id, scaler in enumerate(self._scalers):
            scaler.loss_id = loss_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LossScalers | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as a list of independent scalers."""
        return list, (list(self),)

    def __repr__(self) -> str:
        return repr(list(self))


def _engine_scaler(given: object) -> Scaler:
    if isinstance(given, LossScaler):
        return given._scaler
    raise TypeError(
        f"amp._amp_state.loss_scalers got {type(given).__name__}; it accepts "
        "apex.amp.scaler.LossScaler objects."
    )
