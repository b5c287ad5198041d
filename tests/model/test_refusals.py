"""Models that ``amp.initialize`` refuses, before anything changes."""

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.model.nets import Net, converted

every_level = pytest.mark.parametrize("level", ["O1", "O2", "O5"])


@every_level
def test_a_model_converted_to_16_bits_is_refused(level):
    with pytest.raises(RuntimeError, match=r"already prepared\. Only.*amp\.restore"):
        converted(converted(Net()), level)


@every_level
def test_a_data_parallel_model_is_refused(level):
    with pytest.raises(RuntimeError, match=r"wrapped in DataParallel.*then wrap"):
        converted(DataParallel(Net()), level)


@every_level
def test_a_distributed_model_is_refused(level):
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"wrapped in DistributedDataParallel.*then wrap"):
            converted(DistributedDataParallel(Net()), level)
    finally:
        destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_is_refused_where_its_weights_would_be_cast():
    model = Net()
    model.last = torch.jit.script(model.last)
    with pytest.raises(RuntimeError, match=r"whose last is scripted.*plain module"):
        converted(model, "O5")
    converted(model, "O4")


@every_level
def test_a_model_on_meta_is_refused(level):
    model = Net()
    model.last.to("meta")
    with pytest.raises(RuntimeError, match=r"parameter last\.weight is on the meta.*Materialize"):
        converted(model, level)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused():
    with pytest.raises(RuntimeError, match=r"scripted model.*Pass the plain module"):
        converted(torch.jit.script(nn.Linear(1, 1)))
