"""The base of apex's three ``FP16_Optimizer`` classes: masters and a loss scale on the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from apex._core import arguments, dtypes, finite, master
from apex._core.scale import checked_static
from apex._engine.host_scale import HostScale
from apex._engine.optimizer.optimizer_class import binding_of

_OWN_PASS = (
    "FP16_Optimizer got gradients of a backward pass that it did not run, and divides them by its "
    "loss scale, {:g}, as in apex. Call optimizer.backward(loss), not loss.backward(), unless the "
    "script multiplies the loss by optimizer.loss_scale itself."
)


def forwarded(part: str, name: str, doc: str) -> Any:
    """Returns a property that reads and sets an attribute of a part of its object."""

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name)

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(read, write, doc=doc)


class MasterWrapper:
    """Wraps any optimizer over 16-bit parameters and steps fp32 masters in their place.

    Gradients of several backward passes accumulate at one scale: before each pass, existing ones
    are rescaled to the current loss scale.

    Attributes:
        optimizer: The wrapped optimizer, whose groups hold the masters.
        loss_scaler: The loss scale.
        overflow: Whether the masters' latest gradients held inf or NaN.
        verbose: Whether overflows are logged.
    """

    _adopts_frozen: ClassVar[bool] = False
    """Whether parameters that do not require gradients get masters, too."""
    _scale_type: ClassVar[type[HostScale]] = HostScale
    _scale_options: ClassVar[dict[str, Any]]
    """What ``dynamic_loss_args`` takes, with its defaults."""

    clip_grad_norm = staticmethod(nn.utils.clip_grad_norm_)
    state = forwarded("optimizer", "state", "The optimizer's state.")
    param_groups = forwarded(
        "optimizer", "param_groups", "The optimizer's groups, which hold the masters."
    )
    dynamic_loss_scale = forwarded(
        "loss_scaler", "dynamic", "Whether the scale follows the gradients."
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
            dynamic_loss_args: ``init_scale``, ``scale_factor`` and ``scale_window`` of a dynamic
                scale; in ``apex.fp16_utils`` also ``min_loss_scale`` and ``max_loss_scale``.
            verbose: Whether skipped steps are logged.

        Raises:
            TypeError: If ``init_optimizer`` is not an optimizer or holds parameters of other
                dtypes, a flag is no bool, or ``dynamic_loss_args`` has unknown keys. Nothing has
                changed then.
            ValueError: If a scale is out of range.
            RuntimeError: If ``amp.initialize`` has prepared the optimizer.
        """
        self._check_optimizer(init_optimizer)
        dynamic = arguments.flag("dynamic_loss_scale", dynamic_loss_scale)
        options = self._dynamic_options(dynamic_loss_args if dynamic else None)
        initial = options.pop("init_scale")
        scale = initial if dynamic else static_loss_scale
        self.loss_scaler: Any = self._scale_type(scale, dynamic=dynamic, **options)
        if binding_of(init_optimizer) is not None:
            raise RuntimeError(
                "FP16_Optimizer got an optimizer that amp.initialize has prepared, and each keeps "
                "masters and a loss scale of its own. Use amp.scale_loss(loss, optimizer) without "
                "FP16_Optimizer, or FP16_Optimizer without amp.initialize."
            )
        self.optimizer = init_optimizer
        self.overflow = False
        self.verbose = verbose
        # The scale of the model's present gradients; None for those of the script's own passes.
        self._scale_of_low: float | None = None
        self._scale_of_direct: float | None = None
        self._pending = False
        self._low_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp32_groups: list[list[nn.Parameter]] = []
        for group in init_optimizer.param_groups:
            self._adopt(group["params"])

    def _check_optimizer(self, optimizer: Any) -> None:
        raise NotImplementedError

    def _dynamic_options(self, given: Any) -> dict[str, Any]:
        options, names = {} if given is None else given, ", ".join(self._scale_options)
        if not isinstance(options, Mapping):
            raise TypeError(f"dynamic_loss_args is {options!r}; it must be a dict of {names}.")
        if unknown := sorted(options.keys() - self._scale_options.keys()):
            raise TypeError(f"dynamic_loss_args holds {unknown}; it takes {names}.")
        return {**self._scale_options, **options}

    def _adopt(self, params: list[nn.Parameter]) -> None:
        stepped = [param for param in params if param.requires_grad or self._adopts_frozen]
        masters = {p: master.make_master(p) for p in stepped if dtypes.is_low_precision(p)}
        params[:] = [masters.get(param, param) for param in params]
        for param, own in masters.items():
            if (state := self.optimizer.state.pop(param, None)) is not None:
                self.optimizer.state[own] = {
                    key: dtypes.cast(value, torch.float32) if _is_like(value, param) else value
                    for key, value in state.items()
                }
        self._low_groups.append(list(masters))
        self.fp32_from_fp16_groups.append(list(masters.values()))
        self.fp32_from_fp32_groups.append([param for param in stepped if param not in masters])

    # -- the wrapped optimizer ---------------------------------------------------------------

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
        return [*chain(*self._low_groups)]

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

    def _clear_grads(self, *, set_to_none: bool) -> None:
        for param in chain(*self._stepped(), *self._low_groups):
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        self._scale_of_low = self._scale_of_direct = None
        self._pending = False

    def _backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Runs the backward pass of the scaled loss; the masters do not receive gradients yet."""
        arguments.loss("FP16_Optimizer.backward", loss)
        scale = self.loss_scale
        with torch.no_grad():
            for params, earlier in (
                (self.all_fp16_params, self._scale_of_low),
                (self.all_fp32_from_fp32_params, self._scale_of_direct),
            ):
                if earlier is not None and earlier != scale:
                    finite.unscale_(finite.values_of(params), scale / earlier)
        self._scale_of_low = self._scale_of_direct = scale
        self._pending = True
        torch.autograd.backward(loss.float() * scale, retain_graph=retain_graph)

    @torch.no_grad()
    def _give_masters_grads(self, *, check: bool) -> None:
        """Gives the masters unscaled fp32 gradients; with ``check``, also sets ``overflow``.

        The model keeps its scaled 16-bit gradients. A check is one host sync. Gradients of passes
        that the script ran itself count as multiplied by the present scale, as in apex.
        """
        present = self.loss_scale
        copies = master.copy_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
        fresh = finite.dense_values(copies)
        direct = finite.values_of(self.all_fp32_from_fp32_params)
        if self._scale_of_low is None and present != 1.0 and (fresh or direct):
            warnings.warn(_OWN_PASS.format(present), stacklevel=4)
        self.overflow = _unscale_(
            (fresh, self._scale_of_low or present),
            (direct, self._scale_of_direct or present),
            check=check,
        )
        if self._scale_of_direct is not None:
            self._scale_of_direct = 1.0
        self._pending = False

    def _receive(self) -> None:
        """Gives the masters what they lack of the gradients; here they have them."""

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

    # -- state -------------------------------------------------------------------------------

    def _load(
        self,
        optimizer_state: dict[str, Any],
        masters: list[list[nn.Parameter]],
        saved: list[list[Tensor]],
        scale: dict[str, Any],
    ) -> None:
        """Loads the optimizer's state, each group's masters, and attributes of the loss scale.

        The model gets the rounded masters.

        Raises:
            ValueError: If masters or optimizer do not fit; nothing has changed then.
        """
        given, own = (
            [[tuple(tensor.shape) for tensor in group] for group in groups]
            for groups in (saved, masters)
        )
        check_sizes(given, own)
        self.optimizer.load_state_dict(optimizer_state)
        with torch.no_grad():
            for param, value in zip(chain(*masters), chain(*saved), strict=True):
                param.copy_(value)
        self._master_params_to_model_params()
        vars(self.loss_scaler).update(scale)


def check_keys(state_dict: Any, keys: Iterable[str]) -> None:
    """Raises ValueError unless ``state_dict`` is a dict with all ``keys``."""
    missing = [key for key in keys if not isinstance(state_dict, Mapping) or key not in state_dict]
    if missing:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict got {arguments.kind(state_dict)} without "
            f"{', '.join(missing)}. Pass what FP16_Optimizer.state_dict() returned."
        )


def check_sizes(given: list[Any], own: list[Any]) -> None:
    """Raises ValueError unless the groups' saved masters have the sizes of ``own``."""
    if given != own:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict got masters of sizes {given}; this optimizer's groups "
            f"have {own}. Build model and groups as they were when it was saved."
        )


def _is_like(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape


def _unscale_(*scaled: tuple[list[Tensor], float], check: bool) -> bool:
    """Divides each list by its scale in place; returns whether checked values held inf or NaN."""
    found_inf: Tensor | None = None
    for values, scale in scaled:
        if values and check:
            found_inf = torch.zeros((), device=values[0].device) if found_inf is None else found_inf
            finite.unscale_and_check_(values, torch.full_like(found_inf, 1.0 / scale), found_inf)
        elif values and scale != 1.0:
            finite.unscale_(values, 1.0 / scale)
    return found_inf is not None and bool(found_inf)  # sync: apex's `overflow` is a host value
