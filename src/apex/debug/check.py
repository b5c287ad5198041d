"""Single questions: which values are not finite, why a step was skipped, which weights stay."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex._core import arguments, dtypes, tree
from apex._core.mixins import plain_class
from apex._core.param_groups import PREPARED, params_of, states_in
from apex._engine.optimizer.subclass import prepared_state
from apex.amp.report import NonfiniteGradient, count, nonfinite_gradients
from apex.debug import tracing
from apex.debug.causes import explained, remedies
from apex.debug.common import (
    counted,
    held_by,
    inner,
    percent,
    restore_random_numbers,
    to_json,
)
from apex.debug.place import Finding, innermost_line, unwrapped


def why_skipped(optimizer: Any, *, model: nn.Module | None = None) -> list[NonfiniteGradient]:
    """Returns the gradients that hold inf or NaN; empty if all are finite or cleared.

    Call it after the ``scale_loss`` block and before ``zero_grad``. In a plain loop, call it after
    ``backward`` or, with a ``GradScaler``, after ``scaler.step``. It waits for the device.

    Args:
        optimizer: An optimizer, prepared by ``amp.initialize`` at any level or plain.
        model: The model of a plain loop, which provides the names.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> loss = (model.weight * torch.tensor([[1.0, torch.inf]])).sum()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> for gradient in amp.debug.why_skipped(optimizer):
        ...     print(gradient)
        weight (1 inf of 2)
    """
    inner_optimizer = inner(optimizer)
    prepared = prepared_state(inner_optimizer)
    models: list[nn.Module] = []
    if model is not None:
        arguments.module("amp.debug.why_skipped", model)
        models = [model]
    elif prepared is not None:
        models = prepared.session.models
    return nonfinite_gradients(inner_optimizer, map(unwrapped, models))


# -- numerics --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NonfiniteTensor(NonfiniteGradient):
    """A parameter, buffer, gradient, master or optimizer state that holds inf or NaN.

    Attributes:
        role: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"master"`` or ``"state NAME"``.
        dtype: Name of the dtype, such as ``"float16"``.
    """

    role: str
    dtype: str

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.role} in {self.dtype}"


def check_numerics(model: nn.Module, optimizer: Any = None) -> list[NonfiniteTensor]:
    """Returns the parameters, buffers, gradients, masters and state that hold inf or NaN.

    Call it between two steps to locate a persistent NaN: one in the optimizer's state returns at
    every step, whatever the batch. A buffer that is a mask of infinities is not listed. Waits for
    the device.

    Args:
        model: Any model, prepared or not.
        optimizer: Its optimizer, prepared by ``amp.initialize`` or plain, to check masters and
            state too, under the names of the model's parameters.

    Raises:
        TypeError: If ``model`` is not a module, or ``optimizer`` is not an optimizer.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> amp.debug.check_numerics(model)
        []
        >>> model.weight.data[0, 1] = torch.nan
        >>> print(*amp.debug.check_numerics(model))
        weight (1 nan of 2), parameter in float32
    """
    arguments.module("amp.debug.check_numerics", model)
    optimizers = [] if optimizer is None else [inner(optimizer)]
    nonfinite = []
    for name, role, value in held_by([model], optimizers):
        for tensor in tracing.floating(value):
            inf, nan, elements = count(tensor)
            if not inf and not nan:
                continue
            may_be_mask = role == "buffer" and inf < elements
            if may_be_mask and tracing.is_mask(tensor):
                continue
            dtype = dtypes.name(tensor.dtype)
            nonfinite.append(NonfiniteTensor(name, inf, nan, elements, role, dtype))
    return nonfinite


# -- frozen updates --------------------------------------------------------------------------------


def frozen_updates(optimizer: Any) -> FrozenUpdates:
    """Returns a context that counts the weights that its steps should have moved but did not.

    A copy of the optimizer computes the intended update from the same weights, gradients and state
    in fp64. If that update is not zero but the weight stays the same, rounding has lost the update.
    An example is an Adam step of 1e-3 on a bf16 weight of 1. The weights are those that the
    optimizer updates: fp32 masters where they exist. Skipped steps and weights without a finite
    update do not count.

    Costs a copy of weights and state, an additional step, and host syncs: use it for single steps.
    If the model is sharded, every rank must use it, and counts its own shards.

    Args:
        optimizer: An optimizer that steps without a closure, prepared by amp or plain; a
            ``GradScaler`` may step it.

    Raises:
        TypeError: Before the step, if it gets a closure.
        Exception: Before the step, what the copy of the optimizer raised.

    Example:
        >>> import torch
        >>> from apex.debug import frozen_updates
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.001], dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=1e-3)
        >>> weight.grad = torch.ones_like(weight)
        >>> with frozen_updates(optimizer) as updates:
        ...     optimizer.step()
        >>> updates.frozen, updates.wanted
        (1, 2)
    """
    return FrozenUpdates(inner(optimizer))


_MAY_STAY = 0.2
"""Share of the weights that may keep their value in a healthy training."""


_Step = tuple[str, str, str]
"""How a model trains, the line of a step, and the dtype of what it leaves unchanged."""


def _step_of(optimizer: Optimizer, tensor: Tensor) -> _Step:
    prepared = prepared_state(optimizer)
    way = "plain" if prepared is None else prepared.session.policy.opt_level
    return way, innermost_line(), dtypes.name(tensor.dtype)


class FrozenUpdates:
    """A context that counts the weights that stay, in all steps of one optimizer or of all.

    Attributes:
        wanted: Number of weights whose intended update was not zero.
        frozen: How many of these kept their value.
        errors: The errors that copies of optimizers raised, by the optimizer's class. With a single
            optimizer, the error is raised instead.
        busy: Whether the copy of an optimizer steps.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self.wanted = 0
        self.frozen = 0
        self.errors: dict[str, Exception] = {}
        self.busy = False
        # The optimizer whose steps count; None counts the steps of all.
        self._only = optimizer
        self._steps = 0
        # Number of weights that stayed, by the step.
        self._stayed = Counter[_Step]()
        # A beta with which an average in 16 bits cannot fall, and the step; None without one.
        self._average: tuple[float, _Step] | None = None
        # Between the hooks of a step, where the copy of another context may step: the optimizer's
        # parameters, their values before and their intended values.
        self._wanted: dict[Optimizer, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> FrozenUpdates:
        self._hooks.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @property
    def share(self) -> float:
        """``frozen / wanted``; 0 if no weight was to move."""
        return self.frozen / max(self.wanted, 1)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Computes the values that a step should write; a GradScaler has unscaled the gradients."""
        if self.busy or self._only not in (None, optimizer):  # a copy steps, or another optimizer
            return
        self._steps += 1
        wide = {param: _widened_parameter(param) for param in params_of(optimizer)}
        self.busy = True
        try:
            if arguments.closure_of(args[1:], kwargs) is not None:
                raise TypeError(
                    "optimizer.step got a closure, which computes the gradients inside the step. "
                    "Call the closure first, then optimizer.step() without it."
                )
            with ExitStack() as stack:
                restore_random_numbers(stack, wide)
                _copy_of(optimizer, wide).step()
        except Exception as error:
            if self._only is not None:
                raise
            self.errors[type(optimizer).__name__] = error
            return
        finally:
            self.busy = False
        for group in optimizer.param_groups:
            self._check_average(optimizer, group)
        self._wanted = {optimizer: [(param, param.clone(), wider) for param, wider in wide.items()]}

    def _check_average(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Records a beta that rounds to 1 in the dtype of the squared gradients' average."""
        beta = group.get("betas", [0.0])[-1]
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            average = state.get("exp_avg_sq")
            if average is None:
                continue
            eps = torch.finfo(average.dtype).eps
            if 1.0 - beta < eps / 4:
                self._average = beta, _step_of(optimizer, average)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        """Counts the weights after the step."""
        for param, old, wanted in self._wanted.pop(optimizer, ()):
            # DTensors of torch 2.10 lack `ne` and `count_nonzero`.
            equals = wanted == old.to(wanted.dtype)
            moves = ~equals & torch.isfinite(wanted)
            stays = moves & (param == old)
            frozen = int(stays.sum())  # sync: a diagnosis on request
            self.wanted += int(moves.sum())  # sync: as above
            self.frozen += frozen
            self._stayed[_step_of(optimizer, param)] += frozen

    @property
    def worst(self) -> Finding | None:
        """The finding that too many weights stay or an average cannot fall; None if neither."""
        if self.share > _MAY_STAY:
            section = "frozen"
            what = self._counts
            [(step, _)] = self._stayed.most_common(1)
        elif self._average is not None:
            section = "an average that cannot fall"
            beta, step = self._average
            what = f"the optimizer's exp_avg_sq cannot fall: a decay of {beta:g} rounds to 1"
        else:
            return None
        way, line, dtype = step
        return Finding(
            module="",
            inside=False,
            direction="forward",
            location=line,
            op="step",
            kind="frozen",
            what=f"{what} ({dtype})",
            **explained(section, remedies(section, way), cause="frozen", dtype=dtype),
        )

    @property
    def _counts(self) -> str:
        return (
            f"{percent(self.share)} of the weights that {counted(self._steps, 'step')} should "
            f"have moved stayed, {self.frozen:,} of {self.wanted:,}"
        )

    def to_json(self) -> str:
        """Returns all data as JSON."""
        return to_json(
            {
                "worst": self.worst,
                "steps": self._steps,
                "wanted": self.wanted,
                "frozen": self.frozen,
            }
        )

    def __str__(self) -> str:
        if not self._steps:
            return (
                "No optimizer stepped. If overflows skipped every step, `apex trace` names the "
                "operator behind inf or NaN."
            )
        lines = []
        if self.worst is not None:
            lines.append(f"Updates lost: {self.worst}")
        elif self.wanted:
            lines.append(f"Updates arrive: {self._counts}.")
        elif not self.errors:
            lines.append(
                f"No weight was to move in {counted(self._steps, 'step')}: the learning "
                "rate was 0, or the gradients were 0, None or not finite. `apex trace` names the "
                "operator behind inf or NaN."
            )
        lines += [f"{name} has no verdict: {error}" for name, error in self.errors.items()]
        return "\n".join(lines)


def _copy_of(optimizer: Optimizer, wide: dict[nn.Parameter, nn.Parameter]) -> Any:
    """Returns a plain copy of an optimizer with wider parameters and state."""
    attributes: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        # Hooks, and an LR scheduler's wrapper of `step`, would have side effects.
        if name.endswith("_hooks"):
            attributes[name] = OrderedDict()
        elif name not in (PREPARED, "step"):
            attributes[name] = value
    memo = {id(param): wider for param, wider in wide.items()}
    copied = object.__new__(plain_class(type(optimizer)))
    copied.__dict__.update(copy.deepcopy(attributes, memo))
    for _, state in states_in(copied.state):
        state.update(tree.map_tensors(_widened_state, state))
    return copied


def _widened_state(value: Tensor) -> Tensor:
    # 0-d tensors are step counts, whose dtype the kernels require.
    return value if value.dim() == 0 else _widened(value)


def _widened_parameter(param: Tensor) -> nn.Parameter:
    """Returns a copy of a parameter and its gradient in a wide dtype."""
    wide = nn.Parameter(_widened(param), param.requires_grad)
    if param.grad is not None:
        wide.grad = _widened(param.grad)
    return wide


def _widened(value: Tensor) -> Tensor:
    """Returns a copy in the widest dtype that the tensor's device supports, of the same kind."""
    dtype = tracing.WIDE.get(value.dtype, value.dtype)
    if value.device.type == "mps" and dtype is torch.float64:
        dtype = torch.float32
    return value.detach().to(dtype, copy=True)
