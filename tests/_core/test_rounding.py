"""Exact values of many tensors at once are those of each by itself."""

import pytest
import torch
from torch import nn

from apex._core.rounding import exact_value, exact_values

LOWS = [torch.bfloat16, torch.float16]


def pairs_of(low, shape, count=3):
    exact = [torch.rand(shape) for _ in range(count)]
    return [value.to(low) for value in exact], exact


def all_of(params, known):
    made = dict(exact_values(params, known))
    return [made[index] for index in range(len(params))]


def assert_as_one_by_one(params, known):
    made = all_of(params, known)
    for param, value, result in zip(params, known, made, strict=True):
        alone = exact_value(param, [] if value is None else [value])
        assert result.dtype is torch.float32
        assert not result.requires_grad
        assert result.shape == param.shape
        bits, expected = result.contiguous(), alone.contiguous()
        assert torch.equal(bits.view(torch.int32), expected.view(torch.int32))  # of NaN and -0, too
        assert result.untyped_storage().nbytes() == 4 * result.numel()
    assert len({result.data_ptr() for result in made if result.numel()}) == sum(
        result.numel() > 0 for result in made
    )


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (1, 4), (2, 3, 1, 2), (2**15,)])
def test_values_of_one_shape(low, shape):
    assert_as_one_by_one(*pairs_of(low, shape))


@pytest.mark.parametrize("low", LOWS)
def test_values_of_several_shapes_some_unknown(low):
    params, known = pairs_of(low, (2,))
    for more_params, more_known in (pairs_of(low, (3, 2)), pairs_of(low, (2,))):
        params, known = params + more_params, known + more_known
    assert_as_one_by_one(params, [None if i % 3 == 0 else k for i, k in enumerate(known)])


def test_more_values_than_are_compared_together():
    assert_as_one_by_one(*pairs_of(torch.bfloat16, (2**13,), 19))


@pytest.mark.parametrize("low", LOWS)
def test_elements_that_were_written_come_from_the_parameter(low):
    params, known = pairs_of(low, (2, 3))
    params[1][0, 0] = 7.0
    params[2][1, 1] = float("nan")
    known[0][0, 1], params[0][0, 1] = 0.0, -0.0
    assert_as_one_by_one(params, known)
    assert all_of(params, known)[1][0, 0] == 7.0


def test_parameters_need_no_detach():
    params, known = pairs_of(torch.bfloat16, (2, 3))
    assert_as_one_by_one([nn.Parameter(p) for p in params], known)
    assert_as_one_by_one(params, [nn.Parameter(value) for value in known])


def test_results_have_the_layout_of_the_parameters():
    last = torch.channels_last
    plain, exact = pairs_of(torch.bfloat16, (2, 3, 4, 5))
    moved = [param.to(memory_format=last) for param in plain]
    for params in (plain, moved):
        for known in (exact, [value.to(memory_format=last) for value in exact]):
            assert_as_one_by_one(params, known)
        known = [torch.empty_like(p, dtype=torch.float32).copy_(p) for p in params]
        made = all_of(params, known)
        assert [m.stride() for m in made] == [p.stride() for p in params]


def test_strided_parameters_give_dense_values():
    columns = [torch.rand(4, 2).to(torch.bfloat16)[:, 0] for _ in range(3)]
    assert_as_one_by_one(columns, [column.float() for column in columns])


def test_what_does_not_fit_is_matched_by_itself():
    params, known = pairs_of(torch.bfloat16, (2, 3))
    assert_as_one_by_one(params, [known[0], torch.rand(5), known[2]])
    assert_as_one_by_one(params, [torch.rand(3, 2) for _ in params])
    assert_as_one_by_one(params, [known[0].double(), known[1].to(torch.bfloat16), known[2]])
    assert_as_one_by_one([params[0], params[1].half(), params[2]], known)


def test_many_small_values_take_few_operators():
    params, known = pairs_of(torch.bfloat16, (2, 3), 100)
    with torch.profiler.profile() as profile:
        all_of(params, known)
    names = [event.name for event in profile.events()]
    assert names.count("aten::equal") == names.count("aten::stack") // 2 == 1


def test_values_without_masters():
    params, known = pairs_of(torch.bfloat16, (2, 3), 5)
    assert_as_one_by_one(params, [None] * 5)
    assert_as_one_by_one(params, [known[0], None, known[2], None, None])
    with torch.profiler.profile() as profile:
        all_of(params, [None] * 5)
    assert [event.name for event in profile.events()].count("aten::stack") == 1
