"""Trains at several levels on two ranks, one of which is killed once: run it under torchrun."""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from tests.distributed.cases import prepare, rank_batch
from tests.support import loops

LEVELS = ("O1", "O2", "O4", "O5")
STEPS = 5


def train(rank, folder, dies_at=None):
    """Returns weights, masters and scales after all steps; resumes from the last checkpoint."""
    file = Path(folder, "checkpoint")
    jobs = [prepare(level, seed=rank) for level in LEVELS]
    objects = [part for job in jobs for part in job] + [amp]
    first = 0
    if file.exists():
        first, *states = torch.load(file, weights_only=False)
        for part, state in zip(objects, states, strict=True):
            part.load_state_dict(state)
    wrapped = [DistributedDataParallel(model) for model, _ in jobs]
    for step in range(first, STEPS):
        with ExitStack() as blocks:
            for model, (_, optimizer) in zip(wrapped, jobs, strict=True):
                loss = loops.loss_of(model, *rank_batch(rank, step))
                scaled_loss = blocks.enter_context(amp.scale_loss(loss, optimizer))
                scaled_loss.backward()
            if (rank, step) == (1, dies_at):
                os.kill(os.getpid(), signal.SIGKILL)
        for _, optimizer in jobs:
            optimizer.step()
            optimizer.zero_grad()
        if step % 2 and rank == 0:
            states = [part.state_dict() for part in objects]
            torch.save([step + 1, *states], file.with_name("partial"))
            file.with_name("partial").replace(file)
        dist.barrier()
    return [loops.masters(optimizer) for _, optimizer in jobs], dict(amp.state_dict())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, attempt = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"attempt{attempt}").touch()
    result = train(dist.get_rank(), folder, dies_at=3 if attempt == "0" else None)
    torch.save(result, folder / f"rank{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
