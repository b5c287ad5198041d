"""SVG drawings with real text and colours that follow the page's light or dark theme."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

# Pages that inline a drawing set these variables (docs/conf.py); a file alone uses the defaults.
_COLOURS = {
    "fp32": "var(--drawing-fp32, #2f6db5)",
    "fp16": "var(--drawing-fp16, #c05f0a)",
    "bf16": "var(--drawing-bf16, #0f8570)",
    "plain": "var(--color-foreground-muted, #6b6f76)",
    "bad": "var(--drawing-bad, #c22f4b)",
}

_STYLE = """
.drawing { font-family: var(--font-stack, system-ui, sans-serif); font-size: 14px; }
.drawing text { fill: var(--color-foreground-primary, #1c1d20); }
.drawing .small { font-size: 12px; }
.drawing .muted { fill: var(--color-foreground-muted, #6b6f76); }
.drawing .head { font-weight: 600; }
.drawing .code { font-family: var(--font-stack--monospace, ui-monospace, monospace); }
.drawing .rule { stroke: var(--color-background-border, #d8dade); stroke-width: 1; }
.drawing .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
""" + "\n".join(
    f".drawing .{kind} {{ --ink: {colour}; }}\n"
    f".drawing text.{kind} {{ fill: var(--ink); }}\n"
    f".drawing .line.{kind}, .drawing .box.{kind} {{ stroke: var(--ink); }}\n"
    f".drawing .box.{kind}, .drawing .solid.{kind} {{ fill: var(--ink); }}"
    for kind, colour in _COLOURS.items()
)
_STYLE += "\n.drawing .box { fill-opacity: 0.16; stroke-width: 1.25; }\n"


class Drawing:
    """A drawing of ``width`` by ``height`` units, to which shapes are added in order.

    ``kind`` of a shape is one of ``fp32``, ``fp16``, ``bf16``, ``plain``, ``bad``: its colour.
    """

    def __init__(self, name: str, width: int, height: int, *, says: str) -> None:
        self._name = name
        self._size = (width, height)
        self._says = says
        self._shapes: list[str] = []

    def text(self, x: float, y: float, string: str, kind: str = "", anchor: str = "start") -> None:
        """Writes at a baseline; ``kind`` may also be ``small``, ``muted``, ``head``, ``code``."""
        self._add("text", string, x=x, y=y, **{"class": kind, "text-anchor": anchor})

    def box(
        self, x: float, y: float, width: float, height: float, label: str = "", kind: str = "plain"
    ) -> None:
        """Draws a tinted box with its label in the middle."""
        shape = {"x": x, "y": y, "width": width, "height": height, "rx": min(4, width / 5)}
        self._add("rect", **shape, **{"class": f"box {kind}"})
        if label:
            self.text(x + width / 2, y + height / 2 + 5, label, anchor="middle")

    def solid(self, x: float, y: float, width: float, height: float, kind: str, **more: float):
        """Draws a filled rectangle without an edge."""
        shape = {"x": x, "y": y, "width": width, "height": height, **more}
        self._add("rect", **shape, **{"class": f"solid {kind}"})

    def squares(
        self, corners: Iterable[tuple[float, float]], side: float, kind: str, opacity: float = 1
    ) -> None:
        """Draws filled squares, all as one shape."""
        path = "".join(f"M{_number(x)} {_number(y)}h{side}v{side}h-{side}z" for x, y in corners)
        self._add("path", d=path, opacity=opacity, **{"class": f"solid {kind}"})

    def rule(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draws a thin line of the table or the axis."""
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, **{"class": "rule"})

    def line(self, points: Iterable[tuple[float, float]], kind: str, *, dashed: bool = False):
        """Draws a line through the points."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        more = {"stroke-dasharray": "5 4"} if dashed else {}
        self._add("polyline", points=path, **{"class": f"line {kind}"}, **more)

    def arrow(self, points: list[tuple[float, float]], kind: str = "plain") -> None:
        """Draws a line with a head at its last point."""
        (x0, y0), (x, y) = points[-2:]
        self.line(points, kind)
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)  # heads point along an axis
        left, right = ((x - 7 * dx + s * 4 * dy, y - 7 * dy + s * 4 * dx) for s in (1, -1))
        self.line([left, (x, y), right], kind)

    def render(self) -> str:
        """Returns the text of the SVG file."""
        width, height = self._size
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" id="drawing-{self._name}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(self._says)}>'
        )
        return "\n".join([opening, f"<style>{_STYLE}</style>", *self._shapes, "</svg>", ""])

    def _add(self, tag: str, content: str = "", **attributes: object) -> None:
        written = "".join(
            f" {name}={quoteattr(_number(value))}"
            for name, value in attributes.items()
            if value != ""
        )
        self._shapes.append(
            f"<{tag}{written}>{escape(content)}</{tag}>" if content else f"<{tag}{written}/>"
        )


def _number(value: object) -> str:
    return f"{round(value, 2):g}" if isinstance(value, int | float) else str(value)
