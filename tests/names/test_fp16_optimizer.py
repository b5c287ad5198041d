"""apex's three ``FP16_Optimizer`` classes: a loop with masters by hand, and their files."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from apex import amp, fp16_utils, optimizers
from apex.amp.scaler import LossScaler
from apex.contrib import optimizers as contrib
from tests.support import loops
from tests.support.loops import same, saved_and_loaded
from tests.support.reference.plain_loops import Loop

OLD, FLAT, LISTED = fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer, contrib.FP16_Optimizer
wrapper = loops.each_of(OLD, FLAT, LISTED, ids=["2018", "2019", "contrib"])
SCALE = {"init_scale": 64.0, "scale_window": 2}
DYNAMIC = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALE}
mode = loops.each_of({"static_loss_scale": 128.0}, DYNAMIC)


def net(dtype=torch.float16):
    """16-bit layers around a batch norm in fp32."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    model[1].float()
    return model


def loss_of(model, step=0, overflow=False):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
    x = x * float("inf") if overflow else x
    return model(x.to(model[0].weight.dtype)).float().square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def build(wrapper, dtype=torch.float16, **options):
    model = net(dtype)
    return model, wrapper(sgd(model), **options)


def train_wrapper(model, optimizer, steps, overflow_at=()):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step, overflow=step in overflow_at))
        optimizer.step()


def masters(optimizer):
    return loops.values(p for group in optimizer.param_groups for p in group["params"])


# -- the loop --------------------------------------------------------------------------------


def test_it_trains_like_a_loop_by_hand(wrapper, mode):
    dynamic = "dynamic_loss_scale" in mode
    model = loops.net().half()
    loop = Loop("O2", model.float().parameters(), loops.sgd, scale="dynamic", interval=2)
    loop.dynamic, loop.scale = dynamic, 64.0 if dynamic else 128.0
    optimizer = wrapper(loops.sgd(model.half().parameters()), **mode)
    for x, y in loops.batches(6, overflow_at={1, 4} if dynamic else ()):
        optimizer.zero_grad()
        optimizer.backward(loops.loss_of(model, x.half(), y))
        optimizer.step()
        loop.train_step(x, y)
        assert same(masters(optimizer), loops.values(loop.stepped))
        assert optimizer.loss_scale == loop.scale
    assert same(list(model.parameters()), loop.model)


def test_models_may_clear_the_gradients_themselves(wrapper, mode):
    runs = []
    for clears in (lambda model, optimizer: optimizer, lambda model, optimizer: model):
        model, optimizer = build(wrapper, **mode)
        grads = []
        for step in range(5):
            clears(model, optimizer).zero_grad()
            optimizer.backward(loss_of(model, step, overflow=step == 3 and len(mode) > 1))
            grads += loops.values(param.grad for param in model.parameters())
            optimizer.step()
        runs.append((masters(optimizer), optimizer.loss_scale, grads[:18], grads[-6:]))
    assert same(*runs)


def test_a_static_scale_stays_and_only_the_later_classes_skip_its_overflows():
    for wrapper, skips in ((OLD, False), (FLAT, True), (LISTED, True)):
        model, optimizer = build(wrapper, static_loss_scale=8.0)
        train_wrapper(model, optimizer, [0], overflow_at={0})
        assert optimizer.overflow is skips
        assert all(master.isfinite().all() for master in masters(optimizer)) is skips
        assert optimizer.loss_scale == 8.0


def test_an_overflow_is_logged_if_asked_for(wrapper, caplog):
    for verbose in (False, True):
        model, optimizer = build(wrapper, dynamic_loss_scale=True, verbose=verbose)
        train_wrapper(model, optimizer, [0], overflow_at={0})
        assert (optimizer.overflow, "Skipping step" in caplog.text) == (True, verbose)


def test_a_dynamic_scale_stays_within_the_bounds_of_its_class():
    for wrapper, start, overflow, bound in (
        (OLD, 2.0**24, False, 2.0**24),
        (OLD, 1.0, True, 0.5),
        (FLAT, 2.0**24, False, 2.0**25),
        (FLAT, 1.0, True, 1.0),
    ):
        args = {"init_scale": start, "scale_window": 1}
        _, optimizer = build(wrapper, dynamic_loss_scale=True, dynamic_loss_args=args)
        optimizer.loss_scaler.update_scale(overflow)
        assert optimizer.loss_scale == bound


