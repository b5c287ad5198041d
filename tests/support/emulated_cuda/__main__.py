"""Runs a module in a process that has the emulated device.

python -m tests.support.emulated_cuda MODULE [ARGUMENT ...]
"""

import os
import runpy
import sys

from tests.support.emulated_cuda import device

os.environ[device.VARIABLE] = "1"  # for pytest, if the module starts it
device.install()
_, module, *sys.argv[1:] = sys.argv
runpy.run_module(module, run_name="__main__", alter_sys=True)
