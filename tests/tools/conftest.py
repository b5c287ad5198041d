"""What the tests of the command undo."""

import signal

import pytest


@pytest.fixture(autouse=True)
def terminable():
    """Undoes what ``apex trace`` does at its end: it ignores SIGTERM, and so would processes."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
