"""One call of an operator: what it read, as it was before, and what it gave."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from apex.debug import tensors
from apex.debug.tensors import Traits

# Operators whose further results are notes for their backward, with infinities of their own.
_NOTES_BEHIND_FIRST = ("_ctc_loss", "_scaled_dot_product", "_flash_attention", "_efficient")
_SNAPSHOT_LIMIT = 2**24  # elements that an in-place operator may have for a copy of its input


class Call:
    """One call of an operator, with its inputs as they were."""

    def __init__(self, func: Any, about: Traits, args: Any, kwargs: dict[str, Any]) -> None:
        self.about = about
        self.args, self.kwargs = args, kwargs
        self._func = func
        self._before: tuple[Any, dict[str, Any]] | None = (args, kwargs)
        self._originals: dict[int, Tensor] = {}
        self._takes_notes = about.name.rpartition(".")[2].startswith(_NOTES_BEHIND_FIRST)
        if about.writes and about.reads_written:
            written = about.written(args, kwargs)
            copies = {id(t): t.detach().clone() for t in written if t.numel() <= _SNAPSHOT_LIMIT}
            large = len(copies) < len({id(t) for t in written})
            self._before = None if large else (_swap(args, copies), _swap(kwargs, copies))
            self._originals = {id(copies[id(t)]): t for t in written if id(t) in copies}

    def outputs(self, result: Any) -> list[Tensor]:
        """Returns the floating tensors that the call gave or wrote."""
        given = list(tensors.floating(result[:1] if self._takes_notes else result))
        known = {id(tensor) for tensor in given}
        written = self.about.written(self.args, self.kwargs)
        return given + [tensor for tensor in written if id(tensor) not in known]

    def notes(self, result: Any) -> list[Tensor]:
        """Returns what the call gave for the eyes of its backward only."""
        return list(tensors.floating(result[1:])) if self._takes_notes else []

    def original(self, tensor: Tensor) -> Tensor:
        """Returns the tensor that an input is a copy of, itself if it is none."""
        return self._originals.get(id(tensor), tensor)

    def inputs(self) -> list[Tensor]:
        """Returns the floating tensors that the call read, as they were before it."""
        args, kwargs = self._before or (self.args, self.kwargs)
        read = list(tensors.floating([args, kwargs]))
        if self.about.writes and not self.about.reads_written:
            written = {id(tensor) for tensor in self.about.written(self.args, self.kwargs)}
            read = [tensor for tensor in read if id(tensor) not in written]
        return read

    def largest_in_double(self) -> float | None:
        """Returns the largest result in float64, None if not known."""
        if self._before is None:
            return None
        return tensors.largest_in_double(self._func, *self._before)


def _swap(value: Any, copies: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return copies.get(id(value), value)
    if isinstance(value, dict):
        return {key: _swap(item, copies) for key, item in value.items()}
    return [_swap(item, copies) for item in value] if isinstance(value, list | tuple) else value
