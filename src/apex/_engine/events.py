"""What the engine tells its observers. They change no number, and each list may be empty."""

from __future__ import annotations

from collections.abc import Callable

_Observers = list[Callable[..., None]]

block_begins: _Observers = []
"""Called with a ``BackwardPass`` and its scaled loss, before earlier gradients are put aside."""

pass_ends: _Observers = []
"""Called with a ``BackwardPass`` before its gradients are unscaled, and at its exit."""

block_ends: _Observers = []
"""Called with a ``BackwardPass`` after its exit has done its work."""

scale_updated: _Observers = []
"""Called with a ``BackwardPass`` whose ``updates`` are complete, or that an exception ended."""

step_begins: _Observers = []
"""Called with a ``PreparedOptimizer`` before its step changes anything."""

gradients_used: _Observers = []
"""Called with a ``PreparedOptimizer`` that steps with the gradients of now."""

other_step: _Observers = []
"""Called with an optimizer that amp has not prepared, after its step, and with the versions of its
parameters from before, by ``id``."""

masters_read: _Observers = []
"""Called with a ``PreparedOptimizer`` whose masters a script reads, and the file of the script."""

model_used: _Observers = []
"""Called with the ``ModelState`` of a model that begins a forward pass, or whose method is read by
a frame, which comes second."""

forward_begins: _Observers = []
"""Called with a model, its ``ModelState``, its own forward, the caller's arguments, the cast ones,
and a stack that closes when the forward has returned."""

loading: _Observers = []
"""Called with the ``ModelState`` of a model that loads a state dict."""

converted: _Observers = []
"""Called with a model, and its tensors with their values before conversion."""
