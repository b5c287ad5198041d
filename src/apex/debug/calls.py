"""One operator call: its inputs as they were before the call, and its outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from apex._core import tree
from apex.debug import tensors
from apex.debug.tensors import Traits

# Operators whose outputs after the first are saved for backward and may hold infinities.
_SAVES_FOR_BACKWARD = ("_ctc_loss", "_scaled_dot_product", "_flash_attention", "_efficient")
_SNAPSHOT_LIMIT = 2**24  # elements; larger inputs of in-place operators are not copied


class Call:
    """One operator call, with its inputs as they were before the call."""

    def __init__(self, func: Any, traits: Traits, args: Any, kwargs: dict[str, Any]) -> None:
        self.traits = traits
        self.args, self.kwargs = args, kwargs
        self._func = func
        self._before: tuple[Any, dict[str, Any]] | None = (args, kwargs)
        self._originals: dict[int, Tensor] = {}
        self._saves = traits.name.rpartition(".")[2].startswith(_SAVES_FOR_BACKWARD)
        if traits.writes and traits.reads_written:
            written = traits.written(args, kwargs)
            copies = {id(t): t.detach().clone() for t in written if t.numel() <= _SNAPSHOT_LIMIT}
            large = len(copies) < len({id(t) for t in written})
            self._before = None
            if not large:
                self._before = tree.map_arguments(lambda t: copies.get(id(t), t), args, kwargs)
            self._originals = {id(copies[id(t)]): t for t in written if id(t) in copies}

    def outputs(self, result: Any) -> list[Tensor]:
        """Returns the floating-point tensors that the call returned or wrote."""
        returned = list(tensors.floating(result[:1] if self._saves else result))
        known = {id(tensor) for tensor in returned}
        written = self.traits.written(self.args, self.kwargs)
        return returned + [tensor for tensor in written if id(tensor) not in known]

    def saved_outputs(self, result: Any) -> list[Tensor]:
        """Returns the outputs saved only for backward."""
        return list(tensors.floating(result[1:])) if self._saves else []

    def original(self, tensor: Tensor) -> Tensor:
        """Returns the argument of which ``tensor`` is a snapshot, or ``tensor`` itself."""
        return self._originals.get(id(tensor), tensor)

    def inputs(self) -> list[Tensor]:
        """Returns the floating-point tensors that the call read, as they were before it."""
        args, kwargs = self._before or (self.args, self.kwargs)
        read = list(tensors.floating([args, kwargs]))
        if self.traits.writes and not self.traits.reads_written:
            written = {id(tensor) for tensor in self.traits.written(self.args, self.kwargs)}
            read = [tensor for tensor in read if id(tensor) not in written]
        return read

    def largest_in_double(self) -> float | None:
        """Returns the largest absolute result in float64, or None if unknown."""
        if self._before is None:
            return None
        return tensors.largest_in_double(self._func, *self._before)
