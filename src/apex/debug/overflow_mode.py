"""Checks every operator's outputs and traces non-finite values to their origin."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core.dtypes import is_low_precision
from apex._core.param_groups import params_of, states_in
from apex._engine.session import Session
from apex._torch import ranks
from apex._torch.grad_scaler import enabled_scalers
from apex.debug import tensors
from apex.debug.faults import Cause, Fault, cause_of
from apex.debug.module_tracker import ModuleTracker
from apex.debug.patterns import DIVISOR, nodes_behind, operator_name
from apex.debug.provenance import Origin, Provenance
from apex.debug.tensors import Kind, OperatorCall
from apex.debug.tracing import OperatorMode, is_uninitialized

_MASKS = {f"aten.{name}" for name in ("nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_")}
_MASKS |= {"aten.where", "aten.nansum"}
_MAP_TO_ZERO = {"softmax", "safe_softmax", "exp"}  # -inf
_TO_DIVISOR = {"div", "divide"}
_MAX_INPUTS = 4

_SNAPSHOT_LIMIT = 2**24  # elements; larger inputs of in-place operators are not copied


class _Call:
    """One operator call, with its inputs as they were before the call."""

    def __init__(self, call: OperatorCall) -> None:
        self.name, self.args, self.kwargs = call.traits.name, call.args, call.kwargs
        self.written = call.written()
        self._before = call
        self._saves = self.name.rpartition(".")[2].startswith(tensors.SAVES_INFINITIES)
        changes = self.written if call.traits.reads_written else []
        self._is_known = all(t.numel() <= _SNAPSHOT_LIMIT for t in changes)
        self._copies: dict[int, Tensor] = {}
        if changes and self._is_known:
            self._copies = copies = {id(t): t.detach().clone() for t in changes}
            self._before = call.mapped(lambda t: copies.get(id(t), t))

    @functools.cached_property
    def inputs(self) -> list[tuple[Tensor, Tensor]]:
        """The floating-point arguments that it reads, each with its values before the call."""
        unread = set() if self._before.traits.reads_written else set(map(id, self.written))
        given = tensors.floating([self.args, self.kwargs])
        return [(t, self._copies.get(id(t), t)) for t in given if id(t) not in unread]

    @property
    def is_constant(self) -> bool:
        """Whether the script gave the values itself: a scalar tensor, or an infinite number."""
        scalar = self.name == "aten.lift_fresh" and self.args[0].dim() == 0
        return scalar or tensors.has_infinite_number((self.args, self.kwargs))

    def outputs(self, result: Any) -> list[Tensor]:
        """Returns the floating-point tensors that the call returned or wrote."""
        returned = list(tensors.floating(result[:1] if self._saves else result))
        known = {id(tensor) for tensor in returned}
        return returned + [tensor for tensor in self.written if id(tensor) not in known]

    def saved_outputs(self, result: Any) -> Iterator[Tensor]:
        """Yields the outputs saved only for backward."""
        return tensors.floating(result[1:] if self._saves else [])

    def largest_in_double(self) -> float | None:
        """Returns the largest absolute result in float64, or None if unknown."""
        return tensors.largest_in_double(self._before) if self._is_known else None


class OverflowMode(OperatorMode):  # type: ignore[no-untyped-call]
    """Checks the outputs of every operator."""

    def __init__(
        self,
        tracker: ModuleTracker,
        provenance: Provenance,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(tracker)
        self._provenance = provenance
        self._stepping: Optimizer | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        given = [scaler] if scaler is not None and scaler.is_enabled() else []
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet(given)
        # The memory of gradients that were already non-finite when tracing started.
        stepped = [p for s in self._sessions() for b in s.bindings for p in b.params()]
        grads = tensors.floating([param.grad for param in (*self._params(), *stepped)])
        self._stale = {tensors.storage_key(grad) for grad in grads if tensors.kind_of(grad)}

    def enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Counts the optimizer's own parameters (masters) as weights."""
        self._stepping = optimizer
        self._optimizers.add(optimizer)

    def leave_step(self, *_: Any) -> None:
        """Ends the step."""
        self._stepping = None

    def _operator(self, call: OperatorCall) -> Any:
        self._provenance.time += 1
        target = self.tracker.accumulating
        if call.traits.view and target is None and call.traits.name != "aten.lift_fresh":
            return self._run(call.func, call.args, call.kwargs)
        before = _Call(call)
        result = self._run(call.func, call.args, call.kwargs)
        if call.traits.exchanges:
            self._follow_exchange(before, result)
        else:
            self._check(before, result)
        if target is not None:
            self._check_gradient(target, result)
        return result

    def _check(self, call: _Call, result: Any) -> None:
        bad: list[tuple[Tensor, Kind]] = []
        self._mark_read(call)
        self._mark_saved(call, result)
        for tensor in call.outputs(result):
            kind = tensors.kind_of(tensor)
            if kind is not None:
                bad.append((tensor, kind))
                continue
            self._provenance.clear(tensor)
            if self._stale and tensors.covers_storage(tensor):
                self._stale.discard(tensors.storage_key(tensor))
        if bad:
            origin = self._origin(call, bad)
            for tensor, _ in bad:
                self._provenance.mark(tensor, origin)
            is_mask = origin.deliberate and origin.fault.cause != "update"
            spoiled = (tensor for tensor, _ in bad if not self._is_mask_buffer(tensor))
            if not is_mask and self._writes_weights(call, spoiled):
                self._provenance.mark_reached(origin, spoils=True)
        elif call.name in _MASKS:
            self._mark_inputs(call, self._provenance.mark_masked)
        elif operator_name(call.name) in _MAP_TO_ZERO:
            self._mark_inputs(call, self._provenance.mark_absorbed)
        if call.name == "aten.ones_like" and call.args[0].numel() == 1:
            # Autograd starts a backward pass this way, from the loss.
            self._mark_inputs(call, self._provenance.mark_reached)

    def _follow_exchange(self, call: _Call, result: Any) -> None:
        """Passes on what a collective sends; what it receives may come later."""
        origins: list[Origin] = []
        if call.name != "c10d.broadcast_" or ranks.has_rank(*call.args[1:3]):
            self._mark_read(call)
            origins = [origin for _, origin in self._nonfinite_inputs(call)]
        for tensor in call.outputs(result):
            if origins:
                self._provenance.mark(tensor, min(origins, key=Origin.rank))
            else:
                self._provenance.mark_received(tensor)

    def _mark_read(self, call: _Call) -> None:
        if not self._provenance.has_pending or self.tracker.direction == "backward":
            return
        for place, (argument, _) in enumerate(call.inputs):
            origin = self._provenance.of(argument)
            if origin is not None:
                divides = place == 1 and operator_name(call.name) in _TO_DIVISOR
                self._provenance.mark_read(origin, call.name + DIVISOR * divides)

    def _mark_saved(self, call: _Call, result: Any) -> None:
        for tensor in call.saved_outputs(result):
            kind = tensors.kind_of(tensor)
            if kind is not None:
                origin = self._new_origin(call, kind, tensor.dtype, "constant", deliberate=True)
                self._provenance.mark(tensor, origin)

    def _mark_inputs(self, call: _Call, mark: Callable[[Origin], None]) -> None:
        for argument, values in call.inputs:
            origin = self._provenance.of(argument)
            if origin is not None and tensors.kind_of(values):
                mark(origin)

    def _mirrors_gradients(self, call: _Call) -> bool:
        """Returns whether amp shows a model the gradients that its masters hold in fp32."""
        if self.tracker.inside or call.name not in ("aten._foreach_copy_", "aten.copy_"):
            return False
        pairs = [pair for session in self._sessions() for pair in session.masters.all()]
        return _keys(call.written) <= _gradients(pair.model for pair in pairs)

    def _writes_weights(self, call: _Call, among: Iterable[Tensor] | None = None) -> bool:
        """Returns whether a call writes weights, if given those among these tensors."""
        written = _keys(call.written)
        if written and among is not None:  # batch norms in eval mode leave their statistics alone
            written &= _keys([*among])
        return bool(written) and not self._weights().isdisjoint(written)

    def _weights(self) -> set[int]:
        """Returns the memory of all parameters, masters and buffers, wherever it is by now."""
        masters = [pair.master for session in self._sessions() for pair in session.masters.all()]
        return self._buffers() | _keys([self._params(), masters])

    def _is_mask_buffer(self, tensor: Tensor) -> bool:
        return tensors.storage_key(tensor) in self._buffers() and tensors.is_mask(tensor)

    def _buffers(self) -> set[int]:
        return _keys([list(model.buffers()) for model in self.tracker.models])

    def _params(self) -> list[Tensor]:
        """Returns the parameters of all models, and those that optimizers have stepped."""
        own = [param for model in self.tracker.models for param in model.parameters()]
        return [*own, *(param for each in self._optimizers for param in params_of(each))]

    def _check_gradient(self, target: Tensor, result: Any) -> None:
        for grad in tensors.floating(result):
            name, origin = "", self._provenance.of(grad) if tensors.kind_of(grad) else None
            if origin is not None:
                name = self.tracker.parameters.get(target, "(a tensor of no model)")
            self._provenance.mark_gradient(name, origin, backward=self.tracker.backward)

    # -- origins -------------------------------------------------------------------------------

    def _origin(self, call: _Call, bad: list[tuple[Tensor, Kind]]) -> Origin:
        kind: Kind = "nan" if any(kind == "nan" for _, kind in bad) else "inf"
        inputs = self._nonfinite_inputs(call)
        dtype = bad[0][0].dtype
        if not inputs:
            return self._first_origin(call, kind, dtype)
        worst = min((origin for _, origin in inputs), key=Origin.rank)
        is_new_nan = kind == "nan" and all(found != "nan" for found, _ in inputs)
        is_mask = worst.deliberate and worst.fault.cause == "constant"
        return self._new_origin(call, kind, dtype, "constant") if is_mask and is_new_nan else worst

    def _first_origin(self, call: _Call, kind: Kind, dtype: torch.dtype) -> Origin:
        """Returns the origin of non-finite outputs of finite inputs."""
        if self.tracker.direction == "backward":
            forward = self.tracker.forward_site
            if forward is not None and forward.origin is not None:
                return cast(Origin, forward.origin)  # its derivative is infinite, too
        cause: Cause | None = None
        if is_uninitialized(call.name):
            cause = "uninitialized"
        elif call.is_constant:
            stepping = self._stepping is not None and self._is_update(call)
            cause = "update" if stepping else "constant"
        deliberate = cause is not None or self._mirrors_gradients(call)
        origin = self._new_origin(call, kind, dtype, cause, deliberate=deliberate)
        if self.tracker.created_site is not None:
            self.tracker.created_site.origin = origin
        return origin

    def _nonfinite_inputs(self, call: _Call) -> list[tuple[Kind, Origin]]:
        found = [(argument, values, tensors.kind_of(values)) for argument, values in call.inputs]
        return [
            (kind, self._input_origin(argument, values, kind, call))
            for argument, values, kind in found
            if kind is not None
        ]

    def _input_origin(self, argument: Tensor, values: Tensor, kind: Kind, call: _Call) -> Origin:
        """Returns a non-finite input's origin; this operator if the values are from outside."""
        origin = self._provenance.of(argument)
        if origin is None:
            cause = self._source(argument, call)
            deliberate = cause == "data" and (call.is_constant or tensors.is_mask(values))
            cause = "constant" if deliberate else cause
            origin = self._new_origin(call, kind, argument.dtype, cause, deliberate=deliberate)
            self._provenance.mark(argument, origin)
            return origin
        is_weight = tensors.storage_key(argument) in _keys(self._params())
        if is_weight and not origin.deliberate and not tensors.is_mask(values):
            self._provenance.mark_reached(origin, spoils=True)  # of an average that was not called
        return origin

    def _source(self, tensor: Tensor, call: _Call) -> Cause:
        key = tensors.storage_key(tensor)
        if key in self._stale:
            return "gradients"
        in_backward = self.tracker.direction == "backward"
        if ranks.world_size() > 1 and (in_backward or key in _gradients(self._params())):
            return "another rank"
        if self._provenance.is_received(tensor):
            return "another rank"
        if self._stepping is not None:
            if key in _gradients(params_of(self._stepping)):
                return "gradients"
            if key in _keys([list(state.values()) for _, state in states_in(self._stepping.state)]):
                return "optimizer state"
        if key in self._weights() and not self._is_mask_buffer(tensor):
            return "weights"
        # Of a model that no forward has made known yet, too.
        loads = any(isinstance(written, nn.Parameter) for written in call.written)
        return "weights" if loads else "data"

    def _new_origin(
        self,
        call: _Call,
        kind: Kind,
        dtype: torch.dtype,
        cause: Cause | None,
        *,
        deliberate: bool = False,
    ) -> Origin:
        inputs = [values for _, values in call.inputs]
        direction, formula = self.tracker.direction, self.tracker.runs_formula
        site = self.tracker.site()
        fault = Fault(
            site.module,
            call.name,
            direction,
            kind,
            dtype,
            tensors.largest(inputs),
            site.location,
            cause or "update",
            site.inside,
            call.largest_in_double() if cause is None else None,
            level=self._level(),
            inputs=() if deliberate else tuple(map(tensors.values_of, inputs[:_MAX_INPUTS])),
            node=self.tracker.node if direction == "backward" else "",
            fed_by=() if deliberate else self._fed_by(call, direction),
            in_fp32=self.tracker.in_fp32(site.module),
            written=cause in ("constant", "update") and call.is_constant,
        )
        if cause is None and not self._is_update(call):
            scales = self._loss_scales() if direction == "backward" else []
            largest = max((scale for scale, _ in scales), default=1.0)
            found = cause_of(fault, largest, formula=formula)
            dynamic = found == "loss scale" and any(is_dynamic for _, is_dynamic in scales)
            fault = replace(fault, cause=found, dynamic=dynamic)
        return self._provenance.add_origin(fault, deliberate=deliberate)

    def _is_update(self, call: _Call) -> bool:
        """Returns whether a call belongs to an optimizer step or writes masters to the model."""
        if self.tracker.inside or self.tracker.direction == "backward":
            return False
        # A closure enables gradients: a forward pass of its own.
        steps = self._stepping is not None and not torch.is_grad_enabled()
        return steps or self._writes_weights(call)

    def _fed_by(self, call: _Call, direction: str) -> tuple[str, ...]:
        """Returns the nodes behind the input that matters: of a quotient, the divisor."""
        if direction == "backward":
            return self.tracker.nodes_behind()
        given = [tensor for tensor in call.args if isinstance(tensor, Tensor)]
        at = 1 if operator_name(call.name) in _TO_DIVISOR and len(given) > 1 else 0
        return nodes_behind(given[at].grad_fn) if given else ()

    # -- level and loss scale --------------------------------------------------------------------

    def _level(self) -> str:
        sessions = self._sessions()
        if sessions:
            return sessions[0].policy.opt_level
        if self.tracker.autocast is not None:
            return "torch.autocast"
        params = (param for model in self.tracker.models for param in model.parameters())
        return "16-bit model" if any(map(is_low_precision, params)) else ""

    def _loss_scales(self) -> list[tuple[float, bool]]:
        """Returns the scales of the models' sessions, else of GradScalers, and if each is dynamic.

        GradScalers are searched until there is an enabled one, when a pass overflows.
        """
        own = [each for session in self._sessions() for each in session.scalers]
        if own:
            return [(scaler.read_scale(), scaler.dynamic) for scaler in own]
        if not self._scalers:
            self._scalers.update(enabled_scalers())
        return [(scaler.get_scale(), True) for scaler in self._scalers]

    def _sessions(self) -> list[Session]:
        """Returns the sessions of the models and of modules inside them."""
        owners = dict.fromkeys(state.owner for _, state in self.tracker.prepared())
        return [owner for owner in owners if isinstance(owner, Session)]


def _gradients(params: Iterable[Tensor]) -> set[int]:
    return _keys([param.grad for param in params])


def _keys(value: Any) -> set[int]:
    return {tensors.storage_key(tensor) for tensor in tensors.floating(value)}
