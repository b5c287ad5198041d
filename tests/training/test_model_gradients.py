"""What a script writes into the gradients of the model reaches those of the masters."""

import pytest
import torch
from torch import nn

from apex import amp
from apex._engine.optimizer import one_pass
from tests.training import cases
from tests.training.test_cost import HostReads

SCALES = [1.0, 128.0, 1000.0, "dynamic"]
levels = pytest.mark.parametrize("level", cases.WITH_MASTERS)
scales = pytest.mark.parametrize("scale", SCALES)


def after_backward(level, scale=None, passes=1, **options):
    """A prepared model with the gradients of some passes."""
    model, optimizer = cases.prepared(level, loss_scale=scale, **options)
    for x, y in cases.batches(passes):
        loss = cases.loss_of(model, 0.1 * x, 0.1 * y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    return model, optimizer


def true_gradients(optimizer):
    return cases.grads(amp.master_params(optimizer))


def low_of(model):
    return next(model.parameters()).dtype


def eps_of(model):
    return torch.finfo(low_of(model)).eps


@levels
@scales
@pytest.mark.parametrize("passes", [1, 2])
def test_after_a_block_the_models_gradients_are_the_masters_rounded(level, scale, passes):
    model, optimizer = after_backward(level, scale, passes)
    expected = [grad.to(low_of(model)) for grad in true_gradients(optimizer)]
    assert cases.same(cases.grads(model.parameters()), expected)


@levels
@scales
@pytest.mark.parametrize("passes", [1, 2])
def test_clipping_the_models_norm_clips_the_masters_by_one_factor(level, scale, passes):
    model, optimizer = after_backward(level, scale, passes)
    before = true_gradients(optimizer)
    true_norm = nn.utils.get_total_norm(before)
    max_norm = 0.25 * float(true_norm)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    eps = eps_of(model)
    torch.testing.assert_close(norm.float(), true_norm, rtol=2 * eps, atol=0.0)
    optimizer.step()
    after = true_gradients(optimizer)
    clipped = nn.utils.get_total_norm(after)
    torch.testing.assert_close(clipped, torch.tensor(max_norm), rtol=3 * eps, atol=0.0)
    # The direction is kept in fp32: one factor for all.
    ratios = torch.cat([(a / b)[b != 0].flatten() for a, b in zip(after, before, strict=True)])
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=2e-7, atol=0.0)


@levels
@pytest.mark.parametrize("optimizer", ["fused AdamW", "SGD"])
def test_a_step_after_clipping_the_model_equals_one_after_clipping_the_masters(level, optimizer):
    pairs = [cases.prepared(level, cases.OPTIMIZERS[optimizer], loss_scale=128.0) for _ in range(2)]
    for x, y in cases.batches(3):
        for index, (model, own) in enumerate(pairs):
            own.zero_grad()
            cases.backward(model, own, x, y)
            params = model.parameters() if index else amp.master_params(own)
            nn.utils.clip_grad_norm_(params, 0.1)
            own.step()
    (model, first), (_, second) = pairs
    torch.testing.assert_close(
        cases.masters(second), cases.masters(first), rtol=4 * eps_of(model), atol=eps_of(model) / 50
    )


@levels
@scales
def test_a_norm_below_the_bound_leaves_every_bit(level, scale):
    model, optimizer = after_backward(level, scale, passes=2)
    before = true_gradients(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e3)
    assert cases.same(true_gradients(optimizer), before)


@pytest.mark.parametrize("foreach", [True, False])
def test_elements_that_round_to_zero_in_fp16_are_clipped_too(foreach):
    model, optimizer = after_backward("O2", 128.0)
    for index, param in enumerate(amp.master_params(optimizer)):
        (param.grad if index == 0 else param.grad[..., 0]).fill_(2.0**-30)
    for param, grad in zip(model.parameters(), true_gradients(optimizer), strict=True):
        param.grad.copy_(grad)
    before = true_gradients(optimizer)
    norm = nn.utils.get_total_norm(before)
    nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 2, foreach=foreach)
    for one, other in zip(true_gradients(optimizer), before, strict=True):
        torch.testing.assert_close(one, other / 2, rtol=2.0**-9, atol=0.0)


