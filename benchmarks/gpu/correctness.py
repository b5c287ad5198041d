"""Parts that check: facts of the machine, tests, graphs, moved models, NCCL, compilers."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp, parallel
from apex._torch import foreach
from benchmarks.counting import refused_syncs
from benchmarks.gpu.records import Records
from benchmarks.gpu.timing import timed
from benchmarks.graphs import CAPTURED, difference_of_replays
from benchmarks.loops import Task, fused_adamw, with_amp
from benchmarks.networks import Bert

ROOT = Path(__file__).parents[2]
LEVELS = ("O1", "O2", "O4", "O5")
Checks = Iterator[tuple[str, Callable[[], object]]]


# -- facts of the machine ----------------------------------------------------------------------


def facts(tiny: bool, records: Records) -> Checks:
    """Yields what torch's kernels do on this card where its releases differ."""
    yield "fused kernels", fused_kernels
    yield "_foreach_copy_ into fp16 and fp32 (wrong before torch 2.11)", mixed_copy
    yield "check and unscale of bf16", bf16_unscale
    yield "autocast's dtype in a device thread", dtype_in_backward


def fused_kernels() -> dict[str, bool]:
    """Returns which fused optimizers the device has."""
    names = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    device = torch.device("cuda")
    return {name: foreach.fused_kernel(name, device) is not None for name in names}


def mixed_copy() -> str:
    """Copies into targets of two dtypes in one call."""
    in_fp16 = torch.zeros(8, device="cuda", dtype=torch.float16)
    in_fp32 = torch.zeros(8, device="cuda")
    threes = torch.full((8,), 3.0, device="cuda")
    fives = torch.full((8,), 5.0, device="cuda")
    torch._foreach_copy_([in_fp16, in_fp32], [threes, fives])
    if in_fp16.equal(threes.half()) and in_fp32.equal(fives):
        return "right"
    return f"wrong: {in_fp16.tolist()} and {in_fp32.tolist()}"


def bf16_unscale() -> str:
    """Unscales a bf16 gradient with torch's kernel."""
    grad = torch.ones(4, device="cuda", dtype=torch.bfloat16)
    found_inf = torch.zeros((), device="cuda")
    inverse_scale = torch.ones((), device="cuda")
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, inverse_scale)
    except NotImplementedError:
        return "no kernel"
    return "accepted"


class _NotesDtype(torch.autograd.Function):
    seen: str = ""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        _NotesDtype.seen = str(torch.get_autocast_dtype("cuda"))
        return grad


def dtype_in_backward() -> str:
    """Returns autocast's dtype as a backward pass sees it."""
    inputs = torch.ones(2, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        _NotesDtype.apply(inputs).sum().backward()
    return _NotesDtype.seen


# -- tests -------------------------------------------------------------------------------------


def tests(tiny: bool, records: Records) -> Checks:
    """Yields one run of all files with tests for a GPU; its output lies beside the records."""
    if not _has("pytest"):
        return
    files = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        is_marked = "mark.gpu" in path.read_text(encoding="utf-8")
        is_wanted = not tiny or path.name == "test_copies.py"
        if is_marked and is_wanted:
            files.append(str(path.relative_to(ROOT)))
    output = records.path.with_name(f"{records.path.stem}-tests.txt")
    yield f"{len(files)} files", partial(run_tests, files, output)


def run_tests(files: list[str], output: Path) -> str:
    """Returns pytest's closing line; raises with the tests that failed.

    Where pytest-xdist is installed, half of the cores run tests.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--tb=short", "--durations=10"]
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    if _has("xdist"):
        command += ["-n", str(max(1, min(8, (os.cpu_count() or 2) // 2)))]
    if _has("pytest_timeout"):
        command.append("--timeout=100")
    with output.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [*command, *files], check=False, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    lines = output.read_text(encoding="utf-8").strip().splitlines() or ["pytest wrote nothing"]
    summary = lines[-1].strip("= ")
    if done.returncode:
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("; ".join([summary, *failures]))
    return summary


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# -- loops -------------------------------------------------------------------------------------


def waits(tiny: bool, records: Records) -> Checks:
    """Yields each level."""
    for level in LEVELS:
        yield level, partial(loop_without_waits, level)


def loop_without_waits(level: str) -> str:
    """Trains while torch raises an error at any host sync."""
    work = with_amp(_small_bert(), level)
    for _ in range(2):
        work()
    with refused_syncs():
        for _ in range(20):
            work()
    return "no host sync"


def moved(tiny: bool, records: Records) -> Checks:
    """Yields levels, each with the model moved before and after ``initialize``."""
    width = 64 if tiny else 2048
    for level in LEVELS:
        for first in ("cuda", "initialize"):
            yield f"{level}, {first} first", partial(move, level, first, width)


def move(level: str, first: str, width: int) -> dict[str, object]:
    """Trains a model that was moved before or after ``initialize``."""
    model: nn.Module = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    if first == "cuda":
        model.cuda()
    optimizer = fused_adamw(list(model.parameters()))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.cuda()
    inputs = torch.randn(64, width, device="cuda")

    def iteration() -> None:
        loss = model(inputs).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = timed(iteration, 5)
    devices = {str(param.device) for param in amp.master_params(optimizer)}
    return {**times, "stepped on": sorted(devices)}


def graphs(tiny: bool, records: Records) -> Checks:
    """Yields levels and what is captured."""
    for level in LEVELS:
        for captured in CAPTURED:
            yield f"{level}, {captured}", partial(difference_of_replays, level, captured)


# -- several ranks -----------------------------------------------------------------------------

WRAPPERS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "DDP": nn.parallel.DistributedDataParallel,
    "DDP with bucket views": partial(
        nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True
    ),
    "apex DDP": parallel.DistributedDataParallel,
    "apex DDP, delayed": partial(parallel.DistributedDataParallel, delay_allreduce=True),
    "SyncBatchNorm": lambda model: nn.parallel.DistributedDataParallel(
        parallel.convert_syncbn_model(model)
    ),
}


def nccl(tiny: bool, records: Records) -> Checks:
    """Yields levels, on one rank and, on a machine with two GPUs, on two."""
    for ranks in range(1, min(torch.cuda.device_count(), 2) + 1):
        for level in LEVELS:
            yield f"{level}, ranks: {ranks}", partial(on_ranks, level, ranks)


def on_ranks(level: str, ranks: int) -> dict[str, float]:
    """Trains under each wrapper on every rank, and returns the first rank's sums of weights."""
    if not dist.is_nccl_available():
        raise RuntimeError("this torch has no NCCL")
    context: Any = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    torch.multiprocessing.spawn(_train_on_rank, (level, ranks, queue), nprocs=ranks)
    sums: dict[str, float] = queue.get()
    return sums


def _train_on_rank(rank: int, level: str, ranks: int, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    sums = {name: _sum_of_weights(level, wrap) for name, wrap in WRAPPERS.items()}
    if rank == 0:
        queue.put(sums)
    dist.destroy_process_group()


def _sum_of_weights(level: str, wrap: Callable[[nn.Module], nn.Module]) -> float:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).cuda()
    optimizer = fused_adamw(list(model.parameters()))
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
    )
    wrapped = wrap(model)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 3, 8, 8, generator=generator).cuda()
        if step == 3:
            inputs[0, 0, 0, 0] = math.inf
        loss = wrapped(inputs).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = 0.0
    for master in amp.master_params(optimizer):
        total += master.double().abs().sum().item()
    return round(total, 6)


