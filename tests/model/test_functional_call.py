"""``torch.func`` over prepared models: functional_call, grad, vmap, ensembles."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, stack_module_state, vmap

from apex import amp
from tests.model.cases import CASTS_DOWN, EPS, LEVELS
from tests.support import training as cases
from tests.support.reference.loops import Loop

every_level = pytest.mark.parametrize("level", LEVELS)


def inference(level, seed=0):
    return amp.initialize(cases.net(seed), opt_level=level, verbosity=0)


def params_of(model):
    return {name: param.detach() for name, param in model.named_parameters()}


def by_hand(level):
    """The model as a function of parameters and input, with the level's casts written out."""
    rules = cases.LEVELS[level]

    def forward(params, x):
        given = {name: value.to(rules.compute) for name, value in params.items()}
        hidden = F.linear(x.to(rules.compute), given["0.weight"], given["0.bias"])
        return F.linear(F.relu(hidden), given["2.weight"], given["2.bias"])

    return forward


def sample_loss(forward):
    def loss(params, x, y):
        return F.mse_loss(forward(params, x[None]).float(), y[None])

    return loss


@every_level
def test_training_by_functional_call_is_training(level):
    model, optimizer = cases.prepared(level)
    loop = Loop(level, cases.net().parameters(), cases.sgd)
    for x, y in cases.batches(3):
        optimizer.zero_grad()
        params = dict(model.named_parameters())
        loss = F.mse_loss(functional_call(model, params, (x,)).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        loop.train_step(x, y)
    assert cases.same(cases.masters(optimizer), loop.stepped)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_levels_with_fp32_parameters_take_a_state_dict_as_it_is(level):
    model = inference(level)
    x = cases.batch()[0]
    assert torch.equal(functional_call(model, model.state_dict(), (x,)), model(x))


@pytest.mark.parametrize("level", CASTS_DOWN)
def test_fp32_values_in_a_16_bit_model_are_refused_with_the_remedy(level):
    model = inference(level)
    with pytest.raises(RuntimeError, match=r"0\.weight \(float32\)(.|\n)*value\.to\(param\.dtype"):
        functional_call(model, model.state_dict(), (cases.batch()[0],))
    assert model(cases.batch()[0]).dtype is torch.float32


@every_level
def test_gradients_per_sample_are_those_of_explicit_casts(level):
    model = inference(level)
    x, y = cases.batch()
    per_sample = (None, 0, 0)
    params = params_of(model)
    got = vmap(grad(sample_loss(lambda p, x: functional_call(model, p, (x,)))), per_sample)(
        params, x, y
    )
    with amp.disable_casts():
        expected = vmap(grad(sample_loss(by_hand(level))), per_sample)(params, x, y)
    assert got["0.weight"].shape == (3, 8, 4)
    assert cases.same(got, expected)


@every_level
def test_an_ensemble_by_vmap_gives_what_its_models_give(level):
    models = amp.initialize([cases.net(seed) for seed in range(3)], opt_level=level, verbosity=0)
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x = cases.batch()[0]
    together = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(params, buffers)
    alone = torch.stack([model(x) for model in models])
    torch.testing.assert_close(
        together, alone, rtol=0.0, atol=2 * EPS[level] + 1e-6, check_dtype=False
    )
