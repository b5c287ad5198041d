"""Parametrized and pruned weights, and what else of ``torch.nn.utils`` rewrites parameters."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from apex import amp
from tests.model.cases import CASTS_DOWN, EPS, SCALE, close, dtype_of, prepare, train_plain
from tests.support import loops

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


class Squashed(nn.Module):
    """A parametrization as users write their own."""

    def forward(self, weight):
        return weight.tanh()

    def right_inverse(self, weight):
        return weight.atanh()


WRAPS = {
    "spectral_norm": parametrizations.spectral_norm,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Squashed()),
    "old weight_norm": nn.utils.weight_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def wrapped(wrap):
    model = loops.net()
    torch.manual_seed(3)
    wrap(model[0])
    return model


def weight_of(model):
    """The weight that the first layer multiplies with, as its next forward pass takes it."""
    model.eval()
    model(loops.batch()[0])
    return model[0].weight.detach().float()


def trained_plain(wrap):
    model = wrapped(wrap)
    optimizer = loops.sgd(model.parameters())
    train_plain(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_layer_wrapped_before_initialize_trains_saves_and_loads_as_in_fp32(level, wrap):
    plain, plain_optimizer = trained_plain(wrap)
    expected = weight_of(plain)
    model, optimizer = prepare(level, wrapped(wrap))
    loops.train(model, optimizer)
    # Several 16-bit operations make the weight, and its gradient passes them again.
    eps = 4 * EPS[level]
    assert close(amp.master_params(optimizer), amp.master_params(plain_optimizer), eps=eps)
    other, other_optimizer = prepare(level, wrapped(wrap))
    other.load_state_dict(model.state_dict())
    for pair in ((model, optimizer), (other, other_optimizer)):
        loops.train(*pair, 2, seed=2)
    assert loops.same(loops.masters(optimizer), loops.masters(other_optimizer))
    del plain_optimizer
    model, optimizer = prepare(level, wrapped(wrap))
    loops.train(model, optimizer)
    assert close([weight_of(model)], [expected], eps=eps)


@loops.every(wrap=[parametrizations.weight_norm, parametrizations.orthogonal], level=CASTS_DOWN)
def test_parametrizations_may_compute_in_fp32_in_a_16_bit_model(level, wrap):
    plain, _ = trained_plain(wrap)
    expected = weight_of(plain)
    own = {"fp32_modules": [parametrize.ParametrizationList]}
    model, optimizer = prepare(level, wrapped(wrap), **own)
    loops.train(model, optimizer)
    below = model[0].parametrizations.weight
    assert {t.dtype for t in (*below.parameters(), *below.buffers())} == {torch.float32}
    assert model[0].weight.dtype is model[2].weight.dtype is dtype_of(level)
    assert close([weight_of(model)], [expected], eps=4 * EPS[level])


def test_weight_norm_put_on_after_initialize_trains_by_a_group_of_its_own(level):
    def put_on(model, optimizer):
        parametrizations.weight_norm(model[0])
        optimizer.add_param_group({"params": list(model[0].parametrizations.parameters())})

    plain, plain_optimizer = loops.plain_pair()
    put_on(plain, plain_optimizer)
    train_plain(plain, plain_optimizer)
    expected = weight_of(plain)
    model, optimizer = prepare(level)
    put_on(model, optimizer)
    loops.train(model, optimizer)
    assert close([weight_of(model)], [expected], eps=4 * EPS[level])


def take_off(model):
    if parametrize.is_parametrized(model[0]):
        parametrize.remove_parametrizations(model[0], "weight")
    else:
        prune.remove(model[0], "weight")


@pytest.mark.parametrize("name", ["spectral_norm", "own", "pruned"])
def test_between_restore_and_initialize_it_is_taken_off_for_good(level, name):
    plain, plain_optimizer = trained_plain(WRAPS[name])
    plain.eval()
    take_off(plain)
    train_plain(plain, plain_optimizer, seed=2)
    model, optimizer = prepare(level, wrapped(WRAPS[name]))
    loops.train(model, optimizer)
    amp.restore(model, optimizer)
    model.eval()
    take_off(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=SCALE.get(level))
    loops.train(model, optimizer, seed=2)
    expected = dict(plain.named_parameters())
    got = dict(zip(dict(model.named_parameters()), amp.master_params(optimizer), strict=True))
    names = ["0.bias", "2.weight", "2.bias"]
    assert close([got[n] for n in names], [expected[n] for n in names], eps=8 * EPS[level])


@pytest.mark.parametrize("restores", [False, True])
def test_of_a_parametrized_root_it_is_taken_off(level, restores):
    model = parametrizations.weight_norm(nn.Linear(4, 2))
    model, optimizer = prepare(level, model)
    if restores:
        amp.restore(model, optimizer)
    x = loops.batch()[0]
    expected = model(x)
    parametrize.remove_parametrizations(model, "weight")
    assert model.__class__ is nn.Linear
    torch.testing.assert_close(model(x), expected)
