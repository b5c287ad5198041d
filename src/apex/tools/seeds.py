"""The same random numbers for every level."""

from __future__ import annotations

import random
import sys

import torch


def seed_all(seed: int) -> None:
    """Seeds torch, Python and, if it is loaded, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
