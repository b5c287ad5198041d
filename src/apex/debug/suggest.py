"""``suggest_fp32``: the fewest modules to keep in fp32.

Note [The search]
    A healthy model's gradients at a 16-bit level are off by some percent, which one rounding of
    each value explains. So the limit is measured, not fixed. The rounding trace names modules that
    lose more, one class after another, until none does. With all of them in fp32, the error that
    remains is explained. A module is suggested if the error would be a tenth larger without it in
    fp32. A module whose error does not reach the gradients is not suggested.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._core.scale import ScaleRule
from apex._engine.conversion.state import state_of
from apex._engine.prepare import prepare
from apex._torch import ranks
from apex._torch.modules import modules_in, named_parameters
from apex.amp import frontend, inputs
from apex.amp.properties import level_defaults, to_policy
from apex.amp.sessions import new_session
from apex.debug import common
from apex.debug.rounding import RoundingTrace

_EXPLAINED = 1.1
"""Errors up to this multiple of the error with all faulty modules in fp32 are explained."""

_REPRODUCIBLE = 1e-3
"""Largest error between two runs in fp32."""

_USUAL = 0.3
"""Largest error of the gradients of healthy models in bf16."""

_NEGLIGIBLE = 1e-3
"""Gradients below this share of the largest do not count."""


def suggest_fp32(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Any = None,
    **keywords: Any,
) -> Suggestion:
    """Returns the fewest modules to keep in fp32 so that bf16 costs no more than one rounding.

    Runs copies of a plain fp32 model at O5, forward and backward, and compares their gradients
    with those in fp32. A module is suggested if the model does not run at O5 without it in fp32. A
    module where :func:`trace_rounding` finds lost digits is also suggested, if the gradients' error
    is a tenth larger without it in fp32. A healthy model gets an empty list, although its gradients
    at a 16-bit level are off by some percent.

    Changes nothing: the model, its gradients, buffers and hooks, the inputs and the random number
    generators are as before, also after an error. Checkpoints need ``use_reentrant=False``.

    Cost: one rounding trace for each class of module that loses digits and one more, a run for each
    module found, and the memory of one copy of the model.

    Args:
        model: A plain fp32 model, not prepared by ``amp.initialize``.
        *inputs: Positional arguments of the model: one batch.
        loss_fn: Computes the loss (a one-element floating-point tensor) from the model's output; by
            default the mean of the squares of the floating-point outputs.
        **keywords: Keyword arguments of the model.

    Returns:
        A :class:`Suggestion`; its ``modules`` are names for ``fp32_modules=`` of
        ``amp.initialize``.

    Raises:
        TypeError: If ``model`` is not a module, or the loss is not a tensor.
        ValueError: If the model is prepared or not in fp32, if the loss is not one floating-point
            number that requires gradients, if the gradients of two runs in fp32 differ or are not
            finite, or if several processes run.

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
    inner = _checked(model, loss_fn)
    trials = _Trials(inner, (inputs, keywords), loss_fn)
    before = trials.run([], trace=True)
    found, notes = _faulty(inner, trials)
    limit = max(_EXPLAINED * trials.run(found), _REPRODUCIBLE)
    modules = found
    for name in found:
        fewer = [other for other in modules if other != name]
        if trials.run(fewer) <= limit:
            modules = fewer
    modules = list(dict.fromkeys([*trials.required, *modules]))
    notes += [f"{name} does not run in 16 bits." for name in trials.required]
    return Suggestion(
        modules=modules,
        error_before=before,
        error_after=trials.run(modules),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Suggestion:
    """The modules to keep in fp32 at O5, and the error of the gradients with and without them.

    The error of a model's gradients is the root mean square, over its parameters, of the distance
    of each gradient from fp32's, relative to it by norm. Gradients below a thousandth of the
    largest do not count, because those that vanish by construction have no digits in fp32 either.

    Attributes:
        modules: Names for ``fp32_modules``.
        error_before: Error of the gradients at O5; NaN if one overflows.
        error_after: Error with ``modules`` in fp32.
        notes: The operators that no choice of modules repairs, those without a verdict, and the
            modules that do not run in 16 bits.
    """

    modules: list[str]
    error_before: float
    error_after: float
    notes: tuple[str, ...]

    @property
    def setting(self) -> str:
        """The line of code that applies the suggestion; ``""`` without modules."""
        if not self.modules:
            return ""
        options = f"opt_level='O5', fp32_modules={self.modules!r}"
        return f"amp.initialize(model, optimizer, {options})"

    @property
    def verdict(self) -> str:
        """The modules and the errors, in one sentence."""
        if not math.isfinite(self.error_after):
            return (
                "Could not tell which modules need fp32 at O5: the gradients overflow, whatever "
                "modules were tried. amp.debug.trace_overflow(model) names the operator."
            )
        before = common.percent(self.error_before)
        if not self.modules and self.error_before > _USUAL:
            return (
                f"No module in fp32 repairs the error of the gradients at O5, {before}. Buffers "
                "and arguments are rounded, too: see amp.initialize's fp32_buffers and fp32_inputs."
            )
        if not self.modules:
            return f"No module needs fp32 at O5: error of the gradients {before}."
        return (
            f"Keep in fp32 at O5: {', '.join(self.modules)}. Error of the gradients {before} -> "
            f"{common.percent(self.error_after)}."
        )

    def __str__(self) -> str:
        lines = [self.verdict, *self.notes]
        if self.modules:
            lines.insert(1, f"  {self.setting}")
        return "\n".join(lines)


def _faulty(model: nn.Module, trials: _Trials) -> tuple[list[str], list[str]]:
    """Returns the modules that lose digits, and notes on what no module in fp32 repairs."""
    names: list[str] = []
    notes = [f"{row.op} has no verdict: {row.reason}." for row in trials.trace.skipped]
    classes = {name: type(module) for name, module in model.named_modules()}
    unrepaired: set[str] = set()
    while lost := [row for row in trials.trace.lost if row.module not in unrepaired]:
        first = lost[0]
        if not first.module or _is_within(first.module, names):
            unrepaired.add(first.module)
            notes.append(
                f"{first.op} {first.where} loses digits ({first.direction}, "
                f"{first.location}), and no module in fp32 repairs it: compute in fp32 from where "
                "the error enters, which amp.debug.trace_rounding shows."
            )
            continue
        # Modules of one class have the same fault; one after another would take a trace for each.
        for module in dict.fromkeys(row.module for row in lost if row.module):
            is_alike = classes[module] is classes[first.module]
            if is_alike and not _is_within(module, names):
                names.append(module)
        trials.run(names, trace=True)
    return names, notes


def _is_within(name: str, names: Collection[str]) -> bool:
    """Returns whether a module is one of the named modules, or inside one."""
    return any(f"{name}.".startswith(f"{outer}.") for outer in names)


def _checked(model: Any, loss_fn: object) -> nn.Module:
    """Returns the model inside wrappers; raises an error unless it is plain, and in fp32."""
    inner = common.checked_model("suggest_fp32", model, loss_fn)
    if any(state_of(module) is not None for module in modules_in(inner)):
        raise ValueError(
            f"suggest_fp32 got {type(inner).__name__}, which amp has prepared; it takes the plain "
            "fp32 model. Call it before amp.initialize."
        )
    for name, param in named_parameters(inner):
        if dtypes.is_low_precision(param):
            raise ValueError(
                f"suggest_fp32 got a model whose parameter {name!r} is {param.dtype} on "
                f"{param.device}; it takes a plain fp32 model. Call model.float() first."
            )
    # Each process would run the model, and communicate, another number of times.
    if ranks.world_size() > 1:
        raise ValueError(
            f"suggest_fp32 was called in one of {ranks.world_size()} processes. Call it in a "
            "single process, before torch.distributed.init_process_group: there, SyncBatchNorm is "
            "a plain batch norm."
        )
    return inner


class _Trials:
    """Runs copies of a plain fp32 model at O5, with some modules in fp32.

    Attributes:
        trace: The trace of the last run that was traced.
        required: Modules that have to be in fp32 for the model to run at O5.
    """

    trace: RoundingTrace

    def __init__(self, model: nn.Module, arguments: Any, loss_fn: Any) -> None:
        """Runs the model twice in fp32.

        Raises:
            ValueError: If the gradients of the two runs differ, or are not finite.
        """
        self._model = model
        self._arguments = arguments
        self._loss_fn = loss_fn
        self._policy = to_policy(level_defaults("O5"))
        self.required: list[str] = []
        self._reference = self._gradients(self._copy())
        noise = self._error(self._gradients(self._copy()))
        if not noise <= _REPRODUCIBLE:  # also if it is NaN
            raise ValueError(
                f"suggest_fp32 got {type(model).__name__}, whose gradients in fp32 are not finite, "
                f"or differ between two runs (by {noise:.2g} of their norm), which hides the "
                "errors of 16 bits. amp.debug.trace_overflow(model) names an operator that "
                "overflows. Random numbers must be torch's, Python's or numpy's, and the model "
                "must not keep state outside itself; eval() may help."
            )

    def _copy(self) -> nn.Module:
        return copy.deepcopy(self._model, common.copy_memo(self._model))

    def run(self, fp32: list[str], *, trace: bool = False) -> float:
        """Returns the gradients' error with the modules ``fp32`` and ``required`` in fp32."""
        while True:
            model = self._copy()
            try:
                return self._run(model, [*fp32, *self.required], trace=trace)
            except RuntimeError as error:  # such as a product of bf16 and fp32 raises
                name = _failed_module(error, model)
                if not name or name in self.required:
                    raise
                self.required.append(name)

    def _run(self, model: nn.Module, fp32: list[str], *, trace: bool) -> float:
        """Prepares a model in a session that affects no other model, and runs it."""
        plan = frontend._plan(self._policy, fp32_modules=fp32)
        inputs.check_models([model], plan)
        session = new_session(self._policy, ScaleRule(), made_by="suggest")
        try:
            prepare(session, [model], [], plan, ExitStack())
            if trace:
                self.trace = RoundingTrace(model)
            with self.trace if trace else nullcontext():
                gradients = self._gradients(model)
            return self._error(gradients)
        finally:
            session.close()

    @torch.enable_grad()
    def _gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Runs a model; returns the gradients of its parameters by name."""
        given, keywords = self._arguments
        with common.casts_off(), common.preserve_state(model, self._arguments):
            output = model(*given, **keywords)
            loss = common.loss_of("suggest_fp32", output, self._loss_fn)
            params = {name: param for name, param in named_parameters(model) if param.requires_grad}
            gradients = common.gradients(loss, list(params.values()), model)
        named = zip(params, gradients, strict=True)
        return {name: grad for name, grad in named if grad is not None}

    def _error(self, gradients: dict[str, Tensor]) -> float:
        """Returns the distance of the gradients from fp32's; see :class:`Suggestion`."""
        # sync, here and below: a tool
        sizes = {name: float(exact.norm()) for name, exact in self._reference.items()}
        least = _NEGLIGIBLE * max(sizes.values(), default=0.0)
        squares = []
        for name, exact in self._reference.items():
            size = sizes[name]
            if name not in gradients or size <= least:
                continue
            distance = float((gradients[name] - exact).norm())
            squares.append((distance / size) ** 2)
        return math.sqrt(sum(squares) / max(1, len(squares)))


def _failed_module(error: BaseException, model: nn.Module) -> str:
    """Returns the innermost module of a model whose code raised an error; ``""`` without one."""
    names = {module: name for name, module in model.named_modules()}
    while error.__cause__ is not None:  # amp adds a remedy
        error = error.__cause__
    innermost = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            innermost = names.get(module, innermost)
    return innermost
