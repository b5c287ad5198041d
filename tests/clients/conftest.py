from tests.amp.conftest import fresh_amp

__all__ = ["fresh_amp"]

collect_ignore = ["lightning_ranks.py"]  # a program, not a module with doctests
