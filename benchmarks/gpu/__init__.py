"""The first hour on a GPU, in parts; see :mod:`benchmarks.gpu.__main__`."""
