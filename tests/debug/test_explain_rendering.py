"""An explanation as text, Markdown, JSON and a page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from apex import amp
from apex.debug import explain
from apex.debug.rendering import formatting
from tests.debug.explain_cases import Body

VOID = {"meta", "br", "hr", "link", "img", "input"}


class Page(HTMLParser):
    """Reads a page, and refuses tags that do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.classes, self.words = [], [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.classes.update(dict(attrs).get("class", "").split())
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def found():
    """One explanation with all that can be in it: three dtypes, a round trip, an overflow."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x):
        return self.layers(x).half().float().half() * 6e4

    model = Body(forward, layers=layers, unused=nn.Linear(1, 1))
    model = amp.initialize(model, opt_level="O4", verbosity=0)
    return explain(model, torch.randn(3, 4), loss_fn=lambda out: out.float().mean())


def test_text_has_aligned_tables_of_modules_and_operators(found):
    text = found.to_text()
    for table in re.findall(r"╭[^╯]*╯", text):
        assert len({len(line) for line in table.splitlines()}) == 1
    assert text.count("╭") == 2
    assert "└─ unused" in text
    assert "│ layers.0" in text
    assert "low precision list (linear)" in text
    assert "3 fp32→bf16, 192 B" in text
    assert str(found) == text


def test_colours_change_nothing_but_colours(found):
    coloured = found.to_text(colour=True)
    assert "\x1b[32mbf16\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == found.to_text()


def test_text_omits_the_fastest_rows_and_counts_them(found):
    text = found.to_text(rows=2)
    assert f"{len(found.ops) - 2} faster rows omitted" in text
    slowest = max(found.ops, key=lambda row: row.seconds)
    assert slowest.op.removeprefix("aten.")[:20] in text
    assert "omitted" not in found.to_text(rows=None)


def test_markdown_tables_have_as_many_cells_in_every_row(found):
    for table in re.findall(r"(?:^\|.*\|\n)+", found.to_markdown(), re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert found.to_markdown().count("\n| --- ") == 3


def test_json_holds_every_row_with_totals_and_shares(found):
    data = json.loads(found.to_json())
    assert len(data["ops"]) == len(found.ops)
    assert sum(row["time_share"] for row in data["ops"]) == pytest.approx(1.0)
    assert data["totals"]["wasted_casts"] == found.totals.wasted_casts > 0
    assert data["round_trips"][0]["path"] == ["float32", "float16", "float32"]
    assert {row["name"] for row in data["modules"]} == set(found.kinds)


def test_the_page_is_well_formed_and_loads_nothing(found):
    html = found.to_html()
    page = Page(html)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "http" not in html
    assert "url(" not in html
    assert page.tags.count("details") == len(found.kinds) + 1  # and what ran outside
    assert page.tags.count("table") == 1


def test_the_page_colours_the_tree_by_dtype(found):
    page = Page(found.to_html())
    assert {"bf16", "fp32", "fp16", "mixed", "none"} <= page.classes
    assert "prefers-color-scheme: dark" in found.to_html()


def test_the_page_marks_what_is_wrong(found):
    page = Page(found.to_html())
    assert {"alarm", "alarm-text"} <= page.classes
    clean = explain(nn.Linear(4, 2), torch.ones(3, 4))
    assert not {"alarm", "alarm-text"} & Page(clean.to_html()).classes


def test_names_are_escaped_on_the_page(found):
    kinds = {**found.kinds, "": "A<b>", "unused": "<script>"}
    ops = (replace(found.ops[0], op='aten.<script>"', decided_by="<script>"), *found.ops[1:])
    html = replace(found, model="<script>", kinds=kinds, ops=ops, notes=("<script>",)).to_html()
    assert "&lt;script&gt;, explained" in html
    assert "A&lt;b&gt;" in html
    assert html.count("&lt;script&gt;") == 9
    assert "script" not in Page(html).tags


@pytest.mark.parametrize(
    ("suffix", "start"), [("html", "<!doctype"), ("md", "# Body"), ("json", "{"), ("txt", "Body")]
)
def test_a_file_is_written_in_the_format_of_its_suffix(found, tmp_path, suffix, start):
    found.save(tmp_path / f"report.{suffix}")
    assert (tmp_path / f"report.{suffix}").read_text(encoding="utf-8").startswith(start)


def test_shares_never_round_to_none_or_all():
    shares = [None, 0.0, 1e-5, 0.5, 0.9999, 1.0]
    assert [formatting.percent(s) for s in shares] == [
        "—",
        "0 %",
        "<0.1 %",
        "50.0 %",
        ">99.9 %",
        "100 %",
    ]


def test_bytes_come_in_a_unit_that_fits():
    sizes = [formatting.size(count) for count in (1023, 1024, 3 * 2**20, 2**50)]
    assert sizes == ["1023 B", "1 KiB", "3 MiB", "1024 TiB"]
