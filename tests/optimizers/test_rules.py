"""Every rule against torch's optimizers and against plain loops."""

import pytest
import torch

from apex import optimizers
from apex.contrib import optimizers as contrib
from apex.optimizers import fused_optimizer
from benchmarks.allocation import growth
from tests.optimizers import cases, plain

# Sums in another order, over four steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def compare_with_plain(optimizer, params, reference, **tolerance):
    for step in range(4):
        grads = cases.gradients(params, step)
        cases.give(params, grads)
        optimizer.step()
        reference.step(grads)
    cases.assert_same(params, reference.params, **(tolerance or CLOSE))


def compare_with_torch(optimizer, params, make):
    twins = cases.parameters()
    reference = make(twins)
    cases.run(optimizer, params, 4)
    cases.run(reference, twins, 4)
    cases.assert_same(params, twins, **CLOSE)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_w_mode_is_torch_adamw(weight_decay):
    params = cases.parameters()
    optimizer = optimizers.FusedAdam(params, lr=0.05, weight_decay=weight_decay)
    compare_with_torch(
        optimizer,
        params,
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=weight_decay, foreach=False),
    )


def test_adam_without_w_mode_is_torch_adam():
    params = cases.parameters()
    optimizer = optimizers.FusedAdam(params, lr=0.05, weight_decay=0.1, adam_w_mode=False)
    compare_with_torch(
        optimizer,
        params,
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1, foreach=False),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
    ],
)
def test_sgd_is_torch_sgd(options):
    params = cases.parameters()
    optimizer = optimizers.FusedSGD(params, lr=0.05, **options)
    compare_with_torch(
        optimizer, params, lambda p: torch.optim.SGD(p, lr=0.05, foreach=False, **options)
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adagrad_is_torch_adagrad(weight_decay):
    params = cases.parameters()
    optimizer = optimizers.FusedAdagrad(params, lr=0.05, weight_decay=weight_decay)
    compare_with_torch(
        optimizer,
        params,
        lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=weight_decay, foreach=False),
    )


