"""The base of apex's three ``FP16_Optimizer`` classes: masters and a loss scale on the host."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

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


def dynamic_options(given: Any, accepted: Collection[str]) -> dict[str, Any]:
    """Returns ``dynamic_loss_args``; raises TypeError unless it is a dict of accepted options."""
    options = {} if given is None else given
    names = ", ".join(accepted)
    if not isinstance(options, Mapping):
        raise TypeError(f"dynamic_loss_args is {options!r}; it must be a dict of {names}.")
    if unknown := sorted(set(options) - set(accepted)):
        raise TypeError(f"dynamic_loss_args holds {unknown}; it takes {names}.")
    return dict(options)


def check_state(state_dict: Any, keys: Iterable[str]) -> None:
    """Raises ValueError unless ``state_dict`` is a dict with all ``keys``."""
    missing = [key for key in keys if not isinstance(state_dict, Mapping) or key not in state_dict]
    if missing:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict got {arguments.kind(state_dict)} without "
            f"{', '.join(missing)}. Pass what FP16_Optimizer.state_dict() returned."
        )


def forwarded(part: str, name: str, doc: str) -> Any:
    """Returns a property that reads and sets an attribute of a part of its object."""

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name)

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(read, write, doc=doc)


class Pair(NamedTuple):
    """A model parameter and the fp32 parameter that the optimizer steps in its place."""

    model: nn.Parameter
    master: nn.Parameter


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

    state = forwarded("optimizer", "state", "The optimizer's state.")
    param_groups = forwarded(
        "optimizer", "param_groups", "The optimizer's groups, which hold the masters."
    )
    dynamic_loss_scale = forwarded(
        "loss_scaler", "dynamic", "Whether the scale follows the gradients."
    )

    def __init__(self, optimizer: Any, loss_scaler: HostScale, *, verbose: bool) -> None:
        """Replaces 16-bit parameters in the optimizer's groups, and moves its state.

        Raises:
            RuntimeError: If ``amp.initialize`` has prepared the optimizer.
        """
        if binding_of(optimizer) is not None:
            raise RuntimeError(
                "FP16_Optimizer got an optimizer that amp.initialize has prepared, and each keeps "
                "masters and a loss scale of its own. Use amp.scale_loss(loss, optimizer) without "
                "FP16_Optimizer, or FP16_Optimizer without amp.initialize."
            )
        self.optimizer = optimizer
        self.loss_scaler: Any = loss_scaler
        self.overflow = False
        self.verbose = verbose
        self._pairs: list[list[Pair]] = []
        self._direct: list[list[nn.Parameter]] = []
        # The scale of the model's present gradients; None for those of the script's own passes.
        self._scale_of_low: float | None = None
        self._scale_of_direct: float | None = None
        self._pending = False
        for group in optimizer.param_groups:
            self._adopt(group)

    def _adopt(self, group: dict[str, Any]) -> None:
        pairs: list[Pair] = []
        direct: list[nn.Parameter] = []
        for index, param in enumerate(group["params"]):
            if not (param.requires_grad or self._adopts_frozen):
                continue
            if not dtypes.is_low_precision(param):
                direct.append(param)
                continue
            pair = Pair(param, master.make_master(param))
            group["params"][index] = pair.master
            pairs.append(pair)
            self._move_state(pair)
        self._pairs.append(pairs)
        self._direct.append(direct)

    def _move_state(self, pair: Pair) -> None:
        state = self.optimizer.state.pop(pair.model, None)
        if state is not None:
            self.optimizer.state[pair.master] = {
                key: dtypes.cast(value, torch.float32) if _is_like(value, pair.model) else value
                for key, value in state.items()
            }

    # -- the wrapped optimizer ---------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The current loss scale (multiplier)."""
        return float(self.loss_scaler.cur_scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = checked_static(value)

    def _all_pairs(self) -> list[Pair]:
        return [pair for pairs in self._pairs for pair in pairs]

    def _stepped(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _master_params_to_model_params(self) -> None:
        pairs = self._all_pairs()
        master.copy_to_model([pair.master for pair in pairs], [pair.model for pair in pairs])

    def _load_masters(self, masters: list[nn.Parameter], saved: list[Tensor]) -> None:
        """Writes saved values into masters and, rounded, into the model."""
        with torch.no_grad():
            for param, value in zip(masters, saved, strict=True):
                param.copy_(value)
        self._master_params_to_model_params()

    # -- gradients ---------------------------------------------------------------------------

    def _clear_grads(self, *, set_to_none: bool) -> None:
        for param in (*self._stepped(), *(pair.model for pair in self._all_pairs())):
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
        _rescale_([pair.model for pair in self._all_pairs()], scale / (self._scale_of_low or scale))
        _rescale_(self._all_direct(), scale / (self._scale_of_direct or scale))
        self._scale_of_low = self._scale_of_direct = scale
        self._pending = True
        torch.autograd.backward(loss.float() * scale, retain_graph=retain_graph)

    @torch.no_grad()
    def _give_masters_grads(self, *, check: bool) -> None:
        """Gives the masters unscaled fp32 gradients; with ``check``, also sets ``overflow``.

        The model keeps its scaled 16-bit gradients. A check is one host sync. Gradients of passes
        that the script ran itself count as multiplied by the present scale, as in apex.
        """
        pairs, present = self._all_pairs(), self.loss_scale
        fresh = master.copy_grads([pair.model for pair in pairs], [pair.master for pair in pairs])
        direct = finite.values_of(self._all_direct())
        if self._scale_of_low is None and present != 1.0 and (fresh or direct):
            warnings.warn(_OWN_PASS.format(present), stacklevel=4)
        scaled = [
            (fresh, self._scale_of_low or present),
            (direct, self._scale_of_direct or present),
        ]
        self.overflow = _unscale_(scaled, check=check)
        if self._scale_of_direct is not None:
            self._scale_of_direct = 1.0
        self._pending = False

    def _lacks_grads(self) -> bool:
        """Returns whether a master has yet to receive the gradient of its parameter."""
        if self._pending:
            return True
        return any(p.model.grad is not None and p.master.grad is None for p in self._all_pairs())

    def _all_direct(self) -> list[nn.Parameter]:
        return [param for params in self._direct for param in params]


def _is_like(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape


@torch.no_grad()
def _rescale_(params: list[nn.Parameter], factor: float) -> None:
    if factor != 1.0 and (values := finite.values_of(params)):
        finite.unscale_(values, factor)


def _unscale_(scaled: list[tuple[list[Tensor], float]], *, check: bool) -> bool:
    """Divides each list by its scale in place; returns whether checked values held inf or NaN."""
    found_inf: Tensor | None = None
    for grads, scale in scaled:
        values = finite.dense_values(grads)
        if values and check:
            found_inf = torch.zeros((), device=values[0].device) if found_inf is None else found_inf
            finite.unscale_and_check_(values, torch.full_like(found_inf, 1.0 / scale), found_inf)
        elif values and scale != 1.0:
            finite.unscale_(values, 1.0 / scale)
    return found_inf is not None and bool(found_inf)  # sync: apex's `overflow` is a host value
