"""Rebuilds saved models and optimizers: the only private module that their files refer to.

Files refer to kinds instead of the engine's classes and functions, so that these can be moved.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

_KINDS = {
    "prepared": "apex._engine.optimizer.prepared:PreparedOptimizer",
    "cast": "apex.amp._initialize:AppliedCast",
    "master_link": "apex._engine.conversion.state:MasterLink",
    "model": "apex._engine.conversion.subclass:set_saved_state",
    "model_state": "apex._engine.conversion.state:rebuild_state",
    "optimizer": "apex._engine.optimizer.subclass:rebuild_optimizer",
    "master_pair": "apex._engine.masters:rebuild_pair",
    "plan": "apex._engine.conversion.plan:ModelPlan",
}
"""Location of each kind's class or function, which no import shows.

Existing files use the kinds: keep what can be loaded.
"""


def rebuild(kind: str, *parts: Any) -> Any:
    """Returns the object that a file describes by kind and parts.

    Raises:
        ValueError: If the kind is unknown, as in a file from a newer release.
    """
    return _load(kind)(*parts)


@functools.cache
def _load(kind: str) -> Any:
    if kind not in _KINDS:
        raise ValueError(
            f"The file holds an object of kind {kind!r}; this release of apex knows "
            f"{', '.join(_KINDS)}. Load the file with the release that wrote it, or a newer one."
        )
    module, name = _KINDS[kind].split(":")
    return getattr(import_module(module), name)
