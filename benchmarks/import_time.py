"""The additional cost of ``import apex.amp`` after ``import torch``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measurement import Goal, Measurement, sampled

NAME = "import"

_PROGRAM = """
import gc, json, sys, time
import torch
gc.collect()  # of torch's objects, some 90 ms; otherwise it may run in the next import
before = set(sys.modules)
start = time.perf_counter()
import apex.amp
seconds = time.perf_counter() - start
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([seconds, sorted(roots - {"apex"} - sys.stdlib_module_names)]))
"""


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields the milliseconds, and the count of third-party packages that come along."""
    imported()  # compiles the bytecode that later imports load
    samples = [imported() for _ in range(3 if quick else 11)]
    times = [seconds * 1e3 for seconds, _ in samples]
    yield sampled(NAME, "import apex.amp", times, "ms", goal=Goal("<=", 50), digits=1)
    others = max(len(packages) for _, packages in samples)
    yield Measurement(NAME, "other packages", others, "packages", Goal("==", 0), digits=0)


def imported() -> tuple[float, list[str]]:
    """Returns seconds and the third-party packages of one import in a fresh process."""
    command = [sys.executable, "-c", _PROGRAM]
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds, packages = json.loads(process.stdout)
    return float(seconds), list(packages)
