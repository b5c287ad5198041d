"""The dtypes that come out of op casts are the committed ones, on every torch release."""

import copy
import json

import pytest

from tests.support.reference import op_dtypes


def committed():
    return json.loads(op_dtypes.PATH.read_text(encoding="utf-8"))


def test_the_running_torch_gives_the_committed_dtypes():
    was, now = committed(), op_dtypes.table()
    if was["torch"] != now["torch"]:
        was["decides"] = now["decides"]
    lines = op_dtypes.drift(was, now)
    if lines:
        shown = "\n  ".join(lines)
        pytest.fail(
            f"{len(lines)} results differ from {op_dtypes.PATH.name}:\n  {shown}\n"
            "Is the change meant? Then run `python -m tests.support.reference.op_dtypes` and "
            "commit the table.",
            pytrace=False,
        )


def test_a_drift_names_the_function_both_dtypes_and_who_decides():
    was = committed()
    now = copy.deepcopy(was)
    now["results"]["cpu"]["bfloat16"]["torch.exp"]["low"] = "bfloat16"
    now["results"]["cpu"]["float16"]["torch.mm"]["low"] = "float32"
    now["decides"]["cpu"]["mm"] = "ours"
    assert op_dtypes.drift(was, now) == [
        "aten::mm on cpu: decided by torch's own autocast, now our kernel",
        "torch.exp of low inputs, casts to bfloat16 on cpu: was float32, is bfloat16; "
        "aten::exp: our kernel",
        "torch.mm of low inputs, casts to float16 on cpu: was float16, is float32; "
        "aten::mm: our kernel",
    ]
