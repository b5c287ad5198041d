"""What this machine and this installation are good for: ``apex doctor``."""

from apex.tools.doctor.examination import Health, examine

__all__ = ["Health", "examine"]
