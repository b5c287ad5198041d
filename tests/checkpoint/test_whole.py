"""Whole prepared models and optimizers, copied together or saved as objects."""

import copy
import gc

import pytest

from apex import amp
from tests.support import training as cases


def train(model, optimizer, seed):
    for x, y in cases.batches(2, seed=seed):
        cases.train_step(model, optimizer, x, y)


@pytest.mark.parametrize("name", ["SGD", "fused AdamW", "RMSprop"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_copy_made_in_mid_training_and_the_original_go_on_and_are_saved_alike(level, name):
    original = cases.prepared(level, cases.OPTIMIZERS[name])
    train(*original, seed=1)
    copied = copy.deepcopy(original)
    for pair in (original, copied):
        train(*pair, seed=2)
    for mine, other in zip(original, copied, strict=True):
        assert cases.same(mine.state_dict(), other.state_dict())
    assert cases.same(cases.masters(original[1]), cases.masters(copied[1]))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_weights_loaded_into_a_copy_reach_its_masters_and_not_the_original_s(level):
    original = cases.prepared(level)
    copied = copy.deepcopy(original)
    before = cases.masters(original[1])
    state = cases.net(seed=4).state_dict()
    copied[0].load_state_dict(state)
    dtype = next(amp.master_params(copied[1])).dtype
    assert cases.same([value.to(dtype) for value in state.values()], cases.masters(copied[1]))
    assert cases.same(cases.masters(original[1]), before)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_copy_clears_the_gradients_of_its_own_masters(level):
    original = cases.prepared(level)
    cases.backward(*original, *cases.batch())
    copied = copy.deepcopy(original)
    copied[0].zero_grad()
    assert all(param.grad is None for param in amp.master_params(copied[1]))
    assert all(param.grad is not None for param in amp.master_params(original[1]))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_restored_copy_has_the_values_of_its_masters(level):
    original = cases.prepared(level)
    train(*original, seed=1)
    model, optimizer = copy.deepcopy(original)
    expected = [master.float() for master in cases.masters(optimizer)]
    amp.restore(model, optimizer)
    assert cases.same(expected, cases.values(model.parameters()))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_model_copied_alone_has_rounded_weights_and_outlives_the_session(level):
    model, optimizer = cases.prepared(level)
    train(model, optimizer, seed=1)
    rounded = [param.detach().float() for param in model.parameters()]
    copied = copy.deepcopy(model)
    assert cases.same(rounded, list(copied.state_dict().values()))
    del model, optimizer
    gc.collect()
    assert amp.state_dict() == {}
    assert cases.same(rounded, list(copied.state_dict().values()))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_model_saved_whole_computes_and_saves_what_the_original_does(level):
    model, optimizer = cases.prepared(level)
    train(model, optimizer, seed=1)
    loaded = cases.saved_and_loaded(model)
    x, _ = cases.batch()
    assert cases.same(model(x), loaded(x))
    # The masters stay with the optimizer: what was saved whole is the rounded weights.
    rounded = {
        name: value.to(loaded.get_parameter(name).dtype).float()
        for name, value in model.state_dict().items()
    }
    assert cases.same(rounded, dict(loaded.state_dict()))
    del optimizer


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_model_saved_whole_is_trained_on_after_restore_with_its_masters_loaded(level):
    model, optimizer = cases.prepared(level)
    train(model, optimizer, seed=1)
    loaded = cases.saved_and_loaded(model)
    if level not in ("O0", "O1", "O4"):  # a model that casts no parameters is saved as plain
        amp.restore(loaded)
    loaded.load_state_dict(model.state_dict())
    resumed = cases.prepared(level, model=loaded)
    for pair in ((model, optimizer), resumed):
        train(*pair, seed=2)
    assert cases.same(dict(model.state_dict()), dict(loaded.state_dict()))
