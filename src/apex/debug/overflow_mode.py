"""Look at what every operator gives, and follow what is not finite to where it began."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from apex._engine.model.state import state_of
from apex._engine.session import Session
from apex.amp.nonfinite import nonfinite_gradients
from apex.debug import tensors
from apex.debug.calls import Call
from apex.debug.faults import Cause, Fault, cause_of
from apex.debug.module_tracker import Whereabouts
from apex.debug.provenance import Lineage, Origin
from apex.debug.tensors import Kind

_PLAIN = {Tensor, nn.Parameter}
_MENDS = {f"aten.{name}" for name in ("nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_")}
_MENDS |= {"aten.where"}
_EMPTY = ("empty", "new_empty", "resize", "set_")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what every operator gives."""

    # Their bodies are operators again, which are watched.
    supports_higher_order_operators = True

    def __init__(
        self,
        here: Whereabouts,
        lineage: Lineage,
        models: list[nn.Module],
        gradients: list[str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._here = here
        self._lineage = lineage
        self._gradients = gradients
        self._models = models
        self._process = os.getpid()
        self._stepping: Optimizer | None = None
        own = [t for model in models for t in (*model.parameters(), *model.buffers())]
        self._kept = {tensors.storage_key(t) for t in tensors.floating(own)}
        self._stale = self._stale_gradients()

    def enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Counts the optimizer's own parameters (masters) to what matters."""
        self._stepping = optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._kept |= {tensors.storage_key(t) for t in tensors.floating(params)}

    def leave_step(self, *_: Any) -> None:
        """Ends the step."""
        self._stepping = None

    def _stale_gradients(self) -> set[int]:
        """Returns the memory of gradients that are not finite already, from before the watch."""
        grads = [p.grad for model in self._models for p in model.parameters()]
        of_sessions = [grad for s in self._sessions() for _, grad in nonfinite_gradients(s)]
        held = tensors.floating([*grads, *of_sessions])
        return {tensors.storage_key(grad) for grad in held if tensors.kind_of(grad)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if os.getpid() != self._process:  # a data loader's worker was forked meanwhile
            return func(*args, **(kwargs or {}))
        if not _PLAIN.issuperset(types):  # a tensor subclass: its own operators come here next
            return NotImplemented
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        self._lineage.time += 1
        about = tensors.traits(func)
        accumulates = self._here.accumulates
        if about.view and not accumulates and about.name != "aten.lift_fresh":
            return func(*args, **kwargs)
        call = Call(func, about, args, kwargs)
        result = func(*args, **kwargs)
        self._look(call, result)
        if accumulates:
            self._accumulated(result)
        return result

    def _look(self, call: Call, result: Any) -> None:
        bad: list[tuple[Tensor, Kind]] = []
        for tensor in call.notes(result):
            kind = tensors.kind_of(tensor)
            if kind is not None:
                note = self._begin(call, kind, tensor.dtype, "constant", deliberate=True)
                self._lineage.mark(tensor, note)
        for tensor in call.outputs(result):
            kind = tensors.kind_of(tensor)
            if kind is None:
                self._clean(tensor)
            else:
                bad.append((tensor, kind))
        if bad:
            origin = self._origin(call, bad)
            for tensor, _ in bad:
                self._lineage.mark(tensor, origin)
                if not origin.deliberate and tensors.storage_key(tensor) in self._kept:
                    self._lineage.reach(origin)
        elif call.about.name in _MENDS:
            self._mended(call)
        if call.about.name == "aten.ones_like" and call.args[0].numel() == 1:
            self._loss(call.args[0])  # so autograd starts at a loss

    def _clean(self, tensor: Tensor) -> None:
        self._lineage.clean(tensor)
        if self._stale and tensors.covers_storage(tensor):
            self._stale.discard(tensors.storage_key(tensor))

    def _mended(self, call: Call) -> None:
        for tensor in call.inputs():
            origin = self._lineage.of(call.original(tensor))
            if origin is not None and tensors.kind_of(tensor):
                self._lineage.mend(origin)

    def _loss(self, loss: Tensor) -> None:
        origin = self._lineage.of(loss)
        if origin is not None and any(map(tensors.kind_of, tensors.floating(loss))):
            self._lineage.reach(origin)

    def _accumulated(self, result: Any) -> None:
        for grad in tensors.floating(result):
            origin = self._lineage.of(grad) if tensors.kind_of(grad) else None
            if origin is None:
                self._lineage.reach_finite_gradient()
                continue
            self._lineage.reach(origin)
            name = self._here.parameter or "(a tensor of no model)"
            if name not in self._gradients:
                self._gradients.append(name)

    # -- where it began ------------------------------------------------------------------------

    def _origin(self, call: Call, bad: list[tuple[Tensor, Kind]]) -> Origin:
        kind: Kind = "nan" if any(kind == "nan" for _, kind in bad) else "inf"
        inputs = [(tensor, tensors.kind_of(tensor)) for tensor in call.inputs()]
        parents = [self._parent(tensor, found, call) for tensor, found in inputs if found]
        dtype = bad[0][0].dtype
        if not parents:
            return self._began(call, kind, dtype)
        heir = self._lineage.heir(parents)
        if heir is None or (heir.deliberate and kind == "nan" and not _has_nan(inputs)):
            return self._begin(call, kind, dtype, "constant")
        return heir

    def _began(self, call: Call, kind: Kind, dtype: torch.dtype) -> Origin:
        """Returns the origin of what an operator made of finite inputs."""
        if self._here.direction == "backward":
            forward = self._lineage.of_node(self._here.node_running)
            if forward is not None:
                return forward
        cause: Cause | None = None
        if call.about.name.rpartition(".")[2].lstrip("_").startswith(_EMPTY):
            cause = "uninitialized"
        elif tensors.has_infinite_number((call.args, call.kwargs)):
            cause = "constant"
        origin = self._begin(call, kind, dtype, cause, deliberate=cause is not None)
        site = self._here.node_made
        if site is not None:
            self._lineage.tie(site, origin)
        return origin

    def _parent(self, tensor: Tensor, kind: Kind, call: Call) -> Origin:
        """Returns the origin of an input; this operator, if it came from outside."""
        held = call.original(tensor)
        origin = self._lineage.of(held)
        if origin is None:
            cause = self._source(held)
            constant = call.about.name == "aten.lift_fresh" and tensor.dim() == 0
            deliberate = cause == "data" and (constant or tensors.is_mask(tensor))
            cause = "constant" if deliberate else cause
            origin = self._begin(call, kind, tensor.dtype, cause, deliberate=deliberate)
            self._lineage.mark(held, origin)
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
        if key in self._kept and not (is_buffer_mask and tensors.is_mask(tensor)):
            return "weights"
        return "data"

    def _begin(
        self,
        call: Call,
        kind: Kind,
        dtype: torch.dtype,
        cause: Cause | None,
        *,
        deliberate: bool = False,
    ) -> Origin:
        largest_input = tensors.largest(call.inputs())
        direction = self._here.direction
        true = None
        if cause is None:
            true = call.largest_in_double()
            cause = cause_of(
                call.about.name,
                direction,
                kind,
                dtype,
                largest_input=largest_input,
                largest_true=true,
                loss_scale=self._loss_scale(),
            )
            if self._updates(call):
                cause = "update"
        module, inside, location = self._here.site()
        fault = Fault(
            module,
            call.about.name,
            direction,
            kind,
            dtype,
            largest_input,
            location,
            cause,
            inside,
            true,
        )
        return self._lineage.begin(fault, deliberate=deliberate)

    def _updates(self, call: Call) -> bool:
        """Returns whether a call is part of a step, or of writing masters into the model."""
        if self._here.inside or self._here.direction == "backward":
            return False
        written = call.about.written(call.args, call.kwargs)
        return self._stepping is not None or not self._kept.isdisjoint(_keys(written))

    def _loss_scale(self) -> float:
        """Returns the greatest scale of the models' sessions, 1 without one."""
        scales = [scaler.read_scale() for s in self._sessions() for scaler in s.scalers]
        return max(scales, default=1.0)

    def _sessions(self) -> set[Session]:
        states = [state for model in self._models if (state := state_of(model)) is not None]
        return {state.owner for state in states if isinstance(state.owner, Session)}


def _keys(value: Any) -> set[int]:
    return {tensors.storage_key(tensor) for tensor in tensors.floating(value)}


def _has_nan(inputs: list[tuple[Tensor, Kind | None]]) -> bool:
    return any(kind == "nan" for _, kind in inputs)
