import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def alone():
    """A process group of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_of_four():
    """Rank 3 of four, with a backend that sends nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    torch.distributed.destroy_process_group()
