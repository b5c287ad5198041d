"""Every operator of torch's own test database: mixed dtypes under casts, and 16-bit kernels."""

import functools
import itertools
import os
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from apex._core.op_table import AutocastSpec, OpTable
from tests.casts.op_rows import Region, convert

if "STRESS" not in os.environ:
    # The database changes settings of the process: torch.backends' flags, default dtypes' checks.
    pytest.skip("make stress runs it, in a process of its own", allow_module_level=True)
pytest.importorskip("expecttest", reason="torch's database of operators needs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SAMPLES = 3

# What refuses mixed dtypes, and why it may.
INTERNAL = {
    *("_softmax_backward_data", "native_group_norm", "native_layer_norm", "native_batch_norm"),
    *("_native_batch_norm_legit", "_batch_norm_with_update", "_chunk_cat"),
    *("grid_sampler_2d", "grid_sampler_3d"),
}
# fp32 data with 16-bit weights, which amp does not make; a kernel would cost each layer 5 us.
WEIGHTS = {"nn.functional.instance_norm", "nn.functional.batch_norm"}
REFUSED_ON_PURPOSE = {"nn.functional.binary_cross_entropy", "pow"}  # fp16; in place
OLD = {"lu_solve"}  # torch.linalg.lu_solve takes float64
MAY_REFUSE = INTERNAL | WEIGHTS | REFUSED_ON_PURPOSE | OLD

# Of random numbers, or memory as it was; a singular matrix; statistics that a forward gives beside.
WITHOUT_A_REFERENCE = {
    *("normal", "rand_like", "randn_like", "uniform", "empty", "empty_like", "new_empty"),
    *("empty_strided", "new_empty_strided", "linalg.pinv", "native_layer_norm"),
}
# Losses that add up cancelling terms, or overflow fp16: their rows are fp32 for that.
LOSSES = {"hinge_embedding_loss", "soft_margin_loss", "poisson_nll_loss"}
# What docs/compatibility.md names as inaccurate in 16 bits.
INACCURATE = {
    *("matrix_exp", "logcumsumexp", "grid_sample", "grid_sampler_2d", "grid_sampler_3d"),
    "adaptive_avg_pool3d",
}


def floating(value):
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]


def called(fn, call):
    torch.manual_seed(0)
    args, kwargs = call
    return fn(*args, **kwargs)


def samples(op):
    made = op.sample_inputs("cpu", FP32, requires_grad=False)
    for sample in itertools.islice(made, SAMPLES):
        yield (sample.input, *sample.args), sample.kwargs


def operators():
    makes_nothing = ("jiterator", "empty", "new_empty")
    return [op for op in op_db if FP32 in op.dtypes and not op.name.startswith(makes_nothing)]


@functools.cache
def region(low):
    return Region(AutocastSpec(low, ("cpu",), OpTable.default().for_dtype(low)))


def dense(tensor):
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def error(got, expected):
    """Returns the largest error in ``got``, relative to the largest value."""
    worst = 0.0
    for pair in zip(floating([got]), floating([expected]), strict=True):
        one, other = (dense(tensor).double() for tensor in pair)
        fits = other.abs() < torch.finfo(FP16).max
        if fits.any():
            scale = other[fits].abs().max().clamp_min(1e-6)
            worst = max(worst, ((one - other)[fits].abs().max() / scale).nan_to_num(1e9).item())
    return worst


@pytest.mark.parametrize(("low", "other"), [(BF16, BF16), (FP16, FP16), (BF16, FP64)])
def test_operators_take_a_tensor_of_another_dtype_beside_fp32(low, other):
    refused, wrong = {}, {}
    for op in operators():
        for call in samples(op):
            exact = convert(call, low)
            if len(floating(exact)) < 2:
                continue
            for fn in filter(None, (op.op, op.inplace_variant)):
                try:
                    expected = called(fn, convert(exact, FP32))
                except (RuntimeError, TypeError, NotImplementedError):
                    continue
                for dtypes in ([other, FP32], [FP32, other]):
                    try:
                        got = region(low).run(called, fn, convert(exact, *dtypes))
                    except (RuntimeError, TypeError, NotImplementedError) as failed:
                        refused.setdefault(op.name, str(failed))
                        continue
                    if error(got, expected) > 16 * torch.finfo(low).eps:
                        wrong[op.name] = error(got, expected)
    assert refused.keys() <= MAY_REFUSE, refused
    assert wrong.keys() <= WITHOUT_A_REFERENCE, wrong


@pytest.mark.parametrize("low", [BF16, FP16])
def test_inaccurate_16_bit_kernels_are_listed(low):
    wrong = {}
    for op in operators():
        for call in samples(op):
            exact = convert(call, low)
            try:
                expected = called(op.op, convert(exact, FP32))
                got = called(op.op, exact)
            except (RuntimeError, TypeError, NotImplementedError, ValueError):
                continue  # it says that it has no kernel
            if error(got, expected) > 8 * torch.finfo(low).eps:
                wrong[op.name.rpartition(".")[2]] = error(got, expected)
    unknown = {name.rpartition(".")[2] for name in WITHOUT_A_REFERENCE}
    assert wrong.keys() - unknown <= INACCURATE | LOSSES, wrong
    assert "matrix_exp" in wrong