@pytest.mark.parametrize("w_mode", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_adam_is_its_plain_loop(w_mode, bias):
    params = cases.parameters(torch.float64)
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": bias}
    optimizer = optimizers.FusedAdam(params, lr=0.05, adam_w_mode=w_mode, **options)
    reference = plain.Adam(params, lr=0.05, w_mode=w_mode, **options)
    compare_with_plain(optimizer, params, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("nesterov", "after", "dampening"),
    [(False, True, 0.5), (True, True, 0.0), (False, False, 0.5)],
)
def test_sgd_is_its_plain_loop(nesterov, after, dampening):
    params = cases.parameters(torch.float64)
    options = {
        "momentum": 0.9,
        "dampening": dampening,
        "weight_decay": 0.1,
        "nesterov": nesterov,
        "wd_after_momentum": after,
    }
    optimizer = optimizers.FusedSGD(params, lr=0.05, **options)
    reference = plain.SGD(params, lr=0.05, **options)
    compare_with_plain(optimizer, params, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("w_mode", [True, False])
def test_adagrad_is_its_plain_loop(w_mode):
    params = cases.parameters(torch.float64)
    options = {"eps": 1e-6, "weight_decay": 0.1}
    optimizer = optimizers.FusedAdagrad(params, lr=0.05, adagrad_w_mode=w_mode, **options)
    reference = plain.Adagrad(params, lr=0.05, w_mode=w_mode, **options)
    compare_with_plain(optimizer, params, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("w_mode", "bias", "averaging", "nvlamb", "max_grad_norm"),
    [
        (True, True, True, False, 1.0),
        (False, True, True, False, 1.0),
        (True, False, False, True, 1e9),
        (True, True, False, True, 0.5),
    ],
)
def test_lamb_is_its_plain_loop(w_mode, bias, averaging, nvlamb, max_grad_norm, weight_decay):
    params = cases.parameters()
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    shared = {"bias_correction": bias, "max_grad_norm": max_grad_norm, "use_nvlamb": nvlamb}
    optimizer = optimizers.FusedLAMB(
        params, lr=0.05, adam_w_mode=w_mode, grad_averaging=averaging, **options, **shared
    )
    reference = plain.LAMB(params, lr=0.05, w_mode=w_mode, averaging=averaging, **options, **shared)
    compare_with_plain(optimizer, params, reference)


@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize(
    ("inside", "bias", "averaging", "init_zero"),
    [
        (False, True, True, False),
        (True, True, True, False),
        (False, False, False, True),
        (True, True, False, True),
    ],
)
def test_novograd_is_its_plain_loop(inside, bias, averaging, init_zero, norm_type):
    params = cases.parameters()
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": bias}
    shared = {"norm_type": norm_type, "init_zero": init_zero}
    optimizer = optimizers.FusedNovoGrad(
        params, lr=0.05, reg_inside_moment=inside, grad_averaging=averaging, **options, **shared
    )
    reference = plain.NovoGrad(
        params, lr=0.05, inside=inside, averaging=averaging, **options, **shared
    )
    compare_with_plain(optimizer, params, reference)


def test_lamb_max_grad_norm_0_clips_nothing():
    ours, theirs = cases.parameters(), cases.parameters()
    cases.run(optimizers.FusedLAMB(ours, max_grad_norm=0.0), ours, 3)
    cases.run(optimizers.FusedLAMB(theirs, max_grad_norm=1e9), theirs, 3)
    cases.assert_same(ours, theirs, rtol=0, atol=0)


def test_lamb_clips_by_the_norm_over_all_groups():
    together, apart = cases.parameters(), cases.parameters()
    cases.run(optimizers.FusedLAMB(together), together, 3)
    groups = [{"params": apart[:2]}, {"params": apart[2:]}]
    cases.run(optimizers.FusedLAMB(groups), apart, 3)
    cases.assert_same(apart, together, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", cases.MAKERS)
def test_16_bit_parameters_are_stepped_in_fp32_and_rounded_once(name, dtype):
    params = cases.parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    cases.give(params, cases.gradients(params, 0))
    cases.give(wide, [p.grad.float() for p in params])
    for these in (params, wide):
        cases.MAKERS[name](these).step()
    cases.assert_same(params, [p.to(dtype) for p in wide], rtol=0, atol=0)


@pytest.mark.parametrize("name", cases.MAKERS)
def test_state_of_16_bit_parameters_is_fp32(name):
    params = cases.parameters(torch.bfloat16)
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 1)
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("name", cases.MAKERS)
def test_parameters_of_several_dtypes_step_together(name):
    mixed = [
        p for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for p in cases.parameters(dtype)
    ]  # fmt: skip
    before = [p.detach().clone() for p in mixed]
    optimizer = cases.MAKERS[name](mixed)
    optimizer.param_groups[0]["lr"] = 1.0  # more than bf16 rounds away
    cases.run(optimizer, mixed, 2)
    assert not any(torch.equal(a, b) for a, b in zip(before, mixed, strict=True))


@pytest.mark.parametrize("name", cases.MAKERS)
def test_strides_of_the_gradient_do_not_matter(name):
    (straight,), (turned,) = (cases.parameters(shapes=[(3, 4)]) for _ in range(2))
    grad = cases.gradients([straight], 0)[0]
    straight.grad, turned.grad = grad.clone(), grad.t().contiguous().t()
    for param in (straight, turned):
        cases.MAKERS[name]([param]).step()
    cases.assert_same([turned], [straight], rtol=0, atol=0)


@pytest.mark.parametrize("name", cases.MAKERS)
def test_parameters_without_gradient_stay_and_get_no_state(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    kept = params[1].detach().clone()
    grads = cases.gradients(params, 0)
    cases.give(params, [grads[0], None, grads[2], grads[3]])
    optimizer.step()
    assert torch.equal(params[1], kept)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize("name", cases.MAKERS)
def test_empty_parameters_step(name):
    params = cases.parameters(shapes=[(0, 3), (2,)])
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 2)
    assert torch.isfinite(params[1]).all()


@pytest.mark.parametrize("inside", [False, True])
def test_arguments_of_the_first_fused_adam_give_its_bits(inside):
    """As scripts of 2019 call it, before ``bias_correction`` left the rate."""
    old = {"bias_correction": False, "max_grad_norm": 0.5, "eps_inside_sqrt": inside}
    ours, theirs = cases.parameters(), cases.parameters()
    cases.run(optimizers.FusedAdam(ours, lr=0.05, weight_decay=0.1, **old), ours, 3)
    cases.run(contrib.FusedAdam(theirs, lr=0.05, weight_decay=0.1, **old), theirs, 3)
    cases.assert_same(ours, theirs, rtol=0, atol=0)


def test_adam_clips_by_the_norm_of_unscaled_gradients():
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    ours, theirs = cases.parameters(), cases.parameters()
    clips, steps = (optimizers.FusedAdam(p, max_grad_norm=n) for p, n in ((ours, 0.5), (theirs, 0)))
    for step in range(3):
        grads = cases.gradients(ours, step)
        scaler.scale(torch.ones(()))
        cases.give(ours, [128.0 * grad for grad in grads])
        scaler.step(clips)
        scaler.update()
        cases.give(theirs, grads)
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        steps.step()
    cases.assert_same(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", cases.MAKERS)
def test_a_step_in_parts_has_the_same_bits(name, monkeypatch):
    params, twins = cases.parameters(), cases.parameters()
    cases.run(cases.MAKERS[name](params), params, 3)
    monkeypatch.setattr(fused_optimizer, "_LARGE", 1)
    cases.run(cases.MAKERS[name](twins), twins, 3)
    cases.assert_same(params, twins, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedNovoGrad"])
def test_a_step_allocates_for_a_part_of_the_parameters(name, monkeypatch):
    params = cases.parameters(shapes=[(64, 64)] * 16)
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 1)
    whole = growth(optimizer.step, torch.device("cpu"))
    monkeypatch.setattr(fused_optimizer, "_LARGE", 64 * 64)
    assert growth(optimizer.step, torch.device("cpu")) < whole / 4
