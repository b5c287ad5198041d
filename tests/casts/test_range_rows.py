"""O4 keeps GELU in bf16, which has the range of fp32; O1 runs it in fp32, as apex did."""

import csv

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex.amp as amp
from apex._core.op_rows import FP16_RANGE
from benchmarks import op_errors
from tests.support.features import TORCH_VERSION
from tests.support.loops import prepared

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_bf16_at_o4_and_is_fp32_at_o1(approximate):
    for level, result in (("O1", torch.float32), ("O4", torch.bfloat16)):
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate))
        model = amp.initialize(model, opt_level=level, verbosity=0)
        assert model(torch.randn(2, 4)).dtype is result


def test_o4_with_fp16_casts_runs_gelu_in_fp32():
    _keep = prepared("O4", patch_torch_functions_type=torch.float16)
    assert F.gelu(torch.ones(2, dtype=torch.float16)).dtype is torch.float32


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="the table is of later kernels of rms_norm")
def test_the_rows_dropped_at_o4_are_those_that_only_guard_the_range_of_fp16():
    names = op_errors.names()
    ranges = {op for each in op_errors.measured() if each.range_only for op in names[each.name]}
    assert ranges == FP16_RANGE


def test_no_autocast_of_torch_runs_them_in_fp32():
    names = op_errors.names()
    for each in op_errors.measured():
        if FP16_RANGE & {*names[each.name]}:
            assert not each.in_autocast


def test_the_documentation_lists_every_name_with_the_reason():
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the table is that of torch 2.13")
    with op_errors.PATH.open(encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    assert tuple(head) == op_errors.HEAD
    found = [op_errors.cells(each) for each in op_errors.measured()]
    # The errors are those of the machine that wrote them.
    assert [line[0] for line in lines] == [cells[0] for cells in found]
    assert [line[-1].split()[:4] for line in lines] == [cells[-1].split()[:4] for cells in found]
