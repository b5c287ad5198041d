"""An examination as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from apex._core import dtypes
from apex.tools.doctor.examination import Health
from apex.tools.doctor.speeds import DTYPES, WORK, Speed
from apex.tools.wrapping import wrapped

_NAMES = tuple(map(dtypes.name, DTYPES))


def health_text(health: Health) -> str:
    """Returns the text that ``apex doctor`` prints."""
    parts = [
        ", ".join(f"{name} {version}" for name, version in health.versions.items()),
        "\n".join(_speed_lines(health)),
        "\n".join(_conflict_lines(health)),
        "\n".join(_step_lines(health)),
        *([] if health.huge_pages is None else [str(health.huge_pages)]),
        f"{_advice(health)} `apex compare` measures the gain on your model.",
    ]
    return "\n\n".join("\n".join(wrapped(line) for line in part.splitlines()) for part in parts)


def _advice(health: Health) -> str:
    advice = health.advice
    if advice.opt_level is None:
        return f"No level suggested: {advice.reason}"
    return f"Start with {advice.opt_level}: {advice.reason}"


def _speed_lines(health: Health) -> Iterator[str]:
    yield f"{'':8}{'':10}" + "".join(f"{name:>22}" for name in _NAMES)
    for device, what in health.devices.items():
        yield f"{device}: {what}"
        for work in WORK:
            cells = [s for s in health.speeds if (s.device, s.work) == (device, work)]
            base = cells[0].per_second
            yield f"{'':8}{work:10}" + "".join(f"{_cell(cell, base):>22}" for cell in cells)


def _cell(speed: Speed, base: float) -> str:
    if speed.seconds is None:
        return "not supported"
    times = f"{speed.per_second / base:.2f}x" if base else ""
    return f"{speed.per_second / 1e9:,.0f} GFLOP/s {times:>7}"


def _conflict_lines(health: Health) -> Iterator[str]:
    if not health.conflicts:
        yield "Installation: no conflicting apex."
    for conflict in health.conflicts:
        yield f"Conflict: {conflict}."


def _step_lines(health: Health) -> Iterator[str]:
    waiting = {name: count for name, count in health.host_reads.items() if count}
    free = [name for name in health.host_reads if name not in waiting]
    if free:
        yield "No host sync per step under a dynamic loss scale: " + ", ".join(free) + "."
    for name, count in waiting.items():
        yield f"{name} makes the host wait {count} times per step."
