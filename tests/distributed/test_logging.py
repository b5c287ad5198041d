"""What the logger ``apex`` says, it says on rank 0."""

import logging

import pytest

import apex.amp  # noqa: F401 - sets the logger up

pytestmark = pytest.mark.distributed


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def log_something(rank):
    kept = Kept()
    logger = logging.getLogger("apex")
    logger.addHandler(kept)
    try:
        logger.warning("something")
    finally:
        logger.removeHandler(kept)
    return kept.messages


def test_only_rank_zero_logs(on_two_ranks):
    assert on_two_ranks(log_something) == [["something"], []]
