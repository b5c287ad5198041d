"""Sharded runs saved by ``torch.distributed.checkpoint`` go on where they were, on any ranks."""

import gc

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from apex import amp
from tests.sharded.cases import (
    OPTIMIZERS,
    close,
    net,
    outcome,
    prepared,
    run,
    sharded,
)
from tests.support.features import shards_on_cpu
from tests.training.cases import batches, same

LEVELS = "O1", "O4"
DATA = list(batches(6, overflow_at={1}))
BEFORE, AFTER = DATA[:3], DATA[3:]


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}


def load(model, optimizer, folder):
    loaded = states(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    amp.load_state_dict(loaded["amp"])


def saved(rank, folder, level, world_size):
    gc.collect()  # sessions of earlier tests would be in amp.state_dict, too
    model, optimizer = sharded(level, world_size)
    run(model, optimizer, BEFORE)
    dcp.save(states(model, optimizer), checkpoint_id=f"{folder}/{level}")
    return outcome(model, optimizer), run(model, optimizer, AFTER)


def resumed(rank, folder, level, world_size):
    gc.collect()
    model = net(seed=5)
    model, optimizer = (
        sharded(level, world_size, model=model) if world_size else prepared(level, model)
    )
    load(model, optimizer, f"{folder}/{level}")
    return outcome(model, optimizer), run(model, optimizer, AFTER)


def at_levels(rank, fn, folder, *args):
    return {level: fn(rank, folder, level, *args) for level in LEVELS}


def agree(first, second, *, bits):
    """Whether runs are the same at the checkpoint, and then; without ``bits`` within rounding."""
    return same(first[0], second[0]) and (same if bits else close)(first[1], second[1])


@shards_on_cpu
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_run_of_two_ranks_resumes_on_two_bit_for_bit_and_on_one(on_two_ranks, tmp_path):
    before = on_two_ranks(at_levels, saved, str(tmp_path), 2)
    after = on_two_ranks(at_levels, resumed, str(tmp_path), 2)
    for level in LEVELS:
        assert agree(before[0][level], after[0][level], bits=True), level
        assert agree(before[1][level], after[1][level], bits=True), level
        alone = resumed(0, str(tmp_path), level, None)
        assert agree(before[0][level], alone, bits=False), level


def fused_adam(rank, folder):
    make = OPTIMIZERS["FusedAdam"]
    model, optimizer = sharded("O4", 2, make)
    run(model, optimizer, BEFORE)
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    before = outcome(model, optimizer), run(model, optimizer, AFTER)
    del model, optimizer
    gc.collect()
    model, optimizer = sharded("O4", 2, make, model=net(seed=5))
    load(model, optimizer, folder)
    return before, (outcome(model, optimizer), run(model, optimizer, AFTER))


@shards_on_cpu
def test_counts_that_a_flag_decided_about_load_into_a_new_optimizer(on_two_ranks, tmp_path):
    for before, after in on_two_ranks(fused_adam, str(tmp_path)):
        assert agree(before, after, bits=True)


@shards_on_cpu
def test_a_run_of_two_ranks_resumes_on_four(on_two_ranks, on_four_ranks, tmp_path):
    before = on_two_ranks(saved, str(tmp_path), "O4", 2)[0]
    for after in on_four_ranks(resumed, str(tmp_path), "O4", 4):
        assert agree(before, after, bits=False)


def own_states(model, optimizer):
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }


def by_own_states(rank, folder):
    gc.collect()
    model, optimizer = sharded("O4", 2)
    run(model, optimizer, BEFORE)
    dcp.save(own_states(model, optimizer), checkpoint_id=folder)
    before = run(model, optimizer, AFTER)
    del model, optimizer
    gc.collect()
    model, optimizer = sharded("O4", 2, model=net(seed=5))
    run(model, optimizer, BEFORE[:1])  # so that there is a state to load into
    loaded = own_states(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    return before, run(model, optimizer, AFTER)


@shards_on_cpu
def test_the_objects_own_state_dicts_resume_bit_for_bit(on_two_ranks, tmp_path):
    for before, after in on_two_ranks(by_own_states, str(tmp_path)):
        assert same(before, after)


def full_states(rank):
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = sharded("O4", 2)
    run(model, optimizer, BEFORE)
    full = get_state_dict(model, optimizer, options=options)
    other, other_optimizer = sharded("O4", 2, model=net(seed=5))
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=full[0],
        optim_state_dict=full[1],
        options=options,
    )
    return outcome(model, optimizer), outcome(other, other_optimizer)


@shards_on_cpu
def test_full_state_dicts_come_from_all_ranks_and_go_to_all(on_two_ranks):
    for before, after in on_two_ranks(full_states):
        for part in ("weights", "masters", "optimizer"):
            assert same(before[part], after[part]), part


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_without_its_masters_is_refused_with_the_remedy(level):
    model, optimizer = prepared(level, net())
    run(model, optimizer, BEFORE[:1])
    remedy = r"Save model\.state_dict\(\) and optimizer\.state_dict\(\)"
    with pytest.raises(ValueError, match=remedy):
        get_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=remedy):
        get_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_model_without_masters_needs_no_view(level):
    model, optimizer = prepared(level, net())
    run(model, optimizer, BEFORE[:1])
    names = get_optimizer_state_dict(model, optimizer)["state"]
    assert [*names] == [name for name, _ in model.named_parameters()]
    amp.restore(model, optimizer)  # torch 2.6 keeps the model in a cache
