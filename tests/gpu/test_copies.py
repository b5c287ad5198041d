"""What is read on the host, and on two devices."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from apex._engine.scaler import Readback
from apex._torch import copies
from tests.support import loops
from tests.support.emulated_cuda import device

DEVICES = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
pytestmark = pytest.mark.gpu(devices=2)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("source", DEVICES, ids=str)
def test_a_host_copy_has_the_values_of_its_start(source, current):
    tensor = torch.full((2,), 3.0, device=source)
    with torch.cuda.device(current):
        copy = copies.HostCopy(tensor)
        tensor.fill_(5.0)
        assert copy.wait().tolist() == [3.0, 3.0]


@pytest.mark.emulated
def test_a_host_copy_has_arrived_when_its_event_has_passed():
    copy = copies.HostCopy(torch.full((2,), 3.0, device="cuda:1"))
    device.set_events_pass(False)
    try:
        assert not copy.arrived
    finally:
        device.set_events_pass(True)
    assert copy.arrived
    assert copy.wait().tolist() == [3.0, 3.0]


@pytest.mark.emulated
def test_a_loss_that_arrives_in_the_block_of_another_is_named_by_its_own_number(caplog):
    model, optimizer = loops.prepared("O4", model=loops.net().cuda(), num_losses=2)
    device.set_events_pass(False)
    try:
        loops.scaled_backward(loops.slope(model[0], math.nan), optimizer, loss_id=0)
    finally:
        device.set_events_pass(True)
    loops.scaled_backward(loops.slope(model[0], 1.0), optimizer, loss_id=1)
    assert [text[:13] for text in loops.messages(caplog)] == ["Loss 0 is inf"]


def test_threads_share_a_readback():
    """As replicas of DataParallel do; Python switches between them at almost every line."""
    readback = Readback()

    def work(first):
        arrived = []
        for number in range(first, first + 100):
            readback.send(number, torch.full((1,), float(number), device="cuda"))
            arrived += readback.poll()
        return arrived

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            arrived = [*threads.map(work, range(0, 2000, 100))]
    finally:
        sys.setswitchinterval(interval)
    values = sorted(sum(arrived, readback.poll(wait=True)))
    assert values == [(number, [float(number)]) for number in range(2000)]
