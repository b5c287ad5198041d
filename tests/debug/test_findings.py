"""What ``explain`` says could be saved: round trips through operators, their cost, the remedy."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.lists import functional_overrides
from apex.debug import explain
from apex.debug.findings import Finding
from apex.debug.records import RoundTrip, WeightCasts
from apex.debug.rendering import formatting
from tests.debug.explain_cases import Body
from tests.debug.test_explain_rendering import Page

DETOUR = ("bfloat16", "float32", "bfloat16")


def attention(softmax=lambda self, scores: scores.softmax(-1)):
    def forward(self, x):
        h = self.a(x)
        return self.b(softmax(self, h @ h.mT) @ h)

    return Body(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), drop=nn.Dropout(0.5))


def explained(model, level="O4", x=None, **options):
    model = amp.initialize(model, opt_level=level, verbosity=0, **options)
    return explain(model, torch.randn(3, 4) if x is None else x)


def finding(found, title):
    return next((each for each in found.findings if each.title == title), None)


def test_a_round_trip_through_an_operator_counts_as_one():
    found = explained(attention())
    forward, backward = found.round_trips
    assert (forward.op, forward.direction, forward.path) == ("aten._softmax", "forward", DETOUR)
    assert (forward.count, forward.casts, forward.bytes) == (1, 2, 2 * 9 * 6)
    assert (backward.op, backward.count) == ("aten._softmax_backward_data", 1)
    assert found.totals.round_trips == 2
    assert found.totals.wasted_casts == 0  # they are not redundant: the table asks for fp32
    saved = finding(found, "softmax runs in fp32")
    assert (saved.count, saved.casts, saved.bytes) == (2, 4, 4 * 9 * 6)
    assert 0.0 < saved.share < 1.0
    assert saved.share == pytest.approx(saved.seconds / found.seconds)


def test_a_dropout_between_operator_and_cast_belongs_to_the_round_trip():
    found = explained(attention(lambda self, scores: self.drop(scores.softmax(-1))))
    assert finding(found, "softmax runs in fp32").casts >= 2
    assert [trip.op for trip in found.round_trips if trip.direction == "forward"] == [
        "aten._softmax"
    ]


def test_an_operator_between_fp32_neighbours_makes_no_round_trip():
    found = explained(Body(lambda self, x: self.a(x).softmax(-1) + x, a=nn.Linear(4, 4)))
    assert found.round_trips == ()
    assert explained(attention(), level="O0").findings == ()


def test_the_remedy_by_the_list_saves_the_round_trip(monkeypatch):
    before = finding(explained(attention()), "softmax runs in fp32")
    assert "amp.lists.functional_overrides.FP32_FUNCS.remove('softmax')" in before.remedy
    names = [name for name in functional_overrides.FP32_FUNCS if name != "softmax"]
    monkeypatch.setattr(functional_overrides, "FP32_FUNCS", names)
    assert finding(explained(attention()), "softmax runs in fp32") is None


def test_the_remedy_by_disable_casts_saves_the_round_trip():
    def softmax(self, scores):
        with amp.disable_casts():
            return scores.softmax(-1)

    assert finding(explained(attention(softmax)), "softmax runs in fp32") is None


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def test_the_remedy_for_a_norm_and_for_weights_is_the_level_that_converts_them():
    found = explained(normed())
    weights = finding(found, "weights are cast to bf16 in every pass")
    assert weights.casts == 4
    assert weights.bytes == 2 * (16 + 4) * 6
    assert weights.modules == ("0", "2")
    for saved in (weights, finding(found, "layer_norm runs in fp32")):
        assert "level 'O5'" in saved.remedy
    assert explained(normed(), level="O5").findings == ()


@pytest.mark.parametrize(
    ("middle", "remedy"),
    [
        (nn.LayerNorm(4), "level 'O5', which converts its weights, too"),
        (nn.Softmax(-1), "level 'O5', in which its input is bf16, too"),
    ],
    ids=["layer_norm", "softmax"],
)
def test_a_round_trip_of_the_backward_pass_alone_blames_no_float_that_is_not_there(middle, remedy):
    def forward(self, x):
        return self.b(self.middle(x + self.a(x)))  # the sum is fp32

    body = Body(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), middle=middle)
    found = explained(body)
    assert [trip.direction for trip in found.round_trips] == ["backward"]
    (saved,) = (each for each in found.findings if "runs in fp32" in each.title)
    assert saved.remedy == f"to keep it in bf16: {remedy}"
    again = Body(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), middle=middle)
    assert explained(again, level="O5").findings == ()


@pytest.mark.parametrize("followed", [False, True])
def test_the_remedy_for_an_fp32_operand_saves_the_casts_of_the_backward_pass(followed):
    def forward(self, x):
        low = self.a(x)
        return self.b(low + (self.offset.to(low.dtype) if followed else self.offset))

    body = Body(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    body.register_buffer("offset", torch.ones(1, 4))
    saved = finding(explained(body), "casts from bf16 to fp32 to bf16 undo one another")
    assert (saved is None) == followed
    remedy = "cast the fp32 tensor that meets a bf16 one in the forward pass to bf16"
    assert followed or saved.remedy == remedy


def test_a_cast_to_fp64_is_called_by_its_name():
    def forward(self, x):
        return self.b((self.a(x).double() * 2).to(x.dtype))

    found = explained(Body(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), level="O5")
    assert finding(found, "mul runs in fp64").remedy.endswith("remove the .double() before it")


def test_modules_kept_in_fp32_are_named_with_what_keeps_them():
    found = explained(normed(), level="O5", fp32_modules=["1"])
    [saved] = [each for each in found.findings if "runs in fp32" in each.title]
    assert saved.remedy.endswith("take its module out of fp32_modules")


def test_a_float_in_the_model_is_named_as_such():
    found = explained(attention(lambda self, scores: F.relu(scores.float()).bfloat16()))
    assert finding(found, "relu runs in fp32").remedy.endswith("remove the .float() before it")


def test_casts_that_undo_one_another_are_a_finding():
    found = explained(attention(lambda self, scores: scores.float()))
    saved = finding(found, "casts from bf16 to fp32 to bf16 undo one another")
    assert saved.casts == found.totals.wasted_casts > 0


def test_autocast_of_torch_gets_its_own_remedy():
    def forward(self, x):
        h = self.a(x)
        return self.b(h.prod(-1, keepdim=True).expand_as(h))  # autocast takes prod in fp32

    with torch.autocast("cpu", torch.bfloat16):
        found = explain(Body(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.ones(3, 4))
    remedy = finding(found, "prod runs in fp32").remedy
    assert "`with torch.autocast(device_type, enabled=False):`" in remedy
    assert "amp." not in remedy


def ranked():
    found = explained(attention())
    trips = [
        RoundTrip("a", "forward", DETOUR, 1, 2, 64, "aten._softmax", "fp32 list (softmax)", 1e-3),
        RoundTrip("b", "forward", DETOUR, 2, 4, 64, "aten.exp", "fp32 list (exp)", 3e-3),
        RoundTrip("b", "forward", DETOUR, 1, 2, 64, seconds=4e-3),
    ]
    casts = (WeightCasts("bfloat16", 3, 96, 2e-3, ("a", "b", "c")),)
    return replace(found, round_trips=tuple(trips), weight_casts=casts)


def test_findings_are_ranked_by_the_time_that_they_take():
    findings = ranked().findings
    assert [round(1e3 * each.seconds) for each in findings] == [4, 3, 2, 1]
    assert all(isinstance(each, Finding) for each in findings)


def test_all_formats_end_in_the_same_findings():
    found = ranked()
    sentences = formatting.findings(found)
    assert sentences[2].startswith("weights are cast to bf16 in every pass: 3 x 32 B of casts, ")
    assert " in a, b and 1 more; " in sentences[2]
    assert sentences[1].startswith("exp runs in fp32: 2 round trips, 4 x 16 B of casts, ")
    text = found.to_text().splitlines()
    assert text[-5] == "Findings, by gain"
    assert text[-4:] == [f"  {rank}. {each}" for rank, each in enumerate(sentences, 1)]
    assert found.to_markdown().splitlines()[-4:] == [f"1. {each}" for each in sentences]
    page = Page(found.to_html())
    items = [words.replace("\u00a0", " ") for words in page.words]
    assert [words for words in items if words in sentences] == sentences
    data = json.loads(found.to_json())["findings"]
    assert [each["title"] for each in data] == [each.title for each in found.findings]


def test_a_model_without_casts_has_none_to_save():
    text = explain(nn.Linear(4, 2), torch.ones(3, 4)).to_text()
    assert text.endswith("Findings: no cast could be saved.")
