"""Fixtures that several folders use: functions run on two or four ranks."""

import functools

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def two_processes():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_processes():
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture
def on_two_ranks(two_processes, tmp_path):
    """Calls ``fn(rank, *args)`` in two processes joined by gloo; returns both results."""
    return functools.partial(two_processes.run, tmp_path / "store")


@pytest.fixture
def on_four_ranks(four_processes, tmp_path):
    """Calls ``fn(rank, *args)`` in four processes joined by gloo; returns their results."""
    return functools.partial(four_processes.run, tmp_path / "store")
