"""The version of this package; ``apex.__version__`` may be of NVIDIA's, or missing."""

VERSION = "0.2.0"  # same as in pyproject.toml; importlib.metadata would slow down every import
