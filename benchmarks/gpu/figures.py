"""Parts that measure: launches, block sizes, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from apex import amp, optimizers
from benchmarks import launches
from benchmarks.allocation import growth
from benchmarks.gpu.records import Records
from benchmarks.gpu.training import capturable_adamw, captured, event_times, side_stream
from benchmarks.loops import Batch, MakeOptimizer, Task, fused_adamw, native, with_amp
from benchmarks.networks import Bert, ResNet
from benchmarks.race import Work

Checks = Iterator[tuple[str, Callable[[], object]]]


# -- launches: by the profiler, and by count ---------------------------------------------------


def launch_checks(tiny: bool, records: Records) -> Checks:
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
    "ResNet-50 NCHW": ResNet,
    "ResNet-50 NHWC": lambda: ResNet().to(memory_format=torch.channels_last),
    "BERT-base": Bert,
    "BERT-large": partial(Bert, layers=24, width=1024, heads=16),
}
STEPS: dict[str, MakeOptimizer] = {
    "AdamW": capturable_adamw,
    "FusedAdam": partial(optimizers.FusedAdam, capturable=True),
}
EXPONENTS = (22, 24, 25, 26, 40)
"""Powers of 2 of a block's elements; with the last, the whole step is one block."""


def blocks(tiny: bool, records: Records) -> Checks:
    """Yields models and optimizers."""
    models = {"tiny": partial(square_layers, 16, 4)} if tiny else MODELS
    for model, make in models.items():
        for name, optimizer in STEPS.items():
            yield f"{model}, {name}", partial(swept, make, optimizer)


def swept(make_model: Callable[[], nn.Module], make_optimizer: MakeOptimizer) -> dict[str, str]:
    """Returns the time of a step and its extra bytes per parameter, by a block's elements."""
    from apex._engine.optimizer import block_step

    with torch.device("cuda"):
        net = make_model()
    optimizer = make_optimizer(list(net.parameters()))
    net, optimizer = amp.initialize(net, optimizer, opt_level="O5", verbosity=0)
    grads = [torch.randn_like(param) for param in net.parameters()]
    params = sum(grad.numel() for grad in grads)

    def step() -> None:
        for param, grad in zip(net.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()

    findings: dict[str, str] = {}
    for exponent in EXPONENTS:
        block_step.device_elements = 2**exponent
        block_step._cuts.cache_clear()
        with side_stream() as stream:
            step()
            extra = growth(step, torch.device("cuda")) or 0
            milliseconds = event_times(captured(step, stream))
        findings[f"2^{exponent}"] = f"{milliseconds:.3f} ms, {extra / params:.2f} bytes"
    return findings


# -- memory ------------------------------------------------------------------------------------


def memory(tiny: bool, records: Records) -> Checks:
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
