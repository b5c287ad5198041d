"""Models in shared memory that a spawned process trains: prepared there, or here."""

import copy
import warnings

import pytest
import torch
import torch.multiprocessing

from tests.model.cases import prepare, train_plain
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


def train_shared(rank, models):
    torch.set_num_threads(1)
    for model in models:
        train_plain(model, loops.sgd(model.parameters()))


def test_a_prepared_model_has_what_another_process_trains_in_its_shared_memory():
    new, stepped = pairs = [prepare("O5"), prepare("O5")]
    loops.train(*stepped)
    expected = [copy.deepcopy(model) for model, _ in pairs]
    train_shared(0, expected)
    torch.multiprocessing.spawn(train_shared, ([model for model, _ in pairs],))
    for (model, _), trained in zip(pairs, expected, strict=True):
        model(torch.zeros(1, 4))
        values = loops.values(trained.parameters())
        assert loops.same(loops.values(model.parameters()), [each.bfloat16() for each in values])
        assert loops.same([*model.state_dict().values()], values)
        assert loops.same(loops.values(copy.deepcopy(model).parameters()), values)
    loops.train(*new)
    loops.train(*prepare("O5", expected[0]))
    assert loops.same([*new[0].state_dict().values()], [*expected[0].state_dict().values()])
    # What this process writes to a model stays.
    model, _ = stepped
    loaded = loops.net(seed=1).state_dict()
    model.load_state_dict(loaded)
    model(torch.zeros(1, 4))
    assert loops.same({**model.state_dict()}, {**loaded})
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model(torch.zeros(1, 4))
    assert model.state_dict()["0.weight"].unique().tolist() == [3.0]
