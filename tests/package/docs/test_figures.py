"""The committed figures are those that docs/figures draws, and say what they show."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from docs.figures import FIGURES, loss_scaling, memory, path
from tests.package.docs.pages import ROOT
from tests.support.features import TORCH_VERSION
from tests.support.loops import each_of

TEXT = "{http://www.w3.org/2000/svg}text"
name = each_of(*FIGURES)


def test_the_committed_figure_is_what_is_drawn(name):
    if name == "op_policy" and TORCH_VERSION < (2, 12):
        pytest.skip("this torch lacks the operator of a row")
    assert path(name).read_text("utf-8") == FIGURES[name](), "run python -m docs.figures"


def test_a_figure_is_well_formed_has_text_and_is_described(name):
    figure = ElementTree.fromstring(path(name).read_text("utf-8"))
    assert len(figure.findall(TEXT)) > 5
    assert len(figure.get("aria-label")) > 40


def test_every_figure_stands_on_the_page_of_its_name(name):
    shown = rf"^!\[.+\]\(\.\./_static/figures/{name}\.svg\)$"
    pages = [ROOT / "docs" / folder / f"{name}.md" for folder in ("concepts", "howto")]
    texts = [page.read_text("utf-8") for page in pages if page.exists()]
    assert [bool(re.search(shown, text, re.MULTILINE)) for text in texts] == [True]


def test_the_bars_of_memory_are_the_table_of_its_page():
    page = (ROOT / "docs/howto/memory.md").read_text("utf-8")
    table, _, _ = page.partition("## At the peak")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| O")]
    table = {re.sub(r"[`\[\]]|\(.*?\)", "", row[0]): row[1:5] for row in rows}
    for name, each in memory.values().items():
        sizes = each.weights, each.masters, each.moments, each.stored
        shown = [0.0 if cell == "-" else float(cell) for cell in table[name]]
        assert shown == pytest.approx(sizes, abs=0.01), name


def test_the_scale_of_the_figure_overflows_once_a_growth_too_many():
    scales = [state.scale for state in loss_scaling.history()]
    changes = [after / before for before, after in itertools.pairwise(scales)]
    assert changes.count(2.0) == 7
    assert changes.count(0.5) == 5
