"""Device values read on the host once they have arrived."""

import pytest
import torch

from apex._engine.readback import Readback


def test_nothing_sent_means_nothing_arrived():
    assert Readback().poll() == []


def test_what_was_sent_arrives_once_in_order():
    readback = Readback()
    readback.send("a", torch.tensor([1.0, 0.0]))
    readback.send("b", torch.tensor([2.0, 1.0]))
    assert readback.poll() == [("a", (1.0, 0.0)), ("b", (2.0, 1.0))]
    assert readback.poll() == []


def test_what_arrives_is_the_content_at_sending():
    readback, values = Readback(), torch.tensor([1.0, 0.0])
    readback.send("a", values)
    values.fill_(5.0)
    assert readback.poll() == [("a", (1.0, 0.0))]


@pytest.mark.gpu
def test_sending_from_the_gpu_does_not_wait():
    readback, values = Readback(), torch.tensor([1.0, 0.0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        readback.send("a", values)
        arrived = readback.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert [*arrived, *readback.poll()] == [("a", (1.0, 0.0))]


@pytest.mark.gpu
def test_nothing_is_sent_while_a_cuda_graph_is_captured():
    readback, values = Readback(), torch.ones(2, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        values.mul_(2)
        readback.send("a", values)
    torch.cuda.synchronize()
    assert readback.poll() == []
