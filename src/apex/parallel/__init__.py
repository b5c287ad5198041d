"""Training tools around the optimizer and the model: LARC."""

from apex.parallel.LARC import LARC

__all__ = ["LARC"]
