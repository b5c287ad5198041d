"""apex's ``FP16_Optimizer``: fp32 masters and a loss scale on the host, around any optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from apex._core import arguments, dtypes, finite, master
from apex._core.scale import checked_static
from apex._engine.host_scale import HostScale
from apex._engine.optimizer_class import binding_of

_log = logging.getLogger("apex")

_SCALE = "dynamic_loss_scale", "cur_scale", "cur_iter"
_RULE = "last_overflow_iter", "scale_factor", "scale_window"


def forwarded(part: str, name: str, doc: str = "") -> Any:
    """Returns a property that reads and sets an attribute of a part of its object."""

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name)

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(read, write, doc=doc)


class MasterWrapper:
    """Steps fp32 masters of a model's 16-bit parameters, with a static or dynamic loss scale.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``; the rest of the loop stays. New
    scripts use :func:`apex.amp.initialize` at level O2.

    Attributes:
        optimizer: The wrapped optimizer, whose groups hold the masters.
        loss_scaler: The loss scale, with the attributes ``cur_scale`` to ``scale_window``.
        overflow: Whether the masters' latest gradients held inf or NaN; the step is then skipped.
        verbose: Whether overflows are logged.
        fp16_groups: The model's 16-bit parameters with masters, per group.
        fp32_from_fp16_groups: Their masters.
        fp32_from_fp32_groups: The fp32 parameters of each group, stepped directly.
    """

    _per_step: ClassVar[bool] = True
    """Whether masters get their gradients in ``step``, as in 2019, and not in ``backward``.

    Frozen parameters then have masters, too, and a static scale is checked.
    """
    _masters_key: ClassVar[str] = "fp32_groups_flat"
    _keys: ClassVar[tuple[str, ...]] = (*_SCALE, "optimizer_state_dict")
    """Keys that a saved state must have, beside ``_masters_key``."""
    _scale_type: ClassVar[type[HostScale]] = HostScale
    _scale_options: ClassVar[dict[str, Any]] = {
        "init_scale": 2.0**16,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_loss_scale": 1.0,
        "max_loss_scale": None,
    }

    clip_grad_norm = staticmethod(nn.utils.clip_grad_norm_)
    first_closure_call_this_step = True
    state = forwarded("optimizer", "state", "The optimizer's state.")
    param_groups = forwarded("optimizer", "param_groups", "The optimizer's groups.")
    dynamic_loss_scale = forwarded("loss_scaler", "dynamic", "Whether gradients move the scale.")
    cur_scale, cur_iter, last_overflow_iter, scale_factor, scale_window = (
        forwarded("loss_scaler", name) for name in (*_SCALE[1:], *_RULE)
    )

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Replaces the 16-bit parameters in the optimizer's groups by masters.

        Args:
            init_optimizer: An optimizer over the model's fp16, bf16 and fp32 parameters.
            static_loss_scale: The scale (multiplier) unless it is dynamic.
            dynamic_loss_scale: Whether the scale follows the gradients.
            dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``,
                ``min_loss_scale`` and ``max_loss_scale`` of a dynamic scale.
            verbose: Whether skipped steps are logged.

        Raises:
            TypeError: If ``init_optimizer`` is not an optimizer or holds parameters of other
                dtypes, a flag is no bool, or ``dynamic_loss_args`` has unknown keys. Nothing has
                changed then.
            ValueError: If a scale is out of range.
            RuntimeError: If ``amp.initialize`` has prepared the optimizer.
        """
        _check_optimizer(init_optimizer)
        dynamic = arguments.flag("dynamic_loss_scale", dynamic_loss_scale)
        options = self._dynamic_options(dynamic_loss_args if dynamic else None)
        initial = options.pop("init_scale")
        scale = initial if dynamic else static_loss_scale
        self.loss_scaler: Any = self._scale_type(scale, dynamic=dynamic, **options)
        if dynamic:
            self.loss_scale = min(self.loss_scale, self.loss_scaler.rule().greatest)
        self.optimizer = init_optimizer
        self.overflow = False
        self.verbose = verbose
        self._pending = self._per_step  # whether masters lack gradients that ``step`` needs
        # The scales of the present gradients of 16-bit and fp32 parameters; None for no own pass.
        self._scales: tuple[float | None, float | None] = (None, None)
        self.fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp32_groups: list[list[nn.Parameter]] = []
        for group in init_optimizer.param_groups:
            self._adopt(group["params"])
        if init_optimizer.state:
            init_optimizer.load_state_dict(init_optimizer.state_dict())  # casts it to fp32

    def _dynamic_options(self, given: Any) -> dict[str, Any]:
        options, names = {} if given is None else given, ", ".join(self._scale_options)
        if not isinstance(options, Mapping):
            raise TypeError(f"dynamic_loss_args is {options!r}; it must be a dict of {names}.")
        if unknown := sorted(options.keys() - self._scale_options.keys()):
            raise TypeError(f"dynamic_loss_args holds {unknown}; it takes {names}.")
        return {**self._scale_options, **options}

    def _adopt(self, params: list[nn.Parameter]) -> None:
        stepped = [param for param in params if param.requires_grad or self._per_step]
        masters = {p: master.make_master(p) for p in stepped if dtypes.is_low_precision(p)}
        params[:] = [masters.get(param, param) for param in params]
        for param, own in masters.items():
            if param in self.optimizer.state:
                self.optimizer.state[own] = self.optimizer.state.pop(param)
        self.fp16_groups.append(list(masters))
        self.fp32_from_fp16_groups.append(list(masters.values()))
        self.fp32_from_fp32_groups.append([param for param in stepped if param not in masters])

    @property
    def loss_scale(self) -> float:
        """The current loss scale (multiplier)."""
        return float(self.loss_scaler.cur_scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = checked_static(value)

    @property
    def all_fp16_params(self) -> list[nn.Parameter]:
        """The model's 16-bit parameters that have masters."""
        return [*chain(*self.fp16_groups)]

    @property
    def all_fp32_from_fp16_params(self) -> list[nn.Parameter]:
        """Their masters, in the same order."""
        return [*chain(*self.fp32_from_fp16_groups)]

    @property
    def all_fp32_from_fp32_params(self) -> list[nn.Parameter]:
        """The fp32 parameters, stepped directly."""
        return [*chain(*self.fp32_from_fp32_groups)]

    def _stepped(self) -> list[list[nn.Parameter]]:
        """Returns what the optimizer steps, per group."""
        return [group["params"] for group in self.optimizer.param_groups]

    def _master_params_to_model_params(self) -> None:
        master.copy_to_model(self.all_fp32_from_fp16_params, self.all_fp16_params)

    # -- gradients ---------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool | None = None, set_to_none: bool = False) -> None:  # noqa: N803 - apex's name
        """Clears the gradients of masters and model.

        Args:
            set_grads_to_None: Whether to remove them instead of setting them to zero; by default
                only in ``apex.optimizers`` and ``apex.contrib.optimizers``.
            set_to_none: The same, under torch's name.
        """
        removes = self._per_step if set_grads_to_None is None else set_grads_to_None
        for param in chain(*self._stepped(), *self.fp16_groups):
            if removes or set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        self._scales = None, None
        self._pending = self._per_step

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the backward pass of the loss times the scale, in fp32; several calls accumulate.

        Args:
            loss: The loss.
            update_master_grads: Pass False to call ``update_master_grads`` yourself, after the
                last of several losses (``apex.fp16_utils``).
            retain_graph: As in ``Tensor.backward``.

        Raises:
            RuntimeError: Between ``clip_master_grads`` and ``step``, where ``step`` gives the
                masters their gradients (``apex.optimizers``).
        """
        arguments.loss("FP16_Optimizer.backward", loss)
        if self._per_step and not self._pending:
            raise RuntimeError(
                "FP16_Optimizer.backward was called between clip_master_grads and step. "
                "Accumulate first, then clip, then step."
            )
        scale = self.loss_scale
        present = self.all_fp16_params, self.all_fp32_from_fp32_params
        for params, earlier in zip(present, self._scales, strict=True):
            if earlier not in (None, scale):
                _unscale_(finite.values_of(params), earlier / scale)
        self._scales = scale, scale
        self._pending = True
        torch.autograd.backward(loss.float() * scale, retain_graph=retain_graph)
        if update_master_grads and not self._per_step:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copies the model's gradients to the masters, divided by the scale; updates the scale.

        Gradients of passes that the script ran itself count as multiplied by the present scale, as
        in apex. Where gradients are checked this waits for the device: ``overflow`` is on the host.
        """
        low, direct = (scale or self.loss_scale for scale in self._scales)
        copies = master.copy_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
        flags = (
            _unscale_(finite.dense_values(copies), low),
            _unscale_(finite.values_of(self.all_fp32_from_fp32_params), direct),
        )
        checks = self._per_step or self.loss_scaler.dynamic
        self.overflow = checks and any(flags)  # sync: apex's `overflow` is a host value
        if self._scales[1] is not None:
            self._scales = low, 1.0
        self._pending = False
        self.loss_scaler.update_scale(self.overflow)

    def _receive(self) -> None:
        if self._per_step and self._pending:
            self.update_master_grads()

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns the gradients of each group's parameters; ``None`` after an overflow."""
        if self.overflow:
            _log.warning("inspect_master_grad_data: the gradients overflowed; returning None.")
            return None
        return [[None if p.grad is None else p.grad.data for p in own] for own in self._stepped()]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the gradients of the optimizer's parameters by their total norm.

        Args:
            max_norm: Greatest norm.
            norm_type: Order of the norm; ``"inf"`` for the largest magnitude.

        Returns:
            The norm before clipping, or -1 after an overflow.
        """
        norms = arguments.clipping("FP16_Optimizer.clip_master_grads", max_norm, norm_type)
        self._receive()
        if self.overflow:
            return -1
        return self.clip_grad_norm(list(chain(*self._stepped())), *norms)

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
        self._receive()
        pairs = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        if self._pending or any(own.grad is not None and m.grad is None for own, m in pairs):
            raise RuntimeError(
                "FP16_Optimizer.step got gradients that the masters do not have yet. Call "
                "update_master_grads() after the last backward(..., update_master_grads=False), "
                "and optimizer.backward(loss) in place of loss.backward()."
            )
        result = None
        if self.overflow:
            self._report("Gradient overflow.  Skipping step")
        else:
            result = self.optimizer.step()
            self._master_params_to_model_params()
        if self._per_step:
            for param in self.all_fp32_from_fp16_params:
                param.grad = None
        self._pending = self._per_step
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                self._master_params_to_model_params()  # the optimizer has moved the masters
            self.first_closure_call_this_step = False
            while True:
                loss = closure()
                self._receive()
                if not self.overflow:
                    return loss
                self._report("Gradient overflow within the closure.  Calling it again")
                if self.loss_scale <= self.loss_scaler.rule().least:
                    raise RuntimeError(
                        "The gradients of the closure overflow even at the smallest loss scale, "
                        f"{self.loss_scale:g}: they hold NaN or inf at any scale. Check the batch "
                        "and the loss."
                    )

        try:
            result = self.optimizer.step(evaluate)
            self._master_params_to_model_params()
        finally:
            self.first_closure_call_this_step = True
        return result

    def _report(self, message: str) -> None:
        if self.verbose:
            _log.warning("%s, reducing loss scale to %s", message, self.loss_scale)

    def maybe_print(self, msg: object) -> None:
        """Logs ``msg`` (logger ``apex``) where ``verbose`` is set."""
        if self.verbose:
            _log.info("%s", msg)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns loss scale, optimizer and masters, under apex's keys."""
        return {
            **self._saved_scale(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            self._masters_key: [self._joined(group) for group in self._saved_groups()],
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads what ``state_dict`` returned, here or in apex; the model gets rounded masters.

        Raises:
            ValueError: If it does not fit this optimizer; nothing has changed then.
        """
        state: Any = state_dict if isinstance(state_dict, Mapping) else {}
        if missing := [key for key in (*self._keys, self._masters_key) if key not in state]:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict got {arguments.kind(state_dict)} without "
                f"{', '.join(missing)}. Pass what FP16_Optimizer.state_dict() returned."
            )
        scale, groups, saved = self._scale_in(state), self._saved_groups(), state[self._masters_key]
        given, own = (
            [_shapes(group) for group in each] for each in (saved, map(self._joined, groups))
        )
        if given != own:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict got masters of sizes {given}; this optimizer's "
                f"groups have {own}. Build model and groups as they were when it was saved."
            )
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        with torch.no_grad():
            for params, values in zip(groups, saved, strict=True):
                for param, value in zip(params, self._split(values, params), strict=True):
                    param.copy_(value)
        self._master_params_to_model_params()
        vars(self.loss_scaler).update(scale)

    def _saved_scale(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_SCALE, *_RULE)}

    def _scale_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of the loss scale in a saved state."""
        scale = {name: state[name] for name in (*_SCALE, *_RULE) if name in state}
        scale["cur_scale"] = checked_static(scale["cur_scale"], "cur_scale")
        return {"dynamic": bool(scale.pop("dynamic_loss_scale")), **scale}

    def _saved_groups(self) -> list[list[nn.Parameter]]:
        """Returns the parameters whose values are saved, per group."""
        return self._stepped()

    def _joined(self, params: list[nn.Parameter]) -> Any:
        """Returns a group's values as they are saved."""
        return [param.detach() for param in params]

    def _split(self, saved: Any, params: list[nn.Parameter]) -> Sequence[Tensor]:
        """Returns a group's values by parameter."""
        return saved  # type: ignore[no-any-return]

    def __getstate__(self) -> NoReturn:
        """Refuses pickling, as apex did."""
        raise RuntimeError("FP16_Optimizer is saved by its state_dict(), not by copy or pickle.")


def _shapes(group: Any) -> Any:
    return tuple(group.shape) if isinstance(group, Tensor) else [tuple(t.shape) for t in group]


def _check_optimizer(optimizer: Any) -> None:
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
    if binding_of(optimizer) is not None:
        raise RuntimeError(
            "FP16_Optimizer got an optimizer that amp.initialize has prepared, and each keeps "
            "masters and a loss scale of its own. Use amp.scale_loss(loss, optimizer) without "
            "FP16_Optimizer, or FP16_Optimizer without amp.initialize."
        )


@torch.no_grad()
def _unscale_(values: list[Tensor], scale: float) -> Tensor:
    """Divides dense values in place; returns whether one held inf or NaN, as a 0-d tensor."""
    device = values[0].device if values else torch.device("cpu")
    found_inf = torch.zeros((), dtype=torch.float32, device=device)
    if values:
        finite.unscale_and_check_(values, torch.full_like(found_inf, 1.0 / scale), found_inf)
    return found_inf
