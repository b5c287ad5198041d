"""Bools, integers and sizes as scripts pass them."""

import pytest
import torch

from apex._core import arguments


class NumpyBool:
    """Equals 1, as ``numpy.True_`` does, and is no integer."""

    def __eq__(self, other):
        return other == 1

    __hash__ = None


@pytest.mark.parametrize("value", [True, 1, 2, 1.0, "True", torch.tensor(True), NumpyBool()])
def test_what_old_scripts_pass_as_true_is_true(value):
    assert arguments.flag("enabled", value) is True


@pytest.mark.parametrize("value", [False, 0, 0.0, None, "False", torch.tensor([False])])
def test_what_old_scripts_pass_as_false_is_false(value):
    assert arguments.flag("enabled", value) is False


@pytest.mark.parametrize("value", ["false", "yes", "", "1", 128.0, torch.float16, [], object])
def test_anything_else_is_no_flag(value):
    with pytest.raises(TypeError, match=r"enabled is .*; it must be a bool, or the string 'True'"):
        arguments.flag("enabled", value)


@pytest.mark.parametrize("value", [1.0, "1", True, None, 0])
def test_what_is_no_positive_integer_is_refused(value):
    with pytest.raises(ValueError, match=f"count is {value!r}; it must be an integer of at least"):
        arguments.integer("count", value, least=1)


def test_sizes_may_be_any_iterable():
    assert arguments.sizes("sizes", iter((4, 2)), count=2) == [4, 2]


def test_a_long_value_is_described_by_its_type():
    with pytest.raises(TypeError, match="enabled is a list; it must"):
        arguments.flag("enabled", ["long"] * 100)
