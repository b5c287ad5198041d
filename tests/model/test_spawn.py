"""A model is prepared and trained in a spawned process, in shared memory."""

import warnings

import pytest
import torch
import torch.multiprocessing

from tests.model.cases import prepared, train
from tests.support import training as cases

pytestmark = pytest.mark.slow


def train_there(rank, level, model):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "fp16 is emulated on this CPU")
    train(*prepared(level, model))


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_what_is_stepped_there_is_in_the_shared_memory_of_the_plain_model_here(level):
    model = cases.net().share_memory()
    torch.multiprocessing.spawn(train_there, (level, model))
    own, optimizer = prepared(level)
    train(own, optimizer)
    assert cases.same(cases.values(model.parameters()), cases.masters(optimizer))
