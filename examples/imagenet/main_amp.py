"""Trains an image classifier with amp, on image folders or on scikit-learn's digits.

python examples/imagenet/main_amp.py --opt-level O4 --epochs 3
torchrun --nproc_per_node=8 examples/imagenet/main_amp.py -a resnet50 -b 224 --opt-level O2 DIR
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from architectures import build_model
from image_data import Batch, ImageFolder, Prefetcher, load_digits, make_loader
from options import parse_args
from tally import Score, Tally
from torch import distributed, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from training_run import Run, load_checkpoint, save_checkpoint, say

from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model


def main(argv: Sequence[str] | None = None) -> Score:
    """Trains and validates; returns the last validation's score."""
    args = parse_args(argv)
    rank, world_size, device = join_processes(args.local_rank)
    try:
        be_deterministic(args.deterministic)
        torch.manual_seed(args.seed)
        train_set, val_set, classes = load_data(args.data, args.image_size)
        run = prepare(args, classes, rank, world_size, device)
        if args.resume:
            load_checkpoint(args.resume, run)
        if args.start_epoch is not None:
            run.epoch = args.start_epoch
        return fit(args, run, train_set, val_set)
    finally:
        if world_size > 1:
            # DistributedDataParallel is part of a reference cycle and holds the group. A wrapper
            # that exists when Python exits may abort the process: gloo's threads are still running.
            gc.collect()
            distributed.destroy_process_group()


# -- preparation -----------------------------------------------------------------------------


def join_processes(local_rank: int) -> tuple[int, int, torch.device]:
    """Joins the process group that torchrun describes; returns rank, world size and device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, device
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return distributed.get_rank(), distributed.get_world_size(), device


def be_deterministic(wanted: bool) -> None:
    """Selects deterministic algorithms, or otherwise the fastest convolutions."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = not wanted


def load_data(folder: Path | None, size: int) -> tuple[Dataset, Dataset, int]:
    """Returns training images, validation images and the number of classes."""
    if folder is None:
        return *load_digits(), 10
    train_set = ImageFolder(folder / "train", size, augment=True)
    val_set = ImageFolder(folder / "val", size, augment=False)
    if train_set.classes != val_set.classes:
        raise ValueError(f"{folder}/train and {folder}/val contain different classes.")
    return train_set, val_set, len(train_set.classes)


def prepare(
    args: argparse.Namespace, classes: int, rank: int, world_size: int, device: torch.device
) -> Run:
    """Creates the model and the optimizer and prepares them with amp."""
    model = build_model(args.arch, classes, pretrained=args.pretrained)
    if args.sync_bn:
        model = convert_syncbn_model(model)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(device, memory_format=layout)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        fused=True,  # skips an overflowed step on the device, without a host sync
    )
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=int(rank == 0),
    )
    return Run(model, optimizer, device, rank, world_size)


# -- training --------------------------------------------------------------------------------


def fit(args: argparse.Namespace, run: Run, train_set: Dataset, val_set: Dataset) -> Score:
    """Runs the epochs, each followed by a validation and a checkpoint."""
    share = {"rank": run.rank, "world_size": run.world_size, "workers": args.workers}
    val_loader = make_loader(val_set, args.batch_size, shuffle=False, seed=args.seed, **share)
    val_batches = Prefetcher(val_loader, run.device, channels_last=args.channels_last)
    if args.evaluate:
        return validate(run, val_batches)
    train_loader = make_loader(train_set, args.batch_size, shuffle=True, seed=args.seed, **share)
    train_batches = Prefetcher(train_loader, run.device, channels_last=args.channels_last)
    # amp.initialize comes first: it changes the model's dtypes, which the wrapper's buckets follow.
    model = DistributedDataParallel(run.model) if run.world_size > 1 else run.model
    if args.prof:
        return profile(args, run, model, train_batches)
    score = Score(0.0, 0.0, 0.0)
    for epoch in range(run.epoch, args.epochs):
        torch.manual_seed(args.seed + epoch)  # so that a resumed run has the same crops and flips
        train_loader.sampler.set_epoch(epoch)
        train(args, run, model, train_batches)
        score = validate(run, val_batches)
        run.epoch = epoch + 1
        is_best, run.best = score.top1 > run.best, max(score.top1, run.best)
        if run.rank == 0:
            save_checkpoint(args.output, run, is_best=is_best)
    return score


def train(args: argparse.Namespace, run: Run, model: nn.Module, batches: Prefetcher) -> None:
    """Trains one epoch and prints a line every ``--print-freq`` steps."""
    model.train()
    tally, seen, start = Tally(run.device), 0, time.perf_counter()
    for step, batch in enumerate(batches, start=1):
        progress = (run.epoch + (step - 1) / len(batches)) / args.epochs
        set_learning_rate(run, learning_rate(progress) * args.lr * global_batch(args, run) / 256)
        tally.add(*train_step(model, run.optimizer, batch))
        seen += global_batch(args, run)
        if step % args.print_freq == 0 or step == len(batches):
            score = tally.read()  # syncs, so that the time below covers the steps
            speed = seen / (time.perf_counter() - start)
            say(run, f"epoch {run.epoch} [{step}/{len(batches)}]  {score}  {speed:.0f} images/s")
            tally, seen, start = Tally(run.device), 0, time.perf_counter()


def train_step(
    model: nn.Module, optimizer: Optimizer, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trains on one batch and returns loss, logits and labels, all on the device."""
    images, labels = batch
    logits = model(images).float()
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach(), labels


@torch.no_grad()
def validate(run: Run, batches: Iterable[Batch]) -> Score:
    """Returns the score over the validation images of all processes."""
    run.model.eval()
    tally = Tally(run.device)
    for images, labels in batches:
        logits = run.model(images).float()
        tally.add(F.cross_entropy(logits, labels), logits, labels)
    score = tally.read()
    say(run, f"epoch {run.epoch} validation  {score}")
    return score


def profile(args: argparse.Namespace, run: Run, model: nn.Module, batches: Prefetcher) -> Score:
    """Profiles ``--prof`` steps after three warm-up steps and returns their score."""
    model.train()
    stream = endless(batches)
    for batch in islice(stream, 3):
        train_step(model, run.optimizer, batch)
    tally = Tally(run.device)
    with torch.profiler.profile() as profiler:
        for batch in islice(stream, args.prof):
            tally.add(*train_step(model, run.optimizer, batch))
        score = tally.read()
    column = "self_cuda_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
    say(run, profiler.key_averages().table(sort_by=column, row_limit=15))
    if run.rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(args.output / "trace.json"))
        print(f"trace for https://ui.perfetto.dev: {args.output / 'trace.json'}")
    return score


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yields the batches repeatedly."""
    while True:
        yield from batches


def learning_rate(progress: float) -> float:
    """Returns the multiplier of ``--lr`` at ``progress`` of the run (0 to 1).

    It rises over the first 1/18 and drops by a factor of 10 at 1/3, 2/3 and 8/9: in 90 epochs,
    these are epochs 5, 30, 60 and 80.
    """
    if progress < 1 / 18:
        return 18 * progress
    return 0.1 ** sum(progress >= milestone for milestone in (1 / 3, 2 / 3, 8 / 9))


def set_learning_rate(run: Run, value: float) -> None:
    """Sets the learning rate in every group; amp keeps the groups, so it works at every level."""
    for group in run.optimizer.param_groups:
        group["lr"] = value


def global_batch(args: argparse.Namespace, run: Run) -> int:
    """Returns the number of images in one step over all processes."""
    return args.batch_size * run.world_size


if __name__ == "__main__":
    main()
