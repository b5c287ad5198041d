"""Models and optimizers whose first base has no attributes: ABC, Generic, a protocol."""

import abc
import collections.abc
import copy
import io
import typing

import pytest
import torch
from torch import nn

from apex import amp
from tests.support.steps import TwoLayers

T = typing.TypeVar("T")

every_level = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])


class Abstract(abc.ABC, TwoLayers):
    """As Lightning's modules up to 0.9."""


class Generic(typing.Generic[T], TwoLayers):
    pass


class Sized(collections.abc.Sized, TwoLayers):
    def __len__(self):
        return 2


class AbstractSGD(torch.optim.SGD, abc.ABC):
    pass


every_kind = pytest.mark.parametrize("kind", [Abstract, Generic, Sized])


def prepared(kind, level, optimizer=AbstractSGD):
    torch.manual_seed(0)
    model = kind()
    return amp.initialize(
        model, optimizer(model.parameters(), lr=0.5), opt_level=level, loss_scale=8.0, verbosity=0
    )


def trained(model, optimizer, steps=2):
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(steps):
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@every_kind
@every_level
def test_they_train_as_other_models_do(kind, level):
    model, optimizer = prepared(kind, level)
    assert isinstance(model, kind)
    assert isinstance(optimizer, AbstractSGD)
    wanted = trained(*prepared(TwoLayers, level, torch.optim.SGD))
    torch.testing.assert_close(trained(model, optimizer), wanted, rtol=0, atol=0)


@every_kind
@every_level
def test_they_copy_and_pickle(kind, level):
    model, optimizer = prepared(kind, level)
    trained(model, optimizer, steps=1)
    twin, other = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    loaded, _ = torch.load(file, weights_only=False)
    assert isinstance(loaded, kind)
    x = torch.ones(1, 3)
    torch.testing.assert_close(loaded(x), model(x), rtol=0.01, atol=0.01, check_dtype=False)
    wanted = trained(model, optimizer)
    torch.testing.assert_close(trained(twin, other), wanted, rtol=0, atol=0)


@every_kind
@every_level
def test_they_get_their_own_class_back(kind, level):
    model, optimizer = prepared(kind, level)
    amp.restore(model, optimizer)
    assert type(model) is kind
    assert type(optimizer) is AbstractSGD


@every_level
def test_a_parametrization_on_top_is_restored(level):
    model, optimizer = prepared(Abstract, level)
    nn.utils.parametrizations.weight_norm(model.first)
    amp.restore(model, optimizer)
    assert type(model) is Abstract
    assert model(torch.ones(1, 3)).dtype is torch.float32
