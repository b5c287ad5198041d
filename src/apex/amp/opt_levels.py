"""apex's level objects in ``apex.amp.frontend``: for scripts; amp itself does not read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import ClassVar

from apex.amp._amp_state import OptProperties
from apex.amp.properties import DESCRIPTIONS, LEVELS


class Properties(OptProperties):
    """Options before a level has set them, with apex's defaults; see :class:`Level`."""

    def __init__(self) -> None:
        given = {"enabled": False, "patch_torch_functions": False, "loss_scale": 1.0}
        super().__init__({name: given.get(name) for name in asdict(LEVELS["O0"])})


class Level:
    """One level: a callable that sets the level's defaults in :class:`Properties`.

    Attributes:
        brief: One-line description.
        more: The same line; see ``docs/concepts/levels.md`` for details.
    """

    brief: ClassVar[str]
    more: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Sets the description by the class's name."""
        cls.brief = cls.more = f"{cls.__name__}:  {DESCRIPTIONS[cls.__name__]}"

    def __call__(self, properties: Properties) -> Properties:
        """Sets every option to the level's default; returns ``properties``."""
        properties.options.update(asdict(LEVELS[type(self).__name__]))
        return properties


O0, O1, O2, O3, O4, O5 = (type(name, (Level,), {}) for name in LEVELS)

opt_levels: Mapping[str, Level] = {kind.__name__: kind() for kind in (O3, O2, O1, O0, O4, O5)}
"""Levels by name."""
