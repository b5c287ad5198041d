"""Sphinx configuration: MyST pages and the API from its docstrings, built without a network."""

import argparse
import json
import os
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

from apex._core.project import VERSION
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

RESULTS = Path(__file__).parents[1] / "benchmarks/results/cpu.json"

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


class Measured(Directive):
    """Inserts figures of benchmarks/results/cpu.json as a table.

    Each line of its content is ``benchmark: case = what the figure means``. A case that the file
    lacks fails the build.
    """

    has_content = True

    def run(self):
        measured = json.loads(RESULTS.read_text("utf-8"))
        figures = {f"{each['benchmark']}: {each['case']}": each for each in measured["figures"]}
        lines = [line.split(" = ", 1) for line in self.content]
        missing = [key for key, _ in lines if key not in figures]
        if missing:
            raise self.error(f"{RESULTS.name} has no figure {missing}")
        rows = [(meaning, *cells(figures[key])) for key, meaning in lines]
        machine = measured["machine"]
        made_by = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
        text = [
            "| measured | value | quartiles |",
            "|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            f"*{made_by}; by `python -m benchmarks`.*",
        ]
        return self.state.nested_parse(text, 0, box := nodes.container()) or [box]


def cells(figure):
    """Returns a figure of a benchmark and its quartiles, as text."""
    value, low, high = (
        None if figure[key] is None else f"{figure[key]:.{figure['digits']}f}"
        for key in ("value", "low", "high")
    )
    spread = "" if low is None or low == high else f"{low} to {high}"
    return f"{value}{'' if figure['unit'] == 'x' else ' '}{figure['unit']}", spread


def subparsers(parser):
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def end_blocks(app, name, source):
    """Removes the blank line at the end of a block, which only the page's doctest needs."""
    source[0] = source[0].replace("\n\n```\n", "\n```\n")


def setup(app):
    app.connect("source-read", end_blocks)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("measured", Measured)
