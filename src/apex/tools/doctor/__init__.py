"""``apex doctor``: examines the machine and the installation."""

from apex.tools.doctor.examination import Health, examine

__all__ = ["Health", "examine"]
