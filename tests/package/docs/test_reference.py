"""The reference holds every public name."""

import importlib
import re

import pytest

from tests.package.docs.pages import ROOT

REFERENCE = ROOT / "docs/reference"
LISTED = {"amp": "apex.amp", "debug": "apex.debug"}
"""Pages that name what they show, in an order of their own."""

WHOLE = ["apex.fp16_utils", "apex.normalization", "apex.optimizers", "apex.parallel"]
# A view for scripts, and modules with pages or parts of their own.
NO_FUNCTIONS = {"_amp_state", "debug", "lists"}


@pytest.mark.parametrize("page", LISTED)
def test_a_page_shows_every_name_of_its_module(page):
    text = (REFERENCE / f"{page}.md").read_text("utf-8")
    directive = r"^\.\. auto(?:function|class):: (?:apex\.(?:amp\.|debug\.)?)?(\w+)$"
    shown = re.findall(directive, text, re.M)
    public = set(importlib.import_module(LISTED[page]).__all__) - NO_FUNCTIONS
    assert public <= set(shown)


@pytest.mark.parametrize("module", WHOLE)
def test_the_other_packages_are_shown_whole(module):
    pages = "".join(page.read_text("utf-8") for page in REFERENCE.glob("*.md"))
    assert re.search(rf"^\.\. automodule:: {re.escape(module)}\n   :members:$", pages, re.M)


def test_every_subcommand_has_its_help_on_the_page():
    from apex.cli import build_parser

    (commands,) = [a.choices for a in build_parser()._actions if getattr(a, "choices", None)]
    text = (REFERENCE / "command_line.md").read_text("utf-8")
    assert re.findall(r"^\.\. command-help:: (\w+)$", text, re.M) == [*commands]
