"""How busy the machine is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from apex.debug.rendering.formatting import counted

BUSY = 1.5
"""Load per core above which the machine counts as busy; one program alone reaches 1."""


@dataclass(frozen=True)
class Load:
    """Load of the machine.

    Attributes:
        average: Processes that ran or waited, averaged over the last minute.
        cores: Cores that this process may use.
    """

    average: float
    cores: int

    @property
    def busy(self) -> bool:
        """Whether other programs take time away from this one."""
        return self.average > BUSY * self.cores

    def __str__(self) -> str:
        """Returns, for instance, ``"load 17 on 2 cores"``."""
        return f"load {self.average:.2g} on {counted(self.cores, 'core')}"


def current_load() -> Load | None:
    """Returns the load; ``None`` on systems that do not report it."""
    try:
        average = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows lacks the function; a container may hide the file
        return None
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return Load(average, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)


def why_times_spread(load: Load | None) -> str:
    """Returns the probable reason why times vary, with the load if it is known."""
    if load is None:
        return "the times vary too much"
    return f"this machine is busy ({load})" if load.busy else f"the times vary too much ({load})"
