"""The rows that O4 drops are those that bf16 does not need, by their measured error."""

import csv

import pytest
import torch

from apex._core.op_rows import FP16_RANGE
from benchmarks import op_errors

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")


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
