"""A model is prepared and trained in a spawned process, in shared memory."""

import warnings

import pytest
import torch
import torch.multiprocessing

from tests.model.cases import prepare
from tests.support import loops

pytestmark = pytest.mark.slow


LEVELS = ("O5", "O1")  # O1 casts what the thread runs after it


def train_and_send_back(rank, shared, prepared, queue):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".* is emulated on this CPU")
    for model in prepared:
        queue.put(({*vars(model)}, [value.tolist() for value in model.state_dict().values()]))
    for level, model in zip(LEVELS, shared, strict=True):
        loops.train(*prepare(level, model))


def test_there_a_prepared_model_is_plain_and_exact_and_shared_memory_gets_what_is_stepped():
    shared = [loops.net().share_memory() for _ in LEVELS]
    pairs = [prepare(level) for level in LEVELS]
    pairs[0][0][2].requires_grad_(False)
    models = [model for model, _ in pairs]
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train_and_send_back, (shared, models, queue))
    for model in models:
        attributes, values = queue.get()
        assert attributes == {*vars(loops.net())}
        assert values == [value.tolist() for value in model.state_dict().values()]
    for level, model in zip(LEVELS, shared, strict=True):
        own, optimizer = prepare(level)
        loops.train(own, optimizer)
        assert loops.same(loops.values(model.parameters()), loops.masters(optimizer)), level
