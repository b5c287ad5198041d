"""Steps of optimizers that amp has not prepared: hooks on them while a session needs it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.param_groups import PREPARED, params_of
from apex._engine import masters
from apex._engine.autocast import ambient
from apex._engine.masters import MasterPair
from apex._engine.session import Session, live_optimizers
from apex._torch.dynamo import untraced
from apex._torch.modules import tensor_ids


def _weights_of_models(session: Session, params: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields those of some 16-bit parameters that are weights of a session's models."""
    if not params:
        return  # a walk through large models would take longer than the step
    weights = tensor_ids(session.models)
    for param in params:
        if id(param) in weights:
            yield param


def _pairs(optimizer: Optimizer) -> list[MasterPair]:
    """Returns the pairs of those masters that the optimizer steps."""
    return [*filter(None, map(masters.pair_of_master, params_of(optimizer)))]


def _drop_overflowed(params: Sequence[Tensor]) -> None:
    """Drops gradients that overflowed, of prepared optimizers in whose place another steps."""
    for prepared in live_optimizers:
        is_flagged = prepared.has_overflow_flag and not prepared.stepping
        if is_flagged and not {*params}.isdisjoint(prepared.trained_params()):
            prepared.drop_overflowed()


class _Hooks:
    """Hooks on the steps of all optimizers, while a session with masters or casts lives.

    The end of the last session removes them, unless other code has registered hooks, too. Python
    may collect a session while torch iterates over these. The hooks then stay, idle, for the next
    session.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        # Versions of each optimizer's parameters before its step, which may run other steps.
        self._versions = weakref.WeakKeyDictionary[Optimizer, Mapping[int, int]]()

    def add(self, session: Session) -> None:
        """Follows other optimizers' steps over the parameters of ``session``, while it lives."""
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))
        weakref.finalize(session, self._end).atexit = False

    @untraced
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if PREPARED in vars(optimizer):
            return None
        masters.update_masters_from_model(_pairs(optimizer))
        params = params_of(optimizer)
        self._versions[optimizer] = {id(param): param._version for param in params}
        _drop_overflowed(params)
        return ambient.begin_step(optimizer, args, kwargs)

    @untraced
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if PREPARED in vars(optimizer):
            return
        ambient.end_step(optimizer)
        masters.round_masters(_pairs(optimizer))
        versions = self._versions.get(optimizer, {})
        is_fused = any(group.get("fused") for group in optimizer.param_groups)  # counts no writes
        params = params_of(optimizer)
        low_precision = [*filter(dtypes.is_low_precision, params)]
        for session in Session.live:
            if not session.follows_other_steps:
                continue
            written: list[Tensor] = []
            for param in _weights_of_models(session, low_precision):
                if is_fused or versions.get(id(param)) != param._version:
                    written.append(param)
                increment_version(param)
            session.observer.other_step(params, written)

    def _end(self) -> None:
        if any(session.follows_other_steps for session in Session.live):
            return
        for handle in self._handles:
            hooks: Any = handle.hooks_dict_ref()
            if len(hooks) > 1:
                return
        while self._handles:
            self._handles.pop().remove()


hooks = _Hooks()
