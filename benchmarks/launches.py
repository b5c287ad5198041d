"""Kernels that a GPU launches for mixed precision, and the bytes that they move, by count.

On a machine without a GPU, the tests' emulated device runs the iterations.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import optimizers
from benchmarks.counting import OperatorCounter
from benchmarks.loops import Batch, MakeOptimizer, Task, device, fused_adamw, native, with_amp
from benchmarks.measurement import Goal, Measurement
from benchmarks.race import Work
from tests.support.emulated_cuda import build

NAME = "launches"
ROOT = Path(__file__).parents[1]
WIDTH = 590
LAYERS = 24
"""A model of 8.4 M parameters in 48 tensors."""

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "O1": torch.float16,
    "O2": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
"""The ways to train, with their dtypes: autocast (``fp16`` with a GradScaler), and amp's levels."""

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": fused_adamw,
    "FusedAdam": optimizers.FusedAdam,
    "FusedSGD": partial(optimizers.FusedSGD, lr=0.1, momentum=0.9, set_grad_none=True),
    "FusedLAMB": optimizers.FusedLAMB,
    "FusedNovoGrad": optimizers.FusedNovoGrad,
    "FusedAdagrad": optimizers.FusedAdagrad,
}
Cost = tuple[int, int]
"""Launches, and bytes per parameter."""

MACHINERY: Mapping[str, Cost] = {"O1": (108, 20), "O2": (14, 20), "O4": (96, 12), "O5": (2, 12)}
"""The casts, the scale and the masters of each level."""
CLIP: Mapping[str, Cost] = {"O1": (8, 12), "O2": (8, 12), "O4": (8, 12), "O5": (8, 6)}
"""``amp.clip_grad_norm_``, which leaves 16-bit gradients at O5."""
STEPS: Mapping[str, Cost] = {
    "AdamW": (3, 28),
    "FusedAdam": (8, 28),
    "FusedSGD": (7, 20),
    "FusedLAMB": (83, 76),
    "FusedNovoGrad": (87, 36),
    "FusedAdagrad": (8, 20),
}
"""Each optimizer's step; LAMB and NovoGrad launch one kernel for each tensor."""

WARMUP = 40
"""Iterations before the counted one: amp inspects the first blocks, and every 32nd step later."""

# torch's kernels over lists, built with CUDA 13: the tensors that one launch takes, by the number
# of lists, its thread blocks, and the elements of each (aten/src/ATen/native/cuda/ForeachFunctors).
TENSORS_PER_LAUNCH = {1: 770, 2: 448, 3: 336, 4: 252, 5: 210}
CHUNKS_PER_LAUNCH = 2240
CHUNK = 65536

TWO_KERNELS = frozenset({"_foreach_norm", "_foreach_max"})
"""Reductions: one kernel over pieces, and one over their results."""

_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
)
"""Operators without a kernel, other than views."""

_ONLY_WRITE = frozenset({"copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_"})
"""In-place operators that only write their target."""