# -- gradients -------------------------------------------------------------------------------


def assert_grads_are_those_of(plain, optimizer):
    grads = loops.grads(optimizer.param_groups[0]["params"])
    torch.testing.assert_close(grads, loops.grads(plain.parameters()), rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("window", [1, 100])
def test_gradients_of_two_losses_add_up(wrapper, window):
    args = {"init_scale": 64.0, "scale_window": window}
    model, optimizer = build(wrapper, dynamic_loss_scale=True, dynamic_loss_args=args)
    for step in range(2):
        optimizer.backward(loss_of(model, step))
    if wrapper is not OLD:
        optimizer.update_master_grads()
    plain = net().float()
    sum(loss_of(plain, step) for step in range(2)).backward()
    assert_grads_are_those_of(plain, optimizer)


def test_gradients_add_up_where_all_parameters_have_16_bits(wrapper):
    model = nn.Linear(3, 2).half()
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.125), static_loss_scale=8.0)
    before = model.bias.detach().clone()
    for _ in range(2):
        optimizer.backward(model(torch.ones(1, 3, dtype=torch.float16)).sum())
    optimizer.step()
    expected = torch.full_like(before, 0.25)
    torch.testing.assert_close(before - model.bias, expected, atol=1e-3, rtol=0)


def test_a_step_refuses_gradients_that_masters_lack():
    model, optimizer = build(OLD)
    optimizer.step()  # without any
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\) in place of loss"):
        optimizer.step()


def test_passes_after_an_update_add_up_and_zero_grad_forgets_them():
    model, optimizer = build(OLD, static_loss_scale=4.0)
    optimizer.backward(loss_of(model, 0))
    loss = loss_of(model, 1)
    for retains in (True, False):
        optimizer.backward(loss, update_master_grads=False, retain_graph=retains)
    with pytest.raises(RuntimeError, match="Call update_master_grads"):
        optimizer.step()
    optimizer.update_master_grads()
    plain = net().float()
    (loss_of(plain, 0) + 2 * loss_of(plain, 1)).backward()
    assert_grads_are_those_of(plain, optimizer)
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.zero_grad()
    optimizer.step()
    optimizer.update_master_grads()
    optimizer.zero_grad()
    optimizer.loss_scale = 1.0
    optimizer.backward(loss_of(model, 0), update_master_grads=False)
    unscaled = torch.autograd.grad(loss_of(model, 0), [*model.parameters()])
    assert same([param.grad for param in model.parameters()], unscaled)


def test_clipping_clips_the_unscaled_gradients_and_returns_minus_1_on_overflow():
    model, optimizer = build(OLD, dynamic_loss_scale=True)
    optimizer.backward(loss_of(model) / 64)
    norm = optimizer.clip_master_grads(0.001)
    assert 0.001 < norm < 1
    grads = [g for group in optimizer.inspect_master_grad_data() for g in group]
    assert nn.utils.get_total_norm(grads).item() == pytest.approx(0.001, rel=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, overflow=True))
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None


def test_sparse_gradients_are_unscaled_and_checked_by_the_sum_of_their_rows(wrapper):
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = wrapper(torch.optim.SGD(table.parameters(), lr=1.0), dynamic_loss_scale=True)
    optimizer.backward(table(torch.tensor([1, 1])).sum())
    if wrapper is not OLD:
        optimizer.update_master_grads()
    assert table.weight.grad.to_dense().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    optimizer.zero_grad()
    optimizer.loss_scale = 1.0
    assert optimizer.loss_scaler.cur_scale == 1.0
    optimizer.backward((table(torch.tensor([1, 1])) * 3e38).sum())
    optimizer.step()
    assert optimizer.overflow


