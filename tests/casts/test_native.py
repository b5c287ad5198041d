"""What torch's own autocast does on each device type, as far as the op table relies on it.

The autocast of CUDA, XPU and MPS casts fake tensors, without a device and without values.
"""

import contextlib
import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from apex._core.op_rows import NATIVE_DIFFERENCES, WITHOUT_BF16
from apex._core.op_table import AutocastSpec, OpTable, operators
from apex._engine.autocast import kernels
from apex._torch import dispatcher
from tests.casts.op_calls import HOLDERS, Call, calls
from tests.casts.op_rows import MPS, arguments, convert, floating, floats, rows

LOW, FP32 = torch.bfloat16, torch.float32
ROWS = OpTable.default().rows
WANTED = {  # by category: dtypes of the result for fp32, bf16 and mixed inputs
    "low_precision": (LOW, LOW, LOW),
    "fp32": (FP32, FP32, FP32),
    "promote": (FP32, LOW, FP32),
    "refuses": (FP32, "raises", "raises"),
    "raises": ("raises", "raises", "raises"),
}
# They read values or lay out memory, which fake tensors of a missing device do not let them.
NOT_FAKED = {"equal", "ctc_loss", "grid_sample"}
AT_LEAST = {"cpu": 30, "cuda": 60, "xpu": 60, "mps": 45}
MORE = [
    Call("torch", "tensordot", "", (floats(2, 3), floats(3, 2), 1)),
    Call("torch.linalg", "matrix_norm", "", (floats(2, 2), 2)),
]
HOLDERS = {**HOLDERS, "torch.linalg": torch.linalg}


@contextlib.contextmanager
def native_autocast(device):
    torch.set_autocast_enabled(device, True)
    dtype = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, LOW)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, dtype)


def fake(value, device):
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, list | tuple):
        return type(value)(fake(item, device) for item in value)
    return value


def result(call, dtypes, device):
    """Returns the dtype that comes out, or ``"raises"``."""
    args = convert(call.args, *dtypes)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    mode = contextlib.nullcontext() if device == "cpu" else fakes
    with mode:
        if device != "cpu":
            args = fake(args, device)
        try:
            out = getattr(HOLDERS[call.namespace], call.name)(*args)
        except (RuntimeError, NotImplementedError):
            return "raises"
        return out.dtype if isinstance(out, Tensor) else type(out)


def results(call, device):
    given = [[FP32], [LOW], [LOW, FP32]][: 3 if len(floating(call.args)) > 1 else 2]
    return tuple(result(call, dtypes, device) for dtypes in given)


def native_calls(device):
    """Yields calls of one operator that torch casts itself, and that operator."""
    for call in [*calls(), *MORE]:
        linalg = call.namespace == "torch.linalg"
        ops = ("linalg_matrix_norm",) if linalg else operators(call.namespace, call.name)
        native = [op for op in ops if dispatcher.has_operator(f"aten::{op}")]
        native = [op for op in native if kernels.native_category(op, device)]
        faked = device == "cpu" or call.name not in NOT_FAKED
        if native and faked and call.namespace != "torch.Tensor" and runs(call, device):
            yield call, native[0]


def runs(call, device):
    """Returns whether a fake tensor runs it: before torch 2.9 some calls ask for a driver."""
    if device == "cpu":
        return True
    dtypes = [FP32, LOW] if call.name.startswith("conv") else [FP32]
    return all(result(call, [dtype], device) != "raises" for dtype in dtypes)


def check_native(call, op, device):
    if (device, op) == ("mps", "conv_transpose3d.input"):
        return  # it has no 16-bit kernel; torch runs it in fp32 from torch 2.9 on
    with native_autocast(device):
        found = results(call, device)
    assert found == WANTED[kernels.native_category(op, device)][: len(found)], (call.name, op)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", MPS])
def test_torchs_native_kernels_have_the_categories_that_the_table_says(device):
    checked = set()
    for call, op in native_calls(device):
        check_native(call, op, device)
        checked.add(op)
    assert len(checked) > AT_LEAST[device]


# In fp32 on one device, in a session, too: the CPU has no kernel for it in 16 bits, or one that
# adds up in them (docs/concepts/devices.md).
ON_ONE_DEVICE = {
    "cpu": {"adaptive_avg_pool3d", "avg_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"},
    "mps": {"batch_norm"},
}
# They cast what rows have cast already; the names of others begin with an underscore.
INSIDE_ROWS = {
    *("cudnn_convolution", "cudnn_convolution_transpose", "grid_sampler_2d", "grid_sampler_3d"),
    *("lu_solve", "mkldnn_rnn_layer", "multilabel_margin_loss_forward"),
    *("native_layer_norm", "pinverse"),
}


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_what_torch_casts_on_one_device_is_cast_on_all_or_listed(device):
    key = dispatcher.AUTOCAST_KEYS[device]
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    # Until torch 2.11 some had overloads for named dimensions.
    own = {name.removeprefix("aten::") for name in names if not re.search("imname|names_", name)}
    own -= {op for where, op in kernels._registered if where == device}  # by earlier tests
    listed = ({*NATIVE_DIFFERENCES[device]} - {*ROWS}) | ON_ONE_DEVICE.get(device, set())
    assert {op for op in own - {*ROWS, *listed, *INSIDE_ROWS} if op[0] != "_"} == set()
    assert not listed & {*ROWS}


def test_what_is_fp32_for_want_of_a_kernel_has_none():
    for row in (row for row in rows() if row in WITHOUT_BF16.split()):
        for args, kwargs in arguments(row):
            with pytest.raises(RuntimeError):  # NotImplementedError included
                dispatcher.overload(row)(*convert(args, LOW), **kwargs)


# Without MPS: that torch's fake tensors of it do not run what our rows make of a softmax.
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_without_a_session_a_kernel_does_what_torchs_does(device):
    kernels.register_rows(AutocastSpec(LOW, (device,), OpTable.default()))
    for call, op in native_calls(device):
        check_native(call, op, device)
