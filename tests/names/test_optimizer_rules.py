"""Every rule of apex.optimizers, contrib.optimizers and fused_adam_cuda against plain loops."""

import copy

import pytest
import torch

import fused_adam_cuda
from apex import optimizers
from apex.contrib import optimizers as contrib
from tests.support import fused
from tests.support.loops import agree, every, prepared, same
from tests.support.reference import plain_optimizers

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Sums in another order, over four steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
EXACT = {"rtol": 0, "atol": 0}


class LowSGD(plain_optimizers.SGD):
    low = True


ADAM = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9}
LAMB = {**ADAM, "max_grad_norm": 1.0}
NO_AVERAGE = {"betas": (0, 0.95)}
# Optimizers, their rules, common options, and variants of them.
RULES = {
    "adam": (optimizers.FusedAdam, plain_optimizers.Adam, ADAM, [
        {}, {"adam_w_mode": False}, {"weight_decay": 0.0}, {"bias_correction": False}, NO_AVERAGE]),
    "sgd": (optimizers.FusedSGD, plain_optimizers.SGD, SGD, [
        {}, {"momentum": 0.0}, {"momentum": 0.0, "weight_decay": 0.1}, {"weight_decay": 0.1},
        {"dampening": 0.5}, {"nesterov": True}, {"nesterov": True, "weight_decay": 0.1},
        {"weight_decay": 0.1, "wd_after_momentum": True, "dampening": 0.5},
        {"nesterov": True, "weight_decay": 0.1, "wd_after_momentum": True}]),
    "contrib's sgd": (contrib.FusedSGD, plain_optimizers.SGD, SGD, [{}]),
    "lamb": (optimizers.FusedLAMB, plain_optimizers.LAMB, LAMB, [
        {}, {"weight_decay": 0.0}, {"weight_decay": 0.0, "use_nvlamb": True},
        {"adam_w_mode": False}, {"grad_averaging": False, "max_grad_norm": 1e9},
        {"bias_correction": False}, NO_AVERAGE]),
    "mixed lamb": (optimizers.FusedMixedPrecisionLamb, plain_optimizers.LAMB, LAMB, [
        {}, {"max_grad_norm": 1e9}]),
    "novograd": (optimizers.FusedNovoGrad, plain_optimizers.NovoGrad, ADAM, [
        {}, {"reg_inside_moment": True}, {"norm_type": 0}, {"init_zero": True},
        {"grad_averaging": False, "bias_correction": False},
        {"reg_inside_moment": True, "norm_type": 0, "init_zero": True},
        NO_AVERAGE, {"reg_inside_moment": True, **NO_AVERAGE}]),
    "adagrad": (optimizers.FusedAdagrad, plain_optimizers.Adagrad,
        {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1}, [{}, {"adagrad_w_mode": True}]),
    "contrib's adam": (contrib.FusedAdam, plain_optimizers.LegacyAdam, {**ADAM, "eps": 1e-4}, [
        {}, {"eps_inside_sqrt": True}, {"bias_correction": False}]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_fp32_parameters_follow_the_plain_rule(name):
    kind, rule, common, variants = RULES[name]
    for own in variants:
        options, params = {**common, **own}, fused.parameters()
        optimizer, plain = kind(params, **options), rule(params, **options)
        for step in range(4):
            fused.give(params, fused.gradients(params, step))
            optimizer.step()
            plain.step(fused.gradients(params, step))
        fused.assert_same(params, plain.params, **CLOSE)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_16_bit_parameters_follow_the_plain_rule_rounded_once_per_step(dtype):
    for name, (kind, rule, common, variants) in RULES.items():
        stored = LowSGD if rule is plain_optimizers.SGD and dtype is FP16 else rule
        for own in variants:
            options, params = {**common, **own}, fused.parameters(dtype, [(40, 50), (300,), ()])
            optimizer = kind(params, **options)
            plain = stored([p.float() for p in params], **options)
            for step in range(4):
                grads = fused.gradients(params, step)
                fused.give(params, grads)
                optimizer.step()
                plain.step([g.float() for g in grads])
                rounded = [p.to(dtype) for p in plain.params]
                # Equal but for the ties that the order of operations decides: one in a thousand.
                fused.assert_same(params, rounded, rtol=torch.finfo(dtype).eps, atol=1e-6)
                differs = sum((a != b).sum() for a, b in zip(params, rounded, strict=True))
                assert int(differs) <= 3, (name, own)
                # From one start again, so that a tie does not grow.
                plain.params = [p.detach().float() for p in params]


@pytest.mark.parametrize("flag", [None, 0.0, 1.0])
def test_devices_without_fused_kernels_take_the_same_steps(flag, monkeypatch):
    found = {}
    for has_fused in (True, False):
        if not has_fused:
            monkeypatch.setattr("apex._torch.foreach.fused_kernel", lambda *_: None)
        for name in fused.MAKERS:
            params = fused.parameters()
            optimizer = fused.MAKERS[name](params)
            fused.run(optimizer, params, 1)
            optimizer.found_inf = None if flag is None else torch.tensor(flag)
            fused.run(optimizer, params, 2, first=1)
            fused.assert_same(params, found.setdefault(name, params), **CLOSE)


def test_lamb_clips_by_the_norm_over_all_groups_unless_the_greatest_is_0():
    together, apart = fused.parameters(), fused.parameters()
    fused.run(optimizers.FusedLAMB(together), together, 3)
    groups = [{"params": apart[:2]}, {"params": apart[2:]}]
    fused.run(optimizers.FusedLAMB(groups), apart, 3)
    fused.assert_same(apart, together, **CLOSE)
    ours, theirs = fused.parameters(), fused.parameters()
    fused.run(optimizers.FusedLAMB(ours, max_grad_norm=0.0), ours, 3)
    fused.run(optimizers.FusedLAMB(theirs, max_grad_norm=1e9), theirs, 3)
    fused.assert_same(ours, theirs, **EXACT)


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedNovoGrad"])
def test_a_step_in_parts_has_the_same_bits(name, monkeypatch):
    params, twins = fused.parameters(), fused.parameters()
    fused.run(fused.MAKERS[name](params), params, 3)
    monkeypatch.setattr("apex.optimizers.fused_optimizer._LARGE", 1)
    fused.run(fused.MAKERS[name](twins), twins, 3)
    fused.assert_same(params, twins, **EXACT)


# -- apex's first FusedAdam ----------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_arguments_of_the_first_fused_adam_give_its_bits(inside):
    """As scripts of 2019 call it, before ``bias_correction`` left the rate."""
    old = {"bias_correction": False, "max_grad_norm": 0.5, "eps_inside_sqrt": inside}
    ours, theirs = fused.parameters(), fused.parameters()
    fused.run(optimizers.FusedAdam(ours, lr=0.05, weight_decay=0.1, **old), ours, 3)
    fused.run(contrib.FusedAdam(theirs, lr=0.05, weight_decay=0.1, **old), theirs, 3)
    fused.assert_same(ours, theirs, **EXACT)


def test_adam_clips_each_group_by_the_norm_of_unscaled_gradients():
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    ours, theirs = fused.parameters(), fused.parameters()
    groups = [{"params": ours[:2], "max_grad_norm": 0.5}, {"params": ours[2:], "max_grad_norm": 99}]
    clips, steps = optimizers.FusedAdam(groups), optimizers.FusedAdam(theirs)
    for step in range(3):
        grads = fused.gradients(ours, step)
        scaler.scale(torch.ones(()))
        fused.give(ours, [128.0 * grad for grad in grads])
        scaler.step(clips)
        scaler.update()
        fused.give(theirs, grads)
        torch.nn.utils.clip_grad_norm_(theirs[:2], 0.5)
        steps.step()
    fused.assert_same(ours, theirs, rtol=1e-4, atol=1e-6)


def test_adam_clips_16_bit_gradients_in_fp32():
    averages = []
    for dtype in (BF16, FP32):
        params = fused.parameters(dtype)
        optimizer = optimizers.FusedAdam(params, max_grad_norm=0.5)
        grads = fused.gradients(params, 0, BF16)
        fused.give(params, [grad.to(dtype) for grad in grads])
        optimizer.step()
        averages.append([optimizer.state[param]["exp_avg"] for param in params])
    fused.assert_same(*averages, **EXACT)


def test_contrib_s_adam_clips_each_group_by_the_norm_that_is_given():
    runs = []
    for gives in (False, True):
        params = fused.parameters()
        grads = [fused.gradients(params[:2], 0), fused.gradients(params[2:], 1)]
        scaled = [[4.0 * grad for grad in group] for group in grads]
        norms = [torch.nn.utils.get_total_norm(group) for group in scaled]
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = contrib.FusedAdam(groups, lr=1.0, eps=1.0, max_grad_norm=0.5)
        optimizer.step(grads=scaled, scale=4.0, grad_norms=norms if gives else None)
        runs.append(params)
    fused.assert_same(*runs, **CLOSE)


def test_dampened_momentum_of_some_parameters_goes_on_when_others_start():
    params, alone = fused.parameters(), fused.parameters()[:1]
    options = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}
    optimizer, other = optimizers.FusedSGD(params, **options), optimizers.FusedSGD(alone, **options)
    for step, count in enumerate((1, 4)):
        fused.give(params[:count], fused.gradients(params[:count], step))
        optimizer.step()
    fused.run(other, alone, 2)
    fused.assert_same(params[:1], alone, **EXACT)


def test_mixed_lamb_starts_at_the_step_that_is_given():
    params = fused.parameters()
    optimizer = optimizers.FusedMixedPrecisionLamb(params[:2], step=3)
    optimizer.add_param_group({"params": params[2:]})
    assert [int(group["step"]) for group in optimizer.param_groups] == [3, 3]


@every(kind=[contrib.FusedAdam, contrib.FusedSGD], nested=[False, True])
def test_contrib_steps_take_gradients_scale_and_outputs(kind, nested):
    masters, twins = fused.parameters(), fused.parameters()
    fused.give(masters, fused.gradients(masters, 5))
    own = [p.grad for p in masters]
    grads = [(g * 4.0).bfloat16() for g in fused.gradients(masters, 0)]
    outputs = [torch.zeros_like(p, dtype=BF16) for p in masters]
    given = ([grads], [outputs]) if nested else (iter(grads), outputs)
    kind(masters, lr=0.05).step(grads=given[0], output_params=given[1], scale=4.0)
    fused.give(twins, [g.float() for g in grads])
    kind(twins, lr=0.05).step(scale=4.0)
    fused.assert_same(masters, twins, **EXACT)
    fused.assert_same(outputs, [m.bfloat16() for m in masters], **EXACT)
    assert all(p.grad is grad for p, grad in zip(masters, own, strict=True))
    with pytest.raises(ValueError, match=r"got grads in lists of .*as many as parameters"):
        kind(masters, lr=0.05).step(grads=fused.gradients(masters, 0)[:2])
    before = [param.detach().clone() for param in masters]
    for argument in ("grads", "output_params"):
        small = [torch.ones(1) for _ in masters]
        with pytest.raises(ValueError, match=rf"got {argument} of shape \(1,\) for a parameter"):
            kind(masters, lr=0.05).step(**{argument: small})
    fused.assert_same(masters, before, **EXACT)


@every(kind=[contrib.FusedAdam, contrib.FusedSGD])
def test_contrib_steps_with_given_gradients_reach_a_model_with_masters(kind):
    model, optimizer = prepared("O5", lambda p: kind(p, lr=0.5), torch.nn.Linear(2, 2))
    optimizer.step(grads=[torch.ones_like(param) for param in model.parameters()])
    assert agree(model, optimizer)


@every(mode=[0, 1], correct=[0, 1])
def test_fused_adam_cuda_is_its_plain_loop(mode, correct):
    for dtype in (FP32, BF16):
        p, m, v, g = torch.randn(4, 3, 5).unbind()
        v, out, given = v.abs(), torch.zeros(3, 5, dtype=dtype), (g * 8).to(dtype)
        options = {**ADAM, "eps_inside_sqrt": mode == 0, "bias_correction": bool(correct)}
        plain = plain_optimizers.LegacyAdam([p.double()], **options)
        plain.count, plain.state = 2, [{"m": m.double(), "v": v.double()}]
        plain.step([given.double() / 7])  # 8 would be exact in 16 bits, too
        fused_adam_cuda.adam(p, out, m, v, given, 0.05, 0.8, 0.95, 1e-6, 7.0, 3, mode, correct, 0.1)
        wanted = [plain.params[0], plain.state[0]["m"], plain.state[0]["v"]]
        torch.testing.assert_close([t.double() for t in (p, m, v)], wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(out, p.to(dtype))
        assert torch.equal(given, (g * 8).to(dtype))
    with pytest.raises(ValueError, match="mode is 2; it must be 0"):
        fused_adam_cuda.adam(p, out, m, v, given, 0.05, 0.8, 0.95, 1e-6, 7.0, 3, 2, correct, 0.1)


# -- optimizers that keep fp32 masters themselves ------------------------------------------------

MASTERS = [
    (optimizers.FusedAdam, {"capturable": True, "master_weights": True}, {"capturable": True}),
    (optimizers.FusedMixedPrecisionLamb, {"reduced_precision_dtype": BF16}, {}),
]


@pytest.mark.parametrize(("kind", "options", "plain"), MASTERS)
def test_masters_move_as_fp32_parameters_do_and_survive_a_checkpoint(kind, options, plain):
    params = fused.parameters(BF16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, other = kind(params, lr=0.01, **options), kind(wide, lr=0.01, **plain)
    for step in range(4):
        if step == 2:
            saved, optimizer = optimizer.state_dict(), kind(params, lr=0.01, **options)
            before = copy.deepcopy(saved["state"])
            optimizer.load_state_dict(saved)
        fused.give(params, fused.gradients(params, step))
        fused.give(wide, [p.grad.float() for p in params])
        optimizer.step()
        other.step()
    masters = [optimizer.state[p]["master_param"] for p in params]
    fused.assert_same(masters, wide, **EXACT)
    fused.assert_same(params, [p.to(BF16) for p in wide], **EXACT)
    assert same(saved["state"], before)
    copied = copy.deepcopy(optimizer)
    assert {key: getattr(copied, key) for key in options} == options
    (group,) = optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert group["step"].dtype is torch.int32
    full = fused.parameters()
    optimizer = kind(full, **options)
    fused.run(optimizer, full, 1)
    assert not any("master_param" in state for state in optimizer.state.values())