def test_zero_grad_clears_masters_and_model():
    for wrapper, options, gone in (
        (OLD, {}, False),
        (OLD, {"set_grads_to_None": True}, True),
        (FLAT, {}, True),
        (FLAT, {"set_grads_to_None": False}, False),
    ):
        model, optimizer = build(wrapper)
        optimizer.backward(loss_of(model))
        optimizer.update_master_grads()
        optimizer.zero_grad(**options)
        for param in (*model.parameters(), *optimizer.all_fp32_from_fp16_params):
            assert param.grad is None if gone else param.grad.count_nonzero() == 0


# -- closures --------------------------------------------------------------------------------


def test_lbfgs_sees_the_model_move_between_evaluations():
    model = net()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    optimizer, losses, weights = OLD(inner, static_loss_scale=16.0), [], []

    def evaluate():
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        losses.append(loss.item())
        weights.append(model[0].weight.detach().clone())
        return loss

    optimizer.step(evaluate)
    assert not torch.equal(weights[0], weights[-1])
    assert losses[-1] < losses[0] / 2
    for wrapper in (FLAT, LISTED):
        with pytest.raises(RuntimeError, match=r"takes no closure.*apex\.fp16_utils"):
            build(wrapper)[1].step(evaluate)


@pytest.mark.parametrize("overflows", [2, 99])
def test_a_closure_that_overflows_is_called_again_at_a_lower_scale(overflows, caplog):
    args = {"init_scale": 8.0, "min_loss_scale": 1.0}
    model, optimizer = build(OLD, dynamic_loss_scale=True, dynamic_loss_args=args)
    calls = []

    def evaluate():
        optimizer.zero_grad()
        calls.append(1)
        loss = loss_of(model, overflow=len(calls) <= overflows)
        optimizer.backward(loss)
        return loss

    if overflows == 99:
        with pytest.raises(RuntimeError, match="even at the smallest loss scale, 1"):
            optimizer.step(evaluate)
        calls += [1] * 99
    assert optimizer.step(evaluate).isfinite()
    assert optimizer.loss_scale == 8.0 / 2 ** min(overflows, 3)
    assert "Overflow within the closure; loss scale 4" in caplog.text


def test_a_closure_is_called_again_until_its_scale_fits():
    model, optimizer = build(
        OLD, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**24}
    )

    def evaluate():
        model.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        return loss

    assert optimizer.step(evaluate).isfinite()
    assert 1.0 < optimizer.loss_scale < 2.0**24


# -- construction ----------------------------------------------------------------------------


def test_groups_keep_their_identity_and_hold_the_masters(wrapper):
    model = net()
    inner = sgd(model)
    group = inner.param_groups[0]
    optimizer = wrapper(inner)
    assert optimizer.optimizer.param_groups[0] is optimizer.param_groups[0] is group
    assert {p.dtype for p in group["params"]} == {torch.float32}
    assert optimizer.fp16_groups[0][0] is model[0].weight
    assert optimizer.fp32_from_fp32_groups[0][0] is model[1].weight is group["params"][2]
    torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)


def test_frozen_parameters_have_masters_in_the_later_classes():
    for wrapper, count in ((OLD, 1), (FLAT, 2), (LISTED, 2)):
        model = nn.Linear(3, 2).half()
        model.bias.requires_grad_(False)
        optimizer = wrapper(sgd(model))
        assert len(optimizer.fp32_from_fp16_groups[0]) == count
    frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
    assert OLD(torch.optim.SGD([frozen], lr=0.1)).param_groups[0]["params"] == [frozen]


def test_the_state_of_an_optimizer_that_has_stepped_becomes_fp32(wrapper):
    model = nn.Linear(3, 2).half()
    inner = sgd(model)
    model(torch.ones(1, 3).half()).sum().backward()
    inner.step()
    states = wrapper(inner).state.values()
    assert {state["momentum_buffer"].dtype for state in states} == {torch.float32}


