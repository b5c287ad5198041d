"""Sphinx configuration: MyST pages and the API from its docstrings, built without a network."""

import argparse
import os

from docutils import nodes
from docutils.parsers.rst import Directive

import apex
from apex.cli import build_parser

project = "apex-amp"
author = "the apex-amp authors"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
release = version = apex.__version__

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


def end_blocks(app, name, source):
    """Removes the blank line at the end of a block, which only the page's doctest needs."""
    source[0] = source[0].replace("\n\n```\n", "\n```\n")


def setup(app):
    app.connect("source-read", end_blocks)
    app.add_directive("command-help", CommandHelp)
