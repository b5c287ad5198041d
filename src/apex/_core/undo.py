"""Inverses of the steps of a change, for one that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_log = logging.getLogger("apex")


class Undo(ExitStack):
    """Runs inverses, newest first, when its block fails; ``pop_all`` drops them.

    An inverse that fails is logged: the others run, and the block's own error is raised.
    """

    def callback(self, inverse: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Adds an inverse."""
        return super().callback(_run, inverse, args, kwargs)


def _run(inverse: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        inverse(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the block's own error goes on
        _log.exception("amp: a change could not be undone, by %s.", inverse)
