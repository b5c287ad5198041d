"""The session as seen by the files that it imports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from apex._core.policy import Policy
from apex._engine.registry import MasterTable


class Owner(Protocol):
    """A session: what its prepared_optimizers and models use of it."""

    policy: Policy
    masters: MasterTable
    mistakes: Any
    ddp_tracker: Any

    @property
    def models(self) -> list[nn.Module]: ...
    @property
    def prepared_optimizers(self) -> Sequence[Any]: ...
    @property
    def needs_scale(self) -> bool: ...
    @property
    def can_skip(self) -> bool: ...
    def register(self, prepared: Any) -> None: ...
    def forget(self, prepared: Any) -> None: ...
    def others(self, prepared_optimizers: Sequence[Any]) -> Iterator[tuple[Any, bool]]: ...
    def clear_grads(self, params: Iterable[nn.Parameter], *, set_to_none: bool) -> None: ...
    def convert_late(self, params: Iterable[Tensor]) -> None: ...
