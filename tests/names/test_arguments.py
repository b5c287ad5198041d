"""Bools as scripts pass them."""

import pytest
import torch

from apex import amp


class NumpyBool:
    """Equals 1, as ``numpy.True_`` does, and is no integer."""

    def __eq__(self, other):
        return other == 1

    __hash__ = None


FLAGS = [
    (True, [True, 1, 2, 1.0, "True", torch.tensor(True), NumpyBool()]),
    (False, [False, 0, 0.0, None, "False", torch.tensor([False])]),
]


@pytest.mark.parametrize(("flag", "values"), FLAGS)
def test_what_old_scripts_pass_as_a_flag_is_one(flag, values):
    for value in values:
        assert amp.init(enabled=value).is_active() is flag


@pytest.mark.parametrize("value", ["false", "yes", "", "1", 128.0, torch.float16, [], object])
def test_anything_else_is_no_flag(value):
    with pytest.raises(TypeError, match=r"enabled is .*; it must be a bool, or the string 'True'"):
        amp.init(enabled=value)


def test_a_long_value_is_described_by_its_type():
    with pytest.raises(TypeError, match="enabled is a list; it must"):
        amp.init(enabled=["long"] * 100)
