"""Traces every operator, forward and backward, and names the first that overflows."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from apex._core.param_groups import params_of, states_in
from apex._engine.conversion.state import state_of
from apex._engine.session import Session
from apex._torch import ranks
from apex._torch.autograd import backward_id
from apex.debug import tracing
from apex.debug.causes import Birth, Cause, finding_of, operator_name
from apex.debug.common import check_scaler, listed
from apex.debug.place import Finding, Tracker, current_node, node_name
from apex.debug.tracing import Call, Detector, Kind, Trace, floating, keys, kind_of

_MASKS = {f"aten.{name}" for name in ("nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_")}
_MASKS |= {"aten.where", "aten.nansum"}
_MAP_TO_ZERO = {"softmax", "safe_softmax", "exp"}  # -inf
_MAX_INPUTS = 4

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
        scaler: The ``torch.amp.GradScaler`` of a loop without ``amp.initialize``. With it, scaled
            gradients that overflow only by their scale are known as such at once: cause ``loss
            scale``. Otherwise, once it has unscaled them inside the context.

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


class OverflowTrace(Trace):
    """The result of :func:`trace_overflow`."""

    _NAME = "trace_overflow"

    def __init__(self, *models: nn.Module, scaler: Any = None) -> None:
        check_scaler("trace_overflow", scaler)
        super().__init__(*models)
        self._births, self._scaler = Births(), scaler

    def _detector(self) -> Detector:
        return OverflowDetector(self._tracker, self._births, self._scaler)

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models, the scaler and all values."""
        super().__exit__(*exc_info)
        self._scaler = None
        self._births.close()

    @property
    def first(self) -> Finding | None:
        """The first fault; None if all values were finite or all others were harmless."""
        return self._births.finding()

    @property
    def gradients(self) -> list[str]:
        """Names of parameters that received a non-finite gradient, in order of arrival."""
        return self._births.gradients

    def to_json(self) -> str:
        """Returns ``{"first": {...} or null, "operators": n, "gradients": [names]}``."""
        first = self.first
        found = {"first": None if first is None else first.as_dict()}
        return json.dumps(found | {"operators": self._births.time, "gradients": self.gradients})

    def __str__(self) -> str:
        first = self.first
        if not self._births.time:
            return (
                "Nothing traced: no operator ran inside. Write `with "
                "amp.debug.trace_overflow(model) as trace:` around a whole iteration."
            )
        if first is None:
            return f"No overflow: {self._births.time} operators traced, no fault."
        return "\n".join([f"First overflow: {first}", *hit_lines(self.gradients)])


def hit_lines(gradients: Sequence[str]) -> list[str]:
    """Returns the report's line on the parameters whose gradients were hit; none without any."""
    return [f"  hit    the gradients of {listed(gradients, 3)}"] if gradients else []


