"""The results of a run, one line of JSON for each, written as soon as it is there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ATTEMPTS = 2
"""How often a check begins that ended neither well nor badly: the call that ran it was ended."""


class Records:
    """A file of lines, read anew at each question: two processes write to it."""

    def __init__(self, path: Path) -> None:
        """Names the file, which the first line makes."""
        self.path = path

    def write(self, **line: Any) -> None:
        """Adds a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """Returns all whole lines."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def of(self, part: str) -> list[dict[str, Any]]:
        """Returns the lines of a part."""
        return [line for line in self.lines() if line["part"] == part]

    def results(self, part: str) -> dict[str, dict[str, Any]]:
        """Returns the lines with the result, or the error, of each check that has ended."""
        ended = (line for line in self.of(part) if "result" in line or "error" in line)
        return {line["check"]: line for line in ended}

    def is_due(self, part: str, check: str) -> bool:
        """Returns whether a check has not ended, nor begun too often."""
        begun = Counter(line["check"] for line in self.of(part) if line.get("begun"))
        return check not in self.results(part) and begun[check] < ATTEMPTS

    def running(self, part: str) -> str | None:
        """Returns the check that has begun last and not ended."""
        for line in reversed(self.of(part)):
            if line.get("begun"):
                check: str = line["check"]
                return None if check in self.results(part) else check
        return None

    def seconds(self, part: str) -> float:
        """Returns how long a part has run, in all calls together."""
        return sum(line.get("seconds", 0.0) for line in self.of(part))

    def is_over(self, part: str) -> bool:
        """Returns whether a part has ended."""
        return any(line.get("over") for line in self.of(part))
