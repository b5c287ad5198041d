"""The overhead of amp itself in instructions, which other load on a machine does not change.

The same iterations as :mod:`benchmarks.machinery`, counted by valgrind's cachegrind, which has to
be installed. One process imports everything and forks one for each racer. That one forks again
before the counted iterations; cachegrind's counts of the two are subtracted.

    python -m benchmarks.instructions               # all rows, some ten minutes
    python -m benchmarks.instructions O2 O5         # the rows of these levels
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.loops import native, with_amp
from benchmarks.machine import machine
from benchmarks.machinery import (
    HOST_TIME,
    TASK,
    TENSORS,
    around_a_native_pass,
    around_a_pass,
)
from benchmarks.measurement import Goal, Measurement, table, verdict
from benchmarks.race import Work

NAME = "instructions"
ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cpu_instructions.json"
DTYPES = {"O1": torch.float16, "O4": torch.bfloat16}
"""Levels whose whole iteration is compared with autocast's in the same dtype."""

PEERS = ("amp", "native")

WHOLE = "whole"
HOST = "host"
"""The iteration of many tiny layers, and the one without kernels."""

WARMUP = 48
"""Iterations before the counted ones; amp inspects the first blocks for mistakes."""

COUNTED = 10

Racer = tuple[str, str, str]
"""An iteration, ``WHOLE`` or ``HOST``; a level; and ``"amp"`` or its ``"native"`` peer."""


def work_of(racer: Racer) -> Work:
    """Returns the iteration of a racer."""
    iteration, level, peer = racer
    if iteration == HOST:
        return around_a_pass(level) if peer == "amp" else around_a_native_pass()
    return with_amp(TASK, level) if peer == "amp" else native(TASK, DTYPES[level])


def racers(levels: Sequence[str]) -> list[Racer]:
    """Returns all racers of the rows of these levels."""
    host = [(HOST, levels[0], "native"), *((HOST, level, "amp") for level in levels)]
    whole = [(WHOLE, level, peer) for level in levels if level in DTYPES for peer in PEERS]
    return host + whole


def run(levels: Sequence[str]) -> None:
    """Runs the racers; for a process under cachegrind.

    Prints a line for each: its index, and the processes that end before and after its iterations.
    """
    torch.set_num_threads(1)
    for index, racer in enumerate(racers(levels)):
        process = os.fork()
        if process == 0:
            _race(index, racer)
        os.waitpid(process, 0)
    os._exit(0)  # skips the instructions of Python's shutdown


def _race(index: int, racer: Racer) -> NoReturn:
    work = work_of(racer)
    for _ in range(WARMUP):
        work()
    gc.collect()
    gc.disable()
    before = os.fork()
    if before == 0:
        os._exit(0)
    os.waitpid(before, 0)
    for _ in range(COUNTED):
        work()
    print(index, before, os.getpid(), flush=True)
    os._exit(0)


def millions(levels: Sequence[str]) -> dict[Racer, float]:
    """Returns the instructions of one iteration of each racer, in millions."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command += [sys.executable, "-m", "benchmarks.instructions", "--run", *levels]
    env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env)
    counts: dict[str, int] = {}
    for process, count in re.findall(r"==(\d+)== I\s+refs:\s+([\d,]+)", done.stderr):
        counts[process] = int(count.replace(",", ""))
    figures: dict[Racer, float] = {}
    for line in done.stdout.splitlines():
        index, before, after = line.split()
        counted = counts[after] - counts[before]
        figures[racers(levels)[int(index)]] = counted / COUNTED / 1e6
    if len(figures) != len(racers(levels)):
        raise RuntimeError(f"A racer failed under cachegrind:\n{done.stderr}")
    return figures


def measure(levels: Sequence[str]) -> list[Measurement]:
    """Returns the counts of these levels, and their ratios to those of their peers."""
    counts = millions(levels)
    figures: list[Measurement] = []
    for level in levels:
        if level in DTYPES:
            peer = "autocast + GradScaler" if level == "O1" else "autocast"
            ours = counts[WHOLE, level, "amp"]
            theirs = counts[WHOLE, level, "native"]
            figures.append(Measurement(NAME, level, ours, "M"))
            figures.append(Measurement(NAME, f"{peer}, as {level}", theirs, "M"))
            figures.append(Measurement(NAME, f"{level} / {peer}", ours / theirs, "x"))
    case = f"{TENSORS} tensors without kernels"
    peer = "GradScaler, fused AdamW"
    theirs = counts[HOST, levels[0], "native"]
    figures.append(Measurement(NAME, f"{case}, {peer}", theirs, "M"))
    for level in levels:
        ours = counts[HOST, level, "amp"]
        goal = Goal("<=", HOST_TIME[level])
        figures.append(Measurement(NAME, f"{case}, {level}", ours, "M"))
        figures.append(Measurement(NAME, f"{case}, {level} / {peer}", ours / theirs, "x", goal))
    return figures


def main(levels: Sequence[str]) -> None:
    """Counts both racers of each row, prints the table and writes it as JSON."""
    if shutil.which("valgrind") is None:
        raise SystemExit(
            "This needs valgrind. `python -m benchmarks --only machinery` measures time."
        )
    figures = measure(levels)
    print(table(figures))
    print(verdict(figures))
    data = {"machine": machine(), "levels": levels, "figures": [m.as_json() for m in figures]}
    RESULT.write_text(json.dumps(data, indent=2) + "\n")
    print(f"Written to {RESULT}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".* is emulated on this CPU")
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        main(sys.argv[1:] or [*HOST_TIME])
