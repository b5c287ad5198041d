"""Times several workloads in turns, each in a separate process.

Separate processes are needed because an amp session enables casts in its thread. It also registers
kernels for the whole process, which would affect native autocast. Turns are needed because the
machine's speed drifts: compared measurements lie within half a second.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

Work = Callable[[], object]
Builder = Callable[[], Work]
"""Picklable: a module-level function, or a ``functools.partial`` of one."""


@dataclass(frozen=True)
class Times:
    """Seconds per call of each racer, one sample per round, in the rounds' order."""

    samples: Mapping[str, Sequence[float]]

    def ratios(self, over: str, under: str) -> list[float]:
        """Returns time of ``over`` by time of ``under``, round by round."""
        pairs = zip(self.samples[over], self.samples[under], strict=True)
        return [a / b for a, b in pairs]

    def milliseconds(self, name: str) -> list[float]:
        """Returns the samples of ``name`` in ms."""
        return [seconds * 1e3 for seconds in self.samples[name]]


def race(
    racers: Mapping[str, Builder],
    *,
    rounds: int,
    calls: int,
    heats: int = 1,
    warmup: int = 3,
    threads: int = 0,
) -> Times:
    """Returns how long each racer's work takes.

    Args:
        racers: Functions that return the work, by name; called once per heat, in the racer's
            process.
        rounds: Turns of each racer in a heat; the order rotates.
        calls: Calls of the work per turn; a sample is the fastest of them, because other load on
            the machine only adds time.
        heats: How often to start over with fresh processes. The addresses of its memory can make a
            process some percent slower than its twin.
        warmup: Calls before the first round.
        threads: Of torch, per process; 0 for torch's default.
    """
    samples: dict[str, list[float]] = {name: [] for name in racers}
    for _ in range(heats):
        lanes = {name: _Lane(build, warmup, threads) for name, build in racers.items()}
        try:
            _run_heat(lanes, samples, rounds, calls)
        finally:
            for lane in lanes.values():
                lane.close()
    return Times(samples)


def _run_heat(
    lanes: Mapping[str, _Lane], samples: Mapping[str, list[float]], rounds: int, calls: int
) -> None:
    for lane in lanes.values():
        lane.receive()
    names = list(lanes)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(lanes[name].time(calls))


class _Lane:
    """One racer's process, and the pipe to it."""

    def __init__(self, build: Builder, warmup: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(far, build, warmup, threads), daemon=True
        )
        self._process.start()
        far.close()

    def time(self, calls: int) -> float:
        self._pipe.send(calls)
        return self.receive()

    def receive(self) -> float:
        """Returns the next answer; EOFError if the process died (its traceback is on stderr)."""
        return float(self._pipe.recv())

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, build: Builder, warmup: int, threads: int) -> None:
    warnings.filterwarnings("ignore", message=".* is emulated on this CPU")
    if threads:
        torch.set_num_threads(threads)
    work = build()
    pipe.send(_fastest(work, warmup))
    while True:
        try:
            calls = pipe.recv()
        except EOFError:
            return
        pipe.send(_fastest(work, calls))


def _fastest(work: Work, calls: int) -> float:
    return min(_seconds(work) for _ in range(calls))


def _seconds(work: Work) -> float:
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
