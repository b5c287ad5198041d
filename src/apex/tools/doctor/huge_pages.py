"""Whether huge memory pages make the training of large layers on this CPU faster.

A large layer's gradient is new memory in every step, which Linux hands out in pages of 4 KiB, one
page fault each. With huge pages the same memory takes a few faults. The settings are read when a
process starts, so each is measured in a process of its own, in turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from apex.tools.paired import Interval, paired_ratio

SETTINGS = {
    "THP_MEM_ALLOC_ENABLE": "1",  # of torch
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # of glibc 2.35 and later
}
LEAST_GAIN = 1.1
"""Least speed-up of the measured step that is worth a setting."""
ROUNDS = 6
WIDTH = 4096
"""Of the measured layer, whose gradient of 64 MiB no allocator keeps for the next step."""

_PROGRAM = """
import sys, time, torch
layer = torch.nn.Linear({width}, {width}, bias=False, device="meta").to_empty(device="cpu")
torch.nn.init.zeros_(layer.weight)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
batch = torch.randn(4, {width})
def step():
    start = time.perf_counter()
    layer(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start
step()
for line in sys.stdin:
    print(step(), flush=True)
"""


@dataclass(frozen=True)
class HugePages:
    """The gain of huge pages.

    Attributes:
        setting: The better environment setting, such as ``"THP_MEM_ALLOC_ENABLE=1"``.
        gain: Its speed relative to none, for a step of one large layer.
        worth_it: Whether it gains beyond the noise.
    """

    setting: str
    gain: Interval
    worth_it: bool

    def __str__(self) -> str:
        gain = f"{self.gain.median:.2g} times as fast"
        if not self.worth_it and self.gain.median < LEAST_GAIN:
            return f"Huge memory pages ({self.setting}) gain nothing here: {gain} at most."
        if not self.worth_it:
            return (
                f"Could not tell whether huge memory pages ({self.setting}) help: a step of a "
                f"large layer is {self.gain.low:.2g} to {self.gain.high:.2g} times as fast with "
                "them. Run again when the machine is idle."
            )
        return f"Set {self.setting} in the environment: a step of a large layer is {gain} with it."


def measure(*, rounds: int = ROUNDS, width: int = WIDTH) -> HugePages | None:
    """Measures each setting against none, in turns.

    Returns:
        The better setting; None where they do not apply (not Linux), one of them is set already,
        or a process failed.
    """
    if sys.platform != "linux" or any(name in os.environ for name in SETTINGS):
        return None
    settings = [{}, *({name: value} for name, value in SETTINGS.items())]
    try:
        plain, *others = _seconds(settings, rounds, width)
    except (OSError, ValueError):
        return None
    found = []
    for (name, value), times in zip(SETTINGS.items(), others, strict=True):
        gain = paired_ratio(plain, times)
        found.append(HugePages(f"{name}={value}", gain, gain.low >= LEAST_GAIN))
    return max(found, key=lambda each: each.gain.median)


def _seconds(settings: Sequence[dict[str, str]], rounds: int, width: int) -> list[list[float]]:
    """Returns the seconds of a step under each setting, one for each round."""
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(each, width)) for each in settings]
        times = [[_step(worker) for worker in workers] for _ in range(rounds)]
    return [list(column) for column in zip(*times, strict=True)]


def _step(worker: subprocess.Popen[str]) -> float:
    if worker.stdin is None or worker.stdout is None:
        raise ValueError("The process has no pipes.")
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def _worker(setting: dict[str, str], width: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(width=width)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **setting},
    )
