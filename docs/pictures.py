"""Photographs what the tools show: ``python -m docs.pictures [NAME ...]`` writes them.

The picture of a report is of ``report.html``, which ``make demo`` writes on an idle machine.
Needs Chromium (Debian's package `chromium`) and Pillow. By hand, when a page's looks change: no
test compares pictures.
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from PIL import Image, ImageChops
from torch import nn

from apex import amp

FOLDER = Path(__file__).parent / "_static"

_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: #1b1d21; }
pre { margin: 0; padding: 20px 24px; color: #d7dae0; font: 14px/1.5 ui-monospace, monospace;
  white-space: pre-wrap; }
</style><pre>%s</pre>"""

_COLUMNS = 104
"""Characters that fit into a line of the terminal."""


class Attention(nn.Module):
    """Attention whose scores are too large for fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = 100 * x @ (100 * x).transpose(-1, -2)
        return scores.softmax(-1) @ x


class Block(nn.Module):
    """A part of a transformer."""

    def __init__(self, width: int, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention or nn.Identity()
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x + self.attention(x)))


def trace() -> str:
    """Returns the report on an overflow."""
    model = nn.Sequential(nn.Linear(8, 16), Block(16, Attention()), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.debug.trace_overflow(model) as found:
        loss = model(torch.randn(2, 4, 8)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    lines = f">>> print(trace)\n{found}".replace(f"{Path.cwd()}/", "").splitlines()
    wrapped = [textwrap.fill(line, _COLUMNS, subsequent_indent=" " * 9) for line in lines]
    return _TERMINAL % html.escape("\n".join(wrapped))


def report() -> str:
    """Returns the demo's report."""
    return Path("report.html").read_text("utf-8")


PICTURES = {"trace": (trace, 940, 3000), "demo-report": (report, 1280, 900)}
"""What makes each picture's page, its width, and its largest height in pixels."""

MARGIN = 20
"""Pixels that are kept below a page's content."""


def photograph(page: str, target: Path, width: int, height: int) -> None:
    """Writes a picture of an HTML page, as high as its content if that is less than ``height``."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "page.html")
        source.write_text(page, "utf-8")
        switches = "headless no-sandbox disable-gpu no-first-run hide-scrollbars disable-sync"
        subprocess.run(
            [
                "chromium",
                *(f"--{switch}" for switch in switches.split()),
                "--disable-background-networking",
                f"--user-data-dir={folder}/profile",
                f"--window-size={width},{height}",
                f"--screenshot={target}",
                source.as_uri(),
            ],
            check=True,
            capture_output=True,
        )
    picture = Image.open(target).convert("RGB")
    below = Image.new("RGB", picture.size, picture.getpixel((0, height - 1)))
    _, _, _, bottom = ImageChops.difference(picture, below).getbbox()
    picture.crop((0, 0, width, min(bottom + MARGIN, height))).save(target)


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        make, width, height = PICTURES[name]
        torch.manual_seed(0)
        photograph(make(), FOLDER / f"{name}.png", width, height)
        print(FOLDER / f"{name}.png")
