"""The results of a run: one line of JSON each, written at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MACHINE = "machine"
"""The part and the check of the line that describes the machine."""
ATTEMPTS = 2
"""How often a check is started that has neither a result nor an error."""


class Records:
    """A file of lines, read again by each method, because two processes write to it."""

    def __init__(self, path: Path) -> None:
        """Names the file, which the first :meth:`write` creates."""
        self.path = path

    def write(self, **line: Any) -> None:
        """Adds a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """Returns all complete lines."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        *complete, _ = text.split("\n")  # the last piece may be half written
        return [json.loads(line) for line in complete]

    def of(self, part: str) -> list[dict[str, Any]]:
        """Returns the lines of a part."""
        return [line for line in self.lines() if line["part"] == part]

    def results(self, part: str) -> dict[str, dict[str, Any]]:
        """Returns the last line with a result or an error of each check."""
        results = {}
        for line in self.of(part):
            if "result" in line or "error" in line:
                results[line["check"]] = line
        return results

    def is_due(self, part: str, check: str) -> bool:
        """Returns whether a check has neither ended nor begun too often."""
        if check in self.results(part):
            return False
        beginnings = [line["check"] for line in self.of(part) if line.get("begun")]
        return beginnings.count(check) < ATTEMPTS

    def running(self, part: str) -> str | None:
        """Returns the check that began last, or None if it has ended."""
        check: str | None = None
        for line in self.of(part):
            if line.get("begun"):
                check = line["check"]
        return None if check in self.results(part) else check

    def seconds(self, part: str) -> float:
        """Returns how long a part has run, in all calls together."""
        return sum(line.get("seconds", 0.0) for line in self.of(part))

    def reason(self, part: str) -> str | None:
        """Returns why and when a part ended; None if it has not."""
        reason = None
        for line in self.of(part):
            reason = line.get("over", reason)
        return reason

    def machine(self) -> dict[str, Any]:
        """Returns the machine of the run."""
        machine: dict[str, Any] = self.results(MACHINE)[MACHINE]["result"]
        return machine

    def adopt(self, other: Records) -> None:
        """Replaces the parts that another file has results of, and the machine, by its own."""
        adopted = [line for line in other.lines() if other.results(line["part"])]
        parts = {line["part"] for line in adopted}
        lines = [line for line in self.lines() if line["part"] not in parts]
        lines += [line for line in adopted if line.keys() & {"result", "error", "over"}]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        self.path.write_text(text, encoding="utf-8")
