"""apex's first FusedLAMB: the current one, whose arguments are the same and one more."""

from apex.optimizers import FusedLAMB

__all__ = ["FusedLAMB"]
