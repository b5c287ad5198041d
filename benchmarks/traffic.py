"""Bytes that each rank passes to ``torch.distributed`` in one training step, by level and wrapper.

It always uses two processes with gloo, because the traffic does not depend on the device. Every
collective passes torch's dispatcher, where a mode reads its name and the sizes of its tensors.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apex import amp
from apex.parallel import reduce_in_fp32

WORLD_SIZE = 2
RESULT = Path(__file__).parent / "results/traffic.json"
IN_FP32 = "reduce_in_fp32"
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# Batch norm in 16 bits does not run under fully_shard on a CPU; gradients in fp32 need no option.
NOT_MEASURED = {("fully_shard", "O3"), *((IN_FP32, level) for level in ("O0", "O1", "O4"))}
# What a rank contributes, for each collective that the wrappers use, and where its tensors are.
COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
}


class Traffic(TorchDispatchMode):
    """Adds up the bytes of every collective by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.overloadpacket._qualified_op_name.partition("::")
        if namespace == "c10d" and name in COLLECTIVES:
            kind, position = COLLECTIVES[name]
            tensors = [x for x in tree_leaves(args[position]) if isinstance(x, torch.Tensor)]
            self.bytes[kind] += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    """Two linear layers around a batch norm: 17,152 parameters, 512 of them batch norm's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 32, bias=False)
    )


def trained(wrapper: str, level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the wrapped model and its optimizer, as a script makes them."""
    model = network()
    if wrapper == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for module in (model[0], model[1], model[3]):
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if wrapper != "fully_shard":
        model = DistributedDataParallel(model)
    if wrapper == IN_FP32:
        reduce_in_fp32(model)
    return model, optimizer


def steps(wrapper: str, level: str, count: int = 2) -> Iterator[dict[str, int]]:
    """Yields what each step sends."""
    model, optimizer = trained(wrapper, level)
    for _ in range(count):
        with Traffic() as traffic:
            optimizer.zero_grad()
            loss = F.mse_loss(model(torch.randn(8, 32)).float(), torch.randn(8, 32))
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        yield dict(traffic.bytes)


def measure() -> dict[str, Any]:
    """Returns, for each wrapper and level, the bytes of the first step and of the second.

    Runs in a process group of ``WORLD_SIZE``.
    """
    result: dict[str, Any] = {}
    for wrapper in ("DistributedDataParallel", IN_FP32, "fully_shard"):
        for level in LEVELS:
            if (wrapper, level) in NOT_MEASURED:
                continue
            first, later = steps(wrapper, level)
            result.setdefault(wrapper, {})[level] = {"first": first, "later": later}
    return result


def _run(rank: int, store: str, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE
    )
    result = measure()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0:
        Path(path).write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")


def main() -> None:
    """Measures, prints and writes the traffic."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULT)
    path = parser.parse_args().json
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, args=(f"{folder}/store", str(path)), nprocs=WORLD_SIZE)
    params = sum(param.numel() for param in network().parameters())
    for wrapper, levels in json.loads(path.read_text("utf-8")).items():
        for level, sent in levels.items():
            shown = ", ".join(f"{kind} {size:,}" for kind, size in sorted(sent["later"].items()))
            per_param = sum(sent["later"].values()) / params
            print(f"{wrapper:24} {level}  {per_param:5.2f} B/parameter  ({shown})")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
