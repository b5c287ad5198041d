"""A policy is a value; its low precision is the 16-bit type it computes in."""

import dataclasses

import pytest
import torch

from apex._core.policy import Policy

O1 = Policy("O1", None, torch.float16, None, False, False, "dynamic")
O5 = Policy("O5", torch.bfloat16, None, torch.float32, True, True, 1.0)
O0 = Policy("O0", torch.float32, None, None, False, False, 1.0)


@pytest.mark.parametrize(
    ("policy", "expected"), [(O0, None), (O1, torch.float16), (O5, torch.bfloat16)]
)
def test_low_precision_is_the_16_bit_type_of_ops_or_parameters(policy, expected):
    assert policy.low_precision is expected


def test_a_policy_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        O1.loss_scale = 8.0
