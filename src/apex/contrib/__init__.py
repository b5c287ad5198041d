"""The parts of apex's contrib that scripts use, on torch's operators."""

from apex.contrib import optimizers as optimizers  # OpenNMT-py reads it as an attribute
