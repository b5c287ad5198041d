"""The overhead of amp itself in instructions, which other load on a machine does not change.

The same iterations as :mod:`benchmarks.machinery`, counted by valgrind's cachegrind, which has to
be installed. Two runs of different lengths are subtracted, so that imports do not count.
"""

from __future__ import annotations

import gc
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

PEERS = {"O1": torch.float16, "O4": torch.bfloat16}
WARMUP, FEW, MANY = 45, 5, 25
"""Iterations: the first ones are inspected for mistakes."""


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
    os._exit(0)  # without the instructions of the end


def count(level: str, peer: str, iterations: int) -> int:
    """Returns the instructions of a process that runs some iterations."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    racer = [sys.executable, "-m", "benchmarks.instructions", level, peer, str(iterations)]
    done = subprocess.run(
        [*command, *racer],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if found is None:
        raise RuntimeError(f"cachegrind printed no count of instructions:\n{done.stderr}")
    return int(found[1].replace(",", ""))


def main() -> None:
    """Counts both racers at each level and prints the ratios; takes minutes."""
    if shutil.which("valgrind") is None:
        raise SystemExit(
            "This needs valgrind. `python -m benchmarks --only machinery` measures time."
        )
    runs = [(level, peer, n) for level in PEERS for peer in ("amp", "native") for n in (FEW, MANY)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = dict(zip(runs, pool.map(lambda run: count(*run), runs), strict=True))
    for level in PEERS:
        own, other = (
            (counts[level, peer, MANY] - counts[level, peer, FEW]) / (MANY - FEW)
            for peer in ("amp", "native")
        )
        print(f"{level}: {own / 1e6:.2f} M, native {other / 1e6:.2f} M, {own / other:.4f}x")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="fp16 is emulated")
    iterate(*sys.argv[1:]) if sys.argv[1:] else main()
