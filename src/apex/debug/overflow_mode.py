"""Checks every operator's outputs and traces non-finite values to their origin."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from apex._core.dtypes import is_low_precision
from apex._engine.autocast.region import active_spec
from apex._engine.masters import Master
from apex._engine.model.state import state_of
from apex._engine.session import Session
from apex.amp.nonfinite import nonfinite_gradients
from apex.debug import tensors
from apex.debug.calls import Call
from apex.debug.faults import Cause, Fault, Under, cause_of
from apex.debug.module_tracker import ModuleTracker
from apex.debug.provenance import Origin, Provenance
from apex.debug.tensors import Kind

_PLAIN = {Tensor, nn.Parameter, Master}
_MASKS = {f"aten.{name}" for name in ("nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_")}
_MASKS |= {"aten.where"}
_EMPTY = ("empty", "new_empty", "resize", "set_")


class OverflowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the outputs of every operator."""

    # Their bodies consist of operators, which are traced.
    supports_higher_order_operators = True

    def __init__(
        self,
        tracker: ModuleTracker,
        provenance: Provenance,
        models: list[nn.Module],
        gradients: list[str],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker
        self._provenance = provenance
        self._gradients = gradients
        self._models = models
        self._scaler = scaler
        self._under = self._dtypes_set_by()
        self._process = os.getpid()
        self._stepping: Optimizer | None = None
        own = [t for model in models for t in (*model.parameters(), *model.buffers())]
        self._weights = {tensors.storage_key(t) for t in tensors.floating(own)}
        self._stale = self._stale_gradients()

    def enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Counts the optimizer's own parameters (masters) as weights."""
        self._stepping = optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._weights |= {tensors.storage_key(t) for t in tensors.floating(params)}

    def leave_step(self, *_: Any) -> None:
        """Ends the step."""
        self._stepping = None

    def _stale_gradients(self) -> set[int]:
        """Returns the memory of gradients that were already non-finite when tracing started."""
        grads = [p.grad for model in self._models for p in model.parameters()]
        of_sessions = [grad for s in self._sessions() for _, grad in nonfinite_gradients(s)]
        all_grads = tensors.floating([*grads, *of_sessions])
        return {tensors.storage_key(grad) for grad in all_grads if tensors.kind_of(grad)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if os.getpid() != self._process:  # in a forked data loader worker
            return func(*args, **(kwargs or {}))
        if not _PLAIN.issuperset(types):  # a tensor subclass, whose inner operators come here next
            return NotImplemented
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        self._provenance.time += 1
        traits = tensors.traits(func)
        accumulating = self._tracker.is_accumulating
        if traits.view and not accumulating and traits.name != "aten.lift_fresh":
            return func(*args, **kwargs)
        call = Call(func, traits, args, kwargs)
        result = func(*args, **kwargs)
        self._check(call, result)
        if accumulating:
            self._check_gradient(result)
        return result

    def _check(self, call: Call, result: Any) -> None:
        bad: list[tuple[Tensor, Kind]] = []
        for tensor in call.saved_outputs(result):
            kind = tensors.kind_of(tensor)
            if kind is not None:
                origin = self._new_origin(call, kind, tensor.dtype, "constant", deliberate=True)
                self._provenance.mark(tensor, origin)
        for tensor in call.outputs(result):
            kind = tensors.kind_of(tensor)
            if kind is None:
                self._mark_finite(tensor)
            else:
                bad.append((tensor, kind))
        if bad:
            origin = self._origin(call, bad)
            for tensor, _ in bad:
                self._provenance.mark(tensor, origin)
                if not origin.deliberate and tensors.storage_key(tensor) in self._weights:
                    self._provenance.mark_reached(origin)
        elif call.traits.name in _MASKS:
            self._mark_masked(call)
        if call.traits.name == "aten.ones_like" and call.args[0].numel() == 1:
            self._check_loss(call.args[0])  # autograd starts a backward pass this way

    def _mark_finite(self, tensor: Tensor) -> None:
        self._provenance.clear(tensor)
        if self._stale and tensors.covers_storage(tensor):
            self._stale.discard(tensors.storage_key(tensor))

    def _mark_masked(self, call: Call) -> None:
        for tensor in call.inputs():
            origin = self._provenance.of(call.original(tensor))
            if origin is not None and tensors.kind_of(tensor):
                self._provenance.mark_masked(origin)

    def _check_loss(self, loss: Tensor) -> None:
        origin = self._provenance.of(loss)
        if origin is not None and any(map(tensors.kind_of, tensors.floating(loss))):
            self._provenance.mark_reached(origin)

    def _check_gradient(self, result: Any) -> None:
        for grad in tensors.floating(result):
            origin = self._provenance.of(grad) if tensors.kind_of(grad) else None
            if origin is None:
                self._provenance.mark_finite_gradient()
                continue
            self._provenance.mark_reached(origin)
            name = self._tracker.parameter or "(a tensor of no model)"
            if name not in self._gradients:
                self._gradients.append(name)

    # -- origins -------------------------------------------------------------------------------

    def _origin(self, call: Call, bad: list[tuple[Tensor, Kind]]) -> Origin:
        kind: Kind = "nan" if any(kind == "nan" for _, kind in bad) else "inf"
        inputs = [(tensor, tensors.kind_of(tensor)) for tensor in call.inputs()]
        origins = [self._input_origin(tensor, found, call) for tensor, found in inputs if found]
        dtype = bad[0][0].dtype
        if not origins:
            return self._first_origin(call, kind, dtype)
        worst = self._provenance.most_severe(origins)
        if worst is None or (worst.deliberate and kind == "nan" and not _has_nan(inputs)):
            return self._new_origin(call, kind, dtype, "constant")
        return worst

    def _first_origin(self, call: Call, kind: Kind, dtype: torch.dtype) -> Origin:
        """Returns the origin of non-finite outputs of finite inputs."""
        if self._tracker.direction == "backward":
            forward = self._provenance.of_site(self._tracker.forward_site)
            if forward is not None:
                return forward
        cause: Cause | None = None
        if call.traits.name.rpartition(".")[2].lstrip("_").startswith(_EMPTY):
            cause = "uninitialized"
        elif tensors.has_infinite_number((call.args, call.kwargs)):
            cause = "constant"
        origin = self._new_origin(call, kind, dtype, cause, deliberate=cause is not None)
        site = self._tracker.created_site
        if site is not None:
            self._provenance.link_site(site, origin)
        return origin

    def _input_origin(self, tensor: Tensor, kind: Kind, call: Call) -> Origin:
        """Returns a non-finite input's origin; this operator if the values are from outside."""
        argument = call.original(tensor)
        origin = self._provenance.of(argument)
        if origin is None:
            cause = self._source(argument)
            constant = call.traits.name == "aten.lift_fresh" and tensor.dim() == 0
            deliberate = cause == "data" and (constant or tensors.is_mask(tensor))
            cause = "constant" if deliberate else cause
            origin = self._new_origin(call, kind, tensor.dtype, cause, deliberate=deliberate)
            self._provenance.mark(argument, origin)
        return origin

    def _source(self, tensor: Tensor) -> Cause:
        key = tensors.storage_key(tensor)
        if key in self._stale:
            return "gradients"
        if self._stepping is not None:
            params = [p for group in self._stepping.param_groups for p in group["params"]]
            if key in _keys([p.grad for p in params]):
                return "gradients"
            if key in _keys([list(state.values()) for state in self._stepping.state.values()]):
                return "optimizer state"
        is_buffer_mask = key in _keys([list(m.buffers()) for m in self._models])
        if key in self._weights and not (is_buffer_mask and tensors.is_mask(tensor)):
            return "weights"
        return "data"

    def _new_origin(
        self,
        call: Call,
        kind: Kind,
        dtype: torch.dtype,
        cause: Cause | None,
        *,
        deliberate: bool = False,
    ) -> Origin:
        largest_input = tensors.largest(call.inputs())
        direction = self._tracker.direction
        true = None
        if cause is None:
            true = call.largest_in_double()
            cause = cause_of(
                call.traits.name,
                direction,
                kind,
                dtype,
                largest_input=largest_input,
                largest_true=true,
                loss_scale=self._loss_scale(),
            )
            if self._is_update(call):
                cause = "update"
        module, inside, location = self._tracker.site()
        fault = Fault(
            module,
            call.traits.name,
            direction,
            kind,
            dtype,
            largest_input,
            location,
            cause,
            inside,
            true,
            self._under,
        )
        return self._provenance.add_origin(fault, deliberate=deliberate)

    def _is_update(self, call: Call) -> bool:
        """Returns whether a call belongs to an optimizer step or writes masters to the model."""
        if self._tracker.inside or self._tracker.direction == "backward":
            return False
        written = call.traits.written(call.args, call.kwargs)
        return self._stepping is not None or not self._weights.isdisjoint(_keys(written))

    def _loss_scale(self) -> float:
        """Returns the largest loss scale of sessions and GradScaler; 1 without any."""
        scales = [scaler.read_scale() for s in self._sessions() for scaler in s.scalers]
        if self._scaler is not None:
            scales.append(self._scaler.get_scale())
        return max(scales, default=1.0)

    def _dtypes_set_by(self) -> Under:
        if active_spec() is not None or any(map(state_of, self._models)):
            return "amp"
        params = (param for model in self._models for param in model.parameters())
        return "16-bit model" if any(map(is_low_precision, params)) else "autocast"

    def _sessions(self) -> set[Session]:
        states = [state for model in self._models if (state := state_of(model)) is not None]
        return {state.owner for state in states if isinstance(state.owner, Session)}


def _keys(value: Any) -> set[int]:
    return {tensors.storage_key(tensor) for tensor in tensors.floating(value)}


def _has_nan(inputs: list[tuple[Tensor, Kind | None]]) -> bool:
    return any(kind == "nan" for _, kind in inputs)
