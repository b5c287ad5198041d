"""apex's first FusedLAMB: the current class, which has one more argument."""

from apex.optimizers import FusedLAMB

__all__ = ["FusedLAMB"]
