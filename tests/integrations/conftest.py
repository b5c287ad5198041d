from tests.amp.conftest import fresh_amp
from tests.parallel.conftest import on_two_ranks, two_processes

__all__ = ["fresh_amp", "on_two_ranks", "two_processes"]
