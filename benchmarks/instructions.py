"""The overhead of amp itself in instructions, which other load on a machine does not change.

The same iterations as :mod:`benchmarks.machinery`, counted by valgrind's cachegrind, which has to
be installed. Two runs of different lengths are subtracted, so that imports do not count.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.loops import native, with_amp
from benchmarks.machinery import TASK

ROOT = Path(__file__).parents[1]
PEERS = {"O1": torch.float16, "O4": torch.bfloat16}
WARMUP = 45
"""Iterations before the counted ones; amp inspects the first blocks for mistakes."""
FEW = 5
MANY = 25


def iterate(level: str, peer: str, count: str) -> None:
    """Runs the iterations of one racer; for a process under cachegrind."""
    torch.set_num_threads(1)
    work = with_amp(TASK, level) if peer == "amp" else native(TASK, PEERS[level])
    for _ in range(WARMUP):
        work()
    gc.collect()
    gc.disable()
    for _ in range(int(count)):
        work()
    os._exit(0)  # skips the instructions of Python's shutdown


def count(level: str, peer: str, iterations: int) -> int:
    """Returns the instructions of a process that runs some iterations."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command += [sys.executable, "-m", "benchmarks.instructions", level, peer, str(iterations)]
    env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env)
    match = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if match is None:
        raise RuntimeError(f"cachegrind printed no count of instructions:\n{done.stderr}")
    return int(match[1].replace(",", ""))


def main() -> None:
    """Counts both racers at each level and prints the ratios; takes minutes."""
    if shutil.which("valgrind") is None:
        raise SystemExit(
            "This needs valgrind. `python -m benchmarks --only machinery` measures time."
        )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for level in PEERS:
            runs = itertools.product([level], ["amp", "native"], [FEW, MANY])
            few, many, native_few, native_many = pool.map(lambda run: count(*run), runs)
            millions = (many - few) / (MANY - FEW) / 1e6
            native_millions = (native_many - native_few) / (MANY - FEW) / 1e6
            ratio = millions / native_millions
            print(f"{level}: {millions:.2f} M, native {native_millions:.2f} M, {ratio:.4f}x")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="fp16 is emulated")
    if len(sys.argv) > 1:
        iterate(*sys.argv[1:])
    else:
        main()
