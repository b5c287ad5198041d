"""The command line: apex's flags, and a few of ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains an image classifier with amp.")
    add = parser.add_argument
    add("data", nargs="?", type=Path, help="folder with train/ and val/; none: the digits")
    add("-a", "--arch", default="resnet18", help="a model of torchvision, or resnet10 to resnet152")
    add("-j", "--workers", type=int, default=4, help="loading processes, for each GPU")
    add("--epochs", type=int, default=90)
    add("--start-epoch", type=int, help="number of the first epoch; default: the checkpoint's")
    add("-b", "--batch-size", type=int, default=128, help="images of each process")
    add("--lr", "--learning-rate", type=float, default=0.1, help="for 256 images in all")
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", "--wd", type=float, default=1e-4)
    add("-p", "--print-freq", type=int, default=10, help="steps between two lines")
    add("--resume", type=Path, help="checkpoint to go on from")
    add("-e", "--evaluate", action="store_true", help="validate only")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--prof", type=int, metavar="N", help="profile N steps, print the table, stop")
    add("--deterministic", action="store_true", help="the same numbers in every run")
    add("--seed", type=int, default=0)
    add("--sync_bn", action="store_true", help="batch norm over all processes")
    add("--opt-level", default="O1", metavar="O0..O5")
    add("--keep-batchnorm-fp32", choices=["True", "False"], help="default: the level's own")
    add("--loss-scale", help="a number or 'dynamic'; default: the level's own")
    add("--channels-last", action="store_true", help="the memory format that tensor cores like")
    add("--image-size", type=int, default=224, help="pixels a side, of folders of images")
    add("--output", type=Path, default=Path(), help="folder for checkpoints and the trace")
    # torchrun sets LOCAL_RANK; torch.distributed.launch without --use-env passes the option.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    add("--local_rank", "--local-rank", type=int, default=local_rank, help=argparse.SUPPRESS)
    return parser.parse_args(argv)
