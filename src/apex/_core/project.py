"""Version and address of this project, for messages."""

VERSION = "0.2.0"
"""As in pyproject.toml; ``importlib.metadata`` would slow down every import."""

ADDRESS = "https://github.com/apex-amp/apex-amp"
"""The repository, without a slash at the end."""

TRACE = "`python -m apex trace train.py` runs the script again and names the operator at fault"
"""The advice in warnings of inf and NaN."""
