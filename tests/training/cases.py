"""Another name of :mod:`tests.support.training`, until its last users have moved."""

from tests.support.training import *  # noqa: F403
from tests.support.training import LEVELS, SOURCES  # noqa: F401