class Births:
    """The births of all live non-finite values, by the memory that holds them.

    Note [When a birth is a fault]
        Infinities can be deliberate (masks), and NaNs can be produced and masked out again: torch's
        own formula for the derivative of a norm divides 0 by 0 and replaces the result. So a birth
        counts as a fault only once its values reach a gradient, the loss or a weight. If a backward
        pass completes with finite gradients, all earlier births were harmless, with one exception:
        a value beyond fp16's range is lost even if a later function (a clamp, a sigmoid) maps the
        infinity to a finite value. Only softmax and exp return the right result for -inf. Where
        several meet, those whose values were masked out come last, behind them those that got no
        further than weights and buffers, such as a running mean in training. When a trace ends,
        births that no backward pass has judged count unless they were masked out, or were harmless
        before at the same operator and line (a metric).

    Note [Loss scales]
        A dynamic scale finds its value by overflows, after which it skips the step. The scale of an
        amp session is known at the birth. That of a ``GradScaler`` shows itself: it unscales the
        gradients (``aten._amp_foreach_non_finite_check_and_unscale_``) and then updates its scale
        (``aten._amp_update_scale_``). Until then, a gradient that overflowed is certain only once
        an optimizer steps on it.

    Note [Long traces]
        A trace may last as long as a training. So births are discarded once they are harmless, one
        lost value is kept per line of code, and only the latest autograd nodes are remembered.
    """

    def __init__(self) -> None:
        self.time = 0
        self.passes = 0
        self.gradients: list[str] = []  # names of parameters that a fault reached
        self.certain = False  # whether values of a fault that no scale heals got that far
        self._backward = -1
        self._pending: list[Birth] = []
        self._lost: dict[tuple[str, str], Birth] = {}
        self._reached: dict[Birth, None] = {}
        self._harmless: set[tuple[str, str]] = set()  # their operators and lines
        self._unscaled: list[Birth] = []
        self._by_memory: MutableMapping[UntypedStorage, Birth] = WeakIdKeyDictionary()

    # -- values ----------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> Birth | None:
        """Returns the birth of a tensor's non-finite values; None if they came from outside."""
        return self._by_memory.get(tracing.storage(tensor))

    def mark(self, tensor: Tensor, birth: Birth) -> None:
        """Records the birth of the non-finite values of a tensor."""
        self._by_memory[tracing.storage(tensor)] = birth

    def clear(self, tensor: Tensor) -> None:
        """Records that a tensor was written and is finite."""
        if self._by_memory and tracing.covers_storage(tensor):
            self._by_memory.pop(tracing.storage(tensor), None)

    def close(self) -> None:
        """Releases all values, once tracing has ended."""
        self._by_memory.clear()

    # -- births ----------------------------------------------------------------------------------

    def add(self, birth: Birth) -> Birth:
        """Adds a birth at the current operator, and returns it."""
        if not birth.deliberate:
            self._pending.append(birth)
            if birth.is_lost:
                self._lost.setdefault(_at(birth), birth)
        return birth

    def reach(self, birth: Birth, *, spoils: bool = False) -> None:
        """Records that values reached the loss or, if ``spoils``, a weight or a buffer."""
        self._reach(birth, spoils=spoils)
        birth.stepped = True
        self.certain = True

    def reach_gradient(self, name: str, birth: Birth | None, *, backward: int) -> None:
        """Records that backward pass number ``backward`` adds to the gradient of a parameter.

        ``birth`` is that of its non-finite values; None if it is finite, when ``name`` is not read.
        """
        self.passes += backward != self._backward
        self._backward = backward
        if birth is None:
            judged = [b for b in self._pending if b not in self._reached and not b.may_heal]
            self._harmless |= {_at(birth) for birth in judged}
            self._pending.clear()
            return
        if name not in self.gradients:
            self.gradients.append(name)
        self._reach(birth)
        birth.passes.add(backward)
        self.certain |= not birth.may_heal

    def _reach(self, birth: Birth, *, spoils: bool = False) -> None:
        birth.spoils = spoils and (birth.spoils or birth not in self._reached)
        self._reached.setdefault(birth)

    # -- loss scales of GradScalers --------------------------------------------------------------

    def unscale(self, grads: Iterable[Tensor]) -> None:
        """Records that a ``GradScaler`` checks gradients."""
        self._unscaled += [birth for grad in grads if (birth := self.of(grad)) is not None]

    def update_scale(self, scale: Tensor) -> None:
        """Records that a ``GradScaler`` updates a scale, 0-d, after it has checked gradients."""
        for birth in self._unscaled:
            if birth.scale is None:
                birth.scale, birth.dynamic = float(scale), True  # sync: tracing is a diagnosis
            self.certain |= not birth.may_heal
        self._unscaled.clear()

    def step(self, optimizer: Optimizer) -> None:
        """Records that an optimizer steps on gradients, of which none may heal from here on."""
        waiting = {b for b in self._reached if b.may_heal and b.scale is None} - {*self._unscaled}
        grads = [param.grad for param in params_of(optimizer)] if waiting else []
        for birth in waiting & {self.of(grad) for grad in floating(grads)}:
            birth.stepped = self.certain = True

    # -- results -----------------------------------------------------------------------------------

    @property
    def healed(self) -> int:
        """Number of backward passes after which a dynamic loss scale backed off."""
        return len({each for birth in self._reached if birth.heals for each in birth.passes})

    def first(self, *, healing: bool = True) -> Birth | None:
        """Returns the first birth that is a fault; see Note [When a birth is a fault].

        With ``healing``, an overflow from which a dynamic loss scale backs off counts as one, if
        there is no other.
        """
        lost = [birth for birth in self._lost.values() if birth.is_lost]
        unhealed = [birth for birth in self._reached if not birth.heals]
        unjudged = [b for b in self._pending if not b.masked and _at(b) not in self._harmless]
        pending = [b for b in unjudged if healing or not b.heals]
        kinds = [*unhealed, *lost], self._reached if healing else (), pending
        return next((min(births, key=Birth.rank) for births in kinds if births), None)

    def finding(self, *, healing: bool = True) -> Finding | None:
        """Returns the first fault; see :meth:`first`."""
        birth = self.first(healing=healing)
        return None if birth is None else finding_of(birth)


