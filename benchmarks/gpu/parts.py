"""The parts of a run: their time limits, and their checks by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu import correctness, figures, training
from benchmarks.gpu.records import Records

Check = tuple[str, Callable[[], object]]


@dataclass(frozen=True)
class Part:
    """One part of a run.

    Attributes:
        name: Its name on the command line and in the records.
        about: A sentence for the page.
        checks: Yields the checks; tiny ones for a rehearsal. Also takes the results so far.
        seconds: Time limit of the part, over all calls.
        seconds_per_check: Time limit of a check.
        alone: Whether each check runs in its own process. Sessions of amp register kernels, which
            change later measurements.
        only_rehearsed: Whether a run on a real GPU skips it.
    """

    name: str
    about: str
    checks: Callable[[bool, Records], Iterator[Check]]
    seconds: float
    seconds_per_check: float = 60.0
    alone: bool = False
    only_rehearsed: bool = False


def _networks() -> Iterator[Part]:
    """Yields the parts that train, the most telling first."""
    about = "Milliseconds of an iteration, beside autocast; as a graph, the host does nothing."
    for name in training.NETWORKS:
        yield Part(name, about, partial(training.eager, name), 150, 60)
    about = "The longest kernels of an iteration: milliseconds, launches, name."
    name = "BERT-large"
    yield Part(f"{name}, kernels", about, partial(training.kernels, name), 90, 30)
    about = "The same with each layer compiled by `torch.compile`."
    for name in training.NETWORKS:
        yield Part(f"{name}, compiled", about, partial(training.compiled, name), 300, 120)


_ALL = (
    Part("facts", "What torch and the card do.", correctness.facts, 60, 30),
    Part("tests", "The tests marked gpu.", correctness.tests, 400, 390),
    *_networks(),
    Part("blocks", "Steps at O5 by the size of a block.", figures.blocks, 200, 30),
    Part("launches", "Kernels and bytes of an iteration.", figures.launch_checks, 150, 40),
    Part("memory", "Bytes per parameter at the peak.", figures.memory, 120, 40, alone=True),
    Part("waits", "Twenty iterations without a host sync.", correctness.waits, 40, 20),
    Part("moved", "A model that moves after `initialize`.", correctness.moved, 60, 20),
    Part("graphs", "The greatest difference from eager masters.", correctness.graphs, 90, 20),
    Part("nccl", "Sums of weights after five steps: alike in a row.", correctness.nccl, 150, 30),
    Part("compile", "Losses, and milliseconds.", correctness.compiled, 300, 60),
    Part("sanitizer", "What compute-sanitizer says.", correctness.sanitizer, 130, 120),
    Part("faults", "One crashes, one hangs.", correctness.faults, 60, 4, only_rehearsed=True),
)
PARTS = {part.name: part for part in _ALL}
