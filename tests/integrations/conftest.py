from tests.amp.conftest import fresh_amp

__all__ = ["fresh_amp"]
