"""The op table as a value: what it knows, and how a user's change of the lists changes it."""

import torch

from apex._core.op_table import OpTable, operators
from tests.casts.op_calls import calls

CATEGORIES = {
    "half": {"low_precision"},
    "float": {"fp32", "fp32_inplace"},
    "promote": {"promote"},
    "sequence_promote": {"promote"},
    "banned": {"banned"},
}


def test_every_name_of_apex_is_known_with_its_category():
    rows = OpTable.default().rows
    for call in calls():
        found = {rows[op] for op in operators(call.namespace, call.name) if op in rows}
        assert found <= CATEGORIES[call.category], call.name


NOT_IN_EVERY_TORCH = {
    *("_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa.vec"),  # after 2.11
    "linalg_matrix_sqrth",  # from 2.15
    *("cholesky", "qr"),  # until 2.14
}


def test_every_row_names_an_operator_of_this_torch():
    unknown = {
        op for op in OpTable.default().rows if not torch._C._dispatch_has_kernel(f"aten::{op}")
    }
    assert unknown <= NOT_IN_EVERY_TORCH


def test_in_place_operators_of_a_name_keep_the_dtype_that_they_write():
    table = OpTable.default().with_("torch.Tensor", "relu_", "fp32")
    table = table.with_("torch.Tensor", "__iadd__", "promote")
    assert (table.rows["relu_"], table.rows["add_.Tensor"]) == ("fp32_inplace", "destination")
