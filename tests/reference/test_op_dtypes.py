"""The dtypes that come out of op casts are those committed for this torch release."""

import copy
import json

import pytest

from tests.reference import op_dtypes

RELEASES = sorted(op_dtypes.path().parent.glob("op_dtypes_torch_*.json"))


def committed(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_running_torch_gives_the_committed_dtypes():
    path = op_dtypes.path()
    if not path.exists():
        pytest.fail(
            f"No table for this torch. Run `python -m tests.reference.op_dtypes`, compare {path} "
            f"with {RELEASES[-1].name}, and commit it.",
            pytrace=False,
        )
    lines = op_dtypes.drift(committed(path), op_dtypes.table())
    if lines:
        shown = "\n  ".join(lines)
        pytest.fail(
            f"{len(lines)} results differ from {path.name}:\n  {shown}\nIs the change meant? Then "
            "run `python -m tests.reference.op_dtypes` and commit the table.",
            pytrace=False,
        )


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_results_do_not_depend_on_the_torch_release(path):
    newest = committed(RELEASES[-1])
    now = {**committed(path), "decides": newest["decides"]}
    assert op_dtypes.drift(newest, now) == []


def test_a_drift_names_the_function_both_dtypes_and_who_decides():
    was = committed(RELEASES[-1])
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
