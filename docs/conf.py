"""Sphinx configuration: MyST pages and the API from its docstrings, built without a network."""

import argparse
import os
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

from apex._core.project import ADDRESS, VERSION
from apex.cli import build_parser

project = "apex-amp"
author = "the apex-amp authors"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
release = version = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# The build runs offline, without other projects' inventories: only our own names must resolve.
nitpick_ignore_regex = [("py:.*", r"(?!apex\.).*")]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"apex-amp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

RELATIVE = re.compile(r"\]\(((?!https?:)[^)\s#]+\.md)(#[^)\s]*)?\)")
PICTURE = re.compile(r"^!\[.*\]\((.+\.(svg|png))\)$", re.MULTILINE)

# The colours of docs/figures, by theme.
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#2f6db5",
        "color-brand-content": "#2f6db5",
        "drawing-fp32": "#2f6db5",
        "drawing-fp16": "#c05f0a",
        "drawing-bf16": "#0f8570",
        "drawing-bad": "#c22f4b",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7fb0ec",
        "color-brand-content": "#7fb0ec",
        "drawing-fp32": "#7fb0ec",
        "drawing-fp16": "#f0a050",
        "drawing-bf16": "#4cc9ae",
        "drawing-bad": "#ff7b8f",
    },
}


class CommandHelp(Directive):
    """``.. command-help:: compare``: inserts the output of ``apex compare --help``."""

    optional_arguments = 1

    def run(self):
        os.environ["COLUMNS"] = "88"  # argparse's only way to a fixed width
        parser = build_parser()
        if self.arguments:
            parser = subparsers(parser)[self.arguments[0]]
        text = parser.format_help()
        return [nodes.literal_block(text, text, language="text", classes=["command-help"])]


def subparsers(parser):
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def read(app, name, source):
    """Adds what only the site has; the pages themselves are plain Markdown."""
    text = source[0].replace("\n\n```\n", "\n```\n")  # only the page's doctest needs it
    text = PICTURE.sub(framed, text)
    if name == "index":
        text += "\n" + Path(__file__).with_name("contents.txt").read_text("utf-8")
    folder = (DOCS / name).parent
    if name == "changelog":
        folder = ROOT
        text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    source[0] = RELATIVE.sub(lambda match: on_the_site(match, folder), text)


def on_the_site(match, folder):
    """Returns a link of a page in a folder; files outside of docs/ are the repository's."""
    path, anchor = match.groups("")
    file = (folder / path).resolve()
    if file.is_relative_to(DOCS):
        return f"](/{file.relative_to(DOCS)}{anchor})"
    return f"]({ADDRESS}/blob/main/{file.relative_to(ROOT)}{anchor})"


def framed(match):
    """Returns a picture in a frame that scrolls; a drawing inline, in the colours of the theme."""
    picture, (path, suffix) = match[0], match.groups()
    if suffix == "svg":
        picture = f"```{{raw}} html\n:file: {path}\n```"
    return f":::{{container}} drawing-frame\n{picture}\n:::"


def setup(app):
    app.connect("source-read", read)
    app.add_directive("command-help", CommandHelp)
