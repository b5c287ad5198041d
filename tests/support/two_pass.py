"""Steps that compute every fp32 gradient first: what the step in one pass is compared with."""

from contextlib import contextmanager

from apex._engine.optimizer import one_pass


@contextmanager
def two_pass_steps():
    before, one_pass.enabled = one_pass.enabled, False
    try:
        yield
    finally:
        one_pass.enabled = before
