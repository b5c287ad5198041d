import re

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import apex.amp as amp
from tests.amp.cases import LEVELS, Net, loss_of, overflow, prepared, sgd

LINE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


def start_up(capsys, level="O2", **kwargs):
    prepared(level, verbosity=1, **kwargs)
    return capsys.readouterr().out


@pytest.mark.parametrize("level", LEVELS)
def test_the_report_tells_the_level_first(capsys, level):
    first = start_up(capsys, level).splitlines()[0]
    assert re.fullmatch(rf"Selected optimization level {level}: .{{10,}}\.", first)


def test_the_report_has_apex_s_sentences_in_order(capsys):
    lines = start_up(capsys).splitlines()
    sentences = [
        "Defaults for this optimization level are:",
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
    ]
    places = [lines.index(sentence) for sentence in sentences]
    assert places == sorted(places)


@pytest.mark.parametrize("level", LEVELS)
def test_every_property_is_a_line_in_both_lists(capsys, level):
    names = re.findall(r"^(\w+) +: ", start_up(capsys, level), re.MULTILINE)
    half = len(names) // 2
    assert names[:half] == names[half:]
    assert {"enabled", "opt_level", "cast_model_type", "patch_torch_functions"} <= set(names)
    assert {"keep_batchnorm_fp32", "master_weights", "loss_scale"} <= set(names)


def test_names_are_padded_to_one_column(capsys):
    lines = [line for line in start_up(capsys).splitlines() if re.match(r"\w+ +: ", line)]
    assert len({line.index(" : ") for line in lines}) == 1


def test_defaults_stand_before_and_overrides_after(capsys):
    report = start_up(capsys, "O2", loss_scale=64.0, keep_batchnorm_fp32="False")
    before, after = report.split("After processing overrides, optimization options are:")
    assert re.search(r"^loss_scale +: dynamic$", before, re.MULTILINE)
    assert re.search(r"^keep_batchnorm_fp32 +: True$", before, re.MULTILINE)
    assert re.search(r"^loss_scale +: 64\.0$", after, re.MULTILINE)
    assert re.search(r"^keep_batchnorm_fp32 +: False$", after, re.MULTILINE)
    assert re.search(r"^cast_model_type +: torch\.float16$", after, re.MULTILINE)


def untrained(capsys, net, params, level="O1", **options):
    amp.initialize(net, torch.optim.SGD(params, lr=0.1), opt_level=level, **options)
    return [line for line in capsys.readouterr().out.splitlines() if "in no optimizer" in line]


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_that_no_optimizer_steps_are_named_in_one_line(capsys, level):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    (line,) = untrained(capsys, net, [*net[2].parameters()], level)
    assert line.startswith(
        "Sequential: 4 of 6 parameters that require gradients are in no optimizer "
        "(0.weight, 0.bias, 1.weight, ...). Nothing steps them, and amp.scale_loss leaves their"
    )
    assert untrained(capsys, net[0], [*net[0].parameters()], "O0", verbosity=0) == []


def test_a_layer_replaced_after_the_optimizer_was_created_is_named(capsys):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params = [*net.parameters()]
    net[1] = nn.Linear(2, 3)
    (line,) = untrained(capsys, net, params)
    assert "2 of 4 parameters" in line
    assert "(1.weight, 1.bias)" in line


def test_frozen_parameters_and_models_that_are_not_trained_are_not_named(capsys):
    net, teacher = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    net[0].requires_grad_(False)
    assert untrained(capsys, [net, teacher], net[1].parameters()) == []


def test_parameters_of_an_optimizer_of_an_earlier_call_are_not_named(capsys):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    net, first = amp.initialize(net, first, opt_level="O1", verbosity=0)
    assert untrained(capsys, net, net[1].parameters()) == []


def test_nothing_goes_to_stderr(capsys):
    prepared("O5", verbosity=1)
    assert capsys.readouterr().err == ""


def test_a_refused_call_reports_nothing(capsys):
    with pytest.raises(RuntimeError, match="already prepared"):
        amp.initialize(prepared("O5")[0])
    assert capsys.readouterr().out == ""


# -- overflow lines --------------------------------------------------------------------------


