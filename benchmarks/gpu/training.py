"""Parts that train networks of a size that the device, and not the host, limits.

Each way to train runs in eager mode and as one CUDA graph, where the host does nothing. A part's
first check chooses the batch; torch's own ways follow, and then amp's levels, because a session of
amp registers kernels, which change later measurements.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.allocation import growth
from benchmarks.counting import refused_syncs
from benchmarks.gpu.records import Records
from benchmarks.loops import Batch, Task, native, with_amp
from benchmarks.networks import Bert, Gpt, ResNet
from benchmarks.race import Work

BASELINES: Mapping[str, str] = {"O1": "fp16", "O2": "fp16", "O4": "bf16", "O5": "bf16"}
"""Each level's native counterpart: ``torch.autocast``, in fp16 with a ``GradScaler``."""
MODES = ("fp16", "bf16", "O2", "O5", "O4", "O1", "bf16 again")
"""The ways to train in order; the last shows how much the card has slowed meanwhile."""
DEVICE_SHARE = 3.0
"""How long the device works, relative to the host."""
MEMORY_SHARE = 0.75
"""The share of the card's memory that a batch may need."""
MOST = 12
"""The largest batch, in first batches."""
BATCH = "batch"
"""The check that chooses the batch."""
EAGER, GRAPH = "ms", "ms as a graph"
"""What a way to train finds: the time of an iteration, and of a replay."""
Checks = Iterator[tuple[str, Callable[[], object]]]


@dataclass(frozen=True)
class Network:
    """A network, and random data for it.

    Attributes:
        model: Makes the model.
        data: Makes a batch of so many items.
        first_batch: The smallest batch to measure; others are multiples.
        layers: The submodule whose children ``torch.compile`` compiles, one by one.
        layout: The memory format of weights and images.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    first_batch: int
    layers: str
    layout: torch.memory_format = torch.contiguous_format

    def work(self, mode: str, items: int, backend: str | None) -> Work:
        """Returns one iteration, which returns the loss.

        Args:
            mode: One of ``MODES``.
            items: Items in the batch.
            backend: Of ``torch.compile``; ``None`` for eager mode.
        """
        task = Task(partial(self.build, backend), partial(self.batch, items), capturable_adamw)
        if mode.startswith("O"):
            return with_amp(task, mode)
        return native(task, torch.float16 if mode == "fp16" else torch.bfloat16)

    def build(self, backend: str | None) -> nn.Module:
        """Returns the model on the device, with compiled layers if there is a backend."""
        torch.backends.cudnn.benchmark = True
        with torch.device("cuda"):
            model = self.model()
        if self.layout is torch.channels_last:
            model.to(memory_format=torch.channels_last)
        if backend is not None:
            for layer in model.get_submodule(self.layers).children():
                layer.compile(backend=backend, dynamic=False)
        return model

    def batch(self, items: int) -> Batch:
        """Returns a batch in the memory format."""
        inputs, labels = self.data(items)
        if self.layout is torch.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, labels


def capturable_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns a fused AdamW whose step a CUDA graph may capture."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True, capturable=True)


def images(size: int, classes: int, items: int) -> Batch:
    """Returns random images and labels."""
    return torch.randn(items, 3, size, size), torch.randint(classes, (items,))


def sentences(length: int, vocabulary: int, items: int) -> Batch:
    """Returns random tokens and one of two labels."""
    return torch.randint(vocabulary, (items, length)), torch.randint(2, (items,))


def texts(length: int, vocabulary: int, items: int) -> Batch:
    """Returns random tokens and their successors."""
    tokens = torch.randint(vocabulary, (items, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


_LARGE_BERT = partial(Bert, layers=24, width=1024, heads=16)
_IMAGES = partial(images, 224, 1000)
NETWORKS: Mapping[str, Network] = {
    "BERT-large": Network(_LARGE_BERT, partial(sentences, 512, 30522), 8, "layers"),
    "ResNet-50 NHWC": Network(ResNet, _IMAGES, 256, "stages", torch.channels_last),
    "GPT-2 medium": Network(Gpt, partial(texts, 1024, 50257), 8, "layers"),
    "ResNet-50 NCHW": Network(ResNet, _IMAGES, 256, "stages"),
}

_TINY_RESNET = partial(ResNet, depths=(1, 1), width=4, classes=10)
_TINY_BERT = partial(Bert, layers=2, width=16, heads=2, vocabulary=50, positions=8)
_TINY_GPT = partial(Gpt, layers=2, width=16, heads=2, vocabulary=50, positions=8)
TINY: Mapping[str, Network] = {
    "BERT-large": Network(_TINY_BERT, partial(sentences, 8, 50), 2, "layers"),
    "ResNet-50 NHWC": Network(
        _TINY_RESNET, partial(images, 32, 10), 2, "stages", torch.channels_last
    ),
    "GPT-2 medium": Network(_TINY_GPT, partial(texts, 8, 50), 2, "layers"),
    "ResNet-50 NCHW": Network(_TINY_RESNET, partial(images, 32, 10), 2, "stages"),
}


def eager(name: str, tiny: bool, records: Records) -> Checks:
    """Yields the choice of the batch, and the ways to train without a compiler."""
    network = TINY[name] if tiny else NETWORKS[name]
    yield BATCH, partial(chosen_batch, network)
    for mode in MODES:
        yield mode, partial(trained, network, mode, name, records, None)


def compiled(name: str, tiny: bool, records: Records) -> Checks:
    """Yields the ways to train with compiled layers; a rehearsal's backend compiles nothing."""
    network = TINY[name] if tiny else NETWORKS[name]
    for mode in MODES:
        backend = "eager" if tiny else "inductor"
        yield mode, partial(trained, network, mode, name, records, backend)


