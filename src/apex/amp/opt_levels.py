"""apex's objects of the levels, as ``apex.amp.frontend`` has them: read by scripts, not by amp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from apex.amp._amp_state import OptProperties
from apex.amp.properties import DESCRIPTIONS, LEVELS


class Properties(OptProperties):
    """Options with apex's defaults, before a level has set them; see :class:`O0` and its like."""

    def __init__(self) -> None:
        """Starts disabled."""
        names = asdict(LEVELS["O0"])
        given = {"enabled": False, "patch_torch_functions": False, "loss_scale": 1.0}
        super().__init__({name: given.get(name) for name in names})

    def _update_options_dict(self, new_options: Iterable[tuple[str, Any]]) -> None:
        for name, value in new_options:
            if name not in self.options:
                raise ValueError(f"{name!r} is no option; they are {', '.join(self.options)}.")
            self.options[name] = value


class Level:
    """One level: called with :class:`Properties`, it sets the level's defaults and returns them.

    Attributes:
        brief: The level in a line.
        more: The same: ``docs/concepts/levels.md`` tells more.
    """

    brief: ClassVar[str]
    more: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Describes the level of the class's name."""
        cls.brief = f"{cls.__name__}:  {DESCRIPTIONS[cls.__name__]}"
        cls.more = cls.brief

    def __call__(self, properties: Properties) -> Properties:
        """Sets every option to the level's default."""
        properties._update_options_dict(asdict(LEVELS[type(self).__name__]).items())
        return properties


class O0(Level):
    """The level O0."""


class O1(Level):
    """The level O1."""


class O2(Level):
    """The level O2."""


class O3(Level):
    """The level O3."""


class O4(Level):
    """The level O4."""


class O5(Level):
    """The level O5."""


opt_levels: Mapping[str, Level] = {kind.__name__: kind() for kind in (O3, O2, O1, O0, O4, O5)}
"""Every level by name."""
