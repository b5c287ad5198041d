"""An optimizer's state, found by masters and by their models' parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding


class MasterState(defaultdict[Any, Any]):
    """State by master, which scripts may also look up or drop by the model's parameter.

    They read an average of ASGD, mask momentum, or drop it. Copies and files are plain.
    """

    binding: Any = staticmethod(lambda: None)
    """Returns that of the optimizer, while it exists."""

    original: defaultdict[Any, Any] | None = None
    """The optimizer's own object, which a script may hold; it gets the state back."""

    def _key(self, param: Any) -> Any:
        binding = None if super().__contains__(param) else self.binding()
        return param if binding is None else binding.stepped(param)

    @untraced
    def __missing__(self, param: Any) -> Any:
        key = self._key(param)
        return super().__missing__(param) if key is param else self[key]

    @untraced
    def __contains__(self, param: object) -> bool:
        return super().__contains__(self._key(param))

    @untraced
    def get(self, param: Any, default: Any = None) -> Any:
        return super().get(self._key(param), default)

    @untraced
    def pop(self, param: Any, *default: Any) -> Any:
        return super().pop(self._key(param), *default)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, *super().__reduce__()[1:]


def find_by_model(optimizer: Optimizer, binding: Binding) -> None:
    """Lets an optimizer's state be found by the parameters of the models."""
    state = vars(optimizer).get("state")
    if type(state) is defaultdict:
        found = MasterState(state.default_factory, state)
        found.binding, found.original = weakref.ref(binding), state
        optimizer.state = found


def find_by_itself(optimizer: Optimizer) -> None:
    """Reverts :func:`find_by_model`."""
    state = vars(optimizer).get("state")
    if isinstance(state, MasterState):
        plain = defaultdict(state.default_factory) if state.original is None else state.original
        own = dict(state)
        plain.clear()
        plain.update(own)
        optimizer.state = plain
