"""The op table as a value: what it knows, and how a user's change of the lists changes it."""

import copy
import pickle

import pytest

from apex._core import op_table
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


def test_default_is_one_object_and_equal_to_its_copies():
    table = OpTable.default()
    assert OpTable.default() is table
    for other in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert other == table
        assert hash(other) == hash(table)


NOT_IN_EVERY_TORCH = {
    *("_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa.vec"),  # after 2.11
    "linalg_matrix_sqrth",  # from 2.15
    *("cholesky", "qr"),  # until 2.14
}


def test_every_row_names_an_operator_of_this_torch():
    named = {op for ops in op_table._ROWS.values() for op in ops.split()}
    assert named - OpTable.default().rows.keys() <= NOT_IN_EVERY_TORCH


def test_without_drops_the_operators_of_the_name_and_no_others():
    before = OpTable.default()
    after = before.without("torch", "pow")
    assert before.rows.keys() - after.rows.keys() == {
        f"pow.{kind}" for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar")
    }
    assert before == OpTable.default()


def test_with_moves_a_name_to_another_category():
    table = OpTable.default().with_("torch.nn.functional", "layer_norm", "low_precision")
    assert table.rows["layer_norm"] == "low_precision"
    assert table != OpTable.default()


def test_in_place_operators_of_a_name_keep_the_dtype_that_they_write():
    table = OpTable.default().with_("torch.Tensor", "relu_", "fp32")
    table = table.with_("torch.Tensor", "__iadd__", "promote")
    assert (table.rows["relu_"], table.rows["add_.Tensor"]) == ("fp32_inplace", "destination")


@pytest.mark.parametrize("change", ["without", "with_"])
def test_a_name_that_torch_lacks_is_refused(change):
    extra = ["fp32"] if change == "with_" else []
    with pytest.raises(ValueError, match=r"torch\.sigmiod: torch has no such function.*register"):
        getattr(OpTable.default(), change)("torch", "sigmiod", *extra)
