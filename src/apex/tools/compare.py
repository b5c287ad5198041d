"""Trains, probes and times a target under every variant, and finishes when some of them fail."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from apex.tools import probing, training
from apex.tools.emulation import EMULATION_RATIO, slowdown
from apex.tools.errors import said
from apex.tools.progress import Progress
from apex.tools.recommend import recommendation
from apex.tools.results import Comparison, Result
from apex.tools.seeds import seed_all
from apex.tools.targets import Build, Experiment, TargetError, opened
from apex.tools.timing import time_in_turns
from apex.tools.trainers import INITIAL_SCALE, Trainer, prepare
from apex.tools.training import State, Track
from apex.tools.variants import BASELINE, Variant

FEW_STEPS = 20

WIDE_SPREAD = 0.3
"""Times whose middle half is wider than this share of their median are those of a busy machine."""


@dataclass(frozen=True)
class Options:
    """What to compare, and how long.

    Attributes:
        variants: In the order to show, the baseline first.
        steps: Training steps.
        emulated_steps: Training steps of a variant whose dtype the machine emulates.
        rounds: Timed steps of each variant.
        seed: Of all random numbers.
        device: Where to train.
    """

    variants: tuple[Variant, ...]
    steps: int
    emulated_steps: int
    rounds: int
    seed: int
    device: torch.device


def compare(target: str, options: Options, progress: Progress) -> Comparison:
    """Returns what training ``target`` under each variant shows.

    What fails under one variant is written into its result, and the others go on.

    Raises:
        TargetError: If the target cannot be used at all.
    """
    with opened(target, seed=options.seed) as build, _quiet():
        run = _Run(build, options, progress)
        run.train()
        run.probe()
        run.time()
    found = Comparison(
        target=target,
        machine=machine(options.device),
        steps=len(run.batches),
        seed=options.seed,
        results=tuple(run.results.values()),
        notes=(*run.notes, *_timing_notes(run.results[BASELINE])),
    )
    return replace(found, recommendation=recommendation(found))


def machine(device: torch.device) -> str:
    """Names the device and torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    if device.type != "cpu":
        return f"{device.type}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


