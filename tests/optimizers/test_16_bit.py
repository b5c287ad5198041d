"""16-bit parameters: every optimizer and function computes in fp32 and rounds once per step."""

import pytest
import torch

import amp_C
from apex import optimizers
from apex.contrib import optimizers as contrib
from tests.contrib_optimizers.test_contrib_optimizers import LegacyAdam
from tests.multi_tensor_apply.lists import flag
from tests.optimizers import cases, plain

BOTH = [torch.float16, torch.bfloat16]
both = pytest.mark.parametrize("dtype", BOTH, ids=["fp16", "bf16"])
SHAPES = [(40, 50), (300,), ()]
STEPS = 6


class SGD(plain.SGD):
    """Momentum of fp16 parameters is fp16, and from the second step on applied as stored."""

    def __init__(self, params, dtype, **options):
        super().__init__(params, **options)
        self.dtype = dtype

    def stored(self, momentum):
        return momentum.half().float() if self.dtype is torch.float16 else momentum


def adam(dtype, p, lr=0.05, w_mode=True, weight_decay=0.1, **options):
    shared = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    rule = {"lr": lr, "w_mode": w_mode, "bias_correction": True, **shared}
    return optimizers.FusedAdam(p, lr=lr, adam_w_mode=w_mode, **shared, **options), plain.Adam, rule


def sgd(dtype, p, **options):
    rule = {
        "lr": 0.05, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
        "wd_after_momentum": False, **options,
    }  # fmt: skip
    return optimizers.FusedSGD(p, **rule), lambda p, **o: SGD(p, dtype, **o), rule


def contrib_sgd(dtype, p):
    return contrib.FusedSGD(p, lr=0.05, momentum=0.9), *sgd(dtype, p)[1:]


def lamb(dtype, p, kind=optimizers.FusedLAMB, weight_decay=0.1, use_nvlamb=False, w_mode=True):
    shared = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    shared.update(max_grad_norm=1.0, use_nvlamb=use_nvlamb, bias_correction=True)
    optimizer = kind(p, lr=0.05, adam_w_mode=w_mode, **shared)
    return optimizer, plain.LAMB, {"lr": 0.05, "w_mode": w_mode, "averaging": True, **shared}


def novograd(dtype, p, inside=False, norm_type=2):
    shared = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True}
    shared.update(norm_type=norm_type, init_zero=False)
    optimizer = optimizers.FusedNovoGrad(p, lr=0.05, reg_inside_moment=inside, **shared)
    return optimizer, plain.NovoGrad, {"lr": 0.05, "inside": inside, "averaging": True, **shared}


def adagrad(dtype, p, w_mode=False):
    shared = {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1}
    optimizer = optimizers.FusedAdagrad(p, adagrad_w_mode=w_mode, **shared)
    return optimizer, plain.Adagrad, {"w_mode": w_mode, **shared}


def legacy_adam(dtype, p, inside=False):
    shared = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True}
    optimizer = contrib.FusedAdam(p, lr=0.05, eps_inside_sqrt=inside, **shared)
    return optimizer, LegacyAdam, {"lr": 0.05, "inside": inside, **shared}


def with_options(make, **options):
    return lambda dtype, p: make(dtype, p, **options)


RULES = {
    "adamw": adam,
    "adam": with_options(adam, w_mode=False),
    "adam without decay": with_options(adam, weight_decay=0.0),
    "adam, capturable": with_options(adam, capturable=True),
    "sgd": with_options(sgd, momentum=0.0),
    "sgd, decay": with_options(sgd, momentum=0.0, weight_decay=0.1),
    "momentum": sgd,
    "momentum, decay": with_options(sgd, weight_decay=0.1),
    "momentum, dampened": with_options(sgd, dampening=0.5),
    "momentum, decay after": with_options(sgd, weight_decay=0.1, wd_after_momentum=True),
    "nesterov": with_options(sgd, nesterov=True),
    "nesterov, decay": with_options(sgd, nesterov=True, weight_decay=0.1),
    "nesterov, decay after": with_options(
        sgd, nesterov=True, weight_decay=0.1, wd_after_momentum=True
    ),
    "lamb": lamb,
    "lamb without decay": with_options(lamb, weight_decay=0.0),
    "nvlamb": with_options(lamb, weight_decay=0.0, use_nvlamb=True),
    "lamb, decay in the gradient": with_options(lamb, w_mode=False),
    "mixed precision lamb": with_options(lamb, kind=optimizers.FusedMixedPrecisionLamb),
    "novograd": novograd,
    "novograd, inside": with_options(novograd, inside=True),
    "novograd, largest": with_options(novograd, norm_type=0),
    "adagrad": adagrad,
    "adagrad, decoupled": with_options(adagrad, w_mode=True),
    "contrib adam": legacy_adam,
    "contrib adam, eps inside": with_options(legacy_adam, inside=True),
    "contrib sgd": contrib_sgd,
}


