"""One loss's scale on the device."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apex._core.scale import ScaleRule, ScaleState, next_scale
from apex._engine.events import Iteration, ScaleUpdate
from apex._engine.scaler import scaler_for

STEPS = itertools.count()


def dynamic(**options):
    return scaler_for("dynamic", ScaleRule(**options))


def run_pass(scaler, grad, optimizers=1):
    """One pass whose only gradient is the number ``grad``, scaled; returns it unscaled."""
    values = torch.tensor([grad])
    scaler.begin_pass()
    scaler.unscale_([values])
    scaler.update([Iteration(key, next(STEPS)) for key in range(optimizers)])
    return float(values)


def test_a_dynamic_scale_starts_at_2_to_the_16():
    assert dynamic().read_scale() == 2.0**16


def test_a_dynamic_scale_starts_within_its_bounds():
    assert dynamic(ceiling=4.0).read_scale() == 4.0
    assert dynamic(floor=2.0**20).read_scale() == 2.0**20


def test_a_dynamic_scale_starts_where_it_is_told_and_halves_from_there():
    scaler = scaler_for("dynamic", ScaleRule(ceiling=2.0**24), initial=2.0**30)
    for _ in range(10):
        run_pass(scaler, math.inf)
    assert scaler.read_scale() == 2.0**20


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_passes_move_a_dynamic_scale_by_the_plain_rule(overflows, interval):
    rule = ScaleRule(growth_interval=interval, floor=2.0**10, ceiling=2.0**20)
    scaler, state = scaler_for("dynamic", rule), ScaleState(2.0**16, 0)
    for overflow in overflows:
        run_pass(scaler, math.inf if overflow else 1.0)
        state = next_scale(state, rule, overflow=overflow)
        assert ScaleState(scaler.read_scale(), scaler.read_clean_steps()) == state
        assert scaler.read_found_inf() is overflow


changes = st.one_of(
    st.tuples(st.just("growth_interval"), st.integers(1, 6)),
    st.tuples(st.just("ceiling"), st.sampled_from([None, 2.0**14, 2.0**18])),
    st.tuples(st.just("floor"), st.sampled_from([None, 2.0**12, 2.0**13])),
    st.tuples(st.just("scale"), st.sampled_from([1.0, 2.0**16, 2.0**30])),
    st.tuples(st.just("clean_steps"), st.integers(0, 8)),
    st.tuples(st.just("pass"), st.booleans()),
)


@given(st.lists(changes, max_size=40))
def test_a_dynamic_scale_follows_the_plain_rule_whatever_is_set_in_between(steps):
    scaler = dynamic(growth_interval=4)
    state = ScaleState(2.0**16, 0)
    for kind, value in steps:
        if kind == "pass":
            run_pass(scaler, math.inf if value else 1.0)
            state = next_scale(state, scaler.rule, overflow=value)
        elif kind == "scale":
            scaler.set_scale(value)
            state = state._replace(scale=value)
        elif kind == "clean_steps":
            scaler.set_clean_steps(value)
            state = state._replace(clean_steps=value)
        else:
            scaler.set_rule(replace(scaler.rule, **{kind: value}))
        if kind in ("clean_steps", "growth_interval"):
            count = min(state.clean_steps, scaler.rule.growth_interval - 1)
            state = state._replace(clean_steps=count)
        assert scaler.state() == {"loss_scale": state.scale, "unskipped": state.clean_steps}


@pytest.mark.parametrize("loss_scale", ["dynamic", 1.0, 3.0])
def test_unscaling_undoes_scaling(loss_scale):
    scaler = scaler_for(loss_scale, ScaleRule())
    scaled = float(scaler.scale(torch.tensor(0.75)))
    assert run_pass(scaler, scaled) == 0.75


def test_a_static_scale_counts_steps_and_neither_checks_nor_moves():
    scaler = scaler_for(8.0, ScaleRule(growth_interval=1))
    for _ in range(3):
        run_pass(scaler, math.inf)
    assert scaler.state() == {"loss_scale": 8.0, "unskipped": 3}
    assert not scaler.read_found_inf()
    assert scaler.read_updates() == []


def test_an_optimizer_counts_once_among_overflows_before_one_step():
    scaler = scaler_for("dynamic", ScaleRule())
    first, second = Iteration(0, 0), Iteration(1, 0)
    for iterations in ([first], [first, second], [Iteration(0, 1), second]):
        scaler.begin_pass()
        scaler.unscale_([torch.tensor([math.inf])])
        scaler.update(iterations)
    assert [update.optimizers for update in scaler.read_updates()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("loss_scale", "expected"), [(1.0, True), (2.0, False), ("dynamic", False)]
)
def test_only_a_static_one_is_the_identity(loss_scale, expected):
    assert scaler_for(loss_scale, ScaleRule()).is_identity is expected


def test_a_dynamic_scale_of_one_is_not_the_identity():
    assert not scaler_for("dynamic", ScaleRule(), initial=1.0).is_identity


def test_the_identity_returns_an_fp32_loss_itself():
    loss = torch.tensor(1.0)
    assert scaler_for(1.0, ScaleRule()).scale(loss) is loss


@pytest.mark.parametrize("loss_scale", [0.0, -2.0, math.inf, math.nan])
def test_a_static_scale_that_is_not_positive_and_finite_is_refused(loss_scale):
    with pytest.raises(ValueError, match="positive, finite"):
        scaler_for(loss_scale, ScaleRule())


@pytest.mark.parametrize("loss_scale", [0.0, -2.0, math.inf, math.nan, 1e-50, 1e50])
def test_setting_a_scale_that_is_not_positive_and_finite_is_refused(loss_scale):
    scaler = dynamic()
    with pytest.raises(ValueError, match="positive, finite"):
        scaler.set_scale(loss_scale)
    assert scaler.read_scale() == 2.0**16


@pytest.mark.parametrize("loss_scale", ["dynamic", 1.0])
def test_set_scale_and_count_are_read_back_and_used(loss_scale):
    scaler = scaler_for(loss_scale, ScaleRule())
    scaler.set_scale(32.0)
    scaler.set_clean_steps(7)
    assert scaler.state() == {"loss_scale": 32.0, "unskipped": 7}
    assert scaler.scale(torch.tensor(2.0)) == 64.0


def test_updates_arrive_once_with_scale_overflow_and_skips_in_a_row():
    scaler = scaler_for("dynamic", ScaleRule(), loss_id=3)
    for grad in (math.inf, math.inf, 1.0, math.nan):
        run_pass(scaler, grad, optimizers=2)
    assert scaler.read_updates() == [
        ScaleUpdate(3, 2.0**15, True, 2, 1),
        ScaleUpdate(3, 2.0**14, True, 2, 2),
        ScaleUpdate(3, 2.0**14, False, 2, 0),
        ScaleUpdate(3, 2.0**13, True, 2, 1),
    ]
    assert scaler.read_updates() == []


def test_a_pass_whose_update_was_left_out_keeps_its_flag_for_the_next():
    scaler = dynamic()
    scaler.begin_pass()
    scaler.unscale_([torch.tensor([math.inf])])
    run_pass(scaler, 1.0)
    assert scaler.read_scale() == 2.0**15


def test_an_overridden_scale_divides_instead_of_the_own():
    values = torch.tensor([6.0])
    scaler = dynamic()
    scaler.unscale_([values], inverse=scaler.inverse(2.0))
    assert values == 3.0


def test_while_another_block_is_open_its_scale_stays_and_the_state_goes_on():
    scaler = dynamic()
    earlier = scaler.loss_scale
    scaler.open_blocks.add(object())
    run_pass(scaler, math.inf)
    assert earlier == 2.0**16
    assert scaler.read_scale() == 2.0**15


def test_a_loss_on_the_meta_device_leaves_the_scale_where_it_is():
    scaler = dynamic()
    scaler.scale(torch.zeros((), device="meta"))
    assert scaler.loss_scale.device.type == "cpu"


@pytest.mark.gpu
def test_the_state_moves_to_the_device_of_the_loss():
    scaler = dynamic()
    run_pass(scaler, math.inf)
    scaler.scale(torch.zeros((), device="cuda"))
    tensors = (scaler.loss_scale, scaler.found_inf, scaler.clean_steps)
    assert [tensor.device.type for tensor in tensors] == ["cuda"] * 3
    assert scaler.state() == {"loss_scale": 2.0**15, "unskipped": 0}
    assert scaler.read_found_inf()
