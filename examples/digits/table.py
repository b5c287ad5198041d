"""The comparison as rows of text, for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from levels import Run

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Row:
    """One level's cells, in the order of ``HEADINGS``."""

    level: str
    compute: str
    time: str
    speed: str
    memory: str
    loss: str
    accuracy: str
    skipped: str


HEADINGS = Row(
    level="level",
    compute="compute",
    time="time / step",
    speed="speed vs O0",
    memory="bytes / param",
    loss="final loss",
    accuracy="test accuracy",
    skipped="skipped steps",
)


def rows(runs: Sequence[Run], times: Mapping[str, float]) -> list[Row]:
    """Returns the cells of each level, formatted."""
    return [
        Row(
            level=run.level,
            compute=DTYPE_NAMES[run.compute_dtype] + (" *" if run.emulated else ""),
            time=f"{times[run.level]:.1f} ms",
            speed=f"{times['O0'] / times[run.level]:.2f}x" if "O0" in times else "-",
            memory=f"{run.bytes_per_param:.1f}",
            loss=f"{run.losses[-1]:.4f}" if math.isfinite(run.losses[-1]) else "diverged",
            accuracy=f"{run.accuracy:.1%}",
            skipped=f"{len(run.skipped)} of {len(run.losses)}",
        )
        for run in runs
    ]


def footnote(runs: Sequence[Run]) -> str:
    """Returns what the asterisk means, or nothing if no level carries one."""
    steps = {len(run.losses) for run in runs if run.emulated}
    if not steps:
        return ""
    return (
        f"* emulated: this machine has no arithmetic of its own for it. Trained for {max(steps)} "
        "steps only, so its loss and accuracy do not compare."
    )


def text_table(runs: Sequence[Run], times: Mapping[str, float]) -> str:
    """Returns the comparison as aligned text."""
    lines = [astuple(HEADINGS), *(astuple(row) for row in rows(runs, times))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    body = [_align(line, widths) for line in lines]
    rule = "-" * len(body[0])
    note = footnote(runs)
    return "\n".join([body[0], rule, *body[1:], *([rule, note] if note else [])])


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([*left, *right])
