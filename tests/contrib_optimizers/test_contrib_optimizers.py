"""apex's deprecated optimizers: rules and arguments of their own."""

import inspect

import pytest
import torch

from apex import optimizers
from apex.contrib import optimizers as contrib
from tests.optimizers import cases
from tests.optimizers.plain import Plain


class LegacyAdam(Plain):
    """Adam with the bias corrected in the step size."""

    def rule(self, p, g, state, lr, betas, eps, inside, weight_decay, bias_correction):
        m = self.average(state, "m", betas[0], g, 1 - betas[0])
        v = self.average(state, "v", betas[1], g * g, 1 - betas[1])
        if bias_correction:
            lr = lr * (1 - betas[1] ** self.count) ** 0.5 / (1 - betas[0] ** self.count)
        denominator = (v + eps).sqrt() if inside else v.sqrt() + eps
        p -= lr * (m / denominator + weight_decay * p)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_adam_is_its_plain_loop(inside, bias_correction):
    params = cases.parameters()
    shared = {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    shared["bias_correction"] = bias_correction
    optimizer = contrib.FusedAdam(params, lr=0.05, eps_inside_sqrt=inside, **shared)
    reference = LegacyAdam(params, lr=0.05, inside=inside, **shared)
    for step in range(3):
        cases.give(params, cases.gradients(params, step))
        optimizer.step()
        reference.step(cases.gradients(params, step))
    cases.assert_same(params, reference.params, rtol=1e-5, atol=1e-6)


def test_adam_clips_each_group_to_its_norm():
    ours, theirs = cases.parameters(), cases.parameters()
    groups = [{"params": ours[:2], "max_grad_norm": 0.5}, {"params": ours[2:]}]
    optimizer = contrib.FusedAdam(groups, lr=0.05)
    reference = contrib.FusedAdam(theirs, lr=0.05)
    for step in range(2):
        cases.give(ours, cases.gradients(ours, step))
        cases.give(theirs, cases.gradients(theirs, step))
        torch.nn.utils.clip_grad_norm_(theirs[:2], 0.5)
        optimizer.step()
        reference.step()
    cases.assert_same(ours, theirs, rtol=1e-4, atol=1e-6)


def test_adam_clips_by_norms_that_are_given():
    ours, theirs = cases.parameters(), cases.parameters()
    grads = cases.gradients(ours, 0)
    contrib.FusedAdam(ours, max_grad_norm=2.0).step(
        grads=[g * 8.0 for g in grads], scale=8.0, grad_norms=[torch.tensor(8.0 * 20.0)]
    )
    contrib.FusedAdam(theirs).step(grads=[g / 10.0 for g in grads])
    cases.assert_same(ours, theirs, rtol=1e-4, atol=1e-6)


EXPLICIT = {
    "FusedAdam": lambda p: contrib.FusedAdam(p, lr=0.05),
    "FusedSGD": lambda p: contrib.FusedSGD(p, lr=0.05, momentum=0.9),
}
every = pytest.mark.parametrize("name", EXPLICIT)


@every
@pytest.mark.parametrize("nested", [False, True])
def test_step_takes_gradients_scale_and_outputs(name, nested):
    masters, twins = cases.parameters(), cases.parameters()
    grads = [(g * 4.0).bfloat16() for g in cases.gradients(masters, 0)]
    outputs = [torch.zeros_like(p, dtype=torch.bfloat16) for p in masters]
    given = ([grads], [outputs]) if nested else (grads, outputs)
    EXPLICIT[name](masters).step(grads=given[0], output_params=given[1], scale=4.0)
    cases.give(twins, [g.float() / 4.0 for g in grads])
    EXPLICIT[name](twins).step()
    cases.assert_same(masters, twins, rtol=0, atol=0)
    cases.assert_same(outputs, [m.bfloat16() for m in masters], rtol=0, atol=0)


@every
def test_parameters_keep_their_own_gradients(name):
    params = cases.parameters()
    cases.give(params, cases.gradients(params, 5))
    own = [p.grad for p in params]
    EXPLICIT[name](params).step(grads=cases.gradients(params, 0), scale=2.0)
    assert all(p.grad is grad for p, grad in zip(params, own, strict=True))


@every
def test_scale_divides_their_own_gradients_too(name):
    params, twins = cases.parameters(), cases.parameters()
    cases.give(params, [g * 4.0 for g in cases.gradients(params, 0)])
    EXPLICIT[name](params).step(scale=4.0)
    cases.run(EXPLICIT[name](twins), twins, 1)
    cases.assert_same(params, twins, rtol=0, atol=0)


@every
def test_lists_that_do_not_fit_are_refused(name):
    params = cases.parameters()
    with pytest.raises(ValueError, match=r"grads of \[2\] tensors per group"):
        EXPLICIT[name](params).step(grads=cases.gradients(params, 0)[:2])


def test_generator_of_gradients_is_one_group():
    params, twins = cases.parameters(), cases.parameters()
    contrib.FusedAdam(params).step(grads=(g for g in cases.gradients(params, 0)))
    contrib.FusedAdam(twins).step(grads=cases.gradients(twins, 0))
    cases.assert_same(params, twins, rtol=0, atol=0)


def test_lamb_is_the_usual_one():
    params, twins = cases.parameters(), cases.parameters()
    cases.run(contrib.FusedLAMB(params), params, 3)
    cases.run(optimizers.FusedLAMB(twins), twins, 3)
    cases.assert_same(params, twins, rtol=0, atol=0)


def test_amp_scale_adjustment_is_refused():
    with pytest.raises(ValueError, match="amp_scale_adjustment is 2"):
        contrib.FusedAdam(cases.parameters(), amp_scale_adjustment=2.0)


SIGNATURES = {
    "FusedAdam": "lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm "
    "amsgrad use_mt amp_scale_adjustment",
    "FusedLAMB": "lr bias_correction betas eps weight_decay amsgrad adam_w_mode "
    "grad_averaging set_grad_none max_grad_norm",
    "FusedSGD": "lr momentum dampening weight_decay nesterov wd_after_momentum "
    "materialize_master_grads",
    "FP16_Optimizer": "static_loss_scale dynamic_loss_scale dynamic_loss_args verbose",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_apexs_in_their_order(name):
    found = list(inspect.signature(getattr(contrib, name)).parameters)[1:]
    assert " ".join(found) == SIGNATURES[name]
