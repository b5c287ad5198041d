"""Compiles device.cpp against the installed torch: once, into the user's cache."""

import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
WRITTEN_FOR = "2.13."
"""Torch's C++ interface is not stable: on another release the device may not compile."""


class Unavailable(Exception):
    """This machine, or this torch, cannot have the device."""


def torch_folder():
    """Returns where torch is, without importing it."""
    return Path(importlib.util.find_spec("torch").origin).parent


def library():
    """Returns the path of the compiled device.

    Raises:
        Unavailable: Saying what is missing.
    """
    torch = torch_folder()
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("this torch is built for CUDA: its own device is in the way")
    if not (torch / "include" / "ATen" / "ATen.h").exists():
        raise Unavailable("torch's headers are not installed")
    version = (torch / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + bytes(torch)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apex-emulated-cuda"
    built = cache / f"device-{key}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "device.so"
            _compile(torch, made)
            made.replace(built)  # whole or not at all: several runs may build it at once
    return built


def _compile(torch, made):
    include, lib = torch / "include", torch / "lib"
    command = [
        "g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(made),
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{lib}",
        "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}", "-DAT_PER_OPERATOR_HEADERS",  # half the time
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable("there is no g++") from None
    except subprocess.CalledProcessError as error:
        version = (torch / "version.py").read_text()
        if f"__version__ = '{WRITTEN_FOR}" in version:
            raise
        raise Unavailable(f"g++ cannot compile it for this torch: {error.stderr[-300:]}") from None
