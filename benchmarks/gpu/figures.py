"""Parts that measure: launches, sizes of blocks, memory, networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from apex import amp
from benchmarks import launches as counts
from benchmarks.allocation import growth
from benchmarks.counting import refused_syncs
from benchmarks.gpu.timing import timed
from benchmarks.loops import Batch, MakeOptimizer, Task, fused_adamw, native, plain, with_amp
from benchmarks.networks import Bert, ResNet
from benchmarks.race import Work

LEVELS = ("O1", "O2", "O4", "O5")
LOSSES = (1, 5, 10, 20)
"""Iterations whose loss is shown."""
ROOMY = 20 * 2**30
"""Bytes of memory from which a card gets the larger batches."""
Checks = Iterator[tuple[str, Callable[[], object]]]


# -- launches: the profiler's beside those by count --------------------------------------------


def launches(tiny: bool) -> Checks:
    """Yields ways to train and optimizers."""
    for name in list(counts.OPTIMIZERS)[: 1 if tiny else None]:
        for mode in counts.DTYPES:
            if mode.startswith("O") or name == "AdamW":
                yield f"{mode}, {name}", partial(profiled, mode, counts.OPTIMIZERS[name])


def profiled(mode: str, optimizer: MakeOptimizer) -> dict[str, float]:
    """Returns the kernels of an iteration without those of a 16-bit model's passes."""
    counted = counts.machinery(mode, optimizer)
    found = {
        "launches by count": counted.launches,
        "MiB by count": round(counted.bytes / 2**20, 1),
    }
    if ProfilerActivity.CUDA in supported_activities():  # not on the emulated device
        kernels, microseconds = _kernels(counts.work(mode, optimizer))
        of_passes, microseconds_of_passes = _kernels(counts.passes(counts.DTYPES[mode]))
        found["kernels by profiler"] = kernels - of_passes
        found["us"] = round(microseconds - microseconds_of_passes, 1)
    return found


def _kernels(work: Work) -> tuple[int, float]:
    for _ in range(counts.WARMUP):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    kernels = [event for event in record.events() or () if "cuda" in str(event.device_type).lower()]
    return len(kernels), sum(event.device_time_total for event in kernels)


# -- blocks ------------------------------------------------------------------------------------


def sizes(model: str) -> list[int]:
    """Returns the elements of a model's parameters."""
    with torch.device("meta"):
        made: dict[str, Callable[[], nn.Module]] = {
            "8 M": lambda: nn.Sequential(*[nn.Linear(590, 590) for _ in range(24)]),
            "ResNet-50": ResNet,
            "BERT-base": Bert,
            "BERT-large": partial(Bert, layers=24, width=1024, heads=16),
        }
        return [param.numel() for param in made[model]().parameters()]


def blocks(tiny: bool) -> Checks:
    """Yields models, optimizers, and exponents of 2 of a block's elements; 40 is a whole step."""
    for model in ("8 M",) if tiny else ("8 M", "ResNet-50", "BERT-base", "BERT-large"):
        for name in ("AdamW",) if tiny else ("AdamW", "FusedAdam"):
            yield f"{model}, {name}", partial(swept, model, counts.OPTIMIZERS[name])


