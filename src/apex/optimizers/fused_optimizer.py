"""The base of the fused optimizers: the step around the rule, skips, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from apex._core.arguments import flag, in_range, parameters
from apex._core.dtypes import is_low_precision
from apex._core.foreach.adam import AdamRule
from apex._core.foreach.scalars import Scalar, skip_flag
from apex._core.foreach.working import math_dtype, scale_
from apex._core.param_groups import params_of, states_in
from apex._torch.copies import as_scalar, as_tensor, capturing, moved

MASTER = "master_param"
"""The state key of an fp32 master that the optimizer keeps of a 16-bit parameter."""

_LARGE = 2**23
"""Elements from which on a batch of a rule in several kernels is full.

Such a rule needs lists of intermediate values for the whole batch (FusedLAMB needs three). While a
flag may skip the step, it also needs copies of everything that changes.
"""


SkipOn = Callable[[torch.device], Tensor | None]
"""Returns a device's 0-d flag, 1 to change nothing, made once for each step; ``None`` without."""


@dataclass
class Batch:
    """Parameters of one group that are on one device and have gradients.

    Attributes:
        skip: 0-d flag, 1 to change nothing; ``None`` without a flag.
    """

    group: dict[str, Any]
    device: torch.device
    skip: Tensor | None
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    elements: int = 0

    def option(self, name: str) -> Any:
        """Returns a value of the group; a tensor comes as 0-d on the batch's device."""
        return as_scalar(self.group[name], self.device)

    @property
    def step(self) -> Scalar:
        """The count of this step, from 1.

        Raises:
            RuntimeError: If a CUDA graph would capture a count on the host.
        """
        count: Scalar = self.option("step")
        if not isinstance(count, Tensor) and capturing(self.device):
            raise RuntimeError(
                "A CUDA graph captures a step whose count is on the host, so that each replay "
                "would correct the bias of the same step. Use FusedAdam(..., capturable=True) or "
                "FusedMixedPrecisionLamb, or call optimizer.step() outside the graph."
            )
        return count

    def adam_rule(self, decoupled: int, **options: Any) -> AdamRule:
        """Returns the group's hyperparameters of Adam, LAMB or NovoGrad."""
        return AdamRule(
            lr=self.option("lr"),
            betas=self.group["betas"],
            eps=self.group["eps"],
            weight_decay=self.group["weight_decay"],
            decoupled=bool(decoupled),
            bias_correction=bool(self.group["bias_correction"]),
            averaged=bool(self.group.get("grad_averaging", True)),
            **options,
        )