class _Run:
    """One comparison under way."""

    def __init__(self, build: Build, options: Options, progress: Progress) -> None:
        """Draws the batches and looks at the machine."""
        self.options, self.progress = options, progress
        self.notes: list[str] = []
        if options.device.type != "cuda":
            self.notes.append(
                f"Peak memory is not measured on {options.device.type}; what is stored and what "
                "autograd keeps is."
            )
        self._build = build
        first = build()
        self.batches = self._draw(first)
        self._start: State = {
            name: value.detach().to("cpu", copy=True)
            for name, value in first.model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        self._tracks: dict[str, Track] = {}
        self._slowdowns: dict[torch.dtype, float | None] = {}
        self.results = {variant.name: self._looked_at(variant) for variant in options.variants}
        total = sum(self._steps(r) + self._rounds(r) + 2 for r in self.results.values())
        progress.start(total)

    # -- the three parts ---------------------------------------------------------------------

    def train(self) -> None:
        """Trains under each variant, one after another."""
        for name, result in self.results.items():
            self.progress.describe(f"train {name}" + (" (emulated)" if result.emulated else ""))
            with self._noted(name, "training"):
                self._train_one(name, result)

    def _train_one(self, name: str, result: Result) -> None:
        experiment, trainer = self._fresh(result, self._start)
        record, self._tracks[name] = training.train(
            trainer,
            self.batches[: self._steps(result)],
            device=self.options.device,
            keep_at=[self._steps(other) for other in self.results.values()],
            on_step=self.progress.step,
        )
        if BASELINE in self._tracks:
            record = training.with_distance(record, self._tracks[name], self._tracks[BASELINE])
        self._put(name, training=record)
        if name != BASELINE:
            del self._tracks[name]  # only what the others are compared with is kept
        with self._noted(name, "evaluating"):
            self._put(name, training=training.evaluated(record, trainer, experiment))

    def probe(self) -> None:
        """Passes one batch forward and backward under each variant, from fp32's last weights."""
        if BASELINE not in self._tracks:
            return
        fp32: probing.Seen | None = None
        for name in self._trained():
            self.progress.describe(f"probe {name}")
            with self._noted(name, "probing"):
                seen = self._observed(self.results[name])
                fp32 = fp32 or seen
                self._put(name, probe=probing.compare(self.results[name].variant, seen, fp32))
            self.progress.step()

    def _observed(self, result: Result) -> probing.Seen:
        weights = self._tracks[BASELINE].weights[len(self.batches)]
        _, trainer = self._fresh(result, weights, settled=True)
        batch = training.placed(self.batches[0], self.options.device)
        return probing.observe(trainer, batch, seed=self.options.seed)

    def time(self) -> None:
        """Times all that trained, in turns; one by one where they do not fit side by side."""
        self.progress.describe("time all in turns")
        try:
            self._time_together(self._trained())
            return
        except Exception as error:  # noqa: BLE001 - memory, or the user's code
            self.notes.append(f"Timed one after another, not in turns: {said(error)}.")
        # After the block: the exception has let go of what did not fit.
        for name in self._trained():
            with self._noted(name, "timing"):
                self._time_together([name])

    def _time_together(self, names: Sequence[str]) -> None:
        trainers = {
            name: self._fresh(self.results[name], self._start, settled=True)[1] for name in names
        }
        times = time_in_turns(
            trainers,
            training.placed(self.batches[0], self.options.device),
            {name: self._rounds(self.results[name]) for name in names},
            device=self.options.device,
            on_step=self.progress.step,
        )
        for name, timing in times.items():
            self._put(name, timing=timing)

    # -- their parts -------------------------------------------------------------------------

    def _fresh(
        self, result: Result, state: State, *, settled: bool = False
    ) -> tuple[Experiment, Trainer]:
        """Returns an experiment that holds ``state``, prepared under the result's variant.

        With ``settled`` the loss scale is the one that the training ended with.
        """
        gc.collect()  # the variant before must be gone: its memory would count
        experiment = self._build()
        experiment.model.load_state_dict(state)
        last = result.training if settled else None
        scale = INITIAL_SCALE if last is None else last.loss_scales[-1]
        trainer = prepare(result.variant, experiment, self.options.device, loss_scale=scale)
        seed_all(self.options.seed)
        return experiment, trainer

    def _draw(self, experiment: Experiment) -> list[Any]:
        """Returns the batch of every step; notes where there are fewer."""
        try:
            batches = list(itertools.islice(_again_and_again(experiment), self.options.steps))
        except Exception as error:
            raise TargetError(f"Drawing the batches failed: {said(error)}") from error
        if not batches:
            raise TargetError("The batches are empty: there is nothing to train on.")
        if len(batches) < self.options.steps:
            self.notes.append(
                f"The batches ran out: {len(batches)} of {self.options.steps} steps were trained."
            )
        if len(batches) < FEW_STEPS:
            self.notes.append(f"{len(batches)} steps say little about training; try more.")
        return batches

    def _looked_at(self, variant: Variant) -> Result:
        dtype = variant.dtype
        if dtype not in self._slowdowns:
            try:
                self._slowdowns[dtype] = slowdown(dtype, self.options.device)
            except RuntimeError:
                self._slowdowns[dtype] = None
        ratio = self._slowdowns[dtype]
        return Result(variant, slowdown=ratio, emulated=ratio is None or ratio > EMULATION_RATIO)

    def _steps(self, result: Result) -> int:
        few = self.options.emulated_steps if result.emulated else len(self.batches)
        return min(few, len(self.batches))

    def _rounds(self, result: Result) -> int:
        return 1 if result.emulated else self.options.rounds

    def _trained(self) -> list[str]:
        return [name for name, result in self.results.items() if result.training is not None]

    def _put(self, name: str, **found: Any) -> None:
        self.results[name] = replace(self.results[name], **found)

    @contextmanager
    def _noted(self, name: str, part: str) -> Iterator[None]:
        """Writes an error of the block into the variant's result, and goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's code, or what this machine lacks
            errors = (*self.results[name].errors, f"{part} failed: {said(error)}")
            self._put(name, errors=errors)


def _timing_notes(base: Result) -> Iterator[str]:
    timing = base.timing
    if timing is not None and timing.high - timing.low > WIDE_SPREAD * timing.median:
        yield (
            f"The machine was busy: the middle half of fp32's steps took {timing.low:.3g} to "
            f"{timing.high:.3g} ms. Times of a quiet machine, or more --rounds, say more."
        )


def _again_and_again(experiment: Experiment) -> Iterator[Any]:
    """Yields the batches, and again from the first where they can be gone through again."""
    once: Callable[[], Iterator[Any]] = lambda: iter(experiment.batches)  # noqa: E731
    while True:
        count = 0
        for batch in once():
            count += 1
            yield batch
        if not count:
            return


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out warnings of what the result says itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fp16 is emulated")
        yield
