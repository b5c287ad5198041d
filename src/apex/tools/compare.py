"""Trains, probes and times a target under every variant; a failing one does not stop the rest."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from apex.debug.rendering.formatting import counted
from apex.debug.suggestion import Suggestion, suggestion_for
from apex.tools import probing, training
from apex.tools.errors import TargetError, format_error, place_of
from apex.tools.load import current_load
from apex.tools.progress import Start
from apex.tools.recommend import recommendation
from apex.tools.results import Comparison, Result
from apex.tools.targets import Build, Experiment, open_target, seed_all
from apex.tools.timing import EMULATION_RATIO, slowdown, time_interleaved
from apex.tools.trainers import INITIAL_SCALE, Trainer, prepare
from apex.tools.training import State, States
from apex.tools.variants import BASELINE, Variant

FEW_STEPS = 20

LEAST_SPREAD = 1e-3
"""Difference of two equal passes in fp32 that is no rounding: fp16's rounding step."""


@dataclass(frozen=True)
class Options:
    """What to compare, and how long.

    Attributes:
        variants: In display order, the baseline first.
        steps: Training steps.
        emulated_steps: Training steps of a variant whose dtype the machine emulates; ``None`` to
            skip these variants.
        rounds: Timed steps of each variant.
        seed: Seed of all random numbers.
        device: Device to train on.
        suggest_fp32: Whether to search for modules to keep in fp32, and to train with them too.
    """

    variants: tuple[Variant, ...]
    steps: int
    emulated_steps: int | None
    rounds: int
    seed: int
    device: torch.device
    suggest_fp32: bool = False


def compare(target: str, options: Options, progress: Start) -> Comparison:
    """Trains ``target`` under each variant and returns the results.

    A failure under one variant is recorded in its result; the others continue.

    Raises:
        TargetError: If the target cannot be used under any variant.
    """
    with open_target(target, seed=options.seed) as build, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fp16 is emulated")  # the result says so
        run = _Run(build, options, progress)
        with closing(run.progress):
            run.train()
            if options.suggest_fp32:
                run.suggest()
            run.probe()
            run.time()
        run.note_slow_data()
    found = Comparison(
        target=target,
        machine=machine(options.device),
        steps=len(run.batches),
        seed=options.seed,
        results=tuple(run.results.values()),
        notes=tuple(run.notes),
        suggestions=tuple(run.suggestions),
        interleaved=run.interleaved,
        load=current_load(),
    )
    return replace(found, recommendation=recommendation(found))


