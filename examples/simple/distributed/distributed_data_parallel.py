"""Fits a plane in several processes with amp and apex's DistributedDataParallel.

torchrun --standalone --nproc_per_node=2 examples/simple/distributed/distributed_data_parallel.py
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.nn.functional as F
from torch import distributed, nn

from apex import amp
from apex.parallel import DistributedDataParallel


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", metavar="O0..O5")
    parser.add_argument("--steps", type=int, default=100)
    # torchrun sets LOCAL_RANK; torch.distributed.launch without --use-env passes the option.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    parser.add_argument("--local_rank", "--local-rank", type=int, default=local_rank)
    return parser.parse_args()


def choose_device(local_rank: int) -> torch.device:
    """Returns this process's own GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains on this process's own data; the wrapper averages gradients over the processes."""
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 16, generator=generator).to(device)
    y = x.sum(dim=1, keepdim=True)

    torch.manual_seed(0)  # the same initial weights, and so the same masters, in every process
    model = nn.Linear(16, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # amp comes before the wrapper, which follows the dtypes that amp gives the model.
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, verbosity=int(rank == 0)
    )
    model = DistributedDataParallel(model)

    for _ in range(args.steps):
        loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()  # the processes exchange gradients here
        optimizer.step()

    weights = next(amp.master_params(optimizer)).detach()
    largest, least = weights.clone(), weights.clone()
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    if rank == 0:
        apart = (largest - least).max().item()
        print(f"{distributed.get_world_size()} processes, loss {loss.item():.6f}")
        print(f"largest difference between their weights: {apart}")


def main() -> None:
    """Joins the process group, trains, and leaves the group."""
    args = parse_args()
    device = choose_device(args.local_rank)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        # DistributedDataParallel is part of a reference cycle and holds the group. A wrapper that
        # still exists when Python exits may abort the process, as gloo's threads are still running.
        gc.collect()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
