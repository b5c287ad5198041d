"""Trains and times a target at every level; a failure at one does not stop the rest."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from apex._torch.devices import emulation
from apex.tools.compare import timing, training
from apex.tools.compare.results import BASELINE, Comparison, Level, Result
from apex.tools.compare.soundness import fault
from apex.tools.compare.target import Build, Experiment, open_target, seed_all
from apex.tools.compare.timing import current_load, time_interleaved
from apex.tools.compare.training import AutocastTrainer, Trainer
from apex.tools.compare.verdict import recommendation
from apex.tools.devices import describe
from apex.tools.errors import InputError
from apex.tools.failure import format_error


@dataclass(frozen=True)
class Options:
    """The extent of a comparison.

    Attributes:
        levels: In display order, the baseline first.
        steps: Training steps.
        rounds: Timed steps of each level.
        seed: Seed of all random numbers.
        device: Device to train on.
        patience: Most seconds that training at an emulated level may take; otherwise it is skipped.
    """

    levels: tuple[Level, ...]
    steps: int
    rounds: int
    seed: int
    device: torch.device
    patience: float


PATIENCE = 60.0
"""Most seconds that training takes at an emulated level that the user did not name."""


Tell = Callable[[str], object]
"""Shows a line of text."""


def compare(target: str, options: Options, stage: Tell) -> Comparison:
    """Trains ``target`` at each level and returns the results.

    A failure at one level is recorded in its result; the others continue.

    Args:
        target: As on the command line.
        options: The extent of the comparison.
        stage: Called with a line about each activity, and first about a busy machine.

    Raises:
        InputError: If the target cannot be used at any level.
    """
    with open_target(target, seed=options.seed) as build:
        run = _Run(build, options, stage)
        if run.load.busy:
            stage(
                f"this machine is busy ({run.load}). Training is judged anyway, but a verdict on "
                "speed needs an idle machine."
            )
        with timing.suited_threads(run.load):
            machine = f"{describe(options.device)}, torch {torch.__version__}"
            run.train()
            run.time()
    comparison = Comparison(
        target=target,
        machine=machine,
        steps=len(run.batches),
        seed=options.seed,
        results=tuple(run.results.values()),
        notes=tuple(run.notes),
        load=run.load,
    )
    return replace(comparison, recommendation=recommendation(comparison))


class _Run:
    """One comparison in progress."""

    def __init__(self, build: Build, options: Options, stage: Tell) -> None:
        """Draws the batches and checks which dtypes the CPU emulates."""
        self.notes: list[str] = []
        self.load = current_load()
        self._options = options
        self._build = build
        self._stage = stage
        self.batches = self._draw(build())
        self.results: dict[str, Result] = {}
        for level in options.levels:
            emulated = ""
            if options.device.type == "cpu":
                emulated = emulation(level.dtype)
            self.results[level.name] = Result(level, emulated)

    # -- the phases ----------------------------------------------------------------------

    def train(self) -> None:
        """Trains at each level, one after another."""
        for name in self.results:
            self._stage(f"train {name}")
            with self._recording_errors(name, "training"):
                self._train_one(name)

    def _train_one(self, name: str) -> None:
        emulated = self.results[name].emulated
        if emulated:
            seconds = self._seconds_to_train(name)
            if seconds > self._options.patience:
                why = f"{emulated}: --levels {name} trains it, in about {seconds:.0f} s"
                self._put(name, skipped=why)
                return
        trainer = self._prepared(name)
        record = training.train(trainer, self.batches)
        if name == BASELINE:
            self._note_unmoved(trainer.experiment.model)
        self._put(name, training=record)
        with self._recording_errors(name, "evaluating"):
            self._put(name, training=training.evaluated(record, trainer))

    def _seconds_to_train(self, name: str) -> float:
        """Returns the seconds of all steps on an idle CPU, estimated from the first step."""
        step = self._step(name)
        start = time.thread_time()  # not the time that other programs take
        step()
        return (time.thread_time() - start) * len(self.batches)

    def time(self) -> None:
        """Times the levels' alternating steps, unless no level trains as well as fp32."""
        trained = [result for result in self.results.values() if result.training is not None]
        timed = [result for result in trained if not result.emulated]
        baseline, *others = timed
        if all(fault(result, baseline) for result in others):
            return
        try:
            steps = {result.name: self._step(result.name) for result in timed}
            times_by_level = time_interleaved(steps, self._turns(), self._options.device)
            for name, times in times_by_level.items():
                self._put(name, times=times)
        except Exception as error:  # noqa: BLE001 - memory, or the user's code
            why = format_error(error).rstrip(".")
            self.notes.append(f"Timing failed: {why}. With fewer --levels it takes less memory.")

    def _turns(self) -> Iterator[None]:
        """Yields once to warm up, and once for each round until the machine is busy."""
        yield
        rounds = self._options.rounds
        for number in range(1, rounds + 1):
            self.load = current_load()
            if self.load.busy:
                return
            self._stage(f"time all, interleaved: round {number} of {rounds}")
            yield

    # -- notes -----------------------------------------------------------------------------

    def _note_unmoved(self, model: nn.Module) -> None:
        """Adds a note if training in fp32 changed no parameter."""
        untrained = self._build().model
        for after, before in zip(model.parameters(), untrained.parameters(), strict=True):
            if not torch.equal(after.cpu(), before):
                return
        self.notes.append(
            "Training in fp32 changed no parameter, so the losses compare nothing. Check that the "
            "loss depends on the model and the learning rate is above 0."
        )

    # -- helpers of the phases -----------------------------------------------------------------

    def _prepared(self, name: str) -> Trainer:
        """Returns a trainer at the named level, with the initial weights."""
        gc.collect()  # otherwise the previous level's memory counts
        level = self.results[name].level
        trainer = AutocastTrainer if level.autocast else Trainer
        prepared = trainer(level, self._build(), self._options.device)
        seed_all(self._options.seed)
        return prepared

    def _step(self, name: str) -> timing.Work:
        """Returns a function that trains at the named level on the first batch."""
        trainer = self._prepared(name)
        batch = training.to_device(self.batches[0], self._options.device)

        def step() -> None:
            trainer.backward(batch)
            trainer.step()

        return step

    def _draw(self, experiment: Experiment) -> list[Any]:
        """Returns the batch of every step; adds a note if there are fewer."""
        batches: list[Any] = []
        wanted = self._options.steps
        try:
            while len(batches) < wanted:
                drawn = len(batches)
                # An iterable that can be iterated again starts over.
                batches += itertools.islice(experiment.batches, wanted - drawn)
                if len(batches) == drawn:
                    break
        except Exception as error:
            raise InputError(f"Drawing the batches failed: {format_error(error)}") from error
        if not batches:
            raise InputError("The target gives no batches.")
        if len(batches) < wanted:
            self.notes.append(
                f"The batches ran out after {len(batches)} of {wanted} steps, as those of a "
                "generator do: a list or a DataLoader starts over."
            )
        return batches

    def _put(self, name: str, **parts: Any) -> None:
        self.results[name] = replace(self.results[name], **parts)

    @contextmanager
    def _recording_errors(self, name: str, part: str) -> Iterator[None]:
        """Records an error of the block in the level's result and suppresses it.

        An error of training in fp32 is raised, because there is nothing to compare with.
        """
        try:
            yield
        except Exception as error:
            if (name, part) == (BASELINE, "training"):
                raise InputError(f"Training in fp32 (O0) failed: {format_error(error)}") from error
            errors = (*self.results[name].errors, f"{part} failed: {format_error(error)}")
            self._put(name, errors=errors)
