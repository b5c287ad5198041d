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

from apex._core.param_groups import params_of
from apex._engine.optimizer.subclass import prepared_state
from apex._torch import ranks
from apex._torch.autograd import backward_id
from apex.debug import tracing
from apex.debug.births import Birth, Births
from apex.debug.causes import finding_of
from apex.debug.common import Held, held_by, listed, to_json
from apex.debug.place import Finding, current_node, node_name, owner_of, runs_in_scaler
from apex.debug.rules import SOFTMAXES
from apex.debug.scaled import ScaledGradients
from apex.debug.tracing import ByMemory, Call, Trace, floating, kind_of

_MASKS = {"nan_to_num", "masked_fill", "where", "nansum"}
_MAP_TO_ZERO = {"softmax", "safe_softmax", "exp"}  # -inf
_FATEFUL = _MASKS | SOFTMAXES | _MAP_TO_ZERO
_PARAMETERS = {"parameter", "master"}
_MAX_INPUTS = 4

_GROWTH = 10.0
"""Growth of the largest weight from which a training diverges."""

_MAX_COPIED = 2**24
"""Elements of the arguments of one call that are copied, at most: 64 MiB in fp32."""


def trace_overflow(*models: nn.Module, scaler: Any = None) -> OverflowTrace:
    """Returns a context that finds the first operator that overflows, its cause and a remedy.

    Enter it around one or more whole iterations, forward and backward; it may include
    ``optimizer.step``. The trace covers every operator, whatever calls it; the models provide the
    names of modules. Deliberate infinities (masks) count as a fault only once they produce a NaN or
    reach a gradient.

    A check and a host sync follow each operator, so an iteration takes several times as long. The
    trace copies what operators overwrite, one operator at a time: at most 2**24 elements (64 MiB in
    fp32), and nothing while an optimizer steps. Models under ``torch.compile`` run uncompiled
    inside the context, as compiled code is opaque.

    Args:
        models: Models, as passed to ``amp.initialize`` or since wrapped by ``torch.compile`` or
            DistributedDataParallel; or plain models. Without any, they are found as they are
            called.
        scaler: The ``torch.amp.GradScaler`` of a loop without ``amp.initialize``, needed only if it
            scales the loss before the context is entered.

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


class _Inputs:
    """The inputs of one call as they were before it.

    Attributes:
        call: The call with copies of the arguments that it changes, where these are small enough.
        known: Whether they are.
        inputs: The arguments that it reads.
    """

    def __init__(self, call: Call, *, copies: bool) -> None:
        reads_written = call.traits.reads_written
        changed = call.written if reads_written else []
        self.known = not changed or (copies and sum(map(Tensor.numel, changed)) <= _MAX_COPIED)
        self._changed: dict[int, _Input] = {}
        for tensor in changed:
            values = tensor.detach().clone() if self.known else tensor
            self._changed[id(tensor)] = _Input(tensor, values, kind_of(tensor))
        self.call = call.mapped(self._values) if changed else call
        unread = set() if reads_written else set(map(id, call.written))
        self._read = [t for t in floating(call.arguments) if id(t) not in unread]

    def _values(self, tensor: Tensor) -> Tensor:
        known = self._changed.get(id(tensor))
        return tensor if known is None else known.values

    @functools.cached_property
    def inputs(self) -> list[_Input]:
        inputs = []
        for tensor in self._read:
            known = self._changed.get(id(tensor))
            inputs.append(known or _Input(tensor, tensor, kind_of(tensor)))
        return inputs


class OverflowTrace(Trace):
    """The result of :func:`trace_overflow`."""

    _NAME = "trace_overflow"

    def __init__(self, *models: nn.Module, scaler: Any = None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"amp.debug.trace_overflow got {type(scaler).__name__} as the scaler; it takes the "
                "torch.amp.GradScaler that scales the losses."
            )
        super().__init__(*models)
        self._births = Births()
        unseen = 1.0, False
        if scaler is not None and scaler.is_enabled():
            unseen = scaler.get_scale(), True
        self._scaled = ScaledGradients(unseen)
        self._misused: set[tuple[str, str]] = set()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Memory of weights cast, of what nothing has written yet, and of non-finite values.
        self._casts: ByMemory[bool] = ByMemory()
        self._unwritten: ByMemory[bool] = ByMemory()
        self._born: ByMemory[Birth] = ByMemory()
        self._first_largest: float | None = None  # of the weights, before the first step

    @property
    def first(self) -> Finding | None:
        """The first fault; None if all values were finite or all others were harmless."""
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
            return f"No overflow: {self._births.time} operators traced, no fault."
        return "\n".join([headed(first), *hit_lines(first, self.gradients)])

    def _enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Counts the optimizer's own parameters (masters) as weights."""
        self._optimizers.add(optimizer)
        if self._first_largest is None:
            self._first_largest = self._largest_weight
        gradients = [param.grad for param in params_of(optimizer)]
        scale = self._scaled.scale_of(gradients)
        if not runs_in_scaler():
            if scale != 1.0:
                self._add_misuse("step", scale, "step")
            elif prepared_state(optimizer) is None:  # amp's skips what has overflowed
                self._check_overflowed(gradients)
        super()._enter_step(optimizer)

    def _check_overflowed(self, gradients: list[Tensor | None]) -> None:
        """Adds a step on gradients from which a dynamic loss scale backs off."""
        for gradient in floating(gradients):
            overflow = self._born.of(gradient)
            if overflow is not None and overflow.heals:
                self._add_misuse("step", overflow.scale, "step", cause="skipped step")

    @property
    def _largest_weight(self) -> float:
        weights = self._tracker.parameters
        return max((tracing.values_of(weight).largest for weight in weights), default=0.0)

    # -- operators -------------------------------------------------------------------------------

    def _before(self, call: Call) -> _Inputs | None:
        """Returns the inputs; None for what sets no values."""
        self._births.time += 1
        is_view = call.traits.view and call.name != "aten.lift_fresh"
        # What uninitialized memory holds counts once it is read.
        if call.traits.uninitialized or (is_view and self._tracker.accumulating is None):
            return None
        return _Inputs(call, copies=not self._in_step)

    def _after(self, call: Call, before: _Inputs | None, result: Any) -> None:
        """Checks what the call returned and wrote."""
        self._note_memory(call, result)
        if before is None:
            return
        if not call.traits.exchanges:  # what it receives may come later
            self._check(call, before, result)
        if not self._in_step:
            misuse = self._scaled.misuse(call, result)
            if misuse:
                scale = self._scaled.scale_of(call.arguments)
                self._add_misuse(call.name, scale, misuse)
        target = self._tracker.accumulating
        if target is None or not self._tracker.runs_formula:  # in a hook of it
            return
        for grad in floating(result):
            self._scaled.arrive(grad)
            birth = self._born.of(grad) if kind_of(grad) else None
            if birth is not None and birth.heals and self._scaled.loss_scale[0] < birth.scale:
                # The scaler has backed off since, and nothing has cleared the gradient.
                self._add_misuse(call.name, birth.scale, "stale", cause="gradients")
            name = self._tracker.parameters.get(target, "(a tensor of no model)")
            self._births.reach_gradient(name, birth, backward=backward_id())

    def _note_memory(self, call: Call, result: Any) -> None:
        """Records which memory is a weight's cast, and which nothing has written yet."""
        if call.traits.uninitialized and "empty" in call.name:
            for tensor in floating(result):
                self._unwritten.note(tensor, True)
        else:
            for tensor in call.written:
                self._unwritten.discard(tensor)
        if call.name == "aten._to_copy" and call.args[0] in self._tracker.parameters:
            self._casts.note(result, True)

    def _check(self, call: Call, before: _Inputs, result: Any) -> None:
        saves = call.base.startswith(tracing.SAVES_INFINITIES)
        bad: list[Tensor] = []
        worst = "inf"
        for tensor in tracing.outputs(call, result[:1] if saves else result):
            kind = kind_of(tensor)
            if kind:
                bad.append(tensor)
                if kind == "nan":
                    worst = kind
            elif tracing.covers_storage(tensor):
                self._born.discard(tensor)
        if bad:
            self._mark_bad(call, before, bad, worst)
        self._mark_fate(call, before, is_finite=not bad)

    def _mark_fate(self, call: Call, before: _Inputs, *, is_finite: bool) -> None:
        """Records what a call does to the births that it reads."""
        name = call.base
        # Autograd starts a backward pass by a 1 like the loss.
        starts = call.name == "aten.ones_like" and call.args[0].numel() == 1
        if not starts and name not in _FATEFUL:
            return
        for birth in self._births_read(call, before):
            if starts:
                self._births.reach(birth)
            birth.feeds_softmax |= name in SOFTMAXES
            if is_finite:
                birth.masked |= name in _MASKS and not birth.deliberate
                birth.absorbed |= name in _MAP_TO_ZERO

    def _mark_bad(self, call: Call, before: _Inputs, bad: list[Tensor], kind: str) -> None:
        birth = self._origin(call, before, bad, kind)
        written = set(map(id, call.written))
        held = self._held() if written else ByMemory()
        for tensor in bad:
            self._born.note(tensor, birth)
            # Batch norms in eval mode leave their statistics alone.
            if not birth.deliberate and id(tensor) in written and _is_weight(held, tensor):
                self._births.reach(birth)

    def _add_misuse(
        self,
        op: str,
        scale: float,
        misuse: str,
        *,
        cause: str = "scaled gradients",
    ) -> None:
        """Adds a use of gradients that still carry the loss scale, or have overflowed by it."""
        birth = Birth(
            self._tracker.place,
            op,
            "scaled" if cause == "scaled gradients" else "inf",
            torch.float32,
            way=self._way,
            given=cause,
            misuse=misuse,
            scale=scale,
            masked=misuse == "reading",
        )
        if birth.site not in self._misused:
            self._misused.add(birth.site)
            self._births.reach(self._births.add(birth), certain=not birth.masked)

    # -- where values come from --------------------------------------------------------------------

    def _births_read(self, call: Call, before: _Inputs) -> list[Birth]:
        """Returns the births of the non-finite inputs."""
        return [self._input_birth(read, call, before) for read in before.inputs if read.kind]

    def _origin(self, call: Call, before: _Inputs, bad: list[Tensor], kind: str) -> Birth:
        """Returns the birth of a call's non-finite outputs."""
        births = self._births_read(call, before)
        if not births:
            return self._first_birth(call, before, bad, kind)
        worst = min(births, key=Birth.rank)
        if not worst.reader:
            worst.reader = call.base
            worst.reader_module = self._tracker.module[0]
        is_new_nan = kind == "nan" and all(read.kind != "nan" for read in before.inputs)
        if worst.deliberate and worst.cause == "constant" and is_new_nan:
            return self._birth(call, before, kind, bad, "constant")
        return worst

    def _first_birth(self, call: Call, before: _Inputs, bad: list[Tensor], kind: str) -> Birth:
        """Returns the birth of non-finite outputs of finite inputs."""
        forward = self._tracker.forward_site
        created = self._tracker.created_site
        if self._tracker.direction == "backward" and forward is not None and forward.birth:
            known: Birth = forward.birth
            known.masked_again |= known.masked
            return known  # its derivative is infinite, too
        in_update = self._stepping is not None and self._is_update(call)
        is_constant = _number(call) is not None and not in_update
        cause = "constant" if is_constant else ""
        birth = self._birth(call, before, kind, bad, cause, deliberate=is_constant)
        if created is not None:
            created.birth = birth
        return birth

    def _input_birth(self, read: _Input, call: Call, before: _Inputs) -> Birth:
        """Returns a non-finite input's birth: this operator if the values are from outside."""
        argument = read.argument
        birth = self._born.of(argument)
        if birth is None:
            cause = self._source(argument, call)
            is_mask = _number(call) is not None or tracing.is_mask(read.values)
            deliberate = cause == "data" and is_mask
            if deliberate:
                cause = "constant"
            bad = [argument]
            birth = self._birth(call, before, read.kind, bad, cause, deliberate=deliberate)
            self._born.note(argument, birth)
            return birth
        if not birth.deliberate and _is_weight(self._held(), read.values):
            self._births.reach(birth)  # of an average that was not called
        return birth

    def _source(self, tensor: Tensor, call: Call) -> str:
        held = self._held()
        role = _role(held, tensor)
        in_backward = self._tracker.direction == "backward"
        if ranks.world_size() > 1 and (in_backward or role == "gradient"):
            return "another rank"
        if role == "gradient":
            return "gradients"
        if role.startswith("state"):
            return "optimizer state"
        # Of a model that no forward has made known yet, too.
        loads = any(isinstance(written, nn.Parameter) for written in call.written)
        return "weights" if loads or _is_weight(held, tensor) else "data"

    def _birth(
        self,
        call: Call,
        before: _Inputs,
        kind: str,
        bad: list[Tensor],
        cause: str,
        *,
        deliberate: bool = False,
    ) -> Birth:
        place = self._tracker.place
        node = current_node()
        backward = place.direction == "backward"
        if not cause and self._is_update(call):
            cause = "update"
        values = [] if deliberate or self._in_step else [read.values for read in before.inputs]
        is_small = before.known and sum(map(Tensor.numel, values)) <= _MAX_COPIED
        scale, dynamic = self._scaled.loss_scale if backward else (1.0, False)
        birth = Birth(
            place,
            call.name,
            kind,
            bad[0].dtype,
            way=self._way,
            given=cause,
            deliberate=deliberate,
            number=_number(call) if cause in ("constant", "update") else None,
            numbers=tuple(_numbers(call)),
            inputs=tuple(map(tracing.values_of, values[:_MAX_INPUTS])) if is_small else (),
            true=tracing.largest_in_double(before.call) if not cause and is_small else None,
            node="" if node is None else node_name(node),
            formula=self._tracker.runs_formula,
            eps=self._eps,
            grown=self._has_grown(),
            heaviest=self._heaviest_weight(call),
            negative=kind == "inf" and bool(tracing.real(tracing.dense(bad[0])).amax() < math.inf),
            scale=scale,
            dynamic=dynamic,
            # A norm of scaled gradients may overflow. What comes of it is what counts.
            absorbed=not backward and self._scaled.scale_of(call.arguments) != 1.0,
        )
        self._name_weights(birth, bad)
        return self._births.add(birth)

    @property
    def _eps(self) -> float:
        """The eps of the optimizer that steps; inf without one."""
        group = {} if self._stepping is None else self._stepping.param_groups[0]
        return float(group.get("eps", math.inf))

    def _has_grown(self) -> bool:
        """Returns whether the largest weight has grown manifold since the first step."""
        first = self._first_largest or math.inf
        return self._largest_weight > _GROWTH * first

    def _name_weights(self, birth: Birth, bad: list[Tensor]) -> None:
        """Names the weights that a birth is about: those that were bad, or never written."""
        own = self._held().of(bad[0])
        if birth.given == "weights" and own is not None:
            birth.names = own.name
        if birth.given not in ("", "weights"):
            return
        unwritten = []
        for name, role, value in held_by(self._tracker.models, self._optimizers):
            is_own = role in (*_PARAMETERS, "buffer") and owner_of(name) == birth.place.module
            if is_own and self._unwritten.of(value):
                unwritten.append(name)
        if unwritten:
            birth.given = "weights"
            birth.unwritten = True
            birth.names = ", ".join(unwritten)

    # -- weights -------------------------------------------------------------------

    def _held(self) -> ByMemory[Held]:
        """Returns what the models and the optimizers that have stepped hold."""
        held: ByMemory[Held] = ByMemory()
        for item in held_by(self._tracker.models, self._optimizers):
            for tensor in floating(item.value):
                held.note(tensor, item)
        return held

    def _is_update(self, call: Call) -> bool:
        """Returns whether a call belongs to an optimizer step or writes masters to the model."""
        if self._tracker.module[1] or self._tracker.direction == "backward":
            return False
        held = self._held()
        return self._in_step or any(_is_weight(held, tensor) for tensor in call.written)

    def _heaviest_weight(self, call: Call) -> float:
        """Returns the largest absolute value of the parameters, or their casts, that a call got."""
        held = self._held()
        heaviest = 0.0
        for tensor in floating(call.arguments):
            if self._casts.of(tensor) or _role(held, tensor) in _PARAMETERS:
                heaviest = max(heaviest, tracing.values_of(tensor).largest)
        return heaviest