def chosen_batch(network: Network) -> dict[str, float]:
    """Returns a batch that keeps the device busy for ``DEVICE_SHARE`` times the host's time.

    With one item, an iteration takes as long as the host. A graph of the first batch takes as long
    as the device.
    """
    for_one = network.work("fp16", 1, None)
    host_times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for_one()
        torch.cuda.synchronize()
        host_times.append((time.perf_counter() - start) * 1e3)
    host_ms = min(host_times)
    del for_one

    first = network.first_batch
    with side_stream() as stream:
        work = network.work("fp16", first, None)
        event_times(work, 1)
        resting = torch.cuda.memory_allocated()
        grown = growth(work, torch.device("cuda")) or 1
        device_ms = event_times(captured(work, stream), 3)
    wanted = math.ceil(DEVICE_SHARE * host_ms / device_ms)
    memory = MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
    affordable = int((memory - resting) / grown)
    return {
        "items": first * max(1, min(wanted, affordable, MOST)),
        "host ms": round(host_ms, 2),
        f"device ms of {first}": round(device_ms, 2),
        f"MiB of {first}": grown >> 20,
    }


def trained(
    network: Network, mode: str, name: str, records: Records, backend: str | None
) -> dict[str, object]:
    """Trains in eager mode and as a graph; at amp's levels, a host sync is an error."""
    items = chosen_items(network, name, records)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 32  # ResNet-50 has eight unlike blocks
    with side_stream() as stream:
        work = network.work(mode.removesuffix(" again"), items, backend)
        milliseconds = event_times(work)
        torch.cuda.reset_peak_memory_stats()
        with refused_syncs() if mode in BASELINES else contextlib.nullcontext():
            loss = work()
        findings: dict[str, object] = {
            "items": items,
            EAGER: round(milliseconds, 2),
            "peak MiB": torch.cuda.max_memory_allocated() >> 20,
        }
        try:
            findings[GRAPH] = round(event_times(captured(work, stream)), 2)
        except RuntimeError as error:  # the time of eager mode is of interest without it, too
            findings["graph"] = str(error).partition("\n")[0][:200]
    if isinstance(loss, Tensor):
        findings["loss"] = round(loss.item(), 4)
    return findings


def kernels(name: str, tiny: bool, records: Records) -> Checks:
    """Yields the levels with masters and their native counterparts."""
    network = TINY[name] if tiny else NETWORKS[name]
    for mode in ("fp16", "bf16", "O2", "O5"):
        yield mode, partial(longest_kernels, network, mode, name, records)


def longest_kernels(network: Network, mode: str, part: str, records: Records) -> str:
    """Returns the kernels of one iteration that take longest: milliseconds, launches, name."""
    if ProfilerActivity.CUDA not in supported_activities():
        return "left out: this torch has no profiler for the device"
    work = network.work(mode, chosen_items(network, part, records), None)
    event_times(work, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    milliseconds: dict[str, float] = {}
    launches: Counter[str] = Counter()
    for event in record.events() or ():
        if "cuda" in str(event.device_type).lower():
            before = milliseconds.get(event.name, 0.0)
            milliseconds[event.name] = before + event.device_time_total / 1e3
            launches[event.name] += 1
    longest = sorted(milliseconds, key=milliseconds.__getitem__, reverse=True)[:25]
    lines = [f"{milliseconds[name]:.2f} {launches[name]} `{name[:110]}`" for name in longest]
    return "<br>".join([f"{sum(milliseconds.values()):.2f} {launches.total()} all", *lines])


def chosen_items(network: Network, name: str, records: Records) -> int:
    """Returns the chosen batch, or the network's first if none was chosen."""
    choice = records.results(name).get(BATCH, {}).get("result", {})
    items: int = choice.get("items", network.first_batch)
    return items


@contextlib.contextmanager
def side_stream() -> Iterator[torch.cuda.Stream]:
    """Runs work in a stream of its own, as a capture needs from the first iteration."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


def captured(work: Work, stream: torch.cuda.Stream) -> Work:
    """Returns the replay of a graph of ``work``, which has run in ``stream`` before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def event_times(work: Work, repeats: int = 10) -> float:
    """Returns the device's median milliseconds, in a row that the host does not interrupt."""
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    times = []
    for start, end in itertools.pairwise(events):
        times.append(start.elapsed_time(end))
    return median(times)
