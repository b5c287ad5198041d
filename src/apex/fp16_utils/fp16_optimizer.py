"""``FP16_Optimizer``: fp32 masters and loss scaling around any optimizer, for old scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from apex._core.scale import checked_static
from apex._engine.host_scale import HostScale
from apex._engine.master_wrapper import MasterWrapper


class _Scale(HostScale):
    """The loss scale under the names that ``apex.amp`` uses."""

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

    Masters get their gradients in ``backward``. See :class:`apex.optimizers.FP16_Optimizer` for
    the form of 2019, which gives them in ``step``.
    """

    _per_step: ClassVar[bool] = False
    _masters_key: ClassVar[str] = "fp32_from_fp16"
    _keys: ClassVar[tuple[str, ...]] = ("loss_scaler", "dynamic_loss_scale", "optimizer_state_dict")
    _scale_type: ClassVar[type[HostScale]] = _Scale
    _scale_options: ClassVar[dict[str, Any]] = {
        "init_scale": 2.0**16,
        "scale_factor": 2.0,
        "scale_window": 2000,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    }

    def _saved_scale(self) -> dict[str, Any]:
        scale = self.loss_scaler
        return {
            # Plain numbers, which every `torch.load` reads.
            "loss_scaler": {
                "dynamic": scale.dynamic,
                "_loss_scale": scale.cur_scale,
                "_unskipped": scale.clean_steps,
            },
            "dynamic_loss_scale": scale.dynamic,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
        }

    def _scale_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        saved = state["loss_scaler"]

        # A dict in files of this package; in files of apex the scaler of `apex.amp`, or an older.
        def read(name: str, default: Any = None) -> Any:
            found = saved if isinstance(saved, dict) else {name: getattr(saved, name, default)}
            return found.get(name, default)

        scale = read("_loss_scale", read("cur_scale"))
        if scale is None:
            raise ValueError(
                f"The state's loss_scaler is {saved!r}; it must be what "
                "FP16_Optimizer.state_dict() returned, or a loss scaler of apex."
            )
        unskipped = read("_unskipped")
        last_overflow = read("last_overflow_iter", -1) if unskipped is None else -1
        return {
            "dynamic": bool(state["dynamic_loss_scale"]),
            "cur_scale": checked_static(scale),
            "cur_iter": int(read("cur_iter", 0) if unskipped is None else unskipped),
            "last_overflow_iter": int(last_overflow),
        }

    def _saved_groups(self) -> list[list[nn.Parameter]]:
        return self.fp32_from_fp16_groups
