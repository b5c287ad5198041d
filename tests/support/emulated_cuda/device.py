"""A CUDA device without a GPU, for a CPU build of torch: ``install()`` before torch is imported.

It registers, in the running process, what such a build lacks for the device type "cuda": a guard
with events and two devices, hooks, allocators, and a fallback for the dispatch key CUDA that runs
each operator on the CPU over the same memory. The keys above are the real ones: AutocastCUDA,
AutogradCUDA with its device threads, torch's choice of fused and foreach optimizers by device.
README.md says what a test on it proves, and what it cannot.
"""

import ctypes
import functools
import os
import sys

from tests.support.emulated_cuda import build

VARIABLE = "APEX_EMULATED_CUDA"
"""Set to 1, the root conftest.py installs the device."""
INSTALLED = os.environ.get(VARIABLE) == "1"


def install():
    """Makes ``torch.cuda`` work in this process, for good.

    Raises:
        Unavailable: If this machine cannot have the device.
        ImportError: If torch is imported already: it looks for the device's hooks once.
    """
    if "torch" in sys.modules:
        raise ImportError("The emulated CUDA device must be installed before torch is imported.")
    library()

    from tests.support.emulated_cuda import front

    front.replace(library())


@functools.cache
def library():
    path = build.library()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(build.torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    loaded.get_waits.restype = ctypes.c_char_p
    loaded.get_live_bytes.restype = loaded.get_peak_bytes.restype = ctypes.c_int64
    return loaded


def waits():
    """Returns what has made the host wait since the last call, in order."""
    seen = library().get_waits().decode().splitlines()
    library().clear_waits()
    return seen


def set_events_pass(value):
    """Sets whether events have passed when they are queried, as on a fast device."""
    library().set_events_pass(int(value))
