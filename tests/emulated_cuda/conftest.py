"""Keeps the device, and the checks that need it, out of a process that has not made it first."""

import sys

if "tests.emulated_cuda.device" not in sys.modules:
    collect_ignore_glob = ["device.py", "checks_*.py"]
