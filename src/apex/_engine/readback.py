"""Device flags read on the host once they have arrived, never waited for."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

Reading = tuple[float, ...]


class Arrivals:
    """A queue of small device tensors on their way to the host.

    ``send`` starts a copy and returns at once; ``poll`` gives what has arrived, oldest first. A
    tensor in host memory has arrived when it is sent.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._ready: list[Reading] = []
        self._travelling: deque[tuple[Tensor, torch.Event]] = deque()

    def send(self, values: Tensor) -> bool:
        """Queues the present content of ``values``, a 1-d tensor; returns whether it did.

        Nothing is queued while a CUDA graph is captured: a replay has no host side.
        """
        if values.device.type == "cpu":
            # tolist() on host memory reads it in place: no kernel, nothing to wait for.
            self._ready.append(tuple(values.tolist()))
            return True
        if _capturing(values.device):
            return False
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.Event(values.device)
        event.record()
        self._travelling.append((host, event))
        return True

    def poll(self, *, wait: bool = False) -> list[Reading]:
        """Returns what has arrived since the last call, oldest first; all with ``wait``."""
        while self._travelling and (wait or _arrived(self._travelling[0][1])):
            if wait:
                self._travelling[0][1].synchronize()  # sync: the caller asked to wait
            self._ready.append(tuple(self._travelling.popleft()[0].tolist()))
        if not self._ready:
            return []
        arrived, self._ready = self._ready, []
        return arrived


def _arrived(event: torch.Event) -> bool:
    # Asking an event would break a capture that is under way.
    return not _capturing(event.device) and event.query()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
