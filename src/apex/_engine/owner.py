"""The session as seen by the files that it imports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from apex._core.policy import Policy
from apex._engine.registry import Masters


class Owner(Protocol):
    """A session: what its bindings and models use of it."""

    policy: Policy
    masters: Masters
    mistakes: Any
    communicator: Any

    @property
    def models(self) -> list[nn.Module]: ...
    @property
    def bindings(self) -> Sequence[Any]: ...
    @property
    def needs_scale(self) -> bool: ...
    @property
    def can_skip(self) -> bool: ...
    def register(self, binding: Any) -> None: ...
    def forget(self, binding: Any) -> None: ...
    def others(self, bindings: Sequence[Any]) -> Iterator[tuple[Any, bool]]: ...
    def clear_grads(self, params: Iterable[nn.Parameter], *, set_to_none: bool) -> None: ...
    def convert_late(self, params: Iterable[Tensor]) -> None: ...
