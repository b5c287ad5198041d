"""``amp.debug.two_pass_steps``: steps that compute every fp32 gradient first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apex._engine.optimizer import block_step


@contextmanager
def two_pass_steps() -> Iterator[None]:
    """Turns the step block by block off inside the block, in every thread.

    Large models at O5 otherwise hand their 16-bit gradients to torch's fused kernels block by
    block. Both ways give the same bits; this one takes 4 more bytes per parameter. Use it to find
    out whether the blocks are at fault.

    Example:
        >>> from apex import amp
        >>> with amp.debug.two_pass_steps():
        ...     pass  # train here
    """
    before = block_step.enabled
    block_step.enabled = False
    try:
        yield
    finally:
        block_step.enabled = before
