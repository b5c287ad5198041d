"""``suggest_fp32``: the fewest modules to keep in fp32.

Note [The search]
    A healthy model's gradients at a 16-bit level are off by some percent, which is what one
    rounding of each value explains. So the limit is measured, not fixed: the rounding trace names
    modules that lose more, one kind after another, until none does; what is then left of the error
    is explained. Of these modules, those are suggested without which the error would be a tenth
    larger. A module whose loss does not reach the gradients is not among them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._engine.model.state import state_of
from apex.debug.arguments import check_loss, check_loss_fn, checked_model, floating_outputs
from apex.debug.explanation import within
from apex.debug.rendering import formatting
from apex.debug.rendering.files import json_types
from apex.debug.trials import Loss, Outcome, Trials

_EXPLAINED = 1.1
"""Errors up to this multiple of what remains with all faulty modules in fp32 are explained."""

_REPRODUCIBLE = 1e-3
"""Largest error between two runs in fp32."""

_ROUNDS = 16
"""Largest number of traces."""

_LEVELS = ("O1", "O2", "O3", "O4", "O5")


def suggest_fp32(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Any = None,
    opt_level: str = "O5",
    **keywords: Any,
) -> Suggestion:
    """Returns the fewest modules to keep in fp32 so that 16 bits cost no more than one rounding.

    Runs copies of a plain fp32 model at the level, forward and backward, and compares their
    gradients with those in fp32. A module is suggested if :func:`trace_rounding` finds that it
    loses digits there, and the gradients' error is larger by a tenth without it in fp32. A
    healthy model gets an empty list, although its gradients at a 16-bit level are off by some
    percent.

    Changes nothing: the model, its gradients, buffers and hooks, the inputs and the random number
    generators are as before, also after an error.

    Cost: one rounding trace for each kind of module that loses digits and one more, a run for each
    module found, and a copy of the model at a time.

    Args:
        model: A plain fp32 model, not prepared by ``amp.initialize``.
        *inputs: Positional arguments of the model: one batch.
        loss_fn: Computes the loss (a one-element floating-point tensor) from the model's output; by
            default the mean of the squares of the floating-point outputs.
        opt_level: ``"O1"`` to ``"O5"``.
        **keywords: Keyword arguments of the model.

    Returns:
        A :class:`Suggestion`; its ``modules`` are names for ``fp32_modules=`` of
        ``amp.initialize``; at O1 and O4, of the modules to run without casts, because these levels
        hold the model in fp32.

    Raises:
        TypeError: If ``model`` is not a module or cannot be copied, or the loss is not a tensor.
        ValueError: If the level is none of these, the model is prepared or not in fp32, the inputs
            hold no tensor, the loss is not one floating-point number that requires gradients, or
            two runs in fp32 give different gradients, or gradients that are not finite, or other
            processes take part in a run.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> class Shift(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x + 1000) - 1000
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), Shift(), torch.nn.Linear(8, 1))
        >>> found = amp.debug.suggest_fp32(model, torch.randn(16, 8))
        >>> found.modules
        ['1']
        >>> found.error_after < 0.1 * found.error_before
        True
        >>> found.setting
        "amp.initialize(model, optimizer, opt_level='O5', fp32_modules=['1'])"
    """
    check_loss_fn("suggest_fp32", loss_fn)
    inner = _checked(model, (inputs, keywords), opt_level)
    return suggestion_for(
        inner,
        lambda each: _loss(each(*inputs, **keywords), loss_fn),
        (inputs, keywords),
        opt_level,
    )


@dataclass(frozen=True)
class Suggestion:
    """The modules to keep in fp32 at a level, and what that brings.

    The error of a model's gradients is the root mean square, over its parameters, of the distance
    of each gradient from fp32's, relative to it by norm. Gradients below a thousandth of the
    largest do not count: those that vanish by construction have no digits in fp32, either.

    Attributes:
        modules: Names for ``fp32_modules``; at O1 and O4, of the modules to run without casts.
        opt_level: The level.
        error_before: Error of the gradients at this level; NaN if one overflows.
        error_after: Error with ``modules`` in fp32.
        bytes: Additional memory of weights, masters, gradients and activations saved for backward.
        sensitivities: For each of ``modules``, the error if only this one is left out.
        notes: What no choice of modules repairs, and operators without a verdict.
    """

    modules: list[str]
    opt_level: str
    error_before: float
    error_after: float
    bytes: int
    sensitivities: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def setting(self) -> str:
        """The line of code that applies it; ``""`` without modules."""
        if not self.modules:
            return ""
        if self.opt_level in ("O1", "O4"):
            return "with amp.disable_casts():  # around the forward of each, on .float() inputs"
        return (
            f"amp.initialize(model, optimizer, opt_level={self.opt_level!r}, "
            f"fp32_modules={self.modules!r})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all data in plain containers; an error that overflowed is None."""
        return {**json_types(asdict(self)), "setting": self.setting}

    def to_json(self) -> str:
        """Returns all data as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def verdict(self) -> str:
        """The modules, the errors and the price, in one sentence."""
        if not math.isfinite(self.error_after):
            return (
                f"Could not tell which modules need fp32 at {self.opt_level}: the gradients "
                "overflow, whatever loss scale and modules were tried. amp.debug.trace_overflow("
                "model) names the operator; a bf16 level has the range of fp32."
            )
        before = formatting.percent(self.error_before)
        if not self.modules:
            return f"No module needs fp32 at {self.opt_level}: error of the gradients {before}."
        price = f"{'-' if self.bytes < 0 else ''}{formatting.size(abs(self.bytes))}"
        return (
            f"Keep in fp32 at {self.opt_level}: {', '.join(self.modules)}. Error of the gradients "
            f"{before} -> {formatting.percent(self.error_after)}, for {price}."
        )

    def __str__(self) -> str:
        lines = [
            f"  without {name}: {formatting.percent(error)}"
            for name, error in self.sensitivities.items()
        ]
        setting = [f"  {self.setting}"] if self.setting else []
        return "\n".join([self.verdict, *lines, *setting, *self.notes])


def suggestion_for(model: nn.Module, loss: Loss, arguments: object, opt_level: str) -> Suggestion:
    """Returns the suggestion for a plain fp32 model; for the arguments, see :class:`Trials`."""
    trials = Trials(model, loss, arguments, opt_level)
    if not trials.is_finite:
        raise ValueError(
            f"suggest_fp32 got {type(model).__name__}, whose gradients are not finite in fp32, "
            "too, which no module in fp32 repairs. amp.debug.trace_overflow(model) names the "
            "operator."
        )
    if trials.noise > _REPRODUCIBLE:
        raise ValueError(
            f"suggest_fp32 got {type(model).__name__}, whose gradients differ by "
            f"{trials.noise:.2g} of their norm between two runs in fp32, which hides the errors "
            "of 16 bits. The model must not draw random numbers outside torch, "
            "Python and numpy, or keep state outside itself; eval() may help."
        )
    before = trials.run([], trace=True)
    found, notes = _faulty(model, trials, before)
    limit = max(_EXPLAINED * trials.run(found).error, trials.noise)
    errors = {name: trials.run(_without(found, name)).error for name in found}
    modules = list(found)
    for name in sorted(found, key=lambda each: errors[each]):
        fewer = _without(modules, name)
        if trials.run(fewer).error <= limit:
            modules = fewer
    last = trials.run(modules)
    return Suggestion(
        modules=modules,
        opt_level=opt_level,
        error_before=before.error,
        error_after=last.error,
        bytes=last.bytes - before.bytes,
        sensitivities={name: errors[name] for name in modules},
        notes=tuple(notes),
    )


def _faulty(model: nn.Module, trials: Trials, found: Outcome) -> tuple[list[str], list[str]]:
    """Returns the modules that lose digits, and notes on what no module in fp32 repairs."""
    names: list[str] = []
    notes = [f"{each.op} has no verdict: {each.reason}." for each in found.skipped]
    kinds = {name: type(module) for name, module in model.named_modules()}
    unrepaired: set[str] = set()
    for _ in range(_ROUNDS):
        lost = [row for row in found.lost if row.module not in unrepaired]
        if not lost:
            break
        first = lost[0]
        if not first.module or _is_within(first.module, names):
            unrepaired.add(first.module)
            notes.append(
                f"{first.op} {first.finding.place} loses digits ({first.direction}, {first.location}), and "
                "no module in fp32 repairs it: compute it in fp32, on .float() inputs."
            )
            continue
        # Modules of one class have the same fault; one after another would take a trace for each.
        names += dict.fromkeys(
            row.module
            for row in lost
            if row.module
            and kinds[row.module] is kinds[first.module]
            and not _is_within(row.module, names)
        )
        found = trials.run(names, trace=True)
    return [name for name in names if not _is_within(name, _without(names, name))], notes


def _is_within(name: str, names: Sequence[str]) -> bool:
    return any(within(name, each) for each in names)


def _without(names: Sequence[str], name: str) -> list[str]:
    return [each for each in names if each != name]


def _checked(model: Any, arguments: object, opt_level: str) -> nn.Module:
    inner = checked_model("suggest_fp32", model, arguments)
    if opt_level not in _LEVELS:
        raise ValueError(
            f"suggest_fp32 got opt_level={opt_level!r}; it takes a level that computes in 16 bits: "
            f"{', '.join(map(repr, _LEVELS))}."
        )
    if any(state_of(module) is not None for module in inner.modules()):
        raise ValueError(
            f"suggest_fp32 got {type(inner).__name__}, which amp has prepared; it takes the plain "
            "fp32 model. Call it before amp.initialize."
        )
    for name, param in inner.named_parameters():
        if dtypes.is_low_precision(param):
            raise ValueError(
                f"suggest_fp32 got a model whose parameter {name!r} is {param.dtype} on "
                f"{param.device}; it takes a plain fp32 model. Call model.float() first."
            )
    return inner


def _loss(output: Any, loss_fn: Any) -> Tensor:
    if loss_fn is not None:
        loss: Tensor = loss_fn(output)
    else:
        floating = floating_outputs("suggest_fp32", output)
        loss = torch.stack([each.float().square().mean() for each in floating]).sum()
    check_loss("suggest_fp32", loss)
    return loss
