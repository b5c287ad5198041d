"""The base of the fused optimizers: the step around the rule, skips, checkpoints."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from apex._core.arguments import flag, in_range, parameters
from apex._core.dtypes import is_low_precision, math_dtype
from apex._core.param_groups import states_in
from apex._optimizer_rules.adam import AdamRule
from apex._optimizer_rules.scalars import Scalar, skip_flag
from apex._optimizer_rules.working import scale_
from apex._torch.copies import as_scalar, as_tensor, capturing, moved

MASTER = "master_param"
"""State key of the fp32 master that the optimizer keeps for a 16-bit parameter."""

_LARGE = 2**23
"""Elements that fill a batch, if the rule runs in several kernels.

Such a rule allocates lists of intermediate values for the whole batch; FusedLAMB allocates three.
If a flag may skip the step, the rule also copies everything that changes.
"""


SkipOn = Callable[[torch.device], Tensor | None]
"""Returns the 0-d flag on a device, 1 to change nothing, or ``None`` if the step has no flag."""


@dataclass
class Batch:
    """Parameters of one group on one device that have gradients.

    Attributes:
        group: The parameter group, which holds the options.
        device: The device of all tensors.
        skip: 0-d flag, 1 to change nothing; ``None`` without a flag.
        params: The parameters.
        grads: Their gradients, in the same order.
        elements: The number of elements of all parameters.
    """

    group: dict[str, Any]
    device: torch.device
    skip: Tensor | None
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    elements: int = 0

    def option(self, name: str) -> Any:
        """Returns an option of the group; moves a tensor to the batch's device, as 0-d."""
        return as_scalar(self.group[name], self.device)

    @property
    def step(self) -> Scalar:
        """The number of this step, from 1.

        Raises:
            RuntimeError: If a CUDA graph would capture a step count on the host.
        """
        count: Scalar = self.option("step")
        _check_captured(count, self.device)
        return count

    def adam_rule(self, decoupled: int, **options: Any) -> AdamRule:
        """Returns the group's hyperparameters for Adam, LAMB or NovoGrad."""
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

    Like torch's fused optimizers, it reads two attributes that ``amp`` and ``torch.amp.GradScaler``
    set during a step. If ``self.found_inf`` is not 0, parameters, gradients, state and step counts
    do not change. The step divides gradients by ``self.grad_scale`` in place.

    Attributes:
        set_grad_none: Whether ``zero_grad`` drops gradients instead of setting them to zero.
    """

    _step_supports_amp_scaling = True
    set_grad_none = True

    capturable = False
    """Whether learning rates and step counts are tensors from the start, as for CUDA graphs."""

    steps_dtensors = False
    """Whether the rule supports DTensors: norms cover all ranks, and no plain tensor mixes in."""

    scalar_state: tuple[str, ...] = ("step",)
    """Keys of state that is one number per parameter; other state has the parameter's shape."""

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

        Raises:
            RuntimeError: If ``amsgrad`` is set.
            TypeError: If an option has the wrong type.
            ValueError: If an option is out of range.
        """
        if amsgrad:
            raise RuntimeError(
                f"{type(self).__name__} does not support the AMSGrad variant. "
                "Use torch.optim.AdamW(params, amsgrad=True, fused=True)."
            )
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas is {betas!r}; it must be two numbers, such as (0.9, 0.999).")
        for index, beta in enumerate(betas):
            in_range(f"betas[{index}]", beta, below=1.0)
        defaults = {"lr": lr, "eps": eps, "weight_decay": decay}
        for name, value in defaults.items():
            in_range(name, value)
        corrects = flag("bias_correction", bias_correction)
        return {**defaults, "betas": betas, "bias_correction": corrects}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group."""
        super().add_param_group(param_group)
        if self.capturable:
            put_on_device(self.param_groups[-1])

    def update(self, batch: Batch) -> None:
        """Takes one step for a batch of parameters."""

    def prepare(self, batches: list[Batch]) -> None:
        """Prepares the updates; gets all batches, with unscaled gradients."""

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        # fairseq's subclasses pass this flag to the multi-tensor functions.
        device = self.param_groups[0]["params"][0].device
        return torch.zeros(1, dtype=torch.int32, device=device)

    # -- the step ----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients; sets them to None only if ``set_grad_none`` is also set."""
        super().zero_grad(set_to_none=set_to_none and self.set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **scaling: Any) -> Any:
        """Takes one step.

        Args:
            closure: Recomputes the loss; called once, before the step.
            **scaling: ``grad_scaler``, the ``torch.amp.GradScaler`` that scaled the gradients;
                its own ``step`` then runs. torch would pass it, with a warning, to a ``step`` that
                names this argument.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scaler = _only_grad_scaler(**scaling)
        if grad_scaler is not None:
            grad_scaler.step(self)  # sets both attributes and calls this method again
            return loss
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        # Each device's flag is made once in a step.
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

    def _batches(self, group: dict[str, Any], skip_on: SkipOn) -> Iterator[Batch]:
        """Yields the group's parameters with gradients, in batches of one device each."""
        limit = math.inf if self.gradients_in_kernels else _LARGE
        unfinished: dict[torch.device, Batch] = {}
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            is_dense = grad.layout is torch.strided
            if not (is_dense and param.is_floating_point()):
                found = f"a parameter of {param.dtype}" if is_dense else "a sparse gradient"
                raise RuntimeError(
                    f"{type(self).__name__} got {found}. It does not support sparse gradients, "
                    "only fp16, bf16, fp32 and fp64 parameters. Use another optimizer, such as "
                    "torch.optim.SparseAdam, or an embedding with sparse=False."
                )
            batch = unfinished.get(param.device)
            if batch is not None and batch.elements >= limit:
                yield batch
                batch = None
            if batch is None:
                batch = Batch(group, param.device, skip_on(param.device))
                unfinished[param.device] = batch
            batch.params.append(param)
            batch.grads.append(grad)
            batch.elements += param.numel()
        yield from unfinished.values()

    def _count(self, skip_on: SkipOn) -> None:
        """Counts the step in each group; on the device once a flag may have skipped a step."""
        device_counts: dict[torch.device, list[Tensor]] = {}
        for group in self.param_groups:
            if not group["params"]:
                continue
            device = group["params"][0].device
            count = group.get("step", 0)
            if isinstance(count, Tensor) or skip_on(device) is not None:
                _check_captured(count, device)
                count = _count_on(device, count)
                device_counts.setdefault(device, []).append(count)
            else:
                count += 1
            group["step"] = count
        for device, counts in device_counts.items():
            skip = skip_on(device)
            taken = 1 if skip is None else 1 - skip
            # Without alpha, torch would treat the tensor as a number and read it on the host.
            torch._foreach_add_(counts, _count_on(device, taken), alpha=1)

    def _gradient(self, param: Tensor) -> Tensor | None:
        return param.grad

    def buffers(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """Returns each parameter's state of this name, initially zeros."""
        buffers = []
        for param in params:
            state = self.state[param]
            if name not in state:
                dtype = self.state_dtype(param)
                state[name] = torch.zeros_like(param, dtype=dtype)
            buffers.append(state[name])
        return buffers

    def state_dtype(self, param: Tensor) -> torch.dtype:
        """Returns the dtype of a parameter's state: fp32, or fp64 for an fp64 parameter.

        amp asks when it converts a parameter.
        """
        return math_dtype(param)

    def masters(self, batch: Batch, dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
        """Returns the fp32 masters of parameters of these dtypes; other parameters themselves.

        The first step creates the masters, because until then a loaded checkpoint or a broadcast
        may change the parameters.
        """
        masters = []
        for param in batch.params:
            if param.dtype not in dtypes:
                masters.append(param)
                continue
            state = self.state[param]
            if MASTER not in state:
                state[MASTER] = param.detach().to(torch.float32, copy=True)
            masters.append(state[MASTER])
        return masters

    # -- copies and checkpoints --------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns torch's state and the settings of the constructor, which torch omits."""
        state = super().__getstate__()
        for name, value in vars(self).items():
            if isinstance(value, int | torch.dtype):  # a bool is an int
                state[name] = value
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adds the options and the step count that the state of a torch optimizer lacks.

        Raises:
            ValueError: If a tensor has the wrong shape. Nothing has changed then.
        """
        self._check_state(state)
        super().__setstate__(state)
        for group in self.param_groups:
            if "step" not in group:
                # torch counts the steps of each parameter; the group takes the largest count.
                for param in group["params"]:
                    count = self.state.get(param, {}).get("step", 0)
                    if count > group.get("step", 0):  # sync: to load
                        group["step"] = int(count)
            for name, value in self.defaults.items():
                if name != "differentiable":  # torch adds it to defaults, but not to groups
                    group.setdefault(name, value)
            if self.capturable:  # a file that was loaded to the CPU has them there
                put_on_device(group)

    def _check_state(self, state: dict[str, Any]) -> None:
        """Checks shapes: torch's fused kernels would write outside the memory of a small tensor."""
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
        """Returns torch's state dict with step counts as numbers, unless ``capturable``.

        ``torch.distributed.checkpoint`` loads a value only into a value of the same type. Therefore
        the type does not depend on whether a flag ever controlled a step.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if isinstance(group.get("step"), Tensor) and not self.capturable:
                group["step"] = int(group["step"])  # sync: to save
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; state of 16-bit parameters keeps its saved dtype, such as fp32.

        torch alone would cast it to the dtype of the parameter.
        """
        super().load_state_dict(state_dict)
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                saved_state = state_dict["state"].get(key, {})
                for name, value in saved_state.items():
                    if isinstance(value, Tensor) and is_low_precision(param):
                        # A copy, because the step writes to it.
                        self.state[param][name] = value.detach().to(param.device, copy=True)


def gradients_of(batches: Sequence[Batch]) -> list[Tensor]:
    """Returns the gradients of all batches, in one list."""
    grads: list[Tensor] = []
    for batch in batches:
        grads += batch.grads
    return grads


def _only_grad_scaler(grad_scaler: Any = None) -> Any:
    """Returns ``grad_scaler``; as any function, raises TypeError for another keyword."""
    return grad_scaler


def put_on_device(group: dict[str, Any]) -> None:
    """Moves a group's learning rate and step count to tensors on its parameters' device."""
    if not group["params"]:
        return
    device = group["params"][0].device
    group["lr"] = as_tensor(group["lr"], device).clone()
    group["step"] = _count_on(device, group.get("step", 0))


def _check_captured(count: Scalar, device: torch.device) -> None:
    """Raises RuntimeError if a CUDA graph captures a step whose count is on the host."""
    if not isinstance(count, Tensor) and capturing(device):
        raise RuntimeError(
            "A CUDA graph captures a step whose count is on the host. Each replay would correct "
            "the bias of the same step. Use FusedAdam(..., capturable=True) or "
            "FusedMixedPrecisionLamb, or call optimizer.step() outside the graph. With a dynamic "
            "loss scale, one step before the capture also puts the count on the device."
        )


def _count_on(device: torch.device, count: Scalar) -> Tensor:
    """Returns a number of steps as an int32 tensor on ``device``."""
    if isinstance(count, Tensor):
        return moved(count, device, torch.int32)
    return torch.full((), int(count), dtype=torch.int32, device=device)
