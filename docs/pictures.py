"""Photographs what the tools show: ``python -m docs.pictures`` writes docs/_static/*.png.

Needs Chromium (Debian's package `chromium`). By hand, when a page's looks change: no test compares
pictures.
"""

from __future__ import annotations

import html
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn

from apex import amp

FOLDER = Path(__file__).parent / "_static"

_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: #1b1d21; }
pre { margin: 0; padding: 20px 24px; color: #d7dae0; font: 14px/1.5 ui-monospace, monospace;
  white-space: pre-wrap; }
</style><pre>%s</pre>"""


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
    text = f">>> print(trace)\n{found}".replace(f"{Path.cwd()}/", "")
    return _TERMINAL % html.escape(text)


PICTURES = {"trace": (trace, 940, 275)}
"""What makes each picture's page, and its size in pixels."""


def photograph(page: str, target: Path, width: int, height: int) -> None:
    """Writes a picture of the top of an HTML page."""
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


if __name__ == "__main__":
    for name, (make, width, height) in PICTURES.items():
        torch.manual_seed(0)
        photograph(make(), FOLDER / f"{name}.png", width, height)
        print(FOLDER / f"{name}.png")