# -- compilers ---------------------------------------------------------------------------------


def compiled(tiny: bool, records: Records) -> Checks:
    """Yields levels and modes of ``torch.compile``."""
    for level in LEVELS:
        for mode in ("eager", "default", "reduce-overhead"):
            yield f"{level}, {mode}", partial(compile_model, level, mode, tiny=tiny)


def compile_model(level: str, mode: str, *, tiny: bool) -> dict[str, object]:
    """Trains a small BERT under ``torch.compile``; a rehearsal uses the eager backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = _small_bert().model().cuda()
    optimizer = fused_adamw(list(model.parameters()))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if mode == "eager":
        run = model
    elif tiny:
        run = torch.compile(model, backend="eager")
    else:
        run = torch.compile(model, mode=mode)
    inputs, labels = _small_bert().batch()
    inputs = inputs.cuda()
    labels = labels.cuda()
    losses: list[Tensor] = []

    def iteration() -> None:
        loss = F.cross_entropy(run(inputs).float(), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())

    times = timed(iteration, 3 if tiny else 20)
    samples = losses[:: len(losses) // 4]
    return {**times, "losses": [round(loss.item(), 4) for loss in samples]}


def _small_bert() -> Task:
    model = partial(Bert, layers=2, width=64, heads=2, vocabulary=500, positions=32)
    return Task(model, _sentences, fused_adamw)


def _sentences() -> tuple[Tensor, Tensor]:
    return torch.randint(500, (8, 32)), torch.randint(2, (8,))


# -- memory errors -----------------------------------------------------------------------------


def sanitizer(tiny: bool, records: Records) -> Checks:
    """Yields one run under memcheck."""
    yield "two iterations at every level, blocks of odd sizes", sanitize


def sanitize() -> str:
    """Runs :func:`odd_blocks` under compute-sanitizer."""
    if shutil.which("compute-sanitizer") is None:
        return "left out: compute-sanitizer is not installed"
    code = "from benchmarks.gpu.correctness import odd_blocks; odd_blocks()"
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-c", code]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    summary = " ".join(done.stdout.strip().splitlines()[-2:])
    if done.returncode:
        raise RuntimeError(summary or done.stderr[-300:])
    return summary


def odd_blocks() -> None:
    """Steps small models in blocks that fit no tensor."""
    from apex._engine.optimizer import block_step

    block_step.device_elements = 1000
    for level in LEVELS:
        model: nn.Module = nn.Sequential(nn.Linear(37, 91), nn.LayerNorm(91), nn.Linear(91, 13))
        model.cuda()
        optimizer = fused_adamw(list(model.parameters()))
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            loss = model(torch.randn(5, 37, device="cuda")).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            amp.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()


# -- rehearsals only --------------------------------------------------------------------------


def faults(tiny: bool, records: Records) -> Checks:
    """Yields checks that crash and hang, between two that end well."""
    yield "before", lambda: "ends"
    yield "crashes", lambda: os._exit(3)
    yield "hangs", lambda: time.sleep(3600)
    yield "after", lambda: "ends"
