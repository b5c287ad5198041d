"""A prepared model is still its owner's object: what real classes do with themselves goes on."""

import pytest
import torch

from apex import amp
from tests.model.idioms import IDIOMS

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def plain(value):
    """Returns what a use saw, with tensors as numbers."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", IDIOMS)
def test_a_prepared_model_does_what_its_class_does(name):
    cls, use = IDIOMS[name]
    expected = plain(use(cls(2, 2)))
    for level in LEVELS:
        model = cls(2, 2)
        optimizer = torch.optim.SGD(dict(model.named_parameters()).values(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert plain(use(model)) == expected, level
        if name not in ("ChangesClass", "ForwardIsAProperty"):
            amp.restore(model, optimizer)
            assert type(model) is model.__class__
