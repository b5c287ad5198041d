"""Copies between devices: the only place that decides which ones wait.

Note [Copies]
Copies to a device do not wait, as their readers are queued behind them. From pageable host memory,
the driver has read the source when the call returns. It reads pinned memory later, when the script
may already have overwritten it, so copies from pinned memory wait. Between two devices of the same
type, torch orders the copy on the streams of both.

Copies to the host have two forms. :func:`moved` waits, for code that uses the tensor next.
:class:`HostCopy` does not: torch copies into pinned memory in the background, and the content is
undefined until an event has passed. The event must be on the stream of *the tensor's* device;
``Event.record()`` without a stream uses the thread's current device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``tensor`` on ``device``, safe to read there; itself if it is there already.

    Waits for copies from a device to the host, and for copies from pinned memory.
    """
    source = tensor.device
    if source == device:
        return tensor if dtype is None else tensor.to(dtype)
    if source.type == "cpu":
        background = not tensor.is_pinned()
    else:
        background = source.type == device.type
    # sync: to the host, where the caller reads the result; and from pinned memory
    return tensor.to(device=device, dtype=dtype, non_blocking=background)


def as_tensor(value: float | Tensor, device: torch.device) -> Tensor:
    """Returns a number or a one-element tensor as 0-d fp32 on ``device``.

    Waits only where :func:`moved` does.
    """
    if isinstance(value, Tensor):
        return moved(value, device, torch.float32).reshape(())
    # torch.as_tensor would copy from the host and wait for the copy.
    return torch.full((), value, dtype=torch.float32, device=device)


def as_scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """Returns a host number unchanged, a one-element tensor as 0-d on ``device``."""
    return moved(value, device).reshape(()) if isinstance(value, Tensor) else value


class HostCopy:
    """An asynchronous copy of a device tensor's present values to the host.

    Tensors in host memory are copied immediately.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Begins the copy, without waiting."""
        on_device = not tensor.is_cpu
        self._host = torch.empty_like(tensor.detach(), device="cpu", pin_memory=on_device)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._event: torch.Event | None = None
        if on_device:
            self._event = torch.Event(tensor.device)
            self._event.record(torch.accelerator.current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        """Whether :meth:`wait` would return immediately; False during CUDA graph capture."""
        if self._event is None:
            return True
        # Querying an event would break the capture.
        return not capturing(self._event.device) and self._event.query()

    def wait(self) -> Tensor:
        """Waits for the copy and returns it."""
        if self._event is not None:
            self._event.synchronize()  # sync: the caller waits; returns at once if it has arrived
            self._event = None
        return self._host


def capturing(device: torch.device) -> bool:
    """Returns whether ``device`` is CUDA and the thread's current stream captures a graph."""
    # The CPU first, as the type is a string that takes 0.5 us to make.
    is_cuda = device != _CPU and device.type == "cuda"
    return is_cuda and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> object:
    """Returns the thread's current stream of CUDA or XPU; None of other devices."""
    has_streams = device != _CPU and device.type in ("cuda", "xpu")
    if not (has_streams and torch.accelerator.is_available()):
        return None
    return torch.accelerator.current_stream(device)


def is_readable(tensor: Tensor) -> bool:
    """Returns whether plain operators read the values of ``tensor``.

    Not those of tensors that are sparse, on the meta device, fake, wrapped by torch.func, or of
    another class that runs operators in its own way, such as quantized weights.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or is_wrapped(tensor):
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_wrapped(tensor: Tensor) -> bool:
    """Returns whether a transform of torch.func wraps ``tensor``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
