"""Whole numbers in arguments that 16 bits do not hold are named, once."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support.host_reads import waits_are_errors
from tests.support.loops import messages


class Takes(nn.Linear):
    def forward(self, x, t=None, **more):
        return super().forward(x)


class TakesAny(nn.Linear):
    def forward(self, *args):
        return super().forward(args[0])


def said(caplog, *args, level="O5", times=2, takes=Takes, **kwargs):
    options = {"fp32_inputs": kwargs.pop("fp32_inputs")} if "fp32_inputs" in kwargs else {}
    model = amp.initialize(takes(4, 4), opt_level=level, verbosity=0, **options)
    for _ in range(times):
        model(torch.zeros(2, 4), *args, **kwargs)
    return messages(caplog)


STEPS = torch.tensor([987.0, 3.0])
CODES = torch.rand(50, 3)
CODES[:, 1] = torch.arange(230.0, 280.0)
LOST = {
    "time steps": STEPS,
    "one step": torch.tensor(999.0),
    "a batch of one": torch.tensor([[999.0]]),
    "some steps between": torch.tensor([987.2, 937.0, 833.0, 625.0, 301.5, 998.4, 750.0, 513.0]),
    "seconds since 1970, in float64": STEPS.double() + 1.7e9,
    "a matrix with a column of codes": CODES,
    "a long matrix with a column of codes": CODES.repeat(100, 1),
    "in a list": [torch.ones(2), {"t": STEPS}],
}
with torch.inference_mode():
    MADE_IN_INFERENCE_MODE = torch.rand(2, 4)
KEPT = {
    "small": torch.arange(257.0),
    "even": torch.arange(0.0, 512.0, 2.0),
    "whole numbers in 16 bits": STEPS.bfloat16(),
    "integers": STEPS.long(),
    "measured": torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)) * 1000,
    "masks": torch.tensor([0.0, torch.finfo(torch.float32).min, float("-inf"), -1e9, -10000.0]),
    "no elements": torch.ones(0, 3),
    "made in inference mode": MADE_IN_INFERENCE_MODE,
    "a row of measured values": torch.tensor([[301.0, 302.3, 303.7, 304.9]]),
    "beside integers that were written": [torch.ones(2), torch.zeros(2, dtype=torch.int64).add_(1)],
}


@pytest.mark.parametrize("name", LOST)
def test_whole_numbers_that_16_bits_do_not_hold_are_named_once(caplog, name):
    (line,) = said(caplog, LOST[name])
    assert "argument t of Takes" in line
    assert "fp32_inputs=['t']" in line


@pytest.mark.parametrize("name", KEPT)
def test_other_arguments_say_nothing(caplog, name):
    assert said(caplog, KEPT[name]) == []


@pytest.mark.parametrize("trains", [True, False])
def test_of_a_large_argument_only_a_sample_is_searched(trains):
    """A pass allocates little beside the cast, of 2 MiB."""
    model = amp.initialize(Takes(4, 4), opt_level="O5", verbosity=0).train(trains)
    images = torch.rand(16, 256, 256)
    model(torch.zeros(2, 4), images)
    with torch.autograd.profiler.profile(profile_memory=True) as record:
        model(torch.zeros(2, 4), images)
    events = record.kineto_results.events()
    allocated = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert sum(size for size in allocated if size > 0) < 2.5 * 2**20


def test_many_tensors_are_searched_in_the_first_passes_only():
    model = amp.initialize(Takes(4, 4), opt_level="O5", verbosity=0)
    boxes = [torch.rand(4) for _ in range(600)]
    searched = []
    for _ in range(3):
        with torch.autograd.profiler.profile() as record:
            model(torch.zeros(2, 4), boxes)
        searched.append("aten::where" in {event.name for event in record.function_events})
    assert searched == [True, True, False]


def test_named_arguments_are_named(caplog):
    (line,) = said(caplog, when=STEPS)
    assert "such as 987" in line
    assert "fp32_inputs=['when']" in line


def test_arguments_without_a_name_have_their_position(caplog):
    (line,) = said(caplog, STEPS, takes=TakesAny)
    assert "fp32_inputs=[1]" in line
    caplog.clear()
    assert said(caplog, STEPS, takes=TakesAny, fp32_inputs=[1]) == []


def test_fp16_holds_whole_numbers_up_to_2048(caplog):
    assert said(caplog, STEPS, level="O2") == []
    (line,) = said(caplog, STEPS * 10 + 1, level="O2")
    assert "9871" in line


@pytest.mark.parametrize("options", [{"level": "O4"}, {"level": "O0"}, {"fp32_inputs": ["t"]}])
def test_an_argument_that_is_not_cast_says_nothing(caplog, options):
    assert said(caplog, STEPS, **options) == []


@pytest.mark.gpu
def test_arguments_on_a_device_are_named_without_a_wait(caplog):
    model = amp.initialize(Takes(4, 4).cuda(), opt_level="O5", verbosity=0)
    x, t = torch.zeros(2, 4).cuda(), STEPS.cuda()
    with waits_are_errors():
        for _ in range(3):
            model(x, t)
            torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    model(x, t)
    assert sum("argument t" in record.getMessage() for record in caplog.records) == 1
