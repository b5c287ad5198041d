"""A CUDA device without a GPU, for a CPU build of torch: import this before torch.

Registers, in the running process, what such a build lacks for the device type "cuda": a guard with
events and two devices, hooks, allocators, and a fallback for the dispatch key CUDA that runs each
operator on the CPU over the same memory. The keys above are the real ones: AutocastCUDA,
AutogradCUDA with its device threads, torch's choice of fused and foreach optimizers by device.

What it proves:
- Copies that nobody waits for are read behind an event on the stream of the right device: what
  stands in pinned memory before is garbage (0x7f bytes).
- Nothing makes the host wait: as in ``torch.cuda.set_sync_debug_mode("error")``, which works.
- Tensors of different devices do not meet in one kernel, and the kernels that amp calls take what
  they are given: the fused optimizers' same layouts, no bf16 in the unscaling.
- Casts, gradients and steps have the CPU's numbers.

What it cannot: several streams of one device, races inside a kernel, CUDA graphs, sparse tensors,
cuDNN, NCCL, CUDA's RNNs, what only CUDA's kernels round or refuse, speed, memory.
"""

import ctypes
import sys

from tests.emulated_cuda import build


def _load():
    if "torch" in sys.modules:
        raise ImportError("tests.emulated_cuda.device must be imported before torch.")
    path = build.library()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(build.torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


# Before torch looks for hooks, which it does once.
_device = _load()
_device.get_waits.restype = ctypes.c_char_p

import torch  # noqa: E402


def waits():
    """Returns what has made the host wait since the last call, in order."""
    seen = _device.get_waits().decode().splitlines()
    _device.clear_waits()
    return seen


def set_events_pass(value):
    """Sets whether events have passed when they are queried, as on a fast device."""
    _device.set_events_pass(int(value))


def last_recorded_on():
    """Returns the index of the device on whose stream an event was recorded last."""
    return _device.get_last_recorded_on()


# -- what torch.cuda asks of a build with CUDA -----------------------------------------------------


# Python functions: those of ctypes have no hash, which dynamo wants of everything in torch.


def _get_device():
    return _device.get_device()


def _get_sync_debug_mode():
    return _device.get_sync_mode()


def _exchange_device(index):
    before = _device.get_device()
    if index >= 0:
        _device.set_device(index)
    return before


def _synchronize(device=None):
    index = None if device is None else torch.device(device).index
    _device.synchronize(-1 if index is None else index)


def _new_storage(cls, *args, **kwargs):
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        count = args[0] if args and isinstance(args[0], int) else 0
        return torch.empty(count, dtype=torch.uint8, device=device).untyped_storage()
    return _plain_new_storage(cls, *args, **kwargs)


class _Properties:
    name, major, minor, gcnArchName = "emulated CUDA", 9, 0, ""
    total_memory, multi_processor_count, warp_size = 1 << 34, 1, 32
    regs_per_multiprocessor, max_threads_per_multi_processor = 65536, 2048


_plain_new_storage = torch.UntypedStorage.__new__
torch.UntypedStorage.__new__ = _new_storage

for owner, functions in {
    torch._C: {
        "_cuda_getDevice": _get_device,
        "_cuda_setDevice": lambda index: _device.set_device(index) and None,
        "_cuda_get_sync_debug_mode": _get_sync_debug_mode,
        "_cuda_set_sync_debug_mode": lambda mode: _device.set_sync_mode(mode) and None,
    },
    torch.cuda: {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": _get_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "synchronize": _synchronize,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: torch.accelerator.current_stream(device),
        "get_device_name": lambda device=None: _Properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: _Properties,
        "_get_device_properties": lambda device=None: _Properties,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    },
}.items():
    for name, function in functions.items():
        setattr(owner, name, function)
torch.cuda._initialized = True
torch.cuda.default_generators = (torch.default_generator,) * 2
