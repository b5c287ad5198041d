"""Stands for the compiled kernels."""

WHOSE = "theirs"
