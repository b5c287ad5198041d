"""Steps of optimizers that amp has not prepared, seen by two hooks in the process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.param_groups import params_of
from apex._engine.autocast import ambient
from apex._engine.masters import Master, mark_written, update_model_from_written_masters
from apex._engine.mistakes import Mistake
from apex._engine.optimizer.prepared import PREPARED
from apex._torch.dynamo import untraced
from apex._torch.modules import named_tensors

if TYPE_CHECKING:
    from apex._engine.session import Session

_Versions = weakref.WeakKeyDictionary[nn.Module, dict[int, int]]
"""Of each model, the versions that its 16-bit weights had when it was converted, by ``id``."""


def _look_after(session: Session, versions: _Versions, optimizer: Optimizer) -> None:
    """Rounds masters that an optimizer stepped; warns if it steps 16-bit weights itself."""
    stepped = params_of(optimizer)
    stepped_masters = {id(param) for param in stepped if isinstance(param, Master)}
    pairs = [*session.masters.pairs()]
    if stepped_masters:  # fused kernels do not count their writes
        mark_written(pair for pair in pairs if id(pair.master) in stepped_masters)
    update_model_from_written_masters(pairs)
    weights = [param for param in stepped if dtypes.is_low_precision(param)]
    if not weights:
        return
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    before: dict[int, int] = {}
    for converted in versions.values():
        before.update(converted)
    versions.clear()  # later, steps of ours change weights, too
    for weight in weights:
        if id(weight) in before and (is_fused or before[id(weight)] != weight._version):
            session.mistakes.warn(Mistake.UNPREPARED_OPTIMIZER)
    increment_version([weight for weight in weights if session.masters.pair_of(weight)])


class _Hooks:
    """Hooks on the steps of all optimizers, while a session with masters or casts lives.

    The end of the last removes them, but not beside hooks of others: torch may just iterate over
    them, as sessions end wherever Python collects them. They then stay, idle, for the next session.
    """

    def __init__(self) -> None:
        self._sessions: weakref.WeakKeyDictionary[Session, _Versions] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def add(self, session: Session) -> None:
        """Looks after others' steps over the weights or masters of ``session``, while it lives."""
        self._sessions[session] = versions = _Versions()
        for model in session.models:
            low = filter(dtypes.is_low_precision, named_tensors(model).values())
            versions[model] = {id(param): param._version for param in low}
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))
        weakref.finalize(session, self._end).atexit = False

    @untraced
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return None if PREPARED in vars(optimizer) else ambient.begin_step(optimizer, args, kwargs)

    @untraced
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if PREPARED in vars(optimizer):
            return
        ambient.end_step(optimizer)
        for session, versions in [*self._sessions.items()]:
            _look_after(session, versions, optimizer)

    def _end(self) -> None:
        beside: list[Any] = [handle.hooks_dict_ref() for handle in self._handles]
        if not [*self._sessions] and all(len(hooks) == 1 for hooks in beside):
            while self._handles:
                self._handles.pop().remove()


hooks = _Hooks()
