"""Parametrized and pruned weights, and what else of ``torch.nn.utils`` rewrites parameters."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from apex import amp
from tests.model.cases import (
    CASTS_DOWN,
    EPS,
    LEVELS,
    close,
    dtype_of,
    prepared,
    train,
    train_plain,
)
from tests.support import training as cases

every_level = pytest.mark.parametrize("level", LEVELS)
casting_levels = pytest.mark.parametrize("level", CASTS_DOWN)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")

IN_FP32 = {"fp32_modules": [parametrize.ParametrizationList]}


class Squashed(nn.Module):
    """A parametrization as users write their own."""

    def forward(self, weight):
        return weight.tanh()

    def right_inverse(self, weight):
        return weight.atanh()


def squash(layer):
    return parametrize.register_parametrization(layer, "weight", Squashed())


WRAPS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "own": squash,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def wrapped(wrap):
    model = cases.net()
    torch.manual_seed(3)
    wrap(model[0])
    return model


def weight_of(model):
    """The weight that the first layer multiplies with, as its next forward pass takes it."""
    model.eval()
    model(cases.batch()[0])
    return model[0].weight.detach().float()


def reference(make, count=3):
    model = make()
    optimizer = cases.sgd(model.parameters())
    train_plain(model, optimizer, count)
    return model, optimizer


@every_wrap
@every_level
def test_a_layer_wrapped_before_initialize_trains_as_in_fp32(level, wrap):
    plain, plain_optimizer = reference(lambda: wrapped(wrap))
    expected = weight_of(plain)
    model, optimizer = prepared(level, wrapped(wrap))
    train(model, optimizer)
    # Several 16-bit operations make the weight, and its gradient passes them again.
    eps = 4 * EPS[level]
    assert close(amp.master_params(optimizer), amp.master_params(plain_optimizer), eps=eps)
    assert close([weight_of(model)], [expected], eps=eps)


@every_wrap
@every_level
def test_a_wrapped_layer_saves_and_loads_its_exact_state(level, wrap):
    model, optimizer = prepared(level, wrapped(wrap))
    train(model, optimizer)
    other, other_optimizer = prepared(level, wrapped(wrap))
    other.load_state_dict(model.state_dict())
    for pair in ((model, optimizer), (other, other_optimizer)):
        train(*pair, count=2, seed=2)
    assert cases.same(cases.masters(optimizer), cases.masters(other_optimizer))


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
)
@casting_levels
def test_parametrizations_may_compute_in_fp32_in_a_16_bit_model(level, wrap):
    plain, _ = reference(lambda: wrapped(wrap))
    expected = weight_of(plain)
    model, optimizer = prepared(level, wrapped(wrap), **IN_FP32)
    train(model, optimizer)
    below = model[0].parametrizations.weight
    assert {t.dtype for t in (*below.parameters(), *below.buffers())} == {torch.float32}
    assert model[0].weight.dtype is model[2].weight.dtype is dtype_of(level)
    assert close([weight_of(model)], [expected], eps=4 * EPS[level])


@casting_levels
def test_orthogonal_in_16_bits_says_how_to_keep_it_in_fp32(level):
    model, _ = prepared(level, wrapped(parametrizations.orthogonal))
    with pytest.raises(RuntimeError, match=r"(.|\n)*fp32_modules(.|\n)*ParametrizationList"):
        model(cases.batch()[0])


@every_level
def test_weight_norm_put_on_after_initialize_trains_by_a_group_of_its_own(level):
    def put_on(model, optimizer):
        parametrizations.weight_norm(model[0])
        optimizer.add_param_group({"params": list(model[0].parametrizations.parameters())})

    plain = cases.net()
    plain_optimizer = cases.sgd(plain.parameters())
    put_on(plain, plain_optimizer)
    train_plain(plain, plain_optimizer)
    expected = weight_of(plain)
    model, optimizer = prepared(level)
    put_on(model, optimizer)
    train(model, optimizer)
    assert close([weight_of(model)], [expected], eps=4 * EPS[level])


def take_off(model):
    if parametrize.is_parametrized(model[0]):
        parametrize.remove_parametrizations(model[0], "weight")
    else:
        prune.remove(model[0], "weight")


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, squash, WRAPS["pruned"]])
@every_level
def test_between_restore_and_initialize_it_is_taken_off_for_good(level, wrap):
    plain, plain_optimizer = reference(lambda: wrapped(wrap))
    plain.eval()
    take_off(plain)
    train_plain(plain, plain_optimizer, seed=2)
    model, optimizer = prepared(level, wrapped(wrap))
    train(model, optimizer)
    amp.restore(model, optimizer)
    model.eval()
    take_off(model)
    amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0 if EPS[level] else None
    )
    train(model, optimizer, seed=2)
    expected = dict(plain.named_parameters())
    got = dict(zip(dict(model.named_parameters()), amp.master_params(optimizer), strict=True))
    names = ["0.bias", "2.weight", "2.bias"]
    assert close([got[n] for n in names], [expected[n] for n in names], eps=8 * EPS[level])


@every_level
def test_of_a_parametrized_root_it_is_taken_off_after_restore(level):
    model = parametrizations.weight_norm(nn.Linear(4, 2))
    model, optimizer = prepared(level, model)
    with pytest.raises(AttributeError):  # torch looks for the class that it made, on top
        parametrize.remove_parametrizations(model, "weight")
    amp.restore(model, optimizer)
    x = cases.batch()[0]
    expected = model(x)
    parametrize.remove_parametrizations(model, "weight")
    assert type(model) is nn.Linear
    torch.testing.assert_close(model(x), expected)