def _at(birth: Birth) -> tuple[str, str]:
    return birth.op, birth.place.location


class _Before:
    """The inputs of one call as they were before it.

    Attributes:
        call: The call with copies of the arguments that it changes, where these are small enough.
        known: Whether they are.
        inputs: The arguments that it reads, each with its values and their kind.
    """

    def __init__(self, call: Call, *, copies: bool) -> None:
        changes = call.written if call.traits.reads_written else []
        kinds = {id(tensor): kind_of(tensor) for tensor in changes}
        self.known = not changes or (copies and tracing.elements(changes) <= _MAX_COPIED)
        copied = {id(t): t.detach().clone() for t in changes} if self.known else {}
        self.call = call.mapped(lambda t: copied.get(id(t), t)) if copied else call
        unread = set() if call.traits.reads_written else set(map(id, call.written))
        self._kinds = kinds
        self._given = [t for t in floating([call.args, call.kwargs]) if id(t) not in unread]
        self._copied = copied

    @functools.cached_property
    def inputs(self) -> list[tuple[Tensor, Tensor, Kind | None]]:
        return [(t, self._copied.get(id(t), t), self._kind(t)) for t in self._given]

    def _kind(self, tensor: Tensor) -> Kind | None:
        return self._kinds[id(tensor)] if id(tensor) in self._kinds else kind_of(tensor)


