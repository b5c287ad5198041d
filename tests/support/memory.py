"""What memory holds that nothing has written yet."""

from contextlib import contextmanager

import torch


@contextmanager
def new_memory_holds_nan():
    """Fills the memory that ``torch.empty`` and its like give with NaN, inside."""
    torch.use_deterministic_algorithms(True)  # with it, torch fills
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