BAD_ARGUMENTS = [
    (lambda m: m, {}, TypeError, "got Sequential; it wraps an optimizer"),
    (lambda m: sgd(m.double()), {}, TypeError, r"got a parameter of torch\.float64"),
    (sgd, {"dynamic_loss_scale": "no"}, TypeError, "is 'no'; it must be a bool"),
    (sgd, {**DYNAMIC, "dynamic_loss_args": {"window": 3}}, TypeError, r"holds \['window'\]"),
    (sgd, {**DYNAMIC, "dynamic_loss_args": [1]}, TypeError, "not a mapping"),
    (sgd, {**DYNAMIC, "dynamic_loss_args": {"scale_factor": 1}}, ValueError, "must be above 1"),
    (sgd, {"static_loss_scale": 0.0}, ValueError, "positive, finite"),
    (sgd, {"static_loss_scale": "dynamic"}, ValueError, "dynamic_loss_scale=True"),
    (sgd, {**DYNAMIC, "dynamic_loss_args": {"init_scale": "x"}}, ValueError, "positive"),
]


@pytest.mark.parametrize(("make", "options", "error", "words"), BAD_ARGUMENTS)
def test_bad_arguments_change_nothing(make, options, error, words):
    for wrapper in (OLD, FLAT, LISTED):
        model = net()
        given = make(model)
        with pytest.raises(error, match=words):
            wrapper(given, **options)
        if given is not model:
            assert given.param_groups[0]["params"][0] is model[0].weight


def test_an_optimizer_that_amp_has_prepared_is_refused(wrapper):
    model = nn.Linear(1, 1)
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O5", verbosity=0)
    with pytest.raises(RuntimeError, match=r"amp\.initialize has prepared.*Use amp\.scale_loss"):
        wrapper(optimizer)


def test_amp_initialize_refuses_one(wrapper):
    model = nn.Linear(1, 1)
    optimizer = wrapper(sgd(model))
    words = r"FP16_Optimizer, which has a loss scale of its own. Pass a plain"
    for given in (optimizer, [optimizer]):
        with loops.nothing_changes(model), pytest.raises(RuntimeError, match=words):
            amp.initialize(model, given, opt_level="O2", verbosity=0)
    amp.initialize(model, optimizer, enabled=False)


# -- files -----------------------------------------------------------------------------------


def test_a_saved_run_continues_bit_by_bit(wrapper, mode):
    overflow_at = {2} if "dynamic_loss_scale" in mode else set()
    model, optimizer = build(wrapper, **mode)
    train_wrapper(model, optimizer, range(3), overflow_at)
    states = [model.state_dict(), optimizer.state_dict()]
    of_model, of_optimizer = saved_and_loaded(states, weights_only=True)
    train_wrapper(model, optimizer, range(3, 6))
    other, resumed = build(wrapper, **mode)
    other.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    train_wrapper(other, resumed, range(3, 6))
    assert same(masters(resumed), masters(optimizer))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert resumed.loss_scale == optimizer.loss_scale


def test_a_loaded_state_reaches_the_model_and_its_scale_may_be_static(wrapper):
    model, optimizer = build(wrapper, static_loss_scale=8.0)
    train_wrapper(model, optimizer, range(2))
    state = optimizer.state_dict()
    for name in ("last_overflow_iter", "scale_factor", "scale_window"):  # as in apex's files
        state.pop(name, None)
    _, resumed = build(wrapper, dynamic_loss_scale=True)
    resumed.load_state_dict(state)
    assert (resumed.dynamic_loss_scale, resumed.loss_scale) == (False, 8.0)
    assert same(resumed.all_fp16_params, optimizer.all_fp16_params)


def test_states_have_apexs_keys():
    scale = {"dynamic_loss_scale", "cur_scale", "cur_iter"}
    rule = {"last_overflow_iter", "scale_factor", "scale_window"}
    for wrapper, keys in (
        (OLD, {"loss_scaler", "overflow", "first_closure_call_this_step", "fp32_from_fp16"}),
        (FLAT, {*scale, *rule, "fp32_groups_flat"}),
        (LISTED, {*scale, *rule, "fp32_groups"}),
    ):
        state = build(wrapper)[1].state_dict()
        assert {*state} == {*keys, "dynamic_loss_scale", "optimizer_state_dict"}
    assert [t.shape for t in build(FLAT)[1].state_dict()["fp32_groups_flat"]] == [(34,)]