def machine(device: torch.device) -> str:
    """Names the device and torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    if device.type != "cpu":
        return f"{device.type}, torch {torch.__version__}"
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}, torch {torch.__version__}"


class _Run:
    """One comparison in progress."""

    def __init__(self, build: Build, options: Options, progress: Start) -> None:
        """Draws the batches and checks which dtypes the machine emulates."""
        self.options = options
        self.notes: list[str] = []
        self.suggestions: list[Suggestion] = []
        self.interleaved = True
        self._draw_times: list[float] = []
        self._build = build
        first = build()
        self._loss_place = place_of(first.loss)
        self.batches = self._draw(first)
        self._start = training.snapshot(first.model)
        self._fp32_weights: States = {}
        dtypes = dict.fromkeys(variant.dtype for variant in options.variants)
        slowdowns = {dtype: _slowdown(dtype, options.device) for dtype in dtypes}
        self.results: dict[str, Result] = {}
        for variant in options.variants:
            ratio = slowdowns[variant.dtype]
            emulated = ratio is None or ratio > EMULATION_RATIO
            skipped = emulated and options.emulated_steps is None
            self.results[variant.name] = Result(variant, ratio, emulated, skipped=skipped)
        total = sum(
            (self._steps(result) + self._rounds(result) + 2) * (1 + self._may_suggest(result))
            for result in self.results.values()
            if not result.skipped
        )
        self.progress = progress(total=total)

    # -- the phases ----------------------------------------------------------------------

    def train(self) -> None:
        """Trains under each variant, one after another."""
        for name, result in list(self.results.items()):
            if not result.skipped:
                self.progress.set_description(f"train {name}" + " (emulated)" * result.emulated)
                with self._recording_errors(name, "training"):
                    self._train_one(name)

    def _train_one(self, name: str) -> None:
        result = self.results[name]
        experiment, trainer = self._fresh(result, self._start)
        record, weights = training.train(
            trainer,
            self.batches[: self._steps(result)],
            device=self.options.device,
            keep_at=[self._steps(other) for other in self.results.values()],
            on_step=self.progress.update,
        )
        if name == BASELINE:
            self._fp32_weights = weights
            self._note_unmoved(experiment.model)
        baseline = self.results[BASELINE].training or record
        record = training.with_distance(record, weights, baseline, self._fp32_weights)
        del weights  # only fp32's are needed later
        self._put(name, training=record)
        modes = [(module, module.training) for module in trainer.model.modules()]
        with self._recording_errors(name, "evaluating"):
            record = training.evaluated(record, trainer, experiment)
            self._put(name, training=record)
        with self._recording_errors(name, "measuring its peak"):
            for module, mode in modes:  # an evaluation may leave the model in another
                module.training = mode
            seed_all(self.options.seed)
            batch = self.batches[0]
            record = training.with_peak(record, trainer, batch, device=self.options.device)
            self._put(name, training=record)

    def suggest(self) -> None:
        """Searches for modules to keep in fp32 and trains with them, from fp32's final weights.

        The levels that take ``fp32_modules`` are searched; those that hold the model in fp32 need
        the user's own code.
        """
        for name in self._trained():
            if not self._may_suggest(self.results[name]):
                continue
            self.progress.set_description(f"suggest fp32 modules for {name}")
            try:
                found = self._suggestion(name)
            except Exception as error:  # noqa: BLE001 - the user's code, or what it cannot do twice
                self.notes.append(f"No fp32 modules searched for {name}: {format_error(error)}")
                continue
            self.suggestions.append(found)
            self.notes += [found.verdict, *found.notes]
            if found.modules:
                self._train_with(name, found.modules)

    def _may_suggest(self, result: Result) -> bool:
        variant = result.variant
        takes_names = variant.advised and not variant.fp32_weights
        return self.options.suggest_fp32 and takes_names and not result.emulated

    def _suggestion(self, name: str) -> Suggestion:
        experiment = self._build()
        experiment.model.load_state_dict(self._fp32_weights[len(self.batches)])
        experiment.model.to(self.options.device)
        batch = training.to_device(self.batches[0], self.options.device)
        seed_all(self.options.seed)
        return suggestion_for(
            experiment.model, lambda model: experiment.loss(model, batch), batch, name
        )

    def _train_with(self, level: str, modules: list[str]) -> None:
        """Trains at a level with modules in fp32; the result follows the level's."""
        before = self.results[level]
        variant = replace(
            before.variant,
            name=f"{level}-fp32",
            meaning=f"{level} with fp32_modules={modules}",
            options={"opt_level": level, "fp32_modules": modules},
        )
        results = list(self.results.values())
        results.insert(results.index(before) + 1, Result(variant, slowdown=before.slowdown))
        self.results = {result.name: result for result in results}
        self.progress.set_description(f"train {variant.name}")
        with self._recording_errors(variant.name, "training"):
            self._train_one(variant.name)

    def probe(self) -> None:
        """Runs one batch forward and backward under each variant, from fp32's final weights."""
        fp32: probing.Observation | None = None
        for name in self._trained():
            self.progress.set_description(f"probe {name}")
            with self._recording_errors(name, "probing"):
                seen = self._observed(self.results[name])
                if fp32 is None:
                    fp32 = seen
                    self._note_randomness(fp32)
                self._put(name, probe=probing.compare(self.results[name].variant, seen, fp32))
            self.progress.update()

    def _note_randomness(self, fp32: probing.Observation) -> None:
        """Adds a note if the same pass, from the same seed, gives another result."""
        spread = probing.spread(fp32, self._observed(self.results[BASELINE]))
        if spread > LEAST_SPREAD:
            self.notes.append(
                "The target is random beyond torch's, numpy's and Python's seeds: two equal passes "
                f"in fp32 differ by {spread:.2g} of their results, and so much of every distance "
                "from fp32 is no rounding. Seed its other generators when it is built."
            )

    def _note_unmoved(self, model: nn.Module) -> None:
        """Adds a note if training in fp32 left every parameter as it was."""
        end = self._fp32_weights[len(self.batches)]
        names = [name for name, _ in model.named_parameters() if name in end]
        if all(torch.equal(end[name], self._start[name]) for name in names):
            self.notes.append(
                "Training in fp32 changed no parameter, so the losses compare nothing. Check that "
                "the loss depends on the model and the learning rate is above 0."
            )

    def note_slow_data(self) -> None:
        """Adds a note if a batch takes longer to draw than a step in fp32."""
        timing, drawing = self.results[BASELINE].timing, 1e3 * median(self._draw_times)
        if timing is not None and drawing > timing.median:
            self.notes.append(
                f"Drawing a batch took {drawing:.3g} ms, longer than a step in fp32 "
                f"({timing.median:.3g} ms). The speeds do not include it: loading data limits this "
                "training, and a faster level gains little until that is faster, too."
            )

    def _observed(self, result: Result) -> probing.Observation:
        weights = self._fp32_weights[len(self.batches)]
        _, trainer = self._fresh(result, weights, settled=True)
        batch = training.to_device(self.batches[0], self.options.device)
        return probing.observe(trainer, batch, seed=self.options.seed)

    def time(self) -> None:
        """Times all trained variants interleaved, or one by one if memory is too small."""
        self.progress.set_description("time all, interleaved")
        try:
            self._time_together(self._trained())
            return
        except Exception as error:  # noqa: BLE001 - memory, or the user's code
            self.notes.append(f"Timed one after another, not interleaved: {format_error(error)}.")
            self.interleaved = False
        # Outside the handler, so that the exception no longer holds the memory.
        for name in self._trained():
            with self._recording_errors(name, "timing"):
                self._time_together([name])

    def _time_together(self, names: Sequence[str]) -> None:
        trainers = {
            name: self._fresh(self.results[name], self._start, settled=True)[1] for name in names
        }
        times = time_interleaved(
            trainers,
            training.to_device(self.batches[0], self.options.device),
            {name: self._rounds(self.results[name]) for name in names},
            device=self.options.device,
            on_step=self.progress.update,
        )
        for name, timing in times.items():
            self._put(name, timing=timing)

    # -- helpers of the phases -----------------------------------------------------------------

    def _fresh(
        self, result: Result, state: State, *, settled: bool = False
    ) -> tuple[Experiment, Trainer]:
        """Returns an experiment with weights ``state``, prepared under the result's variant.

        With ``settled``, the loss scale starts where training ended.
        """
        gc.collect()  # memory of the previous variant would count
        experiment = self._build()
        experiment.model.load_state_dict(state)
        last = result.training if settled else None
        scale = INITIAL_SCALE if last is None else last.loss_scales[-1]
        trainer = prepare(result.variant, experiment, self.options.device, loss_scale=scale)
        seed_all(self.options.seed)
        return experiment, trainer

    def _draw(self, experiment: Experiment) -> list[Any]:
        """Returns the batch of every step; adds a note if there are fewer."""
        batches: list[Any] = []
        endless = _cycle(experiment)
        try:
            while len(batches) < self.options.steps:
                start = time.perf_counter()
                batches.append(next(endless))
                self._draw_times.append(time.perf_counter() - start)
        except StopIteration:
            pass
        except Exception as error:
            raise TargetError(f"Drawing the batches failed: {format_error(error)}") from error
        if not batches:
            raise TargetError("The target gives no batches.")
        if len(batches) < self.options.steps:
            self.notes.append(
                f"The batches ran out after {len(batches)} of {self.options.steps} steps."
            )
        if len(batches) < FEW_STEPS:
            self.notes.append(
                f"{len(batches)} steps are too few to judge training; use more --steps."
            )
        return batches

    def _steps(self, result: Result) -> int:
        few = self.options.emulated_steps if result.emulated else None
        return len(self.batches) if few is None else min(few, len(self.batches))

    def _rounds(self, result: Result) -> int:
        return 1 if result.emulated else self.options.rounds

    def _trained(self) -> list[str]:
        return [name for name, result in self.results.items() if result.training is not None]

    def _put(self, name: str, **found: Any) -> None:
        self.results[name] = replace(self.results[name], **found)

    @contextmanager
    def _recording_errors(self, name: str, part: str) -> Iterator[None]:
        """Records an error of the block in the variant's result and suppresses it.

        If fp32 cannot be trained, that is the target's fault, and there is nothing to compare with.
        """
        try:
            yield
        except Exception as error:
            if (name, part) == (BASELINE, "training"):
                text = format_error(error, otherwise=self._loss_place)
                raise TargetError(f"Training in fp32 (O0) failed: {text}") from error
            errors = (*self.results[name].errors, f"{part} failed: {format_error(error)}")
            self._put(name, errors=errors)


def _slowdown(dtype: torch.dtype, device: torch.device) -> float | None:
    try:
        return slowdown(dtype, device)
    except RuntimeError:
        return None


def _cycle(experiment: Experiment) -> Iterator[Any]:
    """Yields the batches, starting over if they can be iterated again."""
    given = True
    while given:
        given = False
        for batch in experiment.batches:
            given = True
            yield batch
