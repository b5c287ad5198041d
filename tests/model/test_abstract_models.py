"""Models and optimizers whose first base has no attributes: ABC, Generic, a protocol."""

import abc
import collections.abc
import copy
import typing

import pytest
import torch
from torch import nn

from apex import amp
from tests.support.loops import LEVELS_SHORT, saved_and_loaded
from tests.support.steps import TwoLayers

T = typing.TypeVar("T")


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
every_level = pytest.mark.parametrize("level", LEVELS_SHORT)


def prepared(kind, level):
    torch.manual_seed(0)
    model = kind()
    optimizer = AbstractSGD(model.parameters(), lr=0.5)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)


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
def test_they_train_copy_save_and_are_restored_as_others(kind, level):
    expected = trained(*prepared(TwoLayers, level))
    model, optimizer = prepared(kind, level)
    assert isinstance(model, kind)
    twin, other = copy.deepcopy((model, optimizer))
    torch.testing.assert_close(trained(model, optimizer), expected, rtol=0, atol=0)
    torch.testing.assert_close(trained(twin, other), expected, rtol=0, atol=0)
    loaded, _ = saved_and_loaded((model, optimizer))
    assert isinstance(loaded, kind)
    x = torch.ones(1, 3)
    torch.testing.assert_close(loaded(x), model(x), rtol=0.01, atol=0.01, check_dtype=False)
    nn.utils.parametrizations.weight_norm(model.first)
    del twin, other  # of the same session, whose casts end with the last
    amp.restore(model, optimizer)
    assert (type(model), type(optimizer)) == (kind, AbstractSGD)
    assert model(x).dtype is torch.float32
