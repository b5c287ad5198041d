"""Parts that measure: launches, block sizes, memory, networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from apex import amp
from benchmarks import launches
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
"""Bytes of memory above which the batches are larger."""
Checks = Iterator[tuple[str, Callable[[], object]]]


# -- launches: by the profiler, and by count ---------------------------------------------------


def launch_checks(tiny: bool) -> Checks:
    """Yields ways to train and optimizers; torch's autocast with AdamW only."""
    names = ["AdamW"] if tiny else launches.OPTIMIZERS
    for name in names:
        for mode in launches.DTYPES:
            if mode.startswith("O") or name == "AdamW":
                yield f"{mode}, {name}", partial(profiled, mode, launches.OPTIMIZERS[name])


def profiled(mode: str, optimizer: MakeOptimizer) -> dict[str, float]:
    """Returns the kernels of an iteration, except the kernels of a 16-bit model's passes."""
    counted = launches.machinery(mode, optimizer)
    findings = {
        "launches by count": counted.launches,
        "MiB by count": round(counted.bytes / 2**20, 1),
    }
    if ProfilerActivity.CUDA in supported_activities():  # the emulated device has no profiler
        kernels, microseconds = _kernels(launches.work(mode, optimizer))
        dtype = launches.DTYPES[mode]
        kernels_of_passes, microseconds_of_passes = _kernels(launches.passes(dtype))
        findings["kernels by profiler"] = kernels - kernels_of_passes
        findings["us"] = round(microseconds - microseconds_of_passes, 1)
    return findings


def _kernels(work: Work) -> tuple[int, float]:
    """Returns the number of kernels of an iteration, and their microseconds."""
    for _ in range(launches.WARMUP):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    count = 0
    microseconds = 0.0
    for event in record.events() or ():
        if "cuda" in str(event.device_type).lower():
            count += 1
            microseconds += event.device_time_total
    return count, microseconds


# -- blocks ------------------------------------------------------------------------------------


MODELS: dict[str, Callable[[], nn.Module]] = {
    "8 M": lambda: nn.Sequential(*[nn.Linear(590, 590) for _ in range(24)]),
    "ResNet-50": ResNet,
    "BERT-base": Bert,
    "BERT-large": partial(Bert, layers=24, width=1024, heads=16),
}
EXPONENTS = (22, 24, 25, 26, 40)
"""Powers of 2 of a block's elements; with the last, the whole step is one block."""


def sizes(model: str) -> list[int]:
    """Returns the elements of a model's parameters."""
    with torch.device("meta"):
        params = MODELS[model]().parameters()
    return [param.numel() for param in params]


def blocks(tiny: bool) -> Checks:
    """Yields models and optimizers."""
    models = ["8 M"] if tiny else MODELS
    names = ["AdamW"] if tiny else ["AdamW", "FusedAdam"]
    for model in models:
        for name in names:
            yield f"{model}, {name}", partial(swept, model, launches.OPTIMIZERS[name])


def swept(model: str, make_optimizer: MakeOptimizer) -> dict[str, str]:
    """Returns the time of a step and its extra bytes per parameter, by a block's elements."""
    from apex._engine.optimizer import block_step

    weights = [nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes(model)]
    net: nn.Module = nn.Module()
    net.weights = nn.ParameterList(weights)
    optimizer = make_optimizer(list(net.parameters()))
    net, optimizer = amp.initialize(net, optimizer, opt_level="O5", verbosity=0)
    grads = [torch.full_like(param, 1e-3) for param in net.parameters()]
    params = sum(grad.numel() for grad in grads)

    def step() -> None:
        for param, grad in zip(net.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()

    findings: dict[str, str] = {}
    for exponent in EXPONENTS:
        block_step.device_elements = 2**exponent
        block_step._cuts.cache_clear()
        milliseconds = timed(step)["ms"]
        extra = growth(step, torch.device("cuda")) or 0
        findings[f"2^{exponent}"] = f"{milliseconds} ms, {extra / params:.2f} bytes"
    return findings


# -- memory ------------------------------------------------------------------------------------


def memory(tiny: bool) -> Checks:
    """Yields ways to train a model that needs memory mostly for its parameters."""
    width, layers = (256, 4) if tiny else (8192, 15)
    for mode in ("bf16", "O2", "O5"):
        yield mode, partial(peak, mode, width, layers)


def peak(mode: str, width: int, layers: int) -> dict[str, float]:
    """Returns the bytes per parameter, stored between iterations and at the peak of one."""
    task = Task(partial(square_layers, width, layers), partial(features, width), fused_adamw)
    before = torch.cuda.memory_allocated()
    work = with_amp(task, mode) if mode.startswith("O") else native(task, torch.bfloat16)
    for _ in range(2):
        work()
    params = width * width * layers
    stored = torch.cuda.memory_allocated() - before
    extra = growth(work, torch.device("cuda")) or 0
    return {
        "stored": round(stored / params, 2),
        "peak": round((stored + extra) / params, 2),
        "parameters": params,
    }


def square_layers(width: int, layers: int) -> nn.Module:
    """Returns layers without biases."""
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def features(width: int) -> Batch:
    """Returns a batch of four."""
    return torch.randn(4, width), torch.randint(0, width, (4,))


# -- networks ----------------------------------------------------------------------------------


def networks(tiny: bool) -> Checks:
    """Yields networks, memory formats and ways to train, torch's own first."""
    modes = ("fp32", "fp16", "bf16", *LEVELS)
    for mode in modes:
        yield f"BERT-base, {mode}", partial(train_bert, mode, tiny=tiny)
    for layout in ("channels_last", "contiguous_format"):
        for mode in modes:
            yield f"ResNet-50, {layout}, {mode}", partial(train_resnet, mode, layout, tiny=tiny)


def train_resnet(mode: str, layout: str, *, tiny: bool) -> dict[str, object]:
    """Trains ResNet-50 in a memory format."""
    task, items = resnet(tiny)
    in_layout = Task(
        partial(laid_out, task.model, layout), partial(_laid_out, task, layout), task.optimizer
    )
    return measured(in_layout, items, mode)


def train_bert(mode: str, *, tiny: bool) -> dict[str, object]:
    """Trains BERT-base."""
    task, items = bert(tiny)
    return measured(task, items, mode)


def measured(task: Task, items: int, mode: str) -> dict[str, object]:
    """Trains for LOSSES, then measures; at amp's levels, a host sync is an error."""
    torch.backends.cudnn.benchmark = True
    if mode == "fp32":
        work = plain(task)
    elif mode == "fp16":
        work = native(task, torch.float16)
    elif mode == "bf16":
        work = native(task, torch.bfloat16)
    else:
        work = with_amp(task, mode)
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
