"""amp's memory is process-wide: each test here starts as a fresh process would."""

from tests.amp.conftest import fresh_amp

__all__ = ["fresh_amp"]