class FusedOptimizer(Optimizer):
    """A torch optimizer that skips a step by a device flag, without a host sync.

    As torch's fused optimizers do, it reads two attributes that ``amp`` and
    ``torch.amp.GradScaler`` set during a step. If ``self.found_inf`` is not 0, parameters,
    gradients, state and step counts do not change. Gradients are divided by ``self.grad_scale`` in
    place.

    Attributes:
        set_grad_none: Whether ``zero_grad`` drops gradients instead of setting them to zero.
    """

    _step_supports_amp_scaling = True
    state_stays_fp32 = True
    """Read by amp: state keeps its dtype where amp converts a parameter."""

    set_grad_none = True

    capturable = False
    """Whether learning rates and step counts are tensors from the start, as for CUDA graphs."""

    steps_dtensors = False
    """Whether the rule supports DTensors: takes norms over all ranks, mixes in no plain tensors."""

    scalar_state: tuple[str, ...] = ("step",)
    """State that is one number per parameter; all other state has the parameter's shape."""

    gradients_in_kernels = False
    """Whether ``update`` leaves the values of gradients to torch's fused kernels; read by amp."""

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], set_grad_none: bool = True
    ) -> None:
        parameters(type(self).__name__, params)
        super().__init__(params, defaults)
        self.set_grad_none = flag("set_grad_none", set_grad_none)

    def adam_defaults(
        self, lr: Any, bias_correction: bool, betas: Any, eps: float, decay: float, amsgrad: bool
    ) -> dict[str, Any]:
        """Returns the options that Adam, LAMB and NovoGrad share.

        Raises for one out of range or of a wrong type; RuntimeError for AMSGrad.
        """
        if amsgrad:
            raise RuntimeError(
                f"{type(self).__name__} does not support the AMSGrad variant. "
                "Use torch.optim.AdamW(params, amsgrad=True, fused=True)."
            )
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas is {betas!r}; it must be two numbers, such as (0.9, 0.999).")
        in_range("betas[0]", betas[0], below=1.0)
        in_range("betas[1]", betas[1], below=1.0)
        in_range("lr", lr)
        in_range("eps", eps)
        in_range("weight_decay", decay)
        return {
            "lr": lr,
            "eps": eps,
            "weight_decay": decay,
            "betas": betas,
            "bias_correction": bias_correction,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group."""
        super().add_param_group(param_group)
        if self.capturable:
            put_on_device(self.param_groups[-1])

    def update(self, batch: Batch) -> None:
        """Takes one step for a batch of parameters."""

    def prepare(self, batches: list[Batch]) -> None:
        """Called with all unscaled gradients before the first update."""

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        # Subclasses (fairseq's) call the multi-tensor functions by themselves, with this flag.
        device = self.param_groups[0]["params"][0].device
        return torch.zeros(1, dtype=torch.int32, device=device)

    # -- the step ----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients; drops them only if ``set_grad_none`` is also set."""
        super().zero_grad(set_to_none=set_to_none and self.set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **scaling: Any) -> Any:
        """Takes one step.

        Args:
            closure: Recomputes the loss; called once, before the step.
            **scaling: ``grad_scaler``, the ``torch.amp.GradScaler`` that scaled the gradients;
                its own ``step`` then runs. (A step that names it would get it from there, with a
                warning.)

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._stepped_by(**scaling):
            return loss
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        skip_on = functools.cache(functools.partial(skip_flag, found_inf))
        batches: list[Batch] = []
        for group in self.param_groups:
            batches += self._batches(group, skip_on)
        if grad_scale is not None:
            for batch in batches:
                factor = as_tensor(grad_scale, batch.device).reciprocal()
                batch.grads = scale_(batch.grads, factor, batch.skip)
        self.prepare(batches)
        self._count(skip_on)
        for batch in batches:
            self.update(batch)
        return loss

    def _stepped_by(self, grad_scaler: Any = None) -> bool:
        """Steps by a ``GradScaler``, which sets both attributes; returns whether there is one."""
        if grad_scaler is not None:
            grad_scaler.step(self)
        return grad_scaler is not None

    def _batches(self, group: dict[str, Any], skip_on: SkipOn) -> Iterator[Batch]:
        last: dict[torch.device, Batch] = {}
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            if grad.layout is not torch.strided or not param.is_floating_point():
                raise RuntimeError(
                    f"{type(self).__name__} got a parameter of {param.dtype} or a sparse gradient. "
                    "It does not support sparse gradients, and steps fp16, bf16, fp32 and fp64 "
                    "parameters. Use another optimizer for it, such as torch.optim.SparseAdam, or "
                    "sparse=False."
                )
            batch = last.get(param.device)
            if batch is None or (batch.elements >= _LARGE and not self.gradients_in_kernels):
                if batch is not None:
                    yield batch
                batch = Batch(group, param.device, skip_on(param.device))
                last[param.device] = batch
            batch.params.append(param)
            batch.grads.append(grad)
            batch.elements += param.numel()
        yield from last.values()

    def _count(self, skip_on: SkipOn) -> None:
        """Counts the step in each group; on the device from the first flag on that may skip one."""
        counts: dict[torch.device, list[Tensor]] = {}
        for group in self.param_groups:
            if not group["params"]:
                continue
            device = group["params"][0].device
            step = group.get("step", 0)
            if skip_on(device) is None and not isinstance(step, Tensor):
                group["step"] = step + 1
            else:
                group["step"] = _count_on(device, step)
                counts.setdefault(device, []).append(group["step"])
        for device, steps in counts.items():
            skip = skip_on(device)
            taken = 1 if skip is None else 1 - skip
            # With alpha, as torch otherwise takes the tensor for a number, and reads it.
            torch._foreach_add_(steps, _count_on(device, taken), alpha=1)

    def _gradient(self, param: Tensor) -> Tensor | None:
        return param.grad

    def buffers(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """Returns the parameters' state of this name, initially zeros."""
        for param in params:
            if name not in self.state[param]:
                self.state[param][name] = torch.zeros_like(param, dtype=self.state_dtype(param))
        return [self.state[param][name] for param in params]

    def state_dtype(self, param: Tensor) -> torch.dtype:
        """Returns the dtype of a parameter's state: fp32, fp64 for fp64 parameters."""
        return math_dtype(param)

    def masters(self, batch: Batch, dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
        """Returns fp32 masters of the parameters of these dtypes, and other parameters themselves.

        Masters are made at the first step: before that the model's values may still change (by a
        loaded checkpoint, by a broadcast).
        """
        for param in batch.params:
            if param.dtype in dtypes and MASTER not in self.state[param]:
                self.state[param][MASTER] = param.detach().to(torch.float32, copy=True)
        return [self.state[p][MASTER] if p.dtype in dtypes else p for p in batch.params]

    # -- copies and checkpoints --------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns torch's state and the settings of the constructor, which torch omits."""
        plain = int | torch.dtype  # a bool is an int
        settings = {name: value for name, value in vars(self).items() if isinstance(value, plain)}
        return {**super().__getstate__(), **settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over options and the step count that a state of torch's own class lacks.

        Raises:
            ValueError: If a tensor of it has another shape; nothing is changed.
        """
        self._check_state(state)
        super().__setstate__(state)
        for group in self.param_groups:
            if "step" not in group:
                states = [self.state.get(param, {}) for param in group["params"]]
                counts = [state["step"] for state in states if "step" in state]
                if counts:
                    group["step"] = int(max(counts))  # sync: to load
            for name, value in self.defaults.items():
                if name != "differentiable":  # torch's, not of a new optimizer's groups
                    group.setdefault(name, value)

    def _check_state(self, state: dict[str, Any]) -> None:
        """Refuses shapes with which torch's fused kernels would write outside a tensor's memory."""
        for param, tensors in states_in(state["state"]):
            for key, tensor in tensors.items():
                wanted = torch.Size() if key in self.scalar_state else param.shape
                if isinstance(tensor, Tensor) and tensor.shape != wanted:
                    raise ValueError(
                        f"{type(self).__name__} got the state of another model or optimizer: {key} "
                        f"has the shape {tuple(tensor.shape)} instead of {tuple(wanted)}. Load the "
                        "one that was saved with this model."
                    )

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's, with step counts as numbers, whether or not a flag decided about steps.

        ``torch.distributed.checkpoint`` loads a value into one of its own type only.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if isinstance(group.get("step"), Tensor) and not self.capturable:
                group["step"] = int(group["step"])  # sync: to save
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; state of 16-bit parameters keeps its saved dtype, such as fp32.

        torch casts state to the dtype of its parameter.
        """
        super().load_state_dict(state_dict)
        saved_ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, param in zip(saved_ids, params_of(self), strict=True):
            for name, saved in state_dict["state"].get(key, {}).items():
                if isinstance(saved, Tensor) and is_low_precision(param):
                    self.state[param][name] = saved.detach().to(param.device, copy=True)


def put_on_device(group: dict[str, Any]) -> None:
    """Moves a group's learning rate and step count to tensors on its parameters' device."""
    if not group["params"]:
        return
    device = group["params"][0].device
    group["lr"] = as_tensor(group["lr"], device).clone()
    group["step"] = _count_on(device, group.get("step", 0))


def _count_on(device: torch.device, count: Scalar) -> Tensor:
    """Returns a number of steps as a tensor, itself if it is one there."""
    if isinstance(count, Tensor):
        return moved(count, device, torch.int32)
    return torch.full((), int(count), dtype=torch.int32, device=device)
