"""The day a GPU is there: tests, loops without a wait, CUDA graphs, ResNet-50 and BERT-base.

python -m benchmarks.gpu    (or: make gpu)

Takes under nine minutes on one card and writes DEVICE.json and DEVICE.md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.counting import refused_syncs
from benchmarks.graphs import difference_of_replays
from benchmarks.loops import Batch, Task, fused_adamw, native, plain, with_amp
from benchmarks.machine import machine
from benchmarks.networks import Bert, ResNet
from benchmarks.race import Work

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
LEVELS = ("O1", "O2", "O4", "O5")
SECONDS = 530
"""All of it; rows that do not fit any more are left out, and named."""
SECONDS_FOR_TESTS = 300
ROOMY = 20 * 2**30
"""Bytes of memory from which a card gets the larger batches."""
LOSSES = (1, 5, 10, 20)
"""Iterations whose loss is shown."""


@dataclass(frozen=True)
class Network:
    """One network of the table.

    Attributes:
        task: What to train.
        items: Images or sequences per iteration.
        unit: Their name.
    """

    task: Task
    items: int
    unit: str


@dataclass(frozen=True)
class Row:
    """One way to train a network.

    Attributes:
        mode: ``"fp32"``, torch's own mixed precision, or a level.
        rate: Items per second, the median over some turns; None where it failed.
        peak: MiB that the allocator had given out at most.
        losses: Of the iterations in LOSSES.
        error: What went wrong.
    """

    mode: str
    rate: float | None = None
    peak: float | None = None
    losses: Sequence[float] = ()
    error: str | None = None


@dataclass
class Findings:
    """Everything that one run found, as it is written."""

    machine: Mapping[str, object]
    date: str
    seconds: float = 0.0
    tests: str = "left out"
    checks: dict[str, str] = field(default_factory=dict)
    networks: dict[str, dict[str, object]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def modes() -> dict[str, Callable[[Task], Work]]:
    """Returns the ways to train: torch's own first, for sessions of amp change the process."""
    return {
        "fp32": plain,
        "autocast fp16 + GradScaler": partial(native, dtype=torch.float16),
        "autocast bf16": partial(native, dtype=torch.bfloat16),
        **{level: partial(with_amp, level=level) for level in LEVELS},
    }