def test_every_optimizer_is_walked():
    names = {
        type(make(torch.float16, cases.parameters(torch.float16))[0]) for make in RULES.values()
    }
    wanted = {getattr(optimizers, n) for n in optimizers.__all__ if n != "FP16_Optimizer"}
    assert names >= wanted | {contrib.FusedAdam, contrib.FusedSGD}


def assert_rounded_once(found, expected, dtype):
    """Equal but for the ties that the order of fp32 operations decides: one in a thousand."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=torch.finfo(dtype).eps, atol=1e-6)
    differs = sum(int((a.float() != b).sum()) for a, b in zip(found, expected, strict=True))
    assert differs <= 3


@both
@pytest.mark.parametrize("name", RULES)
def test_parameter_is_the_plain_rule_rounded_once_per_step(name, dtype):
    params = cases.parameters(dtype, SHAPES)
    optimizer, rule, options = RULES[name](dtype, params)
    reference = rule([p.float() for p in params], **options)
    for step in range(STEPS):
        grads = cases.gradients(params, step)
        cases.give(params, grads)
        optimizer.step()
        reference.step([g.float() for g in grads])
        rounded = [p.to(dtype).float() for p in reference.params]
        assert_rounded_once(params, rounded, dtype)
        # From one start again, so that a tie does not grow.
        reference.params = [p.detach().float() for p in params]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sgd_on_fp16_is_torchs_as_apex_tests_it(device):
    """At most 1e-3 apart in seven steps; the rate and momentum of apex's test are powers of two."""
    generator = torch.Generator().manual_seed(9876)
    start = torch.rand(278011, generator=generator).half().to(device)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.25, "momentum": 0.125}
    optimizer, reference = (
        optimizers.FusedSGD([ours], **options),
        torch.optim.SGD([theirs], **options),
    )
    for _ in range(7):
        theirs.grad = torch.rand(278011, generator=generator).half().to(device)
        ours.grad = theirs.grad
        reference.step()
        optimizer.step()
        assert (ours - theirs).abs().max().item() <= 1e-3
        assert not ((ours != theirs) & (theirs == 0)).any()  # apex divides by the reference


def test_momentum_of_fp16_is_fp16_and_of_others_fp32():
    params = [p for dtype in (*BOTH, torch.float32) for p in cases.parameters(dtype, [(3,)])]
    momenta, new = optimizers.FusedSGD(params, lr=0.1, momentum=0.9).get_momentums(params)
    assert [m.dtype for m in momenta] == [torch.float16, torch.float32, torch.float32]
    assert new


def test_get_momentums_makes_what_is_missing_and_gives_what_is_there():
    params = cases.parameters()
    optimizer = optimizers.FusedSGD(params, lr=0.1, momentum=0.9)
    momenta, new = optimizer.get_momentums(params)
    assert new
    assert not any(m.any() for m in momenta)
    cases.run(optimizer, params, 1)
    again, new = optimizer.get_momentums(iter(params))
    assert not new
    assert all(
        a is optimizer.state[p]["momentum_buffer"] for a, p in zip(again, params, strict=True)
    )
    assert any(m.any() for m in again)
    assert optimizer.get_momentums([]) == ([], True)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_explicit_gradients_are_divided_in_fp32(scale):
    """In 16 bits the quotients would be rounded before the step."""
    params = cases.parameters(torch.bfloat16, SHAPES)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    grads = cases.gradients(wide, 0)
    contrib.FusedSGD(params, lr=0.05).step(grads=grads, scale=scale)
    contrib.FusedSGD(wide, lr=0.05).step(grads=grads, scale=scale)
    cases.assert_same(params, [p.bfloat16() for p in wide], rtol=0, atol=0)


