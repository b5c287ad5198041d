"""The command line: the flags of apex's example and a few more."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Trains an image classifier with amp.")
    add = parser.add_argument
    add("data", nargs="?", type=Path, help="folder with train/ and val/; default: the digits")
    add("-a", "--arch", default="resnet18", help="a torchvision model, or resnet10 to resnet152")
    add("-j", "--workers", type=int, default=4, help="loader processes per GPU")
    add("--epochs", type=int, default=90)
    add("--start-epoch", type=int, help="number of the first epoch; default: the checkpoint's")
    add("-b", "--batch-size", type=int, default=128, help="images per process")
    add(
        "--lr", "--learning-rate", type=float, default=0.1, help="for 256 images over all processes"
    )
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", "--wd", type=float, default=1e-4)
    add("-p", "--print-freq", type=int, default=10, help="steps between printed lines")
    add("--resume", type=Path, help="checkpoint to resume from")
    add("-e", "--evaluate", action="store_true", help="validate only")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--prof", type=int, metavar="N", help="profile N steps, print a table and stop")
    add("--deterministic", action="store_true", help="make runs reproducible")
    add("--seed", type=int, default=0)
    add("--sync_bn", action="store_true", help="synchronize batch norm")
    add("--opt-level", default="O1", metavar="O0..O5")
    add("--keep-batchnorm-fp32", choices=["True", "False"], help="default: the level's")
    add("--loss-scale", help="a number or 'dynamic'; default: the level's")
    add(
        "--channels-last",
        action="store_true",
        help="use the memory format that tensor cores prefer",
    )
    add("--image-size", type=int, default=224, help="side length in pixels, for image folders")
    add("--output", type=Path, default=Path(), help="folder for checkpoints and the trace")
    # torchrun sets LOCAL_RANK; torch.distributed.launch without --use-env passes the option.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    add("--local_rank", "--local-rank", type=int, default=local_rank, help=argparse.SUPPRESS)
    return parser.parse_args(argv)
