"""The result dtype of every function of apex's lists under op casts, and who decides it.

``python -m tests.support.reference.op_dtypes`` writes it for the running torch, as
``op_dtypes.json``, to
be read and committed. The results hold for every release of torch; who decides them changes.
"""

import copy
import functools
import json
import operator
import re
from pathlib import Path

import torch

from apex._core.op_names import NAMES
from apex._core.op_table import COVERED_INSIDE, CastSpec, OpTable
from apex._engine.autocast.region import CastRegion, _registry
from tests._engine.op_calls import HOLDERS, calls, convert, tensor_dtypes

DEVICE_TYPES = ("cpu",)
LOW = (torch.bfloat16, torch.float16)
MODES = ("fp32", "low", "mixed")
DECIDERS = {
    "ours": "our kernel",
    "torch": "torch's own autocast",
    "inner": "the rows of its inner operators",
    "absent": "no such operator",
}


PATH = Path(__file__).with_suffix(".json")


def release():
    """Returns the running torch's release: patch releases share a table."""
    return ".".join(torch.__version__.split(".")[:2])


def table():
    """Returns the table of the running torch: who decides by operator, dtypes by function."""
    return {
        "about": __doc__.splitlines()[0],
        "torch": release(),
        "decides": {device: deciders(device) for device in DEVICE_TYPES},
        "results": {
            device: {name(low): results(device, low) for low in LOW} for device in DEVICE_TYPES
        },
    }


def deciders(device):
    """Returns for every operator with a row whose kernel casts it on a device type."""
    # The registry's own: read before any kernel of ours was registered.
    coverage = _registry._coverage_of(device)
    found = dict.fromkeys(OpTable.default().rows, "absent")
    found.update(dict.fromkeys(found.keys() & COVERED_INSIDE, "inner"))
    found.update(dict.fromkeys(coverage.native, "torch"))
    for group in coverage.groups(OpTable.default()):
        found.update(dict.fromkeys(group.ops, "ours"))
    return dict(sorted(found.items()))


def results(device, low):
    """Returns by function and mode of the inputs the dtype that comes out, or the error's name."""
    region = CastRegion(CastSpec(low, (device,), OpTable.default().for_dtype(low)))
    found = {}
    for call in calls():
        fn = function(call)
        if fn is None:
            continue
        found[f"{call.namespace}.{call.name}"] = {
            mode: result(region, fn, call, mode, low, device)
            for mode in MODES
            if mode != "mixed" or len(tensor_dtypes(call.args)) > 1
        }
    return found


def function(call):
    """Returns the function of a call; None where torch does not have it."""
    if call.name.startswith("__") and (own := getattr(operator, call.name, None)):
        return own
    return getattr(HOLDERS[call.namespace], call.name, None)


def result(region, fn, call, mode, low, device):
    dtypes = {"fp32": [torch.float32], "low": [low], "mixed": [low, torch.float32]}[mode]
    args = convert(copy.deepcopy(call.args), *dtypes, device=device)  # some calls write into them
    try:
        value = region.run(fn, *args, **call.kwargs)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        return type(error).__name__
    return name(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def name(dtype):
    return str(dtype).removeprefix("torch.")


def drift(was, now):
    """Returns a line for everything in which two tables differ: what, from what, to what, why."""
    lines = []
    for device, ops in now["decides"].items():
        for op in sorted({*ops, *was["decides"][device]}):
            before, after = was["decides"][device].get(op, "no row"), ops.get(op, "no row")
            if before != after:
                lines.append(f"aten::{op} on {device}: decided by {who(before)}, now {who(after)}")
    for device, by_dtype in now["results"].items():
        for low, functions in by_dtype.items():
            old = was["results"][device][low]
            for function in sorted({*functions, *old}):
                before, after = old.get(function), functions.get(function)
                for mode in MODES:
                    change = tuple(each and each.get(mode) for each in (before, after))
                    if change[0] != change[1]:
                        lines.append(
                            f"{function} of {mode} inputs, casts to {low} on {device}: was "
                            f"{change[0]}, is {change[1]}; {because(function, now, device)}"
                        )
    return lines


def who(decider):
    return DECIDERS.get(decider, decider)


@functools.cache
def _operators(function):
    namespace, _, short = function.rpartition(".")
    return NAMES.get(namespace, {}).get(short, ())


def because(function, now, device):
    """Returns whose rule gives the result of a function on a device type."""
    ops = _operators(function)
    if not ops:
        return "torch's type promotion decides, or the rows of what it calls"
    return ", ".join(f"aten::{op}: {who(now['decides'][device].get(op, 'no row'))}" for op in ops)


if __name__ == "__main__":
    text = json.dumps(table(), indent=1)
    text = re.sub(r'{\s*("fp32"[^}]*)}', lambda m: f"{{{' '.join(m[1].split())}}}", text)
    PATH.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {PATH}")
