"""Traces every operator, forward and backward, and names the first that overflows."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from apex._core.param_groups import params_of
from apex._engine.optimizer.subclass import prepared_state
from apex._torch import ranks
from apex.debug import tracing
from apex.debug.births import FATEFUL, Birth, Births
from apex.debug.causes import finding_of
from apex.debug.common import Held, counted, held_by, listed, to_json
from apex.debug.place import Finding, node_name, owner_of, runs_in_scaler
from apex.debug.scaled import ScaledGradients
from apex.debug.tracing import ByMemory, Call, Trace, floating, kind_of

_PARAMETERS = {"parameter", "master"}
_MAX_INPUTS = 4

_GROWTH = 10.0
"""A training diverges if its largest weight has grown by more than this factor."""

_MAX_COPIED = 2**24
"""Largest number of elements that are copied for one call: 64 MiB in fp32."""


def trace_overflow(*models: nn.Module, scaler: Any = None) -> OverflowTrace:
    """Returns a context that finds the first operator that overflows, its cause and a remedy.

    Enter it around one or more whole iterations, forward and backward; it may include
    ``optimizer.step``. The trace covers every operator, also outside the models, which provide the
    names of modules. Deliberate infinities (masks) count as a fault only once they produce a NaN or
    reach a gradient.

    A check and a host sync follow each operator, so an iteration takes several times as long. The
    trace copies the tensors that an operator overwrites, for one operator at a time, and at most
    2**24 elements (64 MiB in fp32). It copies nothing while an optimizer steps. Models under
    ``torch.compile`` run uncompiled inside the context, because compiled code is opaque.

    Args:
        models: The models, plain or prepared by ``amp.initialize``, and perhaps wrapped by
            ``torch.compile`` or DistributedDataParallel. Without any, models are found as they are
            called.
        scaler: The ``torch.amp.GradScaler`` of a loop without ``amp.initialize``. It is needed only
            if it scales the loss before the context is entered.

    Returns:
        An :class:`OverflowTrace` context; its ``first`` is the fault, or None.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softplus())
        >>> with amp.debug.trace_overflow(model) as trace:
        ...     model(torch.ones(1, 2)).log().sum().backward()
        >>> trace.first is None
        True
        >>> with amp.debug.trace_overflow(model) as trace:
        ...     (model(torch.ones(1, 2)) * 0).log().sum().backward()
        >>> trace.first.op, trace.first.kind, trace.first.cause
        ('aten.log', 'inf', 'domain')
    """
    return OverflowTrace(*models, scaler=scaler)


class _Input(NamedTuple):
    """An argument that a call reads, its values before the call, and their kind."""

    argument: Tensor
    values: Tensor
    kind: str


class _Observed:
    """A call, and its inputs as they were before it.

    Copies those that the call overwrites, if they have at most ``limit`` elements.
    """

    def __init__(self, call: Call, limit: int) -> None:
        self.call = call
        # The inputs that the call overwrites, by id: the hash of a master is its parameter's.
        self._overwritten: dict[int, _Input] = {}
        overwritten = call.written if call.traits.reads_written else []
        copies = sum(map(Tensor.numel, overwritten)) <= limit
        for tensor in overwritten:
            values = tensor.detach().clone() if copies else tensor
            self._overwritten[id(tensor)] = _Input(tensor, values, kind_of(tensor))

    def values_of(self, tensor: Tensor) -> Tensor:
        """Returns the values of an argument before the call."""
        known = self._overwritten.get(id(tensor))
        return known.values if known else tensor

    @functools.cached_property
    def inputs(self) -> list[_Input]:
        """The arguments that the call reads."""
        inputs = []
        written = set(map(id, self.call.written))
        for tensor in floating(self.call.arguments):
            if id(tensor) in self._overwritten:
                inputs.append(self._overwritten[id(tensor)])
            elif id(tensor) not in written:
                inputs.append(_Input(tensor, tensor, kind_of(tensor)))
        return inputs


class OverflowTrace(Trace):
    """The result of :func:`trace_overflow`."""

    _NAME = "trace_overflow"

    def __init__(self, *models: nn.Module, scaler: Any = None) -> None:
        if not isinstance(scaler, torch.amp.GradScaler | None):
            raise TypeError(
                f"amp.debug.trace_overflow got {type(scaler).__name__} as the scaler; it takes the "
                "torch.amp.GradScaler that scales the losses."
            )
        super().__init__(*models)
        self._births = Births()
        # Scale of a loss that the scaler multiplied before, and whether the scale is dynamic.
        unseen = 1.0, False
        if scaler is not None:  # the scale of a disabled one is 1
            unseen = scaler.get_scale(), True
        self._scaled = ScaledGradients(unseen)
        # Operators and lines of misuses that were added.
        self._misused: set[tuple[str, str]] = set()
        # Parameters with a gradient that nothing had written before the first step.
        self.uninitialized: list[str] = []
        # The optimizers that have stepped.
        self._optimizers = weakref.WeakSet[Optimizer]()
        # Memory of the weights' casts.
        self._casts = ByMemory[bool]()
        # Memory that nothing has written yet.
        self._unwritten = ByMemory[bool]()
        # The birth of the non-finite values in each memory.
        self._born = ByMemory[Birth]()
        # Largest absolute value of the weights before the first step; inf if they are all 0, or
        # before that step, so that no weight counts as grown.
        self._first_largest = math.inf

    @property
    def first(self) -> Finding | None:
        """The first fault; None if all non-finite values were harmless."""
        return finding_of(self._births.first())

    @property
    def gradients(self) -> list[str]:
        """Names of parameters that received a non-finite gradient, in order of arrival."""
        return self._births.gradients

    def to_json(self) -> str:
        """Returns ``{"first": {...} or null, "operators": n, "gradients": [names]}``."""
        return to_json(
            {
                "first": self.first,
                "operators": self._births.time,
                "gradients": self.gradients,
            }
        )

    def __str__(self) -> str:
        first = self.first
        if not self._births.time:
            return self._nothing
        if first is None:
            return f"No overflow: {counted(self._births.time, 'operator')} traced, no fault."
        lines = [headed(first), *hit_lines(first, self.gradients)]
        return "\n".join(lines)

    def _enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Counts the optimizer's own parameters (masters) as weights, and checks its gradients."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._note_uninitialized(optimizer)
        if self._first_largest == math.inf:
            self._first_largest = self._largest_weight or math.inf
        if not runs_in_scaler():
            self._check_gradients(optimizer)
        super()._enter_step(optimizer)

    def _note_uninitialized(self, optimizer: Optimizer) -> None:
        for param in params_of(optimizer):
            if param.grad is not None and self._unwritten.of(param):
                self.uninitialized.append(self._held(param).name)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Adds a step on gradients that carry a loss scale, or from which the scale backs off."""
        gradients = [param.grad for param in params_of(optimizer)]
        scale = self._scaled.scale_of(gradients)
        if scale != 1.0:
            self._add_misuse("step", scale, "step")
        elif prepared_state(optimizer) is None:  # amp skips the step of a prepared one
            for gradient in floating(gradients):
                overflow = self._born.of(gradient)
                if overflow is not None and overflow.heals:
                    self._add_misuse("step", overflow.scale, "step", cause="skipped step")

    @property
    def _largest_weight(self) -> float:
        """The largest absolute value of the models' parameters."""
        weights = filter(tracing.is_checked, self._tracker.parameters)
        return max((tracing.values_of(weight).largest for weight in weights), default=0.0)

    # -- operators -------------------------------------------------------------------------------

    def _before(self, call: Call) -> _Observed | None:
        """Returns the call with its inputs; None if it sets no values."""
        self._births.count_operator()
        if call.traits.uninitialized:  # its values count once they are read
            return None
        is_view = call.traits.view and call.name != "aten.lift_fresh"
        if is_view and self._tracker.accumulating is None:
            return None
        limit = 0 if self._in_step else _MAX_COPIED
        return _Observed(call, limit)

    def _after(self, call: Call, before: _Observed | None, result: Any) -> None:
        """Checks the values that the call returned and wrote."""
        self._note_memory(call, result)
        if before is None:
            return
        if not call.traits.exchanges:  # the values that it receives may come later
            self._check(before, result)
        if not self._in_step:
            misuse = self._scaled.misuse(call, result)
            if misuse:
                scale = self._scaled.scale_of(call.arguments)
                self._add_misuse(call.name, scale, misuse)
        target = self._tracker.accumulating
        if target is not None and self._tracker.runs_formula:  # not a hook of the target
            name = self._tracker.parameters.get(target, "(a tensor of no model)")
            for gradient in floating(result):
                self._arrive(name, gradient, call)

    def _arrive(self, name: str, gradient: Tensor, call: Call) -> None:
        """Records that autograd adds to the gradient of the named parameter."""
        self._scaled.arrive(gradient)
        birth = self._born.of(gradient) if kind_of(gradient) else None
        if birth is not None and birth.heals:
            scale, _ = self._scaled.loss_scale
            # The scaler has backed off since, and nothing has cleared the gradient.
            if scale < birth.scale:
                self._add_misuse(call.name, birth.scale, "stale", cause="gradients")
        self._births.reach_gradient(name, birth)

    def _note_memory(self, call: Call, result: Any) -> None:
        """Records which memory holds a weight's cast, and which nothing has written yet."""
        if "empty" in call.name:
            self._unwritten.note(result, True)
        else:
            self._unwritten.discard(call.written)
        if call.name == "aten._to_copy" and call.args[0] in self._tracker.parameters:
            self._casts.note(result, True)

    def _check(self, observed: _Observed, result: Any) -> None:
        """Records the birth of non-finite outputs, and what the call does to such inputs."""
        call = observed.call
        if call.base.startswith(tracing.SAVES_INFINITIES):
            result = result[:1]
        bad = []
        worst = "inf"
        for tensor in tracing.outputs(call, result):
            kind = kind_of(tensor)
            if kind:
                bad.append(tensor)
                if kind == "nan":
                    worst = kind
            elif tracing.dense(tensor).nbytes >= tracing.storage(tensor).nbytes():  # all of it
                self._born.discard(tensor)
        if bad:
            birth = self._origin(observed, bad[0], worst)
            written = set(call.written)
            for tensor in bad:
                self._born.note(tensor, birth)
                # Batch norms in eval mode leave their statistics alone.
                if tensor in written:
                    self._reach_weight(birth, tensor)
        self._mark_fate(observed, is_finite=not bad)

    def _mark_fate(self, observed: _Observed, *, is_finite: bool) -> None:
        """Records what a call does to the non-finite values that it reads."""
        call = observed.call
        # Autograd starts a backward pass by a 1 like the loss.
        starts_backward = call.name == "aten.ones_like" and call.args[0].numel() == 1
        if not starts_backward and call.base not in FATEFUL:
            return
        for birth in self._births_read(observed):
            if starts_backward:
                self._births.reach(birth)
            birth.meet(call.base, is_finite=is_finite)

    def _add_misuse(
        self,
        op: str,
        scale: float,
        misuse: str,
        *,
        cause: str = "scaled gradients",
    ) -> None:
        """Adds a use of gradients that still carry the loss scale, or that it made overflow."""
        kind = "scaled" if cause == "scaled gradients" else "inf"
        birth = Birth(
            self._tracker.place,
            op,
            kind,
            torch.float32,
            way=self._way,
            given=cause,
            misuse=misuse,
            scale=scale,
            masked=misuse == "reading",
        )
        if birth.site not in self._misused:
            self._misused.add(birth.site)
            birth = self._births.add(birth)
            self._births.reach(birth, certain=not birth.masked)

    # -- where values come from --------------------------------------------------------------------

    def _births_read(self, observed: _Observed) -> list[Birth]:
        """Returns the births of a call's non-finite inputs."""
        return [self._input_birth(read, observed) for read in observed.inputs if read.kind]

    def _origin(self, observed: _Observed, bad: Tensor, kind: str) -> Birth:
        """Returns the birth of a call's non-finite outputs, of which ``bad`` is the first."""
        births = self._births_read(observed)
        if not births:  # the inputs are finite
            cause = ""
            if _number(observed.call) is not None and not self._in_step:
                cause = "constant"
            return self._birth(observed, bad, kind, cause, deliberate=bool(cause))
        worst = min(births, key=Birth.rank)
        worst.pass_on(observed.call.base, self._tracker.module[0])
        reads_nan = any(read.kind == "nan" for read in observed.inputs)
        is_new_nan = kind == "nan" and not reads_nan
        # A mask's infinity is harmless until a call makes a NaN of it.
        is_mask = worst.deliberate and not worst.multiplied
        if is_new_nan and is_mask:
            return self._birth(observed, bad, kind, "constant")
        return worst

    def _input_birth(self, read: _Input, observed: _Observed) -> Birth:
        """Returns a non-finite input's birth: this operator if the values are from outside."""
        tensor, values, kind = read
        birth = self._born.of(tensor)
        if birth is not None:
            # A model that was written before its first call, such as an average, is known by now.
            self._reach_weight(birth, values)
            return birth
        cause = self._source(tensor, observed.call)
        deliberate = False
        if cause == "data":
            deliberate = _number(observed.call) is not None or tracing.is_mask(values)
        if deliberate:
            cause = "constant"
        birth = self._birth(observed, tensor, kind, cause, deliberate=deliberate)
        self._born.note(tensor, birth)
        return birth

    def _source(self, tensor: Tensor, call: Call) -> str:
        """Returns the cause of a non-finite value that came from outside the trace."""
        role = self._held(tensor).role
        is_reduced = role == "gradient" or self._tracker.direction == "backward"
        if is_reduced and ranks.world_size() > 1:
            return "another rank"
        if role == "gradient":
            return "gradients"
        if role.startswith("state"):
            return "optimizer state"
        # Parameters of a model that no forward has made known yet are weights, too.
        fills_parameter = any(isinstance(written, nn.Parameter) for written in call.written)
        if fills_parameter or self._is_weight(tensor):
            return "weights"
        return "data"

    def _birth(
        self,
        observed: _Observed,
        bad: Tensor,
        kind: str,
        cause: str,
        *,
        deliberate: bool = False,
    ) -> Birth:
        """Adds the birth of the values of ``bad``, an input or an output of a call."""
        call = observed.call
        place = self._tracker.place
        is_backward = place.direction == "backward"
        # An optimizer step, or a write of masters to the model.
        may_update = not cause and not place.inside and not is_backward
        if may_update and (self._in_step or any(map(self._is_weight, call.written))):
            cause = "update"
        number = None
        if cause in ("constant", "update"):
            number = _number(call)
        measured: dict[str, Any] = {}
        if not deliberate and not self._in_step:  # a mask would cost a pass over all weights
            measured = self._measured(observed, cause)
            measured["grown"] = self._largest_weight > _GROWTH * self._first_largest
            measured["heaviest"] = self._heaviest_weight(call)
        scale, dynamic = self._scaled.loss_scale if is_backward else (1.0, False)
        largest = tracing.real(tracing.dense(bad)).amax()
        cause, names, unwritten = self._named_weights(cause, bad, place.module)
        birth = Birth(
            place,
            call.name,
            kind,
            bad.dtype,
            way=self._way,
            given=cause,
            deliberate=deliberate,
            number=number,
            numbers=tuple(_numbers(call)),
            writes=any(bad is written for written in call.written),
            negative=bool(largest < math.inf),  # sync: tracing is a diagnosis
            node=node_name(),
            formula=self._tracker.runs_formula,
            names=names,
            unwritten=unwritten,
            eps=self._eps,
            scale=scale,
            dynamic=dynamic,
            # A norm of scaled gradients may overflow. It is a fault only if a result is non-finite.
            absorbed=not is_backward and self._scaled.scale_of(call.arguments) != 1.0,
            **measured,
        )
        return self._births.add(birth)

    @property
    def _eps(self) -> float:
        """The eps of the optimizer that steps; inf without one."""
        if self._stepping is not None:
            eps = self._stepping.param_groups[0].get("eps")
            if isinstance(eps, int | float):  # not a pair, as Adafactor's
                return eps
        return math.inf

    def _measured(self, observed: _Observed, cause: str) -> dict[str, Any]:
        """Returns the inputs' ranges and the true result, unless the inputs are too large."""
        values = [read.values for read in observed.inputs]
        if sum(map(Tensor.numel, values)) > _MAX_COPIED:
            return {}
        true = None
        if not cause:
            before = observed.call.mapped(observed.values_of)
            true = tracing.largest_in_double(before)
        return {"inputs": tuple(map(tracing.values_of, values[:_MAX_INPUTS])), "true": true}

    def _named_weights(self, cause: str, bad: Tensor, module: str) -> tuple[str, str, bool]:
        """Returns the cause, the names of its weights, and whether nothing has written them."""
        names = ""
        if cause == "weights":
            names = self._held(bad).name
        if cause in ("", "weights"):
            unwritten = []
            for name, _, value in held_by(self._tracker.models, self._optimizers):
                if owner_of(name) == module and self._unwritten.of(value):
                    unwritten.append(name)
            if unwritten:
                return "weights", ", ".join(unwritten), True
        return cause, names, False

    # -- weights -------------------------------------------------------------------

    def _held(self, tensor: Tensor) -> Held:
        """Returns a tensor with its name and role in the models and the optimizers that stepped.

        Both are ``""`` if the tensor is not theirs.
        """
        held = ByMemory[Held]()
        for item in held_by(self._tracker.models, self._optimizers):
            held.note(item.value, item)
        return held.of(tensor) or Held("", "", tensor)

    def _is_weight(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is a parameter, its state or a buffer; a mask is no weight."""
        role = self._held(tensor).role
        if role == "buffer":
            return not tracing.is_mask(tensor)
        return role in _PARAMETERS or role.startswith("state")

    def _reach_weight(self, birth: Birth, tensor: Tensor) -> None:
        """Records that a birth's values have reached a weight, if the tensor is one."""
        if not birth.deliberate and not birth.stepped and self._is_weight(tensor):
            self._births.reach(birth)

    def _heaviest_weight(self, call: Call) -> float:
        """Returns the largest absolute value of the parameters, or their casts, that a call got."""
        heaviest = 0.0
        for tensor in floating(call.arguments):
            if self._held(tensor).role in _PARAMETERS or self._casts.of(tensor):
                heaviest = max(heaviest, tracing.values_of(tensor).largest)
        return heaviest


# -- reports ---------------------------------------------------------------------------------------


def headed(finding: Finding, which: str = "First") -> str:
    """Returns the text of a finding, headed by its kind."""
    heading = f"{which} inf"
    if finding.kind == "nan":
        heading = f"{which} NaN"
    elif finding.kind == "scaled":
        heading = "Scaled gradients"
    elif finding.cause in ("range", "loss scale"):
        heading = f"{which} overflow"
    return f"{heading}: {finding}"


def hit_lines(finding: Finding, gradients: Sequence[str]) -> list[str]:
    """Returns the report's line on parameters with non-finite gradients; no line without any."""
    if finding.kind == "scaled" or not gradients:
        return []
    return [f"  hit    the gradients of {listed(gradients)}"]


def _numbers(call: Call) -> Iterator[float]:
    """Yields the Python numbers that the script passed to a call."""
    if call.name == "aten.lift_fresh" and call.args[0].dim() == 0:  # as in torch.tensor(0.5)
        yield float(call.args[0])
    for value in tree_leaves(call.arguments):
        if isinstance(value, int | float):
            yield float(value)


def _number(call: Call) -> float | None:
    """Returns the inf or NaN that the script passed to a call as a number; None without one."""
    for number in _numbers(call):
        if not math.isfinite(number):
            return number
    return None
