"""A model is prepared and trained in a spawned process, in shared memory."""

import warnings

import pytest
import torch
import torch.multiprocessing

from tests.model.cases import prepare
from tests.support import loops

pytestmark = pytest.mark.slow


LEVELS = ("O5", "O1")  # O1 casts what the thread runs after it


def train_there(rank, models):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".* is emulated on this CPU")
    for level, model in zip(LEVELS, models, strict=True):
        loops.train(*prepare(level, model))


def test_what_is_stepped_there_is_in_the_shared_memory_of_the_plain_model_here():
    models = [loops.net().share_memory() for _ in LEVELS]
    torch.multiprocessing.spawn(train_there, (models,))
    for level, model in zip(LEVELS, models, strict=True):
        own, optimizer = prepare(level)
        loops.train(own, optimizer)
        assert loops.same(loops.values(model.parameters()), loops.masters(optimizer)), level


def send_back(rank, models, queue):
    for model in models:
        queue.put(({*vars(model)}, [value.tolist() for value in model.state_dict().values()]))


def test_a_prepared_model_is_plain_and_exact_in_a_spawned_process():
    pairs = [prepare(level) for level in LEVELS]
    pairs[0][0][2].requires_grad_(False)
    models = [model for model, _ in pairs]
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(send_back, (models, queue))
    for model in models:
        attributes, values = queue.get()
        assert attributes == {*vars(loops.net())}
        assert values == [value.tolist() for value in model.state_dict().values()]