def test_an_overflow_is_one_line_with_two_blanks(capsys):
    model, optimizer = prepared("O2", verbosity=1)
    capsys.readouterr()
    overflow(model, optimizer)
    assert capsys.readouterr().out == LINE.format(0, 32768.0)
    optimizer.step()
    overflow(model, optimizer)
    assert capsys.readouterr().out == LINE.format(0, 16384.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_before_one_step_are_one_line_for_each_loss(capsys, level):
    model, optimizer = prepared(level, verbosity=1, num_losses=2)
    capsys.readouterr()
    for _ in range(2):
        for loss_id in (0, 1, 0, 1):
            overflow(model, optimizer, loss_id=loss_id)
        optimizer.step()
    assert capsys.readouterr().out == "".join(
        [LINE.format(i, factor * 65536.0) for factor in (1 / 2, 1 / 8) for i in (0, 1)]
    )


def test_an_overflow_that_was_thrown_away_is_not_the_next_one(capsys):
    model, optimizer = prepared("O2", verbosity=1)
    capsys.readouterr()
    for _ in range(2):
        overflow(model, optimizer)
        optimizer.zero_grad()
    assert capsys.readouterr().out == LINE.format(0, 32768.0) + LINE.format(0, 16384.0)


def test_a_clean_pass_says_nothing(capsys):
    model, optimizer = prepared("O2", verbosity=1, loss_scale="dynamic")
    capsys.readouterr()
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert capsys.readouterr().out == ""


def test_an_overflow_has_a_line_for_each_optimizer(capsys):
    models = [nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [sgd(model) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", verbosity=1)
    capsys.readouterr()
    with amp.scale_loss(models[0].weight.sum() * torch.inf, optimizers) as scaled_loss:
        scaled_loss.backward()
    assert capsys.readouterr().out == 3 * LINE.format(0, 32768.0)


def test_the_line_names_the_scaler_of_the_loss(capsys):
    model, optimizer = prepared("O2", verbosity=1, num_losses=3)
    capsys.readouterr()
    overflow(model, optimizer, loss_id=2)
    assert capsys.readouterr().out == LINE.format(2, 32768.0)


def test_at_the_least_scale_the_line_tells_the_least_scale(capsys):
    model, optimizer = prepared("O2", verbosity=1, min_loss_scale=2.0**16)
    capsys.readouterr()
    overflow(model, optimizer)
    assert capsys.readouterr().out == LINE.format(0, 65536.0)


@pytest.mark.parametrize("given", [128.0, 1.0])
def test_a_static_scale_never_tells_of_an_overflow(capsys, given):
    model, optimizer = prepared("O2", verbosity=1, loss_scale=given)
    capsys.readouterr()
    overflow(model, optimizer)
    assert capsys.readouterr().out == ""


# -- silence ---------------------------------------------------------------------------------


def test_verbosity_0_is_silent_overflow_lines_included(capsys):
    model, optimizer = prepared("O2", verbosity=0)
    overflow(model, optimizer)
    assert capsys.readouterr() == ("", "")


def test_verbosity_can_be_set_later(capsys):
    model, optimizer = prepared("O2", verbosity=1)
    capsys.readouterr()
    amp._amp_state.verbosity = 0
    overflow(model, optimizer)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_reports(capsys, rank):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        model, optimizer = prepared("O2", verbosity=1)
        overflow(model, optimizer)
    finally:
        torch.distributed.destroy_process_group()
    out = capsys.readouterr().out
    assert ("Selected optimization level O2" in out) is (rank == 0)
    assert (LINE.format(0, 32768.0) in out) is (rank == 0)


# -- skipping without end --------------------------------------------------------------------


def skip(optimizer, model, value, times):
    for _ in range(times):
        optimizer.zero_grad()
        with amp.scale_loss((model.last.weight * value).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def test_50_skips_in_a_row_give_one_warning_that_names_a_gradient():
    model, optimizer = prepared("O1")
    skip(optimizer, model, torch.inf, 49)
    with pytest.warns(
        UserWarning, match=r"skipped 50 steps in a row for loss 0.*last\.weight"
    ) as w:
        skip(optimizer, model, torch.inf, 60)
    assert len(w) == 1


def test_the_warning_of_inf_suggests_bf16_and_the_learning_rate():
    # Parameters stay fp32 here; in fp16 the tiny scale of the 50th skip is 0, and 0 * inf is NaN.
    model, optimizer = prepared("O1")
    with pytest.warns(UserWarning, match=r"last\.weight holds inf.*'O4', 'O5'.*learning rate"):
        skip(optimizer, model, torch.inf, 50)


def test_the_warning_of_nan_says_that_no_scale_mends_it():
    model, optimizer = prepared("O2")
    with pytest.warns(UserWarning, match=r"last\.weight holds NaN, which no loss scale can fix"):
        skip(optimizer, model, torch.nan, 50)


def test_a_clean_step_between_starts_the_count_anew():
    model, optimizer = prepared("O1")
    for _ in range(3):
        skip(optimizer, model, torch.inf, 49)
        skip(optimizer, model, 0.0, 1)


def test_the_warning_comes_at_verbosity_0_too():
    model, optimizer = prepared("O1", verbosity=0)
    with pytest.warns(UserWarning, match="skipped 50 steps"):
        skip(optimizer, model, torch.inf, 50)


def test_a_report_of_an_untouched_model_needs_no_optimizer(capsys):
    amp.initialize(Net(), opt_level="O5")
    assert "Selected optimization level O5" in capsys.readouterr().out