class LaunchCounter(OperatorCounter):
    """Counts the kernels that operators would launch on a GPU, and the bytes that they move.

    A tensor counts once for each argument and each result that it is; what is written in place
    counts twice. Kernels over lists count as torch's fast or slow path would launch them.

    Attributes:
        calls: Launches by operator.
        bytes: Read and written.
    """

    def __init__(self) -> None:
        """Starts at zero."""
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    @property
    def launches(self) -> int:
        """The launches of all operators."""
        return self.calls.total()

    def count(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Counts the kernels of an operator and the bytes that they move."""
        namespace, name = func._schema.name.split("::")
        if namespace != "aten" or name in _NOTHING or _is_view(func):
            return
        launches = launches_of(name, [*args, *kwargs.values()])
        if launches:
            self.calls[name] += launches
            self.bytes += _bytes_moved(func, args, kwargs, result)


def launches_of(name: str, args: Sequence[Any]) -> int:
    """Returns how many kernels an operator of these arguments launches."""
    if not name.lstrip("_").startswith(("foreach", "fused", "amp_foreach")):
        return 1
    lists = [tensors for tensors in args if _is_list(tensors) and _has_elements(tensors)]
    if not lists:
        return 0
    first = lists[0]
    if not _takes_fast_path(name, lists):
        return len(first)
    lists = [tensors for tensors in lists if tensors[0].dim() or tensors is first]
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in first)
    for_tensors = math.ceil(len(first) / TENSORS_PER_LAUNCH[len(lists)])
    for_chunks = math.ceil(chunks / CHUNKS_PER_LAUNCH)
    kernels = max(for_tensors, for_chunks)
    return kernels + 1 if name in TWO_KERNELS else kernels


def _takes_fast_path(name: str, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Returns whether torch runs the kernel over lists, instead of one kernel for each tensor."""
    if "foreach" not in name:
        return True  # the fused optimizers have no other path
    first = lists[0]
    for tensors in lists:
        for tensor, like in zip(tensors, first, strict=True):
            if tensor.shape != like.shape or tensor.stride() != like.stride():
                return False
            if tensor.dtype is not tensors[0].dtype:
                return False
    return True


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _has_elements(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.numel() for tensor in tensors)


def _is_view(func: Any) -> bool:
    """Returns whether an operator's result is a view of an argument that it does not change."""
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _bytes_moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    total = 0
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        size = _bytes_of(value)
        total += size
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and kwargs.get("grad_scale") is None:
            is_written = False  # with a scale, the fused optimizers' kernels write gradients back
        if is_written and not argument.is_out and name not in _ONLY_WRITE:
            total += size  # it is also read
    in_place = any(value.alias_info is not None for value in schema.returns)
    return total if in_place else total + _bytes_of(result)


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return 0


def machinery(mode: str, optimizer: MakeOptimizer, **options: Any) -> LaunchCounter:
    """Returns what mixed precision and the step add to the passes of a 16-bit model.

    Args:
        mode: A level, or ``"fp16"`` or ``"bf16"`` for autocast, the former with a GradScaler.
        optimizer: Makes the optimizer.
        **options: Options of :func:`benchmarks.loops.with_amp`.
    """
    counted = _counted(work(mode, optimizer, **options), WARMUP)
    baseline = _of_passes(DTYPES[mode])
    counted.calls.subtract(baseline.calls)
    counted.bytes -= baseline.bytes
    return counted


def work(mode: str, optimizer: MakeOptimizer, **options: Any) -> Work:
    """Returns an iteration; the arguments are those of :func:`machinery`."""
    task = Task(_model, _batch, optimizer)
    if mode.startswith("O"):
        return with_amp(task, mode, **options)
    return native(task, DTYPES[mode])


@functools.cache
def _of_passes(dtype: torch.dtype) -> LaunchCounter:
    return _counted(passes(dtype), 1)


def _counted(iteration: Work, warmup: int) -> LaunchCounter:
    for _ in range(warmup):
        iteration()
    with LaunchCounter() as counted:
        iteration()
    return counted


def passes(dtype: torch.dtype) -> Work:
    """Returns the passes of the same model, all in 16 bits except the loss."""
    model = _model().to(device(), dtype)
    inputs, labels = _batch()
    inputs, labels = inputs.to(device(), dtype), labels.to(device())

    def iteration() -> None:
        F.cross_entropy(model(inputs).float(), labels).backward()
        model.zero_grad()

    return iteration


def _model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def _batch() -> Batch:
    return torch.randn(4, WIDTH), torch.randint(0, WIDTH, (4,))


# -- the rows ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The launches and bytes of one way to train.

    Attributes:
        case: Its level, or torch's autocast, and its optimizer.
        launches: Kernels of one iteration, without those of a 16-bit model's passes.
        moved: Bytes that they read and write, by parameter.
        most_launches: The goal; None for torch's own, given for comparison.
        most_moved: The goal.
    """

    case: str
    launches: int
    moved: float
    most_launches: int | None = None
    most_moved: float | None = None


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields launches and bytes per parameter of each way to train with each optimizer."""
    for row in _counted_elsewhere(quick=quick):
        launches = _at_most(row.most_launches)
        yield Measurement(NAME, row.case, row.launches, "launches", launches, digits=0)
        moved = _at_most(row.most_moved)
        yield Measurement(NAME, row.case, row.moved, "bytes/param", moved, digits=1)


def _at_most(most: float | None) -> Goal | None:
    return None if most is None else Goal("<=", most)


def rows(*, quick: bool) -> Iterator[Row]:
    """Counts in this process, which has a GPU or the emulated device."""
    params = sum(param.numel() for param in _model().parameters())

    def row(mode: str, name: str, title: str, clip: Cost = (0, 0), **options: Any) -> Row:
        counted = machinery(mode, OPTIMIZERS[name], **options)
        counts = Row(title, counted.launches, counted.bytes / params)
        if mode not in MACHINERY:
            return counts
        launches, moved = map(sum, zip(MACHINERY[mode], STEPS[name], clip, strict=True))
        return replace(counts, most_launches=launches, most_moved=moved)

    yield row("fp16", "AdamW", "autocast fp16 + GradScaler, AdamW")
    yield row("bf16", "AdamW", "autocast bf16, AdamW")
    for name in ["AdamW"] if quick else OPTIMIZERS:
        for level in MACHINERY:
            yield row(level, name, f"{level}, {name}")
    for level in MACHINERY:
        yield row(level, "AdamW", f"{level}, AdamW, clipped", CLIP[level], max_norm=0.1)


def _counted_elsewhere(*, quick: bool) -> list[Row]:
    """Returns the rows of a process that has a device; none if this machine cannot have one."""
    start = [sys.executable, "-m"]
    if not torch.cuda.is_available():
        start.append("tests.support.emulated_cuda")
        try:
            build.library()
        except build.Unavailable as reason:
            print(f"launches: left out, no emulated CUDA: {reason}", file=sys.stderr)
            return []
    command = [*start, "benchmarks.launches"]
    if quick:
        command.append("--quick")
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".* is emulated on this CPU")
    for counted_row in rows(quick="--quick" in sys.argv):
        print(json.dumps(asdict(counted_row)), flush=True)
