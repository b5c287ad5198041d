"""Copies between devices, each behind an event or waited for: the one place that decides.

Note [Copies]
Onto a device nothing is waited for: what reads the copy there is queued behind it. From pageable
host memory the driver has read the source when the call returns; pinned memory it reads later, when
the script may have written again, so a copy from there is waited for. Between two devices of one
kind torch orders the copy on the streams of both.

Onto the host there are two ways. :func:`moved` waits, for code that goes on with the tensor.
:class:`HostCopy` does not: torch copies into pinned memory in the background, and what stands there
before the event has passed is garbage. The event belongs on the stream of *the tensor's* device:
``Event.record()`` alone takes that of the device that is current in the thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``tensor`` on ``device``, safe to read there; itself where it is there already.

    Waits for a copy from a device to the host, and for one from pinned memory.
    """
    source = tensor.device
    if source == device:
        return tensor if dtype is None else tensor.to(dtype)
    if source.type == "cpu":
        background = not tensor.is_pinned()
    else:
        background = source.type == device.type
    # sync: onto the host, where the caller reads the result; and from pinned memory
    return tensor.to(device=device, dtype=dtype, non_blocking=background)


def record(device: torch.device, *, timing: bool = False) -> torch.Event:
    """Returns an event recorded on the current stream of ``device``, whichever is current here."""
    event = torch.Event(device, enable_timing=timing)
    event.record(torch.accelerator.current_stream(device))
    return event


class HostCopy:
    """A copy of a device tensor that is on its way to the host.

    A tensor in host memory is copied at once, and has arrived.
    """

    def __init__(self, tensor: Tensor, *, start: bool = True) -> None:
        """Starts the copy; does not wait.

        Args:
            tensor: What to copy.
            start: False to get the memory only, and leave the rest to :meth:`start`.
        """
        self._tensor = tensor.detach()
        self._event: torch.Event | None = None
        pinned = tensor.device.type != "cpu"
        self._host = torch.empty_like(self._tensor, device="cpu", pin_memory=pinned)
        if start:
            self.start()

    def start(self) -> HostCopy:
        """Starts the copy of what the tensor holds now; needs no memory. Returns itself."""
        device = self._tensor.device
        self._host.copy_(self._tensor, non_blocking=True)
        if device.type != "cpu":
            self._event = record(device)
        del self._tensor
        return self

    @property
    def arrived(self) -> bool:
        """Whether :meth:`wait` would return at once. False while its device captures a graph."""
        # Asking an event would break the capture.
        return self._event is None or (not capturing(self._event.device) and self._event.query())

    def wait(self) -> Tensor:
        """Returns the copy, in host memory, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()  # sync: the caller waits; returns at once if it has arrived
            self._event = None
        return self._host


def fetched(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns copies in host memory, having started all before it waits for the first."""
    return [copy.wait() for copy in [HostCopy(tensor) for tensor in tensors]]


def capturing(device: torch.device) -> bool:
    """Returns whether a CUDA graph is being captured on ``device``'s current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