def networks(*, tiny: bool) -> dict[str, Network]:
    """Returns what the table is about; ``tiny`` for a rehearsal without a GPU."""
    if tiny:
        small_resnet = partial(ResNet, depths=(1, 1), width=4, classes=10)
        small_bert = partial(Bert, layers=1, width=16, heads=2, vocabulary=50, positions=8)
        return {
            "ResNet-50": Network(Task(small_resnet, partial(images, 2, 32, 10), sgd), 2, "images"),
            "BERT-base": Network(
                Task(small_bert, partial(sentences, 2, 8, 50), fused_adamw), 2, "sequences"
            ),
        }
    count = 128 if torch.cuda.get_device_properties(0).total_memory > ROOMY else 32
    return {
        "ResNet-50": Network(Task(ResNet, partial(images, count, 224, 1000), sgd), count, "images"),
        "BERT-base": Network(
            Task(Bert, partial(sentences, count // 2, 128, 30522), fused_adamw),
            count // 2,
            "sequences",
        ),
    }


def images(count: int, size: int, classes: int) -> Batch:
    """Returns random images and labels."""
    return torch.randn(count, 3, size, size), torch.randint(classes, (count,))


def sentences(count: int, length: int, vocabulary: int) -> Batch:
    """Returns random tokens and one of two labels."""
    return torch.randint(vocabulary, (count, length)), torch.randint(2, (count,))


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns ResNet's optimizer."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)


# -- tests and checks ------------------------------------------------------------------------


def run_tests(paths: Sequence[Path], output: Path) -> tuple[str, bool]:
    """Runs tests, with all that pytest says in ``output``.

    Returns the tests that failed and pytest's last two lines (ours and its own), and whether all
    passed.
    """
    if importlib.util.find_spec("pytest") is None:
        return f"not run: pytest is not installed for {sys.executable}", False
    parallel = len(paths) > 4 and importlib.util.find_spec("xdist") is not None
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["--tb=short", *(["-n", "4"] if parallel else []), *map(str, paths)]
    with output.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                command, check=False, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                timeout=SECONDS_FOR_TESTS,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    lines = output.read_text(encoding="utf-8").strip().splitlines()
    over = [f"not through after {SECONDS_FOR_TESTS} s"] if code is None else lines[-2:]
    return "\n".join([*failures(lines), *over]), code == 0


def failures(lines: Sequence[str]) -> list[str]:
    """Returns the names of the tests that failed, from what ``pytest -v`` says as it goes."""
    pattern = re.compile(
        r"(?:\[gw\d+\] .*)?(?:FAILED|ERROR) (\S+\.py\S*)|(\S+\.py\S*) (?:FAILED|ERROR)"
    )
    found = (pattern.match(line) for line in lines)
    return list(dict.fromkeys(f"FAILED {m[1] or m[2]}" for m in found if m is not None))


def gpu_tests() -> list[Path]:
    """Returns the files with tests for a GPU: collecting all the others would take its time."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields what is checked beside the tests, each with a function that returns the finding."""
    for level in LEVELS:
        yield f"{level}: 20 iterations without a host sync", partial(loop_without_waits, level)
        yield f"{level}: a whole step in a CUDA graph", partial(replays, level)


def loop_without_waits(level: str) -> str:
    """Trains under ``set_sync_debug_mode("error")``."""
    network = networks(tiny=True)["BERT-base"]
    work = with_amp(network.task, level)
    for _ in range(2):
        work()
    with refused_syncs():
        for _ in range(20):
            work()
    return "ok"


def replays(level: str) -> str:
    """Compares a captured step, replayed, with the same steps run one by one."""
    difference = difference_of_replays(level)
    return "ok" if difference == 0.0 else f"differs from eager steps by {difference:.1e}"


# -- the table -------------------------------------------------------------------------------


def measured(network: Network, mode: str, build: Callable[[Task], Work], seconds: float) -> Row:
    """Trains for LOSSES, then for ``seconds``; amp's levels under an error at any host sync."""
    free()
    work = build(network.task)
    losses = [taken(work()) for _ in range(max(LOSSES))]
    with refused_syncs() if mode in LEVELS else nullcontext():
        torch.cuda.reset_peak_memory_stats()
        rates = list(turns(work, network.items, seconds))
    peak = torch.cuda.max_memory_allocated() / 2**20
    shown = [round(losses[number - 1].item(), 4) for number in LOSSES]
    return Row(mode, median(rates), peak, shown)


def turns(work: Work, items: int, seconds: float) -> Iterator[float]:
    """Yields items per second of turns of five iterations, at least three."""
    end = time.perf_counter() + seconds
    count = 0
    while count < 3 or time.perf_counter() < end:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        yield 5 * items / (time.perf_counter() - start)
        count += 1


def taken(loss: object) -> Tensor:
    """Returns the loss that an iteration gave."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"an iteration gave {type(loss).__name__}, not its loss")
    return loss


def free() -> None:
    """Ends the sessions of what ran before and empties the allocator's caches."""
    gc.collect()
    torch.cuda.empty_cache()


# -- putting it together -----------------------------------------------------------------------


def find(
    *, tiny: bool, tests: Sequence[Path], output: Path, log: Callable[[str], None]
) -> Findings:
    """Runs everything; what fails is noted, and the rest goes on."""
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    found = Findings(
        machine(), datetime.datetime.now(datetime.timezone.utc).isoformat("T", "minutes")
    )
    if tests:
        log("tests ...")
        found.tests, passed = run_tests(tests, output)
        found.failed += [] if passed else ["tests"]
        log(found.tests)
    for name, check in checks():
        free()
        try:
            found.checks[name] = check()
        except Exception as error:  # noqa: BLE001 - the others are still of interest
            found.checks[name] = described(error)
        found.failed += [] if found.checks[name] == "ok" else [name]
        log(f"{name}: {found.checks[name]}")
    for name, network in networks(tiny=tiny).items():
        rows = []
        for mode, build in modes().items():
            if time.perf_counter() - start > SECONDS - 30:
                row = Row(mode, error="left out: the time was over")
            else:
                row = attempted(network, mode, build, 0.1 if tiny else 5.0)
            found.failed += [] if row.error is None else [f"{name}, {mode}"]
            rows.append(row)
            log(f"{name}, {mode}: {row.rate or 0:.1f} {network.unit}/s {row.error or ''}")
        found.networks[name] = {"unit": network.unit, "rows": [asdict(row) for row in rows]}
        found.networks[name]["batch"] = network.items
    found.seconds = round(time.perf_counter() - start, 1)
    return found


def attempted(network: Network, mode: str, build: Callable[[Task], Work], seconds: float) -> Row:
    """Returns the row, or one that says why there is none."""
    try:
        return measured(network, mode, build, seconds)
    except Exception as error:  # noqa: BLE001 - the other rows are still of interest
        return Row(mode, error=described(error))


def described(error: Exception) -> str:
    """Returns an error and where it came from, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]} ({Path(frame.filename).name}:{frame.lineno})"


def markdown(found: Findings) -> str:
    """Returns the findings as a page."""
    about = ", ".join(f"{key} {value}" for key, value in found.machine.items())
    lines = [
        f"# {found.machine['device']}", "",
        f"Written by `make gpu` on {found.date}, in {found.seconds:.0f} s. {about}.", "",
        "## Tests", "", "```", found.tests, "```", "",
        "## Checks", "", "| check | finding |", "|---|---|",
        *(f"| {name} | {finding} |" for name, finding in found.checks.items()),
    ]  # fmt: skip
    shown = ", ".join(map(str, LOSSES))
    for name, network in found.networks.items():
        rows = [Row(**row) for row in network["rows"]]  # type: ignore[attr-defined]
        base = rows[0].rate
        lines += [
            "", f"## {name}, batches of {network['batch']}", "",
            f"| mode | {network['unit']}/s | of fp32's | peak MiB | loss at {shown} |",
            "|---|---|---|---|---|",
        ]  # fmt: skip
        for row in rows:
            if row.rate is None or row.peak is None:
                lines.append(f"| {row.mode} | {row.error} | | | |")
                continue
            ratio = f"{row.rate / base:.2f}x" if base else ""
            losses = ", ".join(f"{loss:.4f}" for loss in row.losses)
            lines.append(f"| {row.mode} | {row.rate:.1f} | {ratio} | {row.peak:.0f} | {losses} |")
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny networks: a rehearsal")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for both files")
    parser.add_argument(
        "--tests", type=Path, nargs="*", help="test files; default: all that have tests for a GPU"
    )
    return parser.parse_args()


def main() -> None:
    """Runs everything, prints the page and writes both files; exits with 1 if anything failed."""
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            f"make gpu needs a GPU and a torch built for it; torch {torch.__version__} of "
            f"{sys.executable} sees none. Name another interpreter with `make gpu PYTHON=...`; "
            "without a GPU, rehearse it with "
            "`python -m tests.support.emulated_cuda benchmarks.gpu --tiny`."
        )
    warnings.filterwarnings("ignore", message="fp16 is emulated")
    tests = gpu_tests() if args.tests is None else args.tests
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    args.results.mkdir(parents=True, exist_ok=True)
    output = args.results / f"{name}-tests.txt"
    log = partial(print, file=sys.stderr, flush=True)
    found = find(tiny=args.tiny, tests=tests, output=output, log=log)
    page = markdown(found)
    print(page)
    (args.results / f"{name}.json").write_text(json.dumps(asdict(found), indent=2) + "\n")
    (args.results / f"{name}.md").write_text(page)
    print(f"Written to {args.results / name}.json and .md in {found.seconds:.0f} s.")
    if found.failed:
        sys.exit(f"Failed: {'; '.join(found.failed)}.")


if __name__ == "__main__":
    main()
