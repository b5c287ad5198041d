"""The dtype or error of every row and every function of apex's lists, as data.

``python -m tests.casts.freeze`` writes those of the CPU to ``outcomes.json``;
``python -m tests.support.emulated_cuda tests.casts.freeze`` writes those of CUDA.
"""

import copy
import json
import operator
from pathlib import Path

import torch

from apex._core.op_table import AutocastSpec, OpTable
from apex._engine.autocast.region import AutocastRegion
from tests.casts.op_calls import HOLDERS, calls
from tests.casts.op_rows import arguments, called, convert, floating, mixes, placed, rows

PATH = Path(__file__).with_name("outcomes.json")
LOW = (torch.bfloat16, torch.float16)


def outcomes(device):
    """Returns the outcomes by group and name: of each call at each dtype and mix, in order."""
    regions = [AutocastRegion(AutocastSpec(low, (device,), OpTable.default())) for low in LOW]
    found = {"rows": {}, "functions": {}}
    for row in rows(device):
        found["rows"][row] = " ".join(
            outcome(region, called, row, placed(row, convert(args, *dtypes), device), kwargs)
            for args, kwargs in arguments(row)
            for region in regions
            for dtypes in mixes(args, region.spec.dtype)
        )
    for call in calls():
        if (fn := function(call)) is None:
            continue
        found["functions"][f"{call.namespace}.{call.name}"] = " ".join(
            outcome(region, on_copies, fn, convert(call.args, *dtypes, device=device))
            for region in regions
            for dtypes in mixes(call.args, region.spec.dtype)
        )
    return found


def function(call):
    """Returns the function of a call; None where torch does not have it."""
    if call.name.startswith("__") and (own := getattr(operator, call.name, None)):
        return own
    return getattr(HOLDERS[call.namespace], call.name, None)


def on_copies(fn, args):
    return fn(*copy.deepcopy(args))  # some calls write into them


def outcome(region, fn, *args):
    try:
        value = region.run(fn, *args)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        return type(error).__name__
    return ",".join(dict.fromkeys(str(t.dtype)[6:] for t in floating([value]))) or kind(value)


def kind(value):
    return str(value.dtype)[6:] if isinstance(value, torch.Tensor) else type(value).__name__


def frozen():
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    PATH.write_text(json.dumps(frozen() | {device: outcomes(device)}, indent=0) + "\n")
    print(f"wrote {PATH}")