def unpickled(**attributes):
    """Returns what unpickling a scaler of ``apex.amp`` gives here."""
    made = LossScaler.__new__(LossScaler)
    made.__setstate__(attributes)
    return made


BOUNDS = {"_min_loss_scale": None, "_max_loss_scale": 2.0**24, "_scale_seq_len": 2000}


SCALERS = [
    # What unpickling gives.
    (SimpleNamespace(_loss_scale=512.0, _unskipped=7, dynamic=True), 7),
    (unpickled(_loss_scale=512.0, _unskipped=7, dynamic=True, **BOUNDS), 7),
    (SimpleNamespace(cur_scale=512.0, cur_iter=9, last_overflow_iter=4), 4),
    (fp16_utils.DynamicLossScaler(init_scale=512.0), 0),
]


@pytest.mark.parametrize(("scaler", "steps"), SCALERS)
def test_a_scaler_of_apexs_checkpoint_is_read(scaler, steps):
    _, optimizer = build(OLD, dynamic_loss_scale=True)
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler})
    assert optimizer.loss_scaler.loss_scale() == optimizer.loss_scaler._loss_scale == 512.0
    assert optimizer.loss_scaler._unskipped == steps


def test_a_group_without_parameters_is_saved_and_loaded(wrapper):
    model = net()
    groups = [{"params": [*model.parameters()]}, {"params": []}]
    optimizer = wrapper(torch.optim.SGD(groups, lr=0.1))
    train_wrapper(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())


OF_WINDOW_100 = unpickled(
    dynamic=True, _loss_scale=2.0, _unskipped=0, **{**BOUNDS, "_scale_seq_len": 100}
)


@pytest.mark.parametrize("saved", [None, OF_WINDOW_100])
def test_the_window_of_a_saved_scale_is_loaded(saved):
    _, optimizer = build(OLD, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 100})
    state = optimizer.state_dict()
    if saved is not None:
        state["loss_scaler"] = saved
    _, resumed = build(OLD, dynamic_loss_scale=True)
    resumed.load_state_dict(state)
    assert resumed.loss_scaler.scale_window == 100


def damages(wrapper):
    key = wrapper._masters_key
    yield lambda state: {}
    yield lambda state: None
    yield lambda state: {name: value for name, value in state.items() if name != key}
    yield lambda state: {**state, key: state[key][:-1]}
    yield lambda state: {**state, "loss_scaler": None, "cur_scale": "x"}
    groups = {"state": {}, "param_groups": []}
    yield lambda state: {**state, "optimizer_state_dict": groups}


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(wrapper):
    model, optimizer = build(wrapper, **DYNAMIC)
    train_wrapper(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    train_wrapper(model, optimizer, range(2, 3))
    before = copy.deepcopy(optimizer.state_dict())
    for damage in damages(wrapper):
        words = r"load_state_dict|loss_scaler|parameter group|cur_scale is 'x'"
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(damage(state))
        assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_script_saves_and_loads_the_flat_masters_itself(layout):
    def setup():
        torch.manual_seed(3)
        model = nn.Conv2d(3, 2, 2).bfloat16().to(memory_format=layout)
        return model, FLAT(torch.optim.Adam(model.parameters(), lr=0.05, fused=True))

    def train_conv(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(x).float().square().sum())
            optimizer.step()
        return masters(optimizer)

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(5)).bfloat16()
    (model, first), (other, second), (unsaved, third) = setup(), setup(), setup()
    train_conv(model, first)
    train_conv(unsaved, third)
    other.load_state_dict(model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for current, saved in zip(second.fp32_groups_flat, first.fp32_groups_flat, strict=True):
        current.data.copy_(saved)
    expected = train_conv(unsaved, third)
    assert same([train_conv(model, first), train_conv(other, second)], [expected, expected])
    weight, bias = second.param_groups[0]["params"]
    bias.data = bias.data.clone()  # a script moves it alone
    assert second.fp32_groups_flat[0].zero_().data_ptr() == weight.data_ptr()
    assert not bias.any()