@levels
def test_clipping_the_norm_of_each_layer_scales_each_by_its_own_factor(level):
    model, optimizer = after_backward(level, 128.0)
    before = true_gradients(optimizer)
    factors = (0.5, 0.25)
    for index, layer in enumerate((model[0], model[2])):
        norm = nn.utils.get_total_norm(before[2 * index : 2 * index + 2])
        nn.utils.clip_grad_norm_(layer.parameters(), factors[index] * float(norm))
    for index, (one, other) in enumerate(zip(true_gradients(optimizer), before, strict=True)):
        rtol = 3 * eps_of(model)
        torch.testing.assert_close(one, other * factors[index // 2], rtol=rtol, atol=0.0)
        ratio = (one / other)[other != 0]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=2e-7, atol=0.0)


@levels
@scales
def test_clipping_values_replaces_only_those_beyond_the_bound(level, scale):
    model, optimizer = after_backward(level, scale, passes=2)
    before = true_gradients(optimizer)
    bound = 2.0 ** float(torch.cat([g.abs().flatten() for g in before]).max().log2().floor() - 1)
    rounded = cases.grads(model.parameters())
    nn.utils.clip_grad_value_(model.parameters(), bound)
    for low, one, other in zip(rounded, true_gradients(optimizer), before, strict=True):
        expected = torch.where(low.abs() > bound, bound * other.sign(), other)
        assert torch.equal(one, expected)


def gradient_edits():
    generator = torch.Generator().manual_seed(0)

    def add_noise(param):
        param.grad.add_(torch.randn(param.shape, generator=generator).to(param.dtype))

    def halve_by_assignment(param):
        param.grad = param.grad * 0.5

    def scale_beyond_one(param):
        param.grad.mul_(3.0)

    def flip(param):
        param.grad.neg_()

    def weight_decay(param):
        param.grad.add_(param.detach(), alpha=0.5)

    def zero(param):
        param.grad.zero_()

    def clamp_through_data(param):
        param.grad.data.clamp_(-1e-3, 1e-3)

    def halve_through_data(param):
        torch._foreach_mul_([param.grad.data], 0.5)

    def halve_by_assignment_to_data(param):
        param.grad.data = param.grad.data * 0.5

    in_place = [add_noise, scale_beyond_one, flip, weight_decay, zero]
    through_data = [clamp_through_data, halve_through_data, halve_by_assignment_to_data]
    return [*in_place, *through_data, halve_by_assignment]


@levels
@scales
@pytest.mark.parametrize("edit", gradient_edits(), ids=lambda edit: edit.__name__)
def test_any_edit_of_the_models_gradients_reaches_the_masters(level, scale, edit):
    model, optimizer = after_backward(level, scale)
    for param in model.parameters():
        edit(param)
    for one, edited in zip(true_gradients(optimizer), cases.grads(model.parameters()), strict=True):
        torch.testing.assert_close(one, edited.float(), rtol=2 * eps_of(model), atol=2.0**-23)


@levels
def test_a_mask_zeroes_elements_that_round_to_zero_as_well(level):
    model, optimizer = after_backward(level, 128.0)
    param, master = model[2].weight, list(amp.master_params(optimizer))[2]
    master.grad[0, 0] = 2.0**-140
    param.grad.copy_(master.grad)
    kept = list(amp.master_params(optimizer))[2].grad.clone()
    assert param.grad[0, 0] == 0.0 != kept[0, 0]
    assert param.grad[0].any()
    param.grad *= torch.tensor([[0.0], [1.0]])
    assert not list(amp.master_params(optimizer))[2].grad[0].any()
    assert torch.equal(master.grad[1], kept[1])


def _exchanges(first, second):
    first.grad, second.grad = second.grad, first.grad


def _shares(first, second):
    first.grad = second.grad


@levels
@scales
@pytest.mark.parametrize("least_elements", [one_pass.least_elements, 1])
@pytest.mark.parametrize("move", [_exchanges, _shares])
def test_gradients_given_to_other_parameters_reach_their_masters(
    level, scale, move, least_elements, monkeypatch
):
    monkeypatch.setattr(one_pass, "least_elements", least_elements)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = after_backward(
        level, scale, make_optimizer=cases.OPTIMIZERS["fused SGD"], model=layers
    )
    move(model[0].weight, model[1].weight)
    moved = cases.grads([model[0].weight, model[1].weight])
    optimizer.step()
    masters = list(amp.master_params(optimizer))
    assert cases.same([masters[0].grad.to(low_of(model)), masters[2].grad.to(low_of(model))], moved)


@levels
def test_one_gradient_zeroed_by_hand_is_zero_in_the_step(level):
    model, optimizer = after_backward(level, 128.0)
    before = cases.masters(optimizer)
    model[0].weight.grad.zero_()
    optimizer.step()
    moved = [
        not torch.equal(one, other)
        for one, other in zip(cases.masters(optimizer), before, strict=True)
    ]
    assert moved == [False, True, True, True]


@levels
def test_a_plain_backward_after_a_block_adds_to_its_gradients(level):
    model, optimizer = after_backward(level, 128.0)
    first = true_gradients(optimizer)
    x, y = cases.batch(2)
    cases.loss_of(model, x, y).backward()
    model_only, _ = cases.prepared(level)
    cases.loss_of(model_only, x, y).backward()
    for one, two, total in zip(
        first, cases.grads(model_only.parameters()), true_gradients(optimizer), strict=True
    ):
        torch.testing.assert_close(total, one + two.float(), rtol=0.02, atol=2 * eps_of(model))


@levels
def test_clipping_after_an_overflow_still_skips_the_step(level):
    model, optimizer = cases.prepared(level, loss_scale="dynamic")
    before = cases.masters(optimizer)
    cases.backward(model, optimizer, *cases.overflowing())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert cases.same(cases.masters(optimizer), before)
    optimizer.zero_grad()
    cases.backward(model, optimizer, *(0.01 * value for value in cases.batch()))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not cases.same(cases.masters(optimizer), before)
    assert all(value.isfinite().all() for value in cases.masters(optimizer))


@levels
def test_clipping_the_model_reads_nothing_on_the_host(level):
    model, optimizer = after_backward(level, "dynamic")
    with HostReads() as reads:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        list(amp.master_params(optimizer))
    assert reads.count == 0


@levels
def test_gradients_beyond_one_chunk_are_carried_over(level, monkeypatch):
    monkeypatch.setattr("apex._engine.optimizer.mirror_gradients._CHUNK", 9)
    test_clipping_the_models_norm_clips_the_masters_by_one_factor(level, 128.0, 1)
    test_clipping_the_norm_of_each_layer_scales_each_by_its_own_factor(level)


@levels
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear", ["model", "optimizer"])
def test_cleared_gradients_are_not_carried_over_as_an_edit(level, clear, set_to_none, monkeypatch):
    model, optimizer = after_backward(level, 128.0)
    {"model": model, "optimizer": optimizer}[clear].zero_grad(set_to_none=set_to_none)
    carried = []
    monkeypatch.setattr("apex._engine.optimizer.mirror_gradients.carry_over", carried.extend)
    list(amp.master_params(optimizer))
    assert not carried
