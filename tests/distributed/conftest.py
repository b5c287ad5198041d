"""Processes by their number: one, the two of all tests, and four."""

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def pools(two_processes):
    pools = {1: Ranks(1), 2: two_processes, 4: Ranks(4)}
    yield pools
    pools[1].stop()
    pools[4].stop()


@pytest.fixture
def on_ranks(pools, tmp_path):
    """Calls ``fn(rank, *args)`` in a number of processes; returns their results."""
    return lambda count, fn, *args: pools[count].run(tmp_path / f"store{count}", fn, *args)