class OverflowDetector(Detector):
    """Checks the outputs of every operator, and follows non-finite values from their birth."""

    def __init__(self, tracker: Tracker, births: Births, scaler: Any = None) -> None:
        super().__init__(tracker)
        self._births = births
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizers: MutableMapping[Optimizer, None] = WeakIdKeyDictionary()
        # The memory of gradients that were already non-finite when tracing started.
        grads = floating([param.grad for param in tracker.parameters])
        self._stale: MutableMapping[UntypedStorage, None] = WeakIdKeyDictionary()
        self._stale.update((tracing.storage(grad), None) for grad in grads if kind_of(grad))

    def enter_step(self, optimizer: Optimizer) -> None:
        """Counts the optimizer's own parameters (masters) as weights."""
        self._optimizers[optimizer] = None
        if not self._sessions():
            self._births.step(optimizer)

    # -- operators -------------------------------------------------------------------------------

    def before(self, call: Call) -> _Before | None:
        """Returns the inputs; None for what sets no values."""
        self._births.time += 1
        is_view = call.traits.view and call.name != "aten.lift_fresh"
        # What uninitialized memory holds counts once it is read.
        if call.traits.uninitialized or (is_view and self.tracker.accumulating is None):
            return None
        if call.name == "aten._amp_foreach_non_finite_check_and_unscale_" and self._unknown_scale:
            self._births.unscale(call.args[0])
        if call.name == "aten._amp_update_scale_":
            self._births.update_scale(call.args[0])
        return _Before(call, copies=not self.in_step)

    def after(self, call: Call, before: _Before | None, result: Any) -> None:
        """Checks what the call returned and wrote."""
        if before is None:
            return
        if not call.traits.exchanges:  # what it receives may come later
            self._check(call, before, result)
        target = self.tracker.accumulating
        if target is None:
            return
        for grad in floating(result):
            birth = self._births.of(grad) if kind_of(grad) else None
            name = self.tracker.parameters.get(target, "(a tensor of no model)")
            self._births.reach_gradient(name, birth, backward=backward_id())

    def _check(self, call: Call, before: _Before, result: Any) -> None:
        saves = call.name.rpartition(".")[2].startswith(tracing.SAVES_INFINITIES)
        for tensor in floating(result[1:] if saves else []):
            if (kind := kind_of(tensor)) is not None:
                own = self._birth(call, before, kind, tensor.dtype, "constant", deliberate=True)
                self._births.mark(tensor, own)
        outputs = [*_outputs(call, result[:1] if saves else result)]
        kinds = [(tensor, kind_of(tensor)) for tensor in outputs]
        for tensor in (each for each, kind in kinds if kind is None):
            self._births.clear(tensor)
            if self._stale and tracing.covers_storage(tensor):
                self._stale.pop(tracing.storage(tensor), None)
        bad = [(tensor, kind) for tensor, kind in kinds if kind is not None]
        if bad:
            self._mark_bad(call, before, bad)
        self._mark_fate(call, before, masks=not bad)

    def _mark_fate(self, call: Call, before: _Before, *, masks: bool) -> None:
        """Records what a call does to the births that it reads."""
        if masks and (call.name in _MASKS or operator_name(call.name) in _MAP_TO_ZERO):
            for birth in self._births_read(call, before):
                birth.masked |= call.name in _MASKS and not birth.deliberate
                birth.absorbed |= call.name not in _MASKS
        if call.name == "aten.ones_like" and call.args[0].numel() == 1:
            # Autograd starts a backward pass this way, from the loss.
            for birth in self._births_read(call, before):
                self._births.reach(birth)

    def _mark_bad(self, call: Call, before: _Before, bad: list[tuple[Tensor, Kind]]) -> None:
        birth = self._origin(call, before, bad)
        for tensor, _ in bad:
            self._births.mark(tensor, birth)
        is_mask = birth.deliberate and birth.cause != "update"
        spoiled = [tensor for tensor, _ in bad if not self._is_mask_buffer(tensor)]
        # Batch norms in eval mode leave their statistics alone.
        written = keys(call.written) & keys(spoiled)
        if not is_mask and not written.isdisjoint(self._weights() if written else ()):
            self._births.reach(birth, spoils=True)

    # -- where values come from --------------------------------------------------------------------

    def _births_read(self, call: Call, before: _Before) -> list[Birth]:
        """Returns the births of the non-finite inputs."""
        return [
            self._input_birth(argument, values, kind, call, before)
            for argument, values, kind in before.inputs
            if kind is not None
        ]

    def _origin(self, call: Call, before: _Before, bad: list[tuple[Tensor, Kind]]) -> Birth:
        """Returns the birth of a call's non-finite outputs."""
        kind: Kind = "nan" if any(kind == "nan" for _, kind in bad) else "inf"
        dtype = bad[0][0].dtype
        births = self._births_read(call, before)
        if not births:
            return self._first_birth(call, before, kind, dtype)
        worst = min(births, key=Birth.rank)
        is_new_nan = kind == "nan" and all(found != "nan" for *_, found in before.inputs)
        if worst.deliberate and worst.cause == "constant" and is_new_nan:
            return self._birth(call, before, kind, dtype, "constant")
        return worst

    def _first_birth(self, call: Call, before: _Before, kind: Kind, dtype: torch.dtype) -> Birth:
        """Returns the birth of non-finite outputs of finite inputs."""
        forward, created = self.tracker.forward_site, self.tracker.created_site
        if self.tracker.direction == "backward" and forward is not None and forward.birth:
            known: Birth = forward.birth
            return known  # its derivative is infinite, too
        is_constant = _number(call) is not None
        cause: Cause | None = None
        if is_constant:
            cause = "update" if self.stepping is not None and self._is_update(call) else "constant"
        birth = self._birth(call, before, kind, dtype, cause, deliberate=is_constant)
        if created is not None:
            created.birth = birth
        return birth

    def _input_birth(
        self, argument: Tensor, values: Tensor, kind: Kind, call: Call, before: _Before
    ) -> Birth:
        """Returns a non-finite input's birth: this operator if the values are from outside."""
        birth = self._births.of(argument)
        if birth is None:
            cause = self._source(argument, call)
            mask = _number(call) is not None or tracing.is_mask(values)
            deliberate = cause == "data" and mask
            cause = "constant" if deliberate else cause
            birth = self._birth(call, before, kind, argument.dtype, cause, deliberate=deliberate)
            self._births.mark(argument, birth)
            return birth
        is_weight = tracing.storage_key(argument) in keys(self._params())
        if is_weight and not birth.deliberate and not tracing.is_mask(values):
            self._births.reach(birth, spoils=True)  # of an average that was not called
        return birth

    def _source(self, tensor: Tensor, call: Call) -> Cause:
        if tracing.storage(tensor) in self._stale:
            return "gradients"
        key = tracing.storage_key(tensor)
        in_backward = self.tracker.direction == "backward"
        exchanged = in_backward or key in tracing.gradients(self._params())
        if ranks.world_size() > 1 and exchanged:
            return "another rank"
        if self.stepping is not None:
            if key in tracing.gradients(params_of(self.stepping)):
                return "gradients"
            if key in keys([list(state.values()) for _, state in states_in(self.stepping.state)]):
                return "optimizer state"
        if key in self._weights() and not self._is_mask_buffer(tensor):
            return "weights"
        # Of a model that no forward has made known yet, too.
        loads = any(isinstance(written, nn.Parameter) for written in call.written)
        return "weights" if loads else "data"

    def _birth(
        self,
        call: Call,
        before: _Before,
        kind: Kind,
        dtype: torch.dtype,
        cause: Cause | None,
        *,
        deliberate: bool = False,
    ) -> Birth:
        place, node = self.tracker.place, current_node()
        backward = place.direction == "backward"
        if cause is None and self._is_update(call):
            cause = "update"
        values = [] if deliberate or self.in_step else [each for _, each, _ in before.inputs]
        small = before.known and tracing.elements(values) <= _MAX_COPIED
        scale, dynamic = self._loss_scale() if backward else (None, False)
        birth = Birth(
            place,
            call.name,
            kind,
            dtype,
            self._births.time,
            given=cause or "",
            deliberate=deliberate,
            number=_number(call) if cause in ("constant", "update") else None,
            inputs=tuple(map(tracing.values_of, values[:_MAX_INPUTS])) if small else (),
            true=tracing.largest_in_double(before.call) if cause is None and small else None,
            node="" if node is None or not backward else node_name(node),
            formula=self.tracker.runs_formula,
            scale=scale,
            dynamic=dynamic,
        )
        return self._births.add(birth)

    def _is_update(self, call: Call) -> bool:
        """Returns whether a call belongs to an optimizer step or writes masters to the model."""
        if self.tracker.module[1] or self.tracker.direction == "backward":
            return False
        return self.in_step or not keys(call.written).isdisjoint(self._weights())

    # -- weights and loss scales -------------------------------------------------------------------

    def _params(self) -> list[Tensor]:
        """Returns the parameters of all models, and those that optimizers have stepped."""
        own = [param for model in self.tracker.models for param in model.parameters()]
        return [*own, *(param for each in self._optimizers for param in params_of(each))]

    def _buffers(self) -> set[int]:
        return keys([list(model.buffers()) for model in self.tracker.models])

    def _weights(self) -> set[int]:
        """Returns the memory of all parameters, masters and buffers, wherever it is by now."""
        masters = [pair.master for session in self._sessions() for pair in session.masters.pairs()]
        return self._buffers() | keys([self._params(), masters])

    def _is_mask_buffer(self, tensor: Tensor) -> bool:
        return tracing.storage_key(tensor) in self._buffers() and tracing.is_mask(tensor)

    @property
    def _unknown_scale(self) -> bool:
        return self._scaler is None and not self._sessions()

    def _loss_scale(self) -> tuple[float | None, bool]:
        """Returns the largest scale of the models' sessions, or the scaler's, and if it adapts."""
        own = [each for session in self._sessions() for each in session.scalers]
        if own:
            return max(each.read_scale() for each in own), any(each.dynamic for each in own)
        return (None, False) if self._scaler is None else (self._scaler.get_scale(), True)

    def _sessions(self) -> list[Session]:
        """Returns the sessions of the models and of modules inside them."""
        parts = (part for model in self.tracker.models for part in model.modules())
        sessions = dict.fromkeys(state.link.session for part in parts if (state := state_of(part)))
        return [session for session in sessions if session is not None]


def _outputs(call: Call, result: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors that a call returned or wrote."""
    returned = list(floating(result))
    known = set(map(id, returned))
    yield from returned
    yield from (tensor for tensor in call.written if id(tensor) not in known)


def _number(call: Call) -> float | None:
    """Returns the inf or NaN that the script itself gave to a call, as a number; None without."""
    given: list[Any] = [*tracing.leaves([call.args, call.kwargs])]
    if call.name == "aten.lift_fresh" and call.args[0].dim() == 0:
        given = [float(call.args[0])]
    return next((x for x in given if isinstance(x, float) and not math.isfinite(x)), None)
