"""Another name of :mod:`tests.support.steps`, until its last users have moved."""

from tests.support.steps import *  # noqa: F403
