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
    waiting = {name: count for name, count in health.host_reads.items() if count}
    free = ", ".join(name for name in health.host_reads if name not in waiting)
    steps = [f"No host sync per step under a dynamic loss scale: {free}."] if free else []
    steps += [f"{name} makes the host wait {n} times per step." for name, n in waiting.items()]
    conflicts = [f"Conflict: {conflict}." for conflict in health.conflicts]
    parts = [
        [", ".join(f"{name} {version}" for name, version in health.versions.items())],
        _speed_lines(health),
        conflicts or ["Installation: no conflicting apex."],
        steps,
        [] if health.huge_pages is None else [str(health.huge_pages)],
        [f"{health.advice} `apex compare` measures the gain on your model."],
    ]
    return "\n\n".join("\n".join(map(wrapped, part)) for part in map(list, parts) if part)


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
