"""Writes the comparison as one self-contained page: no network, no library."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path

from charts import Chart, Line, smooth, svg
from levels import Run
from table import HEADINGS, footnote, rows

PAGE = Path(__file__).parent / "page"

MEANINGS = {
    "O0": "fp32 throughout",
    "O1": "fp16 where it is safe, fp32 weights",
    "O2": "fp16 model, fp32 batch norm and masters",
    "O3": "fp16 throughout, no masters",
    "O4": "bf16 where it is safe, fp32 weights",
    "O5": "bf16 model, fp32 batch norm and masters",
}


def write_report(
    path: Path, runs: Sequence[Run], times: Mapping[str, float], *, machine: str
) -> None:
    """Writes the page to ``path``.

    Args:
        path: The file, replaced if there.
        runs: One per level, in the order to show.
        times: Milliseconds per step, per level.
        machine: What it ran on, in words.
    """
    body = [
        _header(runs, times, machine),
        _table(runs, times),
        *_figures(runs),
        "<footer>Written by <code>examples/digits/compare.py</code>. "
        "The same seed gives the same curves; only the times vary.</footer>",
    ]
    page = (PAGE / "page.html").read_text()
    for name, text in {
        "style": (PAGE / "style.css").read_text(),
        "script": (PAGE / "hover.js").read_text(),
        "body": "\n".join(body),
    }.items():
        page = page.replace(f"<!-- {name} -->", text)
    path.write_text(page, encoding="utf-8")


def _header(runs: Sequence[Run], times: Mapping[str, float], machine: str) -> str:
    return (
        '<header><p class="eyebrow">apex.amp on handwritten digits</p>'
        f"<h1>{_headline(runs, times)}</h1>"
        "<p>One conv net of 0.4 million parameters, 1437 digits of 8 by 8 pixels, fused AdamW, "
        "the same first weights and the same batches at each optimization level. Only "
        f"<code>opt_level</code> differs.</p><p class='machine'>{escape(machine)}</p></header>"
    )


def _headline(runs: Sequence[Run], times: Mapping[str, float]) -> str:
    native = [run for run in runs if run.level != "O0" and not run.emulated]
    if "O0" not in times or not native:
        return "One net at each level of precision"
    best = min(native, key=lambda run: times[run.level])
    base = next(run for run in runs if run.level == "O0")
    speed = times["O0"] / times[best.level]
    if speed <= 1:
        return "At this size no level is faster here than fp32"
    return (
        f'<b class="{best.level}">{best.level}</b> trains {speed:.1f}x as fast as fp32: '
        f"{best.accuracy:.1%} of the test digits right, against {base.accuracy:.1%}"
    )


def _table(runs: Sequence[Run], times: Mapping[str, float]) -> str:
    names = [field.name for field in fields(HEADINGS)]
    head = "".join(f'<th scope="col">{getattr(HEADINGS, name)}</th>' for name in names)
    slowest = max((times[run.level] for run in runs if not run.emulated), default=1.0)
    body = []
    for run, row in zip(runs, rows(runs, times), strict=True):
        cells = [
            f'<th scope="row"><b class="chip {run.level}">{run.level}</b>'
            f"<small>{MEANINGS[run.level]}</small></th>"
        ]
        for name in names[1:]:
            bar = _bar(run, times[run.level] / slowest) if name == "time" else ""
            cells.append(
                f'<td class="{name}" data-label="{getattr(HEADINGS, name)}">'
                f"<span>{getattr(row, name)}</span>{bar}</td>"
            )
        kind = ' class="emulated"' if run.emulated else ""
        body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return (
        f"<section><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        f"<p class='note'>{_table_note(runs)}</p></section>"
    )


def _bar(run: Run, share: float) -> str:
    """Returns a bar of ``share`` of the cell; none for an emulated level, which dwarfs the rest."""
    if run.emulated:
        return ""
    return f'<i class="bar {run.level}" style="width:{share * 100:.0f}%"></i>'


def _table_note(runs: Sequence[Run]) -> str:
    note = (
        "Time: median of steps taken in turns. Bytes: parameters, fp32 masters and optimizer "
        "state that live between two steps."
    )
    return note + (f"<br>{star}" if (star := footnote(runs)) else "")


def _figures(runs: Sequence[Run]) -> list[str]:
    full = [run for run in runs if not run.emulated]
    few = [run for run in runs if run.emulated]
    scaled = [run for run in runs if len(set(run.loss_scales)) > 1 or run.loss_scales[0] != 1]
    figures = []
    if full:
        figures.append(
            _figure(
                "Training loss",
                "Faint: every step. Bold: the running mean, broad for the first level and dashed "
                "where the whole model is converted. Curves on top of one another: the reduced "
                "precision changes nothing that matters.",
                Chart("Training loss of each level", tuple(_loss_line(run) for run in full)),
            )
        )
    if few:
        start = max(len(run.losses) for run in few)
        figures.append(
            _figure(
                f"The first {start} steps",
                "All levels, the emulated ones included.",
                Chart(
                    f"Training loss of all levels in the first {start} steps",
                    tuple(Line(run.level, run.losses[:start]) for run in runs),
                ),
            )
        )
    if scaled:
        figures.append(_scale_figure(scaled))
    return figures


def _scale_figure(runs: Sequence[Run]) -> str:
    skips = sum(len(run.skipped) for run in runs)
    found = {0: "No step overflowed.", 1: "A cross marks the skipped step."}.get(
        skips, f"Crosses mark the {skips} skipped steps."
    )
    return _figure(
        "Loss scale",
        "fp16 gradients underflow, so the loss is multiplied; when they overflow, the step is "
        f"skipped and the scale halves. {found} Levels not shown keep it at 1.",
        Chart(
            "Loss scale of each level with loss scaling",
            tuple(Line(run.level, run.loss_scales, marks=run.skipped) for run in runs),
            base=2,
            shape="stairs",
            first_step=0,
        ),
    )


def _loss_line(run: Run) -> Line:
    return Line(run.level, smooth(run.losses), raw=run.losses)


def _figure(title: str, caption: str, chart: Chart) -> str:
    data = {
        line.level: [_short(value) for value in (line.raw or line.values)] for line in chart.lines
    }
    legend = "".join(
        f'<li><b class="chip {line.level}">{line.level}</b><output data-level="{line.level}">'
        f"{_final(data[line.level])}</output></li>"
        for line in chart.lines
    )
    last = chart.first_step + max(len(line.values) for line in chart.lines) - 1
    return (
        f"<figure data-values='{json.dumps(data)}'><figcaption><h2>{title}</h2><p>{caption}</p>"
        f'</figcaption><ul class="legend"><li>step <output data-step>{last}</output></li>{legend}'
        f"</ul>{svg(chart, width=960, height=320, kind='wide')}"
        f"{svg(chart, width=360, height=260, kind='narrow')}</figure>"
    )


def _final(values: Sequence[float | None]) -> str:
    last = values[-1]
    if last is None:
        return "-"
    return str(last) if isinstance(last, int) else f"{last:.4f}"  # as page/hover.js writes them


def _short(value: float) -> float | None:
    """Returns ``value`` with at most four decimals; JSON has no NaN, so None for one."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else round(value, 4)
