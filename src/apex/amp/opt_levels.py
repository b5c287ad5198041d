"""apex's level objects in ``apex.amp.frontend``: for scripts; amp itself does not read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from apex.amp._amp_state import OptProperties
from apex.amp.properties import DESCRIPTIONS, LEVELS


class Properties(OptProperties):
    """Options before a level has set them, with apex's defaults; see :class:`Level`."""

    def __init__(self) -> None:
        names = asdict(LEVELS["O0"])
        given = {"enabled": False, "patch_torch_functions": False, "loss_scale": 1.0}
        super().__init__({name: given.get(name) for name in names})

    def _update_options_dict(self, new_options: Iterable[tuple[str, Any]]) -> None:
        for name, value in new_options:
            if name not in self.options:
                raise ValueError(
                    f"{name!r} is not an option; the options are {', '.join(self.options)}."
                )
            self.options[name] = value


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
        cls.brief = f"{cls.__name__}:  {DESCRIPTIONS[cls.__name__]}"
        cls.more = cls.brief

    def __call__(self, properties: Properties) -> Properties:
        """Sets every option to the level's default; returns ``properties``."""
        properties._update_options_dict(asdict(LEVELS[type(self).__name__]).items())
        return properties


O0, O1, O2, O3, O4, O5 = (type(name, (Level,), {}) for name in LEVELS)

opt_levels: Mapping[str, Level] = {kind.__name__: kind() for kind in (O3, O2, O1, O0, O4, O5)}
"""Levels by name."""
