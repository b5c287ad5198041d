"""Device values read on the host once they have arrived, never waited for."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

from torch import Tensor

from apex._torch.copies import HostCopy, capturing

Reading = tuple[float, ...]


class Readback:
    """A queue of small device tensors on their way to the host.

    ``send`` starts a copy and returns at once; ``poll`` returns what has arrived, oldest first. A
    tensor in host memory has arrived when it is sent.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._ready: list[Reading] = []
        self._in_flight: deque[HostCopy] = deque()

    def send(self, values: Tensor) -> bool:
        """Queues the present content of ``values``, a 1-d tensor; returns whether it did.

        Nothing is queued while a CUDA graph is captured: a replay has no host side.
        """
        return self.prepare(values)()

    def prepare(self, values: Tensor) -> Callable[[], bool]:
        """Returns what does as ``send`` later, and has the memory for it now."""
        if values.device.type == "cpu" and not self._in_flight:
            return functools.partial(self._read, values)
        if capturing(values.device):
            return lambda: False
        return functools.partial(self._start, HostCopy(values, start=False))

    def _read(self, values: Tensor) -> bool:
        # tolist() on host memory reads it in place: no kernel, nothing to wait for.
        self._ready.append(tuple(values.tolist()))
        return True

    def _start(self, copy: HostCopy) -> bool:
        self._in_flight.append(copy.start())
        return True

    def poll(self, *, wait: bool = False) -> list[Reading]:
        """Returns what has arrived since the last call, oldest first; all with ``wait``."""
        while self._in_flight and (wait or self._in_flight[0].arrived):
            self._ready.append(tuple(self._in_flight.popleft().wait().tolist()))
        if not self._ready:
            return []
        arrived, self._ready = self._ready, []
        return arrived
