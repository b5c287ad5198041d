"""The FP16_Optimizer of 2019, and its sibling in contrib."""

import copy
import logging

import pytest
import torch
from torch import nn

from apex import optimizers
from apex.contrib import optimizers as contrib

both = pytest.mark.parametrize("wrapper", [optimizers.FP16_Optimizer, contrib.FP16_Optimizer])
INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def setup(wrapper, make=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).bfloat16()
    make = make or (lambda p: optimizers.FusedAdam(p, lr=0.05))
    return model, wrapper(make(list(model.parameters())), **options)


def backward(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    optimizer.backward(model(INPUTS.bfloat16()).float().square().mean() * factor)


def fp32_run(steps, max_norm=None):
    """The same training with masters kept by hand and no loss scale."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = optimizers.FusedAdam(masters, lr=0.05)
    for _ in range(steps):
        model.zero_grad()
        model(INPUTS.bfloat16()).float().square().mean().backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        for param, master in zip(model.parameters(), masters, strict=True):
            param.data.copy_(master)
    return masters


def masters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@both
@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_steps_masters_as_by_hand(wrapper, options):
    model, optimizer = setup(wrapper, **options)
    for _ in range(3):
        backward(model, optimizer)
        optimizer.step()
    for ours, theirs in zip(masters_of(optimizer), fp32_run(3), strict=True):
        torch.testing.assert_close(ours, theirs)


@both
@pytest.mark.parametrize("after", [0, 1])
def test_a_pass_that_a_script_scales_itself_is_divided_by_the_scale_with_a_warning(wrapper, after):
    model, optimizer = setup(wrapper, static_loss_scale=128.0)
    for _ in range(after):
        backward(model, optimizer)
        optimizer.step()
    optimizer.zero_grad()
    (model(INPUTS.bfloat16()).float().square().mean() * 128.0).backward()
    with pytest.warns(UserWarning, match=r"its loss scale, 128, as in apex\. Call optimizer\.back"):
        optimizer.step()
    for ours, theirs in zip(masters_of(optimizer), fp32_run(after + 1), strict=True):
        torch.testing.assert_close(ours, theirs)


@both
def test_model_holds_the_rounded_masters(wrapper):
    model, optimizer = setup(wrapper)
    backward(model, optimizer)
    optimizer.step()
    for param, master in zip(model.parameters(), masters_of(optimizer), strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(param, master.bfloat16())


@both
def test_overflow_skips_and_halves_the_scale(wrapper):
    model, optimizer = setup(wrapper, dynamic_loss_scale=True)
    before = [m.detach().clone() for m in masters_of(optimizer)]
    backward(model, optimizer, factor=float("inf"))
    optimizer.step()
    assert optimizer.overflow
    assert optimizer.cur_scale == 2.0**15
    for old, new in zip(before, masters_of(optimizer), strict=True):
        assert torch.equal(old, new)


@both
def test_static_scale_skips_too_and_stays(wrapper):
    model, optimizer = setup(wrapper, static_loss_scale=8.0)
    backward(model, optimizer, factor=float("nan"))
    optimizer.step()
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 8.0)


@both
def test_scale_grows_after_the_window(wrapper):
    arguments = {"init_scale": 4.0, "scale_factor": 2.0, "scale_window": 2}
    model, optimizer = setup(wrapper, dynamic_loss_scale=True, dynamic_loss_args=arguments)
    scales = []
    for _ in range(4):
        backward(model, optimizer)
        optimizer.step()
        scales.append(optimizer.cur_scale)
    assert scales == [4.0, 8.0, 8.0, 16.0]


def test_scale_stops_at_1():
    arguments = {"init_scale": 1.5}
    model, optimizer = setup(
        optimizers.FP16_Optimizer, dynamic_loss_scale=True, dynamic_loss_args=arguments
    )
    backward(model, optimizer, factor=float("inf"))
    optimizer.step()
    assert optimizer.cur_scale == 1.0


def test_clip_master_grads_clips_what_is_stepped():
    model, optimizer = setup(optimizers.FP16_Optimizer, static_loss_scale=64.0)
    for _ in range(2):
        backward(model, optimizer)
        optimizer.clip_master_grads(0.01)
        optimizer.step()
    for ours, theirs in zip(masters_of(optimizer), fp32_run(2, max_norm=0.01), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_clip_master_grads_returns_minus_1_on_overflow():
    model, optimizer = setup(optimizers.FP16_Optimizer)
    backward(model, optimizer, factor=float("inf"))
    assert optimizer.clip_master_grads(1.0) == -1


def test_backward_after_clip_is_refused():
    model, optimizer = setup(optimizers.FP16_Optimizer)
    backward(model, optimizer)
    optimizer.clip_master_grads(1.0)
    with pytest.raises(RuntimeError, match="between clip_master_grads and step"):
        optimizer.backward(model(INPUTS.bfloat16()).float().sum())


def test_backward_accumulates():
    model, optimizer = setup(optimizers.FP16_Optimizer, static_loss_scale=16.0)
    loss = model(INPUTS.bfloat16()).float().square().mean()
    optimizer.backward(loss / 2)
    optimizer.backward(model(INPUTS.bfloat16()).float().square().mean() / 2)
    optimizer.step()
    for ours, theirs in zip(masters_of(optimizer), fp32_run(1), strict=True):
        torch.testing.assert_close(ours, theirs)


@both
def test_gradients_that_stay_over_a_step_add_up_unscaled(wrapper):
    """Also those of fp32 parameters, and when the scale moves in between."""
    params = [nn.Parameter(torch.ones(2).bfloat16()), nn.Parameter(torch.ones(2))]
    arguments = {"init_scale": 4.0, "scale_window": 1}
    optimizer = wrapper(
        torch.optim.SGD(params, lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=arguments
    )
    for _ in range(2):
        optimizer.backward(params[0].float().sum() + params[1].sum())
        optimizer.step()
    assert optimizer.cur_scale == 16.0
    assert [m.tolist() for m in masters_of(optimizer)] == [[-2.0, -2.0]] * 2


@both
def test_state_of_a_used_optimizer_moves_to_the_masters_in_fp32(wrapper):
    param = nn.Parameter(torch.ones(2).bfloat16())
    inner = torch.optim.SGD([param], lr=1.0, momentum=0.5)
    param.grad = torch.ones_like(param)
    inner.step()
    (master,) = masters_of(wrapper(inner))
    assert inner.state[master]["momentum_buffer"].dtype is torch.float32


@both
def test_save_load_continue_is_the_uninterrupted_run(wrapper):
    model, optimizer = setup(wrapper, dynamic_loss_scale=True)
    for factor in (1.0, float("inf"), 1.0):
        backward(model, optimizer, factor)
        optimizer.step()
    resumed, other = setup(wrapper, dynamic_loss_scale=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for these, optim in ((model, optimizer), (resumed, other)):
        for _ in range(2):
            backward(these, optim)
            optim.step()
    assert (optimizer.cur_scale, optimizer.cur_iter) == (other.cur_scale, other.cur_iter)
    for a, b in zip(masters_of(optimizer), masters_of(other), strict=True):
        assert torch.equal(a, b)


@both
def test_masters_of_another_model_are_refused(wrapper):
    _, optimizer = setup(wrapper)
    state = nn.Linear(5, 2).bfloat16()
    other = wrapper(optimizers.FusedAdam(list(state.parameters()), lr=0.05))
    with pytest.raises(ValueError, match="as they were when it was saved"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_script_saves_and_loads_the_flat_masters_itself(layout):
    def setup_mixed():
        parts = nn.Conv2d(3, 2, 2).bfloat16().to(memory_format=layout), nn.Linear(2, 2)
        make = optimizers.FusedAdam([p for part in parts for p in part.parameters()], lr=0.05)
        return parts, optimizers.FP16_Optimizer(make)

    def train(parts, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            out = parts[0](INPUTS.bfloat16().expand(2, 3, 8, 4))
            optimizer.backward(parts[1](out.float().mean((2, 3))).square().sum())
            optimizer.step()
        return masters_of(optimizer)

    (parts, first), (others, second) = setup_mixed(), setup_mixed()
    train(parts, first)
    for other, part in zip(others, parts, strict=True):
        other.load_state_dict(part.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for current, saved in zip(second.fp32_groups_flat, first.fp32_groups_flat, strict=True):
        current.data.copy_(saved)
    ours, theirs = train(others, second), train(parts, first)
    assert all(map(torch.equal, ours, theirs))
    assert second.fp32_groups_flat[0].data_ptr() == ours[0].data_ptr()


def test_checkpoints_use_apexs_keys():
    _, flat = setup(optimizers.FP16_Optimizer)
    _, listed = setup(contrib.FP16_Optimizer)
    assert [t.shape for t in flat.state_dict()["fp32_groups_flat"]] == [(10,)]
    assert [[t.shape for t in g] for g in listed.state_dict()["fp32_groups"]] == [[(2, 4), (2,)]]


def test_overflow_is_logged_unless_silenced(caplog):
    caplog.set_level(logging.INFO, logger="apex")
    for verbose in (True, False):
        model, optimizer = setup(optimizers.FP16_Optimizer, verbose=verbose)
        backward(model, optimizer, factor=float("inf"))
        optimizer.step()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, {"dynamic_loss_scale": True, "dynamic_loss_args": {"window": 3}}),
        (TypeError, {"dynamic_loss_scale": True, "dynamic_loss_args": [1]}),
        (TypeError, {"dynamic_loss_scale": "no"}),
        (ValueError, {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": "x"}}),
        (TypeError, {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": "2"}}),
        (ValueError, {"static_loss_scale": 0.0}),
        (ValueError, {"static_loss_scale": None}),
        (ValueError, {"static_loss_scale": "dynamic"}),
    ],
)
def test_bad_arguments_are_refused(error, arguments):
    with pytest.raises(
        error, match=r"(growth_factor|[a-z]+_[a-z_]+) (is|holds) .*; it (must|takes)"
    ):
        setup(optimizers.FP16_Optimizer, **arguments)


@both
@pytest.mark.parametrize("loss", [None, "loss", 1.0])
def test_what_is_no_loss_is_refused(wrapper, loss):
    _, optimizer = setup(wrapper)
    with pytest.raises(TypeError, match=r"FP16_Optimizer\.backward got a loss of type"):
        optimizer.backward(loss)


@both
@pytest.mark.parametrize(
    ("max_norm", "error"), [("x", TypeError), (None, TypeError), (-1, ValueError)]
)
def test_a_norm_to_clip_to_that_makes_no_sense_is_refused(wrapper, max_norm, error):
    model, optimizer = setup(wrapper)
    backward(model, optimizer)
    with pytest.raises(error, match=f"clip_master_grads got max_norm={max_norm!r}; it must be"):
        optimizer.clip_master_grads(max_norm)
    backward(model, optimizer)  # the masters have not received gradients yet


@both
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: None, "got NoneType without dynamic_loss_scale"),
        (lambda state: {}, "got dict without dynamic_loss_scale, cur_scale"),
        (lambda state: {k: v for k, v in state.items() if k != "cur_iter"}, "without cur_iter"),
        (lambda state: {**state, "cur_scale": "x"}, "cur_scale is 'x'; it must be a positive"),
        (lambda state: {**state, "cur_scale": -1.0}, "cur_scale is -1.0; it must be a positive"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused_and_changes_nothing(wrapper, change, words):
    model, optimizer = setup(wrapper)
    backward(model, optimizer)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    backward(model, optimizer)
    optimizer.step()
    before = [param.detach().clone() for param in masters_of(optimizer)]
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(change(state))
    assert all(map(torch.equal, masters_of(optimizer), before))
    assert optimizer.cur_iter == 2


def test_only_optimizers_are_wrapped():
    with pytest.raises(TypeError, match=r"wraps a torch\.optim\.Optimizer"):
        optimizers.FP16_Optimizer(nn.Linear(1, 1))


def test_closure_is_refused():
    _, optimizer = setup(optimizers.FP16_Optimizer)
    with pytest.raises(RuntimeError, match="takes no closure"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: contrib.FusedAdam(p, lr=0.05, max_grad_norm=1.0),
        lambda p: optimizers.FusedAdam(p, lr=0.05, bias_correction=False, max_grad_norm=1.0),
        lambda p: contrib.FusedSGD(p, lr=0.05),
        lambda p: optimizers.FusedLAMB(p, lr=0.05),
        lambda p: torch.optim.SGD(p, lr=0.05),
    ],
)
def test_wraps_any_optimizer(make):
    model, optimizer = setup(contrib.FP16_Optimizer, make, dynamic_loss_scale=True)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, optimizer)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
