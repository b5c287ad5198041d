"""Each test starts with amp as a new process has it; functions run on two ranks."""

import functools
import gc

import pytest

from apex.amp import _amp_state
from tests.support.emulation import emulate
from tests.support.loops import LEVELS_SHORT, at_levels
from tests.support.ranks import Ranks, run_alone

level = at_levels(*LEVELS_SHORT)
"""Of every test that takes a level and has no others, in its decorators or its module."""


@pytest.fixture(autouse=True)
def fresh_amp():
    """amp's memory is process-wide: without this, ``amp.state_dict`` has other tests' scales."""
    _forget()
    yield
    _forget()


def _forget():
    _amp_state.hold_handle(None)  # that of amp.init lives until the next one
    if _amp_state.sessions():
        gc.collect()  # sessions end with their models and optimizers
    _amp_state.__dict__.clear()
    type(_amp_state).__init__(_amp_state)


@pytest.fixture(scope="module")
def ideal_machine():
    """Lets ``apex compare`` train and time all levels without 16-bit units and when busy, too."""
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)  # no dtype
        patch.setattr("apex.tools.compare.timing.Load.busy", False)
        yield


@pytest.fixture(scope="session")
def two_processes():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture
def on_two_ranks(two_processes, tmp_path):
    """Calls ``fn(rank, *args)`` in two processes joined by gloo; returns both results."""
    return functools.partial(two_processes.run, tmp_path / "store")


@pytest.fixture(scope="session")
def pools(two_processes):
    """Runners of functions by their number of processes."""
    four_processes = Ranks(4)
    yield {1: run_alone, 2: two_processes.run, 4: four_processes.run}
    four_processes.stop()


@pytest.fixture
def on_ranks(pools, tmp_path):
    """Calls ``fn(rank, *args)`` in this process, or in two or four; returns their results."""
    return lambda count, fn, *args: pools[count](tmp_path / f"store{count}", fn, *args)
