"""What amp prints, warns and logs: the start-up report, overflows, a loss that is not finite."""

import re
import warnings

import pytest
import torch

from apex import amp
from tests.support import loops
from tests.support.emulation import emulate
from tests.support.loops import LEVELS, Net, overflow, prepared, scaled_backward, small_loss
from tests.support.ranks import fake_group

NAN = torch.nan
LINE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


@pytest.mark.parametrize("level", LEVELS)
def test_the_report_has_apexs_sentences_and_a_line_for_each_property(capsys, level):
    given = {"loss_scale": 64.0}
    _keep = prepared(level, model=Net(), verbosity=1, **given)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert re.fullmatch(rf"Selected optimization level {level}: .{{10,}}\.", lines[0])
    sentences = [
        "Defaults for this optimization level are:",
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
    ]
    places = [lines.index(sentence) for sentence in sentences]
    assert places == sorted(places)
    parts = out.split(sentences[1])
    before, after = (dict(re.findall(r"^(\w+) +: (.+)$", part, re.MULTILINE)) for part in parts)
    assert before.keys() == after.keys()
    assert after == {**before, "loss_scale": "64.0"}
    assert {"enabled", "opt_level", "cast_model_type", "patch_torch_functions"} <= before.keys()
    assert len({line.index(" : ") for line in lines if re.match(r"\w+ +: ", line)}) == 1
    assert err == ""


@pytest.mark.parametrize(("rank", "verbosity"), [(0, 1), (0, 2), (1, 1), (0, 0)])
def test_only_rank_0_reports_and_verbosity_0_is_silent(capsys, rank, verbosity):
    with fake_group(rank, 2):
        model, optimizer = prepared("O2", model=Net(), verbosity=verbosity)
        overflow(model, optimizer)
    out = capsys.readouterr().out
    speaks = rank == 0 and verbosity > 0
    assert ("Selected optimization level O2" in out) is speaks
    assert (LINE.format(0, 32768.0) in out) is speaks
    assert bool(out) is speaks


# -- overflows -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_one_line_for_each_pass(capsys, level):
    model, optimizer = prepared(level, model=Net(), verbosity=1, num_losses=2)
    capsys.readouterr()
    for _ in range(2):
        for loss_id in (0, 1, 0, 1):
            overflow(model, optimizer, loss_id=loss_id)
        optimizer.step()
        optimizer.zero_grad()
    scaled_backward(small_loss(model), optimizer)
    expected = [LINE.format(i, 65536.0 / 2**count) for count in (1, 2, 3, 4) for i in (0, 1)]
    assert capsys.readouterr().out == "".join(expected)


def skip(optimizer, model, value, times):
    for _ in range(times):
        loops.descend((model.last.weight * value).sum(), optimizer)


@pytest.mark.parametrize(("level", "value"), [("O1", torch.inf), ("O1", NAN), ("O2", NAN)])
def test_50_skips_in_a_row_give_one_warning_that_names_a_gradient_and_the_command(level, value):
    model, optimizer = prepared(level, model=Net())
    for _ in range(2):
        skip(optimizer, model, value, 49)
        skip(optimizer, model, 0.0, 1)  # starts the count anew
    words = r"skipped 50 steps in a row for loss 0.*last\.weight \(12 {} of 12\).*apex trace"
    with pytest.warns(UserWarning, match=words.format(value)) as caught:
        skip(optimizer, model, value, 60)
    assert len(caught) == 1
    assert caught[0].filename == loops.__file__  # where ``scaled_backward`` opens the block


# -- emulated dtypes -------------------------------------------------------------------------

SAID = r"{} is emulated on this CPU: matrix products are far slower than in fp32\. "
BF16 = r"Use bf16 here: opt_level 'O4' instead of 'O1', or 'O5' instead of 'O2'\."
FP32 = r"Train with opt_level 'O0' here, and use 16-bit levels to test a script for a GPU\."
HALF = {"O1": {}, "O2": {}, "O5": {"cast_model_type": torch.float16}}
BRAIN = {"O4": {}, "O5": {}, "O1": {"patch_torch_functions_type": torch.bfloat16}}


EMULATED = [
    (("fp16",), HALF, SAID.format("fp16") + BF16),
    (("fp16", "bf16"), HALF, SAID.format("fp16") + FP32),
    (("fp16", "bf16"), BRAIN, SAID.format("bf16") + FP32),
]


@pytest.mark.parametrize(("names", "levels", "words"), EMULATED)
def test_an_emulated_level_warns_once_at_the_callers_line(monkeypatch, names, levels, words):
    emulate(monkeypatch, *names)
    for level, options in levels.items():
        with pytest.warns(UserWarning, match=words) as caught:
            keep = amp.initialize([Net(), Net()], opt_level=level, verbosity=0, **options)
        assert [warning.filename for warning in caught] == [__file__]
        del keep
    with pytest.warns(UserWarning, match=SAID.format("fp16")):
        amp.init()


def test_levels_that_the_cpu_computes_do_not_warn_and_an_error_changes_nothing(monkeypatch):
    emulate(monkeypatch, "fp16")
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=SAID.format("fp16")):
            amp.initialize(model, opt_level="O2")
        assert (type(model), amp.state_dict()) == (Net, {})
        for level in ("O0", "O4", "O5"):
            prepared(level, model=Net())
        prepared("O1", model=Net(), enabled=False)
        prepared("O1", model=Net(), patch_torch_functions=False)
        prepared("O2", model=Net(), cast_model_type=torch.bfloat16)


@pytest.mark.parametrize("values", [[1.0, NAN, torch.inf, NAN], [1.0] * 40 + [NAN] * 32])
@pytest.mark.parametrize(("level", "times"), [("O4", 1), ("O5", 1), ("O1", 0), ("O2", 0)])
def test_a_loss_that_is_not_finite_is_said_once_where_nothing_skips(level, times, values, caplog):
    model, optimizer = prepared(level, model=Net())
    for value in values:
        loops.descend(small_loss(model) * value, optimizer)
    found = [text for text in caplog.messages if "is inf or NaN" in text]
    assert len(found) == times
    assert all("`python -m apex trace train.py`" in text for text in found)


def test_one_element_of_a_loss_that_is_not_finite_is_said(caplog):
    _, optimizer = prepared("O4", model=Net())
    for value in (1.0, -torch.inf):
        with amp.scale_loss(torch.tensor([[3e38, 3e38, value]], requires_grad=True), optimizer):
            pass
        assert ("is inf or NaN" in caplog.text) is (value != 1.0)
