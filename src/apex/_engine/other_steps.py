"""Steps of optimizers that amp has not prepared, seen by one hook in the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.param_groups import params_of
from apex._engine.masters import PREPARED, Master
from apex._engine.mistakes import Mistake, Mistakes
from apex._engine.registry import Masters
from apex._torch.dynamo import untraced


class OtherSteps:
    """Looks after steps over the weights or masters of one session, as long as it lives."""

    def __init__(self, masters: Masters, mistakes: Mistakes, params: Iterable[Tensor]) -> None:
        """Begins to watch.

        Args:
            masters: Those of the session.
            mistakes: Those found in the session.
            params: The models' parameters, now that they are converted.
        """
        self._masters, self._mistakes = masters, mistakes
        self._versions = {id(p): p._version for p in params if dtypes.is_low_precision(p)}
        _hook.add(self)

    def look_after(self, optimizer: Optimizer) -> None:
        """Rounds masters that an optimizer stepped; warns if it steps 16-bit weights itself."""
        stepped = params_of(optimizer)
        own = {id(param) for param in stepped if isinstance(param, Master)}
        for pair in self._masters.all() if own else ():
            if id(pair.master) in own:
                pair.mark_written()  # fused kernels do not count
        self._masters.write_back()
        low = [param for param in stepped if dtypes.is_low_precision(param)]
        if low:
            fused = any(group.get("fused") for group in optimizer.param_groups)
            before, self._versions = self._versions, {}  # later, steps of ours change weights, too
            if any(
                before.get(id(p), p._version) != p._version or (fused and id(p) in before)
                for p in low
            ):
                self._mistakes.warn(Mistake.UNPREPARED_OPTIMIZER)
            increment_version(low)


class _Hook:
    """A hook on the steps of all optimizers, while anything watches.

    The end of the last removes it, but not beside hooks of others: torch may just iterate over
    them, as sessions end wherever Python collects them. It then stays, idle, for the next session.
    """

    def __init__(self) -> None:
        self._watching: list[weakref.ref[OtherSteps]] = []
        self._handle: RemovableHandle | None = None

    def add(self, steps: OtherSteps) -> None:
        """Has ``steps`` look after others' steps, as long as it lives."""
        self._watching.append(weakref.ref(steps))
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._after_step)
        weakref.finalize(steps, self._end).atexit = False

    @untraced
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        for reference in () if PREPARED in vars(optimizer) else [*self._watching]:
            steps = reference()
            if steps is not None:
                steps.look_after(optimizer)

    def _end(self) -> None:
        self._watching = [each for each in self._watching if each() is not None]
        hooks: Any = self._handle and self._handle.hooks_dict_ref()
        if self._handle is not None and not self._watching and len(hooks) == 1:
            self._handle.remove()
            self._handle = None


_hook = _Hook()
