"""``torch.func`` over prepared models: functional_call, grad, vmap, ensembles."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

from apex import amp
from tests.model.cases import CASTS_DOWN, EPS, close
from tests.support import loops
from tests.support.reference.plain_loops import Loop


def inference(level, seed=0):
    return amp.initialize(loops.net(seed), opt_level=level, verbosity=0)


def by_hand(level):
    """The model as a function of parameters and input, with the level's casts written out."""
    rules = loops.LEVELS[level]

    def forward(params, x):
        given = {name: value.to(rules.compute) for name, value in params.items()}
        hidden = F.linear(x.to(rules.compute), given["0.weight"], given["0.bias"])
        return F.linear(F.relu(hidden), given["2.weight"], given["2.bias"])

    return forward


def sample_loss(forward):
    def loss(params, x, y):
        return F.mse_loss(forward(params, x[None]).float(), y[None])

    return loss


def test_training_by_functional_call_is_training(level):
    model, optimizer = loops.prepared(level)
    loop = Loop(level, loops.net().parameters(), loops.sgd)
    for x, y in loops.batches(3):
        params = dict(model.named_parameters())
        loops.descend(F.mse_loss(functional_call(model, params, (x,)).float(), y), optimizer)
        loop.train_step(x, y)
    assert loops.same(loops.masters(optimizer), loop.stepped)


def test_a_state_dict_is_taken_where_parameters_are_fp32_and_else_refused_with_the_remedy(level):
    model, x = inference(level), loops.batch()[0]
    if level in CASTS_DOWN:
        words = r"0\.weight \(float32\)(.|\n)*value\.to\(param\.dtype"
        with pytest.raises(RuntimeError, match=words):
            functional_call(model, model.state_dict(), (x,))
        assert model(x).dtype is torch.float32
    else:
        assert torch.equal(functional_call(model, model.state_dict(), (x,)), model(x))


def test_gradients_per_sample_are_those_of_explicit_casts(level):
    model = inference(level)
    x, y = loops.batch()
    per_sample = (None, 0, 0)
    params = {name: param.detach() for name, param in model.named_parameters()}
    gradient = grad(sample_loss(lambda p, x: functional_call(model, p, (x,))))
    got = vmap(gradient, per_sample)(params, x, y)
    with amp.disable_casts():
        expected = vmap(grad(sample_loss(by_hand(level))), per_sample)(params, x, y)
    assert got["0.weight"].shape == (3, 8, 4)
    assert loops.same(got, expected)


def test_derivatives_of_any_depth_follow_each_other_after_a_step(level):
    model, optimizer = loops.prepared(level)
    loops.train(model, optimizer, 1)
    plain = copy.deepcopy(model)
    x = loops.batch()[0][0]

    def derivatives(model):
        once = grad(lambda x: model(x).float().square().sum())
        twice = jacrev(once)
        return once(x), twice(x), once(x), vmap(twice)(x[None])[0], twice(x), once(x)

    got = derivatives(model)
    with amp.disable_casts():
        expected = derivatives(plain)
    assert close(got, expected, eps=4 * EPS[level])


def test_gradients_by_torch_func_leave_those_of_the_model(level):
    model, _ = loops.prepared(level)
    x, y = loops.batch()
    loops.loss_of(model, x, y).backward()
    before = [param.grad.clone() for param in model.parameters()]
    loss = sample_loss(lambda params, x: functional_call(model, params, (x,)))
    grad(loss)(dict(model.named_parameters()), x[0], y[0])
    assert loops.same([param.grad for param in model.parameters()], before)


def test_an_ensemble_by_vmap_gives_what_its_models_give(level):
    models = amp.initialize([loops.net(seed) for seed in range(3)], opt_level=level, verbosity=0)
    plain = copy.deepcopy(models)
    params, buffers = stack_module_state(plain)
    base = copy.deepcopy(plain[0]).to("meta")
    x = loops.batch()[0]
    together = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(params, buffers)
    alone = torch.stack([model(x) for model in models])
    eps = 2 * EPS[level] + 1e-6
    torch.testing.assert_close(together, alone, rtol=0.0, atol=eps, check_dtype=False)
