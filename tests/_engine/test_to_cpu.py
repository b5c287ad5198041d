"""``Tensor.cpu()`` of a 16-bit tensor gives fp32, and so does what torch cannot tell from it."""

import pytest
import torch

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.region import CastRegion
from apex._torch import dispatcher

LOW = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
ALIKE = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to_device": lambda x: x.to(x.device),
    "type_as": lambda x: x.type_as(x),
}
KEEPS = {
    "dtype": lambda x: x.to("cpu", x.dtype),
    "copy": lambda x: x.to("cpu", copy=True),
    "non_blocking": lambda x: x.to("cpu", non_blocking=True),
    "other": lambda x: x.to(x),
    "dtype_of_another": lambda x: x.to(x.dtype),
}


def run(call, low):
    x = torch.ones(2, dtype=low)
    return CastRegion(CastSpec(low, ("cpu",), OpTable.default())).run(call, x)


@LOW
@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
def test_what_arrives_as_tensor_cpu_gives_fp32(call, low):
    assert run(call, low).dtype is torch.float32


@LOW
@pytest.mark.parametrize("call", KEEPS.values(), ids=KEEPS)
def test_what_names_a_dtype_or_the_way_of_the_copy_keeps_it(call, low):
    assert run(call, low).dtype is low


def test_the_number_that_a_script_asks_for_the_range_of_its_dtype_keeps_it():
    """ESPnet masks with the least number of the scores' dtype, of which fp16 has no fp32's."""
    asked = run(lambda x: torch.tensor(0, dtype=x.dtype).numpy().dtype, torch.float16)
    assert asked == "float16"


@LOW
@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("outside", [False, True])
def test_it_does_in_inference_mode_and_of_its_tensors_too(call, low, outside):
    with torch.inference_mode():
        x = torch.ones(2, dtype=low)
    with torch.inference_mode(mode=not outside):
        assert run(call, low).dtype is torch.float32
        region = CastRegion(CastSpec(low, ("cpu",), OpTable.default()))
        assert region.run(call, x).dtype is torch.float32


@LOW
def test_a_kernel_of_torch_that_copies_keeps_the_dtype_that_it_allocated(low):
    def sums(x):
        return torch.logcumsumexp(x, 0, out=torch.empty_like(x))

    x = torch.ones(64, dtype=low)
    got = CastRegion(CastSpec(low, ("cpu",), OpTable.default())).run(sums, x)
    assert got.tolist() == sums(x).tolist()


@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
def test_torch_calls_one_operator_with_equal_arguments(call):
    """Should this fail, torch has learned to tell them apart: give ``.to("cpu")`` its dtype."""
    seen = []

    def kernel(keyset, *args, **kwargs):
        seen.append((args[1:], kwargs))
        return args[0]

    remove = dispatcher.register({"to.dtype_layout": kernel}, "AutocastCPU")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            call(torch.ones(2, dtype=torch.bfloat16))
    finally:
        remove()
    options = {"dtype": torch.bfloat16, "layout": torch.strided, "device": torch.device("cpu")}
    assert seen == [((), options)]