# -- amp_C ---------------------------------------------------------------------------------------

ADAM = (0.1, 0.8, 0.9, 1e-6, 3, 1, 1, 0.1)
LAMB = (0.1, 0.8, 0.9, 1e-6, 3, 1, 0.1, 1, 1, torch.full((1,), 5.0), 1.0, False)
FUNCTIONS = {
    "multi_tensor_scale": (2, (1 / 3,)),
    "multi_tensor_axpby": (3, (1 / 3, 0.7, -1)),
    "multi_tensor_l2norm": (1, (True,)),
    "multi_tensor_l2norm_mp": (1, (True,)),
    "multi_tensor_l2norm_scale": (2, (1 / 3, True)),
    "multi_tensor_unscale_l2norm": (1, (1 / 3, True)),
    "multi_tensor_adam": (4, ADAM),
    "multi_tensor_adam_capturable": (4, (*ADAM, 1 / 3)),
    "multi_tensor_adam_capturable_master": (5, (*ADAM, 1 / 3)),
    "multi_tensor_adagrad": (3, (0.1, 1e-6, 0, 0.1)),
    "multi_tensor_novograd": (
        3, (torch.ones(3), 0.1, 0.8, 0.9, 1e-6, 3, 1, 0.1, 1, 1, 2)),
    "multi_tensor_lamb": (4, LAMB),
    "multi_tensor_lamb_mp": (4, (*LAMB, torch.zeros(1), 1 / 3)),
    "multi_tensor_lamb_stage1_cuda": (
        5, (torch.full((3,), 0.1), 2, 0.8, 0.9, 1e-6, torch.full((1,), 5.0), 1.0)),
    "multi_tensor_lamb_stage2_cuda": (
        2, (torch.full((3,), 2.0), torch.full((3,), 3.0), 0.1, 0.1, False)),
    "multi_tensor_sgd": (3, (0.1, 0.0, 0.0, 0.1, False, False, False, 1 / 3)),
}  # fmt: skip


def test_every_function_is_walked():
    assert sorted([*FUNCTIONS, "update_scale_hysteresis"]) == sorted(amp_C.__all__)


def called(name, lists, args):
    """Returns what the function wrote into its lists, and what it returned."""
    args = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    returned = getattr(amp_C, name)(65536, flag(), lists, *args)
    return [t for tensors in lists for t in tensors], list(returned or ())


@both
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_rounds_what_it_gives_in_fp32(name, dtype):
    count, args = FUNCTIONS[name]
    low = [
        [t.abs() for t in cases.gradients(cases.parameters(dtype, SHAPES), s)] for s in range(count)
    ]
    if name.endswith("_master"):
        low[4] = [t.float() for t in low[4]]
    wide = [[t.to(torch.float32, copy=True) for t in tensors] for tensors in low]
    written, returned = called(name, low, args)
    expected, wanted = called(name, wide, args)
    for one, other in zip(written, expected, strict=True):
        assert torch.equal(one, other.to(one.dtype))
    cases.assert_same(returned, wanted, rtol=1e-6, atol=0)


@both
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("first_run", [False, True])
def test_sgd_function_steps_by_the_momentum_that_it_stores(dtype, nesterov, first_run):
    grads, params, momenta = (
        cases.gradients(cases.parameters(dtype, SHAPES), seed) for seed in range(3)
    )
    wide = [[t.float() for t in tensors] for tensors in (grads, params, momenta)]
    args = (0.1, 0.9, 0.0, 0.1, nesterov, first_run, False, 1.0)
    amp_C.multi_tensor_sgd(65536, flag(), [grads, params, momenta], *args)
    for g, p, m, param, momentum in zip(*wide, params, momenta, strict=True):
        decayed = g + 0.1 * p
        stored = (decayed if first_run else 0.9 * m + decayed).to(dtype)
        applied = decayed if first_run else stored.float()
        update = decayed + 0.9 * applied if nesterov else applied
        assert_rounded_once([momentum], [stored.float()], dtype)
        assert_rounded_once([param], [(p - 0.1 * update).to(dtype).float()], dtype)
