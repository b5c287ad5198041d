"""apex's ``FP16_Optimizer``: fp32 masters and a loss scale on the host, around any optimizer."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from apex._core import arguments, dtypes
from apex._core.flat import unflatten
from apex._core.param_groups import exchange, params_of
from apex._core.scale import checked_static
from apex._engine.masters import make_master
from apex._engine.optimizer.subclass import prepared_state
from apex._torch.dtensor import values_of
from apex._torch.foreach import unscale_, unscale_and_check_
from apex.fp16_utils.fp16util import master_params_to_model_params, model_grads_to_master_grads
from apex.fp16_utils.loss_scaler import DynamicLossScaler, scaled

_log = logging.getLogger("apex")

_SCALE = "dynamic_loss_scale", "cur_scale", "cur_iter"
"""Entries of the loss scale in every state dict."""

_ALL_OF_SCALE = *_SCALE, "last_overflow_iter", "scale_factor", "scale_window"
"""All entries of the loss scale; files of apex contain the last three only for a dynamic scale."""


def forwarded(part: str, name: str) -> Any:
    """Returns a property that reads and sets an attribute of a part of its object."""

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(operator.attrgetter(f"{part}.{name}"), write)


class MasterWrapper:
    """Updates fp32 masters of a model's 16-bit parameters, with a static or dynamic loss scale.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``; the rest of the loop does not change.
    New scripts use :func:`apex.amp.initialize` at level O2.

    Attributes:
        optimizer: The wrapped optimizer, whose groups hold the masters.
        state, param_groups: The attributes of the optimizer.
        loss_scaler: The loss scale, with the attributes ``cur_scale`` to ``scale_window``.
        loss_scale: The current loss scale (multiplier).
        dynamic_loss_scale: Whether overflows and clean steps change the scale.
        overflow: Whether the masters' latest gradients held inf or NaN, so that ``step`` does
            nothing.
        verbose: Whether overflows are logged.
        fp16_groups: The model's 16-bit parameters with masters, per group.
        fp32_from_fp16_groups: Their masters.
        fp32_from_fp32_groups: The fp32 parameters per group, which have no masters.
        all_fp16_params, all_fp32_from_fp16_params, all_fp32_from_fp32_params: The parameters of
            these lists, without groups.
    """

    _with_frozen = True
    """Whether frozen parameters also have masters."""
    _checks_static = True
    """Whether gradients are also checked at a static scale."""
    _masters_key = "fp32_groups_flat"
    _keys: tuple[str, ...] = (*_SCALE, "optimizer_state_dict")
    """Keys that a saved state must have, beside ``_masters_key``."""
    _scale_type = DynamicLossScaler
    _scale_options: ClassVar[dict[str, Any]] = {
        "init_scale": 2.0**16,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_loss_scale": 1.0,
        "max_loss_scale": None,
    }

    state = forwarded("optimizer", "state")
    param_groups = forwarded("optimizer", "param_groups")
    loss_scale = forwarded("loss_scaler", "cur_scale")
    dynamic_loss_scale = forwarded("loss_scaler", "dynamic")
    cur_scale = loss_scale
    cur_iter = forwarded("loss_scaler", "cur_iter")
    last_overflow_iter = forwarded("loss_scaler", "last_overflow_iter")
    scale_factor = forwarded("loss_scaler", "scale_factor")
    scale_window = forwarded("loss_scaler", "scale_window")

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Replaces the 16-bit parameters in the optimizer's groups with masters.

        Args:
            init_optimizer: An optimizer over the model's fp16, bf16 and fp32 parameters.
            static_loss_scale: The scale (multiplier) unless it is dynamic.
            dynamic_loss_scale: Whether overflows and clean steps change the scale.
            dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``,
                ``min_loss_scale`` and ``max_loss_scale`` of a dynamic scale.
            verbose: Whether skipped steps are logged.

        Raises:
            TypeError: If ``init_optimizer`` is not an optimizer, a parameter has another dtype, a
                flag is not a bool, or ``dynamic_loss_args`` has unknown keys. Nothing has changed
                then.
            ValueError: If a scale is out of range.
            RuntimeError: If ``amp.initialize`` has prepared the optimizer.
        """
        _check_optimizer(init_optimizer)
        dynamic = arguments.flag("dynamic_loss_scale", dynamic_loss_scale)
        options = {**self._scale_options, **(dynamic_loss_args or {})}
        unknown = sorted(options.keys() - self._scale_options.keys())
        if unknown:
            names = ", ".join(self._scale_options)
            raise TypeError(f"dynamic_loss_args holds {unknown}; it takes {names}.")
        dynamic_scale = options.pop("init_scale")
        scale = dynamic_scale if dynamic else static_loss_scale
        self.loss_scaler: Any = self._scale_type(scale)
        vars(self.loss_scaler).update(options, dynamic=dynamic)
        self.loss_scaler.rule()  # raises for an option out of range
        self.optimizer = init_optimizer
        self.overflow = False
        self.verbose = verbose
        # The scale of gradients to which more passes may add; None before `update_master_grads`.
        self._scale: float | None = None
        # Whether a backward pass has added to the gradients since they were unscaled.
        self._pending = False
        self._make_masters()
        if init_optimizer.state:
            init_optimizer.load_state_dict(init_optimizer.state_dict())  # casts the state to fp32

    def _make_masters(self) -> None:
        """Creates the lists of parameters and puts masters into the optimizer's groups."""
        self.fp16_groups = []
        self.fp32_from_fp16_groups = []
        self.fp32_from_fp32_groups = []
        self.all_fp16_params = []
        self.all_fp32_from_fp16_params = []
        self.all_fp32_from_fp32_params = []
        masters_by_id = {}
        for params in self._stepped():
            low = []
            masters = []
            full = []
            for param in params:
                if not param.requires_grad and not self._with_frozen:
                    continue
                if not dtypes.is_low_precision(param):
                    full.append(param)
                    continue
                master = make_master(param)
                masters_by_id[id(param)] = master
                low.append(param)
                masters.append(master)
            self.fp16_groups.append(low)
            self.fp32_from_fp16_groups.append(masters)
            self.fp32_from_fp32_groups.append(full)
            self.all_fp16_params.extend(low)
            self.all_fp32_from_fp16_params.extend(masters)
            self.all_fp32_from_fp32_params.extend(full)
        exchange(self.optimizer, masters_by_id)

    def _stepped(self) -> list[list[nn.Parameter]]:
        """Returns the parameters that the optimizer updates, per group."""
        return [group["params"] for group in self.optimizer.param_groups]

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def maybe_print(self, msg: object) -> None:
        """Logs ``msg`` (logger ``apex``) if ``verbose`` is set."""
        if self.verbose:
            _log.warning("%s", msg)

    # -- one step ----------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = True) -> None:  # noqa: N803 - apex's name
        """Clears the gradients of masters and model.

        Args:
            set_grads_to_None: Whether to remove gradients instead of setting them to zero.
        """
        for param in (*params_of(self.optimizer), *self.all_fp16_params):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        self._scale = None
        self._pending = False

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss times the scale, in fp32; several calls accumulate.

        All passes that accumulate use the scale of the first.
        """
        scale = self._scale or self.loss_scale
        if self._scale is not None and not self._pending:
            unscale_(values_of(self.all_fp32_from_fp32_params), scale)
        self._pending = True
        scaled_loss = scaled(loss.float(), scale, dynamic=self.loss_scaler.dynamic)
        torch.autograd.backward(scaled_loss, retain_graph=retain_graph)

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copies the model's gradients to the masters, divided by the scale; updates the scale.

        As in apex, gradients from other backward passes count as multiplied by the present scale. A
        check of gradients synchronizes, because ``overflow`` is on the host.
        """
        scale = self._scale or self.loss_scale
        self._pending = False
        masters = self.all_fp32_from_fp16_params
        model_grads_to_master_grads(self.all_fp16_params, masters)
        grads = values_of(masters + self.all_fp32_from_fp32_params)
        device = grads[0].device if grads else torch.device("cpu")
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        inverse_scale = torch.full_like(found_inf, 1.0 / scale)
        unscale_and_check_(grads, inverse_scale, found_inf)
        is_checked = self._checks_static or self.loss_scaler.dynamic
        self.overflow = is_checked and bool(found_inf)  # sync: apex's `overflow` is a host value
        self._scale = None if self.overflow else scale
        self.loss_scaler.update_scale(self.overflow)

    def step(self, closure: None = None) -> Any:
        """Updates the masters and rounds them into the model; does nothing after an overflow."""
        if closure is not None:
            raise RuntimeError(
                "FP16_Optimizer.step of 2019 takes no closure. Use apex.fp16_utils.FP16_Optimizer."
            )
        self.update_master_grads()
        return self._step_masters()

    def _step_masters(self, *closure: Any) -> Any:
        result = None
        if self.overflow:
            self.maybe_print(
                f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}"
            )
        else:
            result = self.optimizer.step(*closure)
            self._master_params_to_model_params()
        self._scale = None
        return result

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns loss scale, optimizer and masters, under apex's keys."""
        return {
            **self._saved_scale(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            self._masters_key: [self._joined(group) for group in self._saved_groups()],
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state dict of this class or of apex's; the model gets the rounded masters.

        Raises:
            ValueError: If the state does not fit this optimizer. Nothing has changed then.
        """
        state: Any = state_dict if isinstance(state_dict, Mapping) else {}
        missing = [key for key in (*self._keys, self._masters_key) if key not in state]
        if missing:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict got {arguments.kind(state_dict)} without "
                f"{', '.join(missing)}. Pass what FP16_Optimizer.state_dict() returned."
            )
        scale = self._loaded_scale(state)
        groups = self._saved_groups()
        saved = state[self._masters_key]
        saved_sizes = [_shapes(values) for values in saved]
        sizes = [_shapes(self._joined(params)) for params in groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict got masters of sizes {saved_sizes}; this "
                f"optimizer's groups have {sizes}. Build model and groups as they were when it was "
                "saved."
            )
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        with torch.no_grad():
            for params, values in zip(groups, saved, strict=True):
                split = unflatten(values, params) if isinstance(values, Tensor) else values
                for param, value in zip(params, split, strict=True):
                    param.copy_(value)
        self._master_params_to_model_params()
        vars(self.loss_scaler).update(scale)

    def _saved_scale(self) -> dict[str, Any]:
        """Returns the entries of the loss scale in a state dict."""
        return {name: getattr(self, name) for name in _ALL_OF_SCALE}

    def _loaded_scale(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of the loss scale from a state dict."""
        scale = {name: state[name] for name in _ALL_OF_SCALE if name in state}
        scale["cur_scale"] = checked_static(scale["cur_scale"], "cur_scale")
        scale["dynamic"] = bool(scale.pop("dynamic_loss_scale"))
        return scale

    def _saved_groups(self) -> list[list[nn.Parameter]]:
        """Returns the parameters whose values a state dict contains, per group."""
        return self._stepped()

    def _joined(self, params: list[nn.Parameter]) -> Any:
        """Returns the values of a group in the form of the state dict."""
        return [param.detach() for param in params]

    def __getstate__(self) -> NoReturn:
        """Refuses pickling, as apex did."""
        raise RuntimeError("FP16_Optimizer cannot be copied or pickled; save its state_dict().")


def _shapes(values: Any) -> Any:
    """Returns the shape of flat masters, or the shapes of a list of masters."""
    if isinstance(values, Tensor):
        return tuple(values.shape)
    return [tuple(value.shape) for value in values]


def _check_optimizer(optimizer: Any) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        raise TypeError(
            f"FP16_Optimizer got {type(optimizer).__name__}; it wraps an optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    accepted = (*dtypes.LOW_PRECISION, torch.float32)
    for param in params_of(optimizer):
        if param.requires_grad and param.dtype not in accepted:
            raise TypeError(
                f"FP16_Optimizer got a parameter of {param.dtype} and shape "
                f"{tuple(param.shape)}; it takes float16, bfloat16 and float32."
            )
    if prepared_state(optimizer) is not None:
        raise RuntimeError(
            "FP16_Optimizer got an optimizer that amp.initialize has prepared, and each keeps "
            "masters and a loss scale of its own. Use amp.scale_loss(loss, optimizer) without "
            "FP16_Optimizer, or FP16_Optimizer without amp.initialize."
        )