def swept(model: str, make_optimizer: MakeOptimizer) -> dict[str, str]:
    """Returns milliseconds, and bytes per parameter above what is stored, by a block's elements."""
    from apex._engine.optimizer import block_step

    net: nn.Module = nn.Module()
    net.weights = nn.ParameterList(
        [nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes(model)]
    )
    optimizer = make_optimizer(list(net.parameters()))
    net, optimizer = amp.initialize(net, optimizer, opt_level="O5", verbosity=0)
    grads = [torch.full_like(param, 1e-3) for param in net.parameters()]
    params = sum(grad.numel() for grad in grads)

    def step() -> None:
        for param, grad in zip(net.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()

    found: dict[str, str] = {}
    for exponent in (22, 24, 25, 26, 40):
        block_step.device_elements = 2**exponent
        block_step._cuts.cache_clear()
        milliseconds = timed(step)["ms"]
        extra = (growth(step, torch.device("cuda")) or 0) / params
        found[f"2^{exponent}"] = f"{milliseconds} ms, {extra:.2f} bytes"
    return found


# -- memory ------------------------------------------------------------------------------------


def memory(tiny: bool) -> Checks:
    """Yields ways to train a model whose memory is its parameters'."""
    width, layers = (256, 4) if tiny else (8192, 15)
    for mode in ("bf16", "O2", "O5"):
        yield mode, partial(peak, mode, width, layers)


def peak(mode: str, width: int, layers: int) -> dict[str, float]:
    """Returns the bytes per parameter that are allocated at most in an iteration."""
    task = Task(partial(square_layers, width, layers), partial(features, width), fused_adamw)
    before = torch.cuda.memory_allocated()
    work = with_amp(task, mode) if mode.startswith("O") else native(task, torch.bfloat16)
    for _ in range(2):
        work()
    params = width * width * layers
    stored = (torch.cuda.memory_allocated() - before) / params
    extra = (growth(work, torch.device("cuda")) or 0) / params
    return {"stored": round(stored, 2), "peak": round(stored + extra, 2), "parameters": params}


def square_layers(width: int, layers: int) -> nn.Module:
    """Returns layers without biases."""
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def features(width: int) -> Batch:
    """Returns a batch of four."""
    return torch.randn(4, width), torch.randint(0, width, (4,))


# -- networks ----------------------------------------------------------------------------------


def networks(tiny: bool) -> Checks:
    """Yields networks, layouts and ways to train, torch's own first."""
    for mode in ("fp32", "fp16", "bf16", *LEVELS):
        for layout in ("contiguous_format", "channels_last"):
            yield f"ResNet-50, {mode}, {layout}", partial(trained, resnet(tiny), mode, layout)
        yield f"BERT-base, {mode}", partial(trained, bert(tiny), mode, None)


def trained(task_and_items: tuple[Task, int], mode: str, layout: str | None) -> dict[str, object]:
    """Trains for LOSSES, then measures; amp's levels under an error at any host sync."""
    task, items = task_and_items
    if layout is not None:
        task = Task(
            partial(laid_out, task.model, layout), partial(_laid_out, task, layout), task.optimizer
        )
    torch.backends.cudnn.benchmark = True
    if mode == "fp32":
        work = plain(task)
    elif mode in LEVELS:
        work = with_amp(task, mode)
    else:
        work = native(task, torch.float16 if mode == "fp16" else torch.bfloat16)
    losses = [work() for _ in range(max(LOSSES))]
    torch.cuda.reset_peak_memory_stats()
    if mode in LEVELS:
        with refused_syncs():
            work()
    times = timed(work, 20 if items > 2 else 3)
    shown = [losses[number - 1] for number in LOSSES]
    return {
        "items/s": round(items / times["ms"] * 1e3, 1),
        **times,
        "peak MiB": torch.cuda.max_memory_allocated() >> 20,
        "losses": [round(loss.item(), 4) for loss in shown if isinstance(loss, Tensor)],
    }


def laid_out(model: Callable[[], nn.Module], layout: str) -> nn.Module:
    """Returns a model with weights in a memory format."""
    return model().to(memory_format=getattr(torch, layout))


def _laid_out(task: Task, layout: str) -> Batch:
    inputs, labels = task.batch()
    return inputs.to(memory_format=getattr(torch, layout)), labels


def resnet(tiny: bool) -> tuple[Task, int]:
    """Returns ResNet-50 with its data, and the images in a batch."""
    if tiny:
        small = partial(ResNet, depths=(1, 1), width=4, classes=10)
        return Task(small, partial(images, 2, 32, 10), sgd), 2
    count = 128 if _is_roomy() else 32
    return Task(ResNet, partial(images, count, 224, 1000), sgd), count


def bert(tiny: bool) -> tuple[Task, int]:
    """Returns BERT-base with its data, and the sequences in a batch."""
    if tiny:
        small = partial(Bert, layers=1, width=16, heads=2, vocabulary=50, positions=8)
        return Task(small, partial(sentences, 2, 8, 50), fused_adamw), 2
    count = 64 if _is_roomy() else 16
    return Task(Bert, partial(sentences, count, 128, 30522), fused_adamw), count


def _is_roomy() -> bool:
    return bool(torch.cuda.get_device_properties(0).total_memory > ROOMY)


def images(count: int, size: int, classes: int) -> Batch:
    """Returns random images and labels."""
    return torch.randn(count, 3, size, size), torch.randint(classes, (count,))


def sentences(count: int, length: int, vocabulary: int) -> Batch:
    """Returns random tokens and one of two labels."""
    return torch.randint(vocabulary, (count, length)), torch.randint(2, (count,))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns ResNet's optimizer."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)
