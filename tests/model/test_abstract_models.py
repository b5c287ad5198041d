"""Models and optimizers whose first base has no attributes: ABC, Generic, a protocol."""

import abc
import collections.abc
import copy
import typing

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops
from tests.support.loops import LEVELS_SHORT, Net, saved_and_loaded, train

T = typing.TypeVar("T")


class Abstract(abc.ABC, Net):
    """As Lightning's modules up to 0.9."""


class Generic(typing.Generic[T], Net):
    pass


class Sized(collections.abc.Sized, Net):
    def __len__(self):
        return 2


class AbstractSGD(abc.ABC, torch.optim.SGD):
    pass


every_kind = pytest.mark.parametrize("kind", [Abstract, Generic, Sized])
every_level = pytest.mark.parametrize("level", LEVELS_SHORT)


def prepared(kind, level):
    torch.manual_seed(0)
    return loops.prepared(level, lambda p: AbstractSGD(p, lr=0.5), kind(), loss_scale=8.0)


def trained(model, optimizer):
    train(model, optimizer, 2)
    return model.state_dict()


@every_kind
@every_level
def test_they_train_copy_save_and_are_restored_as_others(kind, level):
    expected = trained(*prepared(Net, level))
    model, optimizer = prepared(kind, level)
    assert isinstance(model, kind)
    twin, other = copy.deepcopy((model, optimizer))
    torch.testing.assert_close(trained(model, optimizer), expected, rtol=0, atol=0)
    torch.testing.assert_close(trained(twin, other), expected, rtol=0, atol=0)
    loaded, _ = saved_and_loaded((model, optimizer))
    assert isinstance(loaded, kind)
    x = torch.ones(2, 4)
    torch.testing.assert_close(loaded(x), model(x), rtol=0.01, atol=0.01, check_dtype=False)
    nn.utils.parametrizations.weight_norm(model.first)
    del twin, other  # of the same session, whose casts end with the last
    amp.restore(model, optimizer)
    assert (type(model), type(optimizer)) == (kind, AbstractSGD)
    assert model(x).dtype is torch.float32