# -- reports ---------------------------------------------------------------------------------------


def headed(finding: Finding) -> str:
    """Returns a finding behind the word for what it is."""
    words = {"nan": "First NaN", "scaled": "Scaled gradients"}
    word = words.get(finding.kind, "First inf")
    if finding.kind == "inf" and finding.cause in ("range", "loss scale"):
        word = "First overflow"
    return f"{word}: {finding}"


def hit_lines(finding: Finding, gradients: Sequence[str]) -> list[str]:
    """Returns the report's line on the parameters whose gradients were hit; none without any."""
    if finding.kind == "scaled" or not gradients:
        return []
    return [f"  hit    the gradients of {listed(gradients)}"]


def _role(held: ByMemory[Held], tensor: Tensor) -> str:
    own = held.of(tensor)
    return "" if own is None else own.role


def _is_weight(held: ByMemory[Held], tensor: Tensor) -> bool:
    """Returns whether a tensor is a parameter, a master or a buffer; a mask is no weight."""
    role = _role(held, tensor)
    return role in _PARAMETERS or (role == "buffer" and not tracing.is_mask(tensor))


def _numbers(call: Call) -> Iterator[float]:
    """Yields the numbers that the script itself gave to a call."""
    if call.name == "aten.lift_fresh" and call.args[0].dim() == 0:
        yield float(call.args[0])
    for value in tracing.leaves(call.arguments):
        if isinstance(value, int | float):
            yield float(value)


def _number(call: Call) -> float | None:
    """Returns the inf or NaN that the script itself gave to a call, as a number; None without."""
    return next((number for number in _numbers(call) if not math.isfinite(number)), None)
