"""The fenced blocks of the documentation, in the order of their pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$|^<!-- (?P<setup>setup)\n(?P<prepares>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_INDENTED = re.compile(r"^    ((?:apex|make|pip|python|torchrun) .*)$", re.MULTILINE)


def blocks(page):
    """Yields language, code and line of every block; hidden ones (``<!-- setup``) as ``setup``."""
    text = page.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        code = found["code"] or found["prepares"] or ""
        line = text.count("\n", 0, found.start()) + 1
        yield found["language"] or "setup", code, line


def shell(page):
    """Returns every command line of a page: of its fenced blocks, and of indented ones."""
    fenced = [code for language, code, _ in blocks(page) if language in ("sh", "shell")]
    indented = _INDENTED.findall(_BLOCK.sub("", page.read_text("utf-8")))
    lines = "".join(fenced).replace("\\\n", " ").splitlines()
    return [line for line in [*lines, *indented] if line and not line.startswith("#")]


def name(page):
    return str(page.relative_to(ROOT))
