"""What the tests on the device stand on: copies that must be waited for, and what waits."""

import pytest
import torch

from tests.support.host_reads import waits_are_errors

pytestmark = pytest.mark.gpu(devices=2)


@pytest.mark.emulated
def test_an_unwaited_copy_is_garbage_until_an_event_of_its_own_device_has_passed():
    host = torch.full((2,), 3.0, device="cuda:1").to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert (host > 1e38).all()
    event = torch.Event("cuda:1")
    event.record(torch.accelerator.current_stream("cuda:0"))
    event.synchronize()
    assert (host > 1e38).all()
    event.record(torch.accelerator.current_stream("cuda:1"))
    event.synchronize()
    assert host.tolist() == [3.0, 3.0]


def test_what_waits_is_an_error():
    words = "synchronizing CUDA operation"
    with waits_are_errors(), pytest.raises(RuntimeError, match=words):
        torch.ones((), device="cuda").item()


@pytest.mark.emulated
def test_host_reads_are_refused_under_capture():
    flag = torch.zeros((), device="cuda")
    for read in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu):
        graph = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), graph:
            read(flag)
