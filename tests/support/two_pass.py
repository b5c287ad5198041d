"""Steps that compute every fp32 gradient first: what the step in one pass is compared with."""

from contextlib import contextmanager

from apex._engine import block_step


@contextmanager
def two_pass_steps():
    before, block_step.enabled = block_step.enabled, False
    try:
        yield
    finally:
        block_step.enabled = before
