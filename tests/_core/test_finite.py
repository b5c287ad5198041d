"""Gradients are unscaled in place, and inf or NaN raises a flag on the device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apex._core import finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]


def flag(value=0.0):
    return torch.tensor(value)


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX])
def test_finite_gradients_are_multiplied_in_place_and_raise_no_flag(dtype):
    grad, found_inf = torch.tensor([2.0, -4.0], dtype=dtype), flag()
    finite.unscale_and_check_([grad], torch.tensor(0.5), found_inf)
    assert torch.equal(grad, torch.tensor([1.0, -2.0], dtype=dtype))
    assert found_inf == 0.0


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX])
def test_one_non_finite_number_raises_the_flag(dtype, bad):
    grads = [torch.ones(3, dtype=torch.float32), torch.tensor([1.0, bad], dtype=dtype)]
    found_inf = flag()
    finite.unscale_and_check_(grads, torch.tensor(0.5), found_inf)
    assert found_inf == 1.0


def test_a_non_finite_imaginary_part_raises_the_flag():
    found_inf = flag()
    grad = torch.complex(torch.tensor([1.0]), torch.tensor([float("inf")]))
    finite.unscale_and_check_([grad], torch.tensor(0.5), found_inf)
    assert found_inf == 1.0


def test_a_raised_flag_stays_up():
    found_inf = flag(1.0)
    finite.unscale_and_check_([torch.ones(2)], torch.tensor(0.5), found_inf)
    assert found_inf == 1.0


numbers = st.floats(width=16) | st.sampled_from([float("inf"), float("nan")])


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(numbers, max_size=4)), min_size=1))
def test_the_flag_says_whether_any_number_was_non_finite(grads):
    values = [torch.tensor(own, dtype=dtype) for dtype, own in grads]
    expected = any(not bool(value.isfinite().all()) for value in values)
    found_inf = flag()
    finite.unscale_and_check_(values, torch.tensor(0.25), found_inf)
    assert bool(found_inf) == expected


@pytest.mark.parametrize("bad", [None, 0, 3, 5])
def test_every_mix_of_dtypes_is_unscaled_in_the_wider_precision_and_checked(bad):
    torch.manual_seed(0)
    grads = [torch.randn(7, dtype=dtype) for dtype in (*DTYPES, *COMPLEX) for _ in range(2)]
    if bad is not None:
        grads[2 * bad][3] = torch.inf
    inverse, found_inf = torch.tensor(1 / 3.0), flag()
    expected = [unscaled(grad, inverse) for grad in grads]
    finite.unscale_and_check_(grads, inverse, found_inf)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert bool(found_inf) == (bad is not None)


def unscaled(grad, inverse):
    """Returns the product in fp32, or in the gradient's own precision where that is wider."""
    if grad.is_complex():
        return torch.view_as_complex(unscaled(torch.view_as_real(grad), inverse))
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(wide) * inverse.to(wide)).to(grad.dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX])
def test_unscaling_without_a_check_multiplies_in_place(dtype):
    grad = torch.tensor([2.0, -4.0], dtype=dtype)
    finite.unscale_([grad], 0.5)
    assert torch.equal(grad, torch.tensor([1.0, -2.0], dtype=dtype))


def test_groups_have_one_dtype_each_and_hold_every_gradient():
    grads = [torch.ones(1, dtype=dtype) for dtype in (*DTYPES, *DTYPES)]
    groups = list(finite.group(grads))
    assert [len(group) for group in groups] == [2] * len(DTYPES)
    assert all(len({grad.dtype for grad in group}) == 1 for group in groups)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
def test_dense_values_share_memory_with_their_gradients():
    dense = torch.ones(2)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True).coalesce()
    first, second = finite.dense_values([dense, sparse])
    first.mul_(3)
    second.mul_(3)
    assert torch.equal(dense, torch.tensor([3.0, 3.0]))
    assert torch.equal(sparse.to_dense(), torch.tensor([3.0, 0.0]))


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_a_flag_is_raised_where_the_other_is(first, second):
    raised = flag(first)
    finite.raise_flag_(raised, flag(second))
    assert raised == max(first, second)


@pytest.mark.gpu
def test_gradients_of_another_device_than_the_flag_raise_it():
    found_inf = torch.zeros((), device="cuda")
    here, there = torch.tensor([2.0]), torch.tensor([float("inf")], device="cuda")
    finite.unscale_and_check_([here], torch.tensor(0.5, device="cuda"), found_inf)
    assert here == 1.0
    assert found_inf == 0.0
    finite.unscale_and_check_([there], torch.tensor(0.5, device="cuda"), found_inf)
    assert found_inf == 1.0
