"""Faster forms of what ``nn.Module`` yields."""

import pytest
from torch import nn

from apex._torch.modules import named_modules, named_tensors
from tests._engine.conversion_cases import Net, Tied


class Renaming(nn.Sequential):
    """Hides a part of itself from ``named_modules``, as a wrapper may."""

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            if not name.endswith("hidden"):
                yield name, module


def shared():
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.Sequential(layer, nn.ReLU()), Tied(), nn.BatchNorm1d(2))


def with_nothing():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Net())
    model.register_module("none", None)
    model.register_buffer("empty", None)
    return model


def overridden():
    inner = Renaming()
    inner.add_module("hidden", nn.Linear(2, 2))
    inner.add_module("shown", nn.Linear(2, 2))
    return nn.Sequential(Net(), inner, Net())


MODELS = [Net, Tied, shared, with_nothing, overridden, lambda: nn.Linear(2, 2)]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("prefix", ["", "model.part"])
def test_modules_are_those_of_torch(make, prefix):
    model = make()
    assert list(named_modules(model, prefix).items()) == list(model.named_modules(prefix=prefix))


@pytest.mark.parametrize("make", MODELS)
def test_tensors_are_those_of_torch(make):
    model = make()
    expected = [*model.named_parameters(), *model.named_buffers()]
    found = list(named_tensors(model).items())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))
