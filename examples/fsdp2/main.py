"""Trains a sharded transformer with FSDP2 and amp, and saves it with distributed checkpoints.

torchrun --standalone --nproc-per-node 2 examples/fsdp2/main.py
torchrun --standalone --nproc-per-node 2 examples/fsdp2/main.py --resume --steps 120
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from apex import amp

LENGTH, SYMBOLS = 16, 10


class Sorter(nn.Module):
    """A transformer that reads a sequence of digits and predicts it sorted."""

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, digits):
        x = self.tokens(digits) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step, size, device):
    """Returns this rank's part of a step's batch: a resumed run sees the same."""
    seed = step * distributed.get_world_size() + distributed.get_rank()
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(SYMBOLS, (size, LENGTH), generator=generator).to(device)
    return digits, digits.sort(dim=1).values


def train(args, device):
    torch.manual_seed(0)
    model = Sorter().to(device)
    # First the shards, then the optimizer over them, then amp.
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first_rank = distributed.get_rank() == 0
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, verbosity=int(first_rank)
    )
    first = load(args.output, model, optimizer) if args.resume else 0
    for step in range(first, args.steps):
        digits, ordered = batch(step, args.batch, device)
        loss = F.cross_entropy(model(digits).flatten(0, 1), ordered.flatten())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    dcp.save({**states_of(model, optimizer), "step": args.steps}, checkpoint_id=args.output)

    digits, ordered = batch(10**6, 256, device)
    with torch.no_grad():
        right = (model(digits).argmax(dim=-1) == ordered).float().mean()
        loss = F.cross_entropy(model(digits).flatten(0, 1), ordered.flatten())
    found = torch.stack([loss, right])
    distributed.all_reduce(found)
    loss, right = (found / distributed.get_world_size()).tolist()
    if first_rank:
        print(f"{distributed.get_world_size()} ranks, step {args.steps}: loss {loss:.6f}")
        print(f"{right:.1%} of the digits are in their places")


def states_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}


def load(folder, model, optimizer):
    """Loads a checkpoint, of any number of ranks, and returns its step."""
    states = {**states_of(model, optimizer), "step": 0}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    amp.load_state_dict(states["amp"])
    return states["step"]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O4", choices=["O0", "O1", "O4"])
    parser.add_argument("--steps", type=int, default=150, help="steps of the whole run")
    parser.add_argument("--batch", type=int, default=64, help="sequences per rank and step")
    parser.add_argument("--output", type=Path, default=Path("sorter"), help="checkpoint folder")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return parser.parse_args()


def main():
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(args, device)
    finally:
        # A sharded model is a reference cycle, and keeps gloo's threads, which may abort at exit.
        gc.collect()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
