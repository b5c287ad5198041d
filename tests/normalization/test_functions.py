"""The functions of fused_layer_norm against the plain formulas."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from apex.normalization import fused_layer_norm as fused
from tests.normalization import cases
from tests.normalization.cases import BF16, DOUBLE, FULL, HALF, SIZE
from tests.support.reference import norms

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MIXES = [(x, w) for x in (FULL, BF16, HALF, DOUBLE) for w in (FULL, BF16, HALF, DOUBLE)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXES)
@pytest.mark.parametrize("name", cases.AFFINE)
def test_values_are_those_of_the_formula_rounded_once(name, dtype, weight_dtype, device):
    x, weight, bias = cases.tensors(dtype, weight_dtype, device=device)
    result = cases.run(name, x, weight, bias)
    norms.assert_close(result, cases.reference(name, x, weight, bias))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXES)
@pytest.mark.parametrize("name", cases.AFFINE)
def test_result_has_the_dtype_of_the_input_and_mixed_of_the_weight(
    name, dtype, weight_dtype, device
):
    x, weight, bias = cases.tensors(dtype, weight_dtype, device=device)
    _, mixed = cases.AFFINE[name]
    assert cases.run(name, x, weight, bias).dtype is (weight_dtype if mixed else dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXES)
@pytest.mark.parametrize("name", cases.AFFINE)
def test_gradients_are_those_of_the_formula_in_the_dtypes_of_their_tensors(
    name, dtype, weight_dtype, device
):
    made = cases.tensors(dtype, weight_dtype, device=device)
    result, expected = cases.run(name, *made), cases.reference(name, *made)
    inputs = cases.leaves(name, *made)
    # The gradient that enters is rounded to the result's dtype, sums over 12 rows follow.
    worst = max(torch.finfo(kind).eps for kind in (dtype, weight_dtype))
    pairs = zip(
        inputs,
        cases.gradients(result, inputs),
        cases.gradients(expected, inputs),
        strict=True,
    )
    for leaf, actual, wanted in pairs:
        assert actual.dtype is leaf.dtype
        torch.testing.assert_close(
            actual.double(), wanted.double(), rtol=16 * worst, atol=16 * worst
        )


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF, DOUBLE])
@pytest.mark.parametrize("name", cases.PLAIN)
def test_without_parameters_values_are_those_of_the_formula(name, dtype):
    x = torch.randn(3, SIZE).to(dtype)
    result = getattr(fused, name)(x, (SIZE,), 1e-5)
    reference = norms.rms_norm if cases.PLAIN[name] else norms.layer_norm
    norms.assert_close(result, reference(x, eps=1e-5))
    assert result.dtype is dtype


@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_layer_norm_of_one_dtype_is_torchs_own_bit_for_bit(dtype):
    x, weight, bias = cases.tensors(dtype)
    ours = fused.fused_layer_norm_affine(x, weight, bias, (SIZE,), 1e-5)
    assert torch.equal(ours, F.layer_norm(x, (SIZE,), weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_rms_norm_of_one_dtype_is_torchs_own_bit_for_bit(dtype):
    x, weight, _ = cases.tensors(dtype)
    ours = fused.fused_rms_norm_affine(x, weight, (SIZE,), 1e-5)
    assert torch.equal(ours, F.rms_norm(x, (SIZE,), weight, 1e-5))


@pytest.mark.parametrize("name", cases.AFFINE)
def test_memory_efficient_gives_the_same_result_and_gradients(name):
    made = cases.tensors()
    plain, efficient = (cases.run(name, *made, memory_efficient=on) for on in (False, True))
    inputs = cases.leaves(name, *made)
    assert torch.equal(plain, efficient)
    for one, other in zip(
        cases.gradients(plain, inputs), cases.gradients(efficient, inputs), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", cases.AFFINE)
def test_eps_is_a_millionth_by_default(name):
    x, weight, bias = cases.tensors()
    x = x * 1e-3  # so that eps decides
    params = cases.leaves(name, x, weight, bias)[1:]
    result = getattr(fused, name)(x, *params, (SIZE,))
    norms.assert_close(result, cases.reference(name, x, weight, bias, eps=1e-6), ulps=32)


@pytest.mark.parametrize("shape", [(4, SIZE), [4, SIZE], torch.Size((4, SIZE))])
def test_several_dimensions_are_normalized_together(shape):
    x = torch.randn(3, 4, SIZE)
    norms.assert_close(
        fused.fused_layer_norm(x, shape, 1e-5), norms.layer_norm(x, dims=2, eps=1e-5)
    )


def test_an_integer_shape_is_the_last_dimension():
    x, weight, bias = cases.tensors()
    one, other = (fused.fused_layer_norm_affine(x, weight, bias, s) for s in (SIZE, (SIZE,)))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", cases.AFFINE)
def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(name):
    made = cases.tensors(shape=(0, SIZE))
    result = cases.run(name, *made)
    result.sum().backward()
    assert result.shape == (0, SIZE)
    assert all(not leaf.grad.any() for leaf in cases.leaves(name, *made))


@pytest.mark.parametrize("name", cases.AFFINE)
def test_memory_layout_of_the_input_changes_nothing(name):
    _, weight, bias = cases.tensors()
    x = torch.randn(4, SIZE, 3).transpose(1, 2)
    result = cases.run(name, x, weight, bias)
    norms.assert_close(result, cases.reference(name, x, weight, bias))


@pytest.mark.parametrize("name", cases.AFFINE)
def test_second_derivatives_are_right(name):
    made = cases.tensors(DOUBLE, shape=(2, SIZE))
    inputs = cases.leaves(name, *made)
    calls = getattr(fused, name)
    assert torch.autograd.gradgradcheck(lambda *given: calls(*given, (SIZE,), 1e-3), inputs)


@pytest.mark.parametrize("name", [*cases.AFFINE, *cases.PLAIN])
def test_autograd_functions_by_name_give_what_the_functions_give(name):
    x, weight, bias = cases.tensors()
    params = cases.leaves(name, x, weight, bias)[1:] if name in cases.AFFINE else []
    function = getattr(fused, cases.FUNCTION_CLASSES[name])
    ours = function.apply(x, *params, torch.Size((SIZE,)), 1e-5)
    assert torch.equal(ours, getattr(fused, name)(x, *params, (SIZE,), 1e-5))


@pytest.mark.parametrize("name", cases.FUNCTION_CLASSES.values())
def test_libraries_find_memory_efficient_in_the_signature_of_forward(name):
    forward = getattr(fused, name).forward
    assert inspect.getfullargspec(forward).args[-1] == "memory_efficient"


@pytest.mark.parametrize("weight_dtype", [FULL, BF16, None])
@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_manual_rms_norm_has_the_dtype_of_t5s_own(dtype, weight_dtype):
    x = torch.randn(3, SIZE).to(dtype)
    weight = None if weight_dtype is None else torch.ones(SIZE, dtype=weight_dtype)
    result = fused.manual_rms_norm(x, (SIZE,), weight, 1e-6)
    assert result.dtype is (BF16 if weight_dtype is BF16 else FULL)
    norms.assert_close(result, norms.rms_norm(x, weight, eps=1e-6))


@pytest.mark.parametrize("name", cases.AFFINE)
def test_meta_tensors_give_shapes(name):
    made = [tensor.to("meta") for tensor in cases.tensors()]
    assert cases.run(name, *made).shape == (3, 4, SIZE)


@pytest.mark.parametrize("name", cases.AFFINE)
def test_integer_input_is_refused_by_its_dtype(name):
    _, weight, bias = cases.tensors()
    with pytest.raises(TypeError, match=r"torch\.int64; it takes float16, bfloat16, float32"):
        cases.run(name, torch.ones(2, SIZE, dtype=torch.int64), weight, bias)


@pytest.mark.parametrize("name", cases.AFFINE)
def test_an_input_of_another_size_is_refused_with_both_shapes(name):
    _, weight, bias = cases.tensors()
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[8\].*\[2, 5\]"):
        cases.run(name, torch.ones(2, 5), weight, bias)


@pytest.mark.parametrize("name", cases.AFFINE)
def test_a_weight_of_another_size_is_refused_with_both_shapes(name):
    x, _, bias = cases.tensors()
    with pytest.raises(RuntimeError, match=r"weight of shape \[5\].*\[8\]"):
        cases.run(name, x, torch.ones(5), bias)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.AFFINE)
def test_a_weight_on_another_device_is_refused(name):
    x, weight, bias = cases.tensors()
    with pytest.raises(RuntimeError, match="device"):
        cases.run(name, x.cuda(), weight, bias)
