"""Device values read on the host once they have arrived."""

import pytest
import torch

from apex._engine.readback import Arrivals


def test_nothing_sent_means_nothing_arrived():
    assert Arrivals().poll() == []


def test_what_was_sent_arrives_once_in_order():
    arrivals = Arrivals()
    arrivals.send(torch.tensor([1.0, 0.0]))
    arrivals.send(torch.tensor([2.0, 1.0]))
    assert arrivals.poll() == [(1.0, 0.0), (2.0, 1.0)]
    assert arrivals.poll() == []


def test_what_arrives_is_the_content_at_sending():
    arrivals, values = Arrivals(), torch.tensor([1.0, 0.0])
    arrivals.send(values)
    values.fill_(5.0)
    assert arrivals.poll() == [(1.0, 0.0)]


@pytest.mark.gpu
def test_sending_from_the_gpu_does_not_wait():
    arrivals, values = Arrivals(), torch.tensor([1.0, 0.0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        arrivals.send(values)
        arrived = arrivals.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert [*arrived, *arrivals.poll()] == [(1.0, 0.0)]


@pytest.mark.gpu
def test_nothing_is_sent_while_a_cuda_graph_is_captured():
    arrivals, values = Arrivals(), torch.ones(2, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        values.mul_(2)
        arrivals.send(values)
    torch.cuda.synchronize()
    assert arrivals.poll() == []
