"""torch's checkpoints of several ranks: fp32 by name, on other numbers of ranks, and restarts."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from tests.distributed import restarts
from tests.distributed.cases import START_SCALE, rank_batch
from tests.support import loops, sharding
from tests.support.features import copies_before_saving, shards_on_cpu

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]

OPTIONS = {"growth_interval": 3, "max_loss_scale": START_SCALE}
FULL = state_dict.StateDictOptions(full_state_dict=True)


def pair_at(level, seed=0):
    """The wrapped model, and its optimizer: FSDP2 at O0, else DistributedDataParallel."""
    model = sharding.net(seed)
    if level == "O0":
        sharding.shard(model, sharding.mesh(dist.get_world_size()))
    first, last = model[0].parameters(), model[2].parameters()
    groups = [{"params": [*first], "lr": 0.02}, {"params": [*last]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if level is not None:
        options = OPTIONS if level in loops.DYNAMIC else {}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return (model if level == "O0" else DistributedDataParallel(model)), optimizer


def trained_on(rank, model, optimizer, steps):
    loops.train(model, optimizer, data=(rank_batch(rank, step) for step in steps))
    return full(model, optimizer)


def full(model, optimizer):
    """Weights, and state of the optimizer, by name."""
    weights, state = state_dict.get_state_dict(model, optimizer, options=FULL)
    return [{name: value.clone() for name, value in weights.items()}, state["state"]]


def states(model, optimizer):
    weights, state = state_dict.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "amp": amp.state_dict()}


def load(model, optimizer, folder, *, has_scale=True):
    loaded = states(model, optimizer)
    if not has_scale:  # of this kind, static or dynamic
        del loaded["amp"]
    dcp.load(loaded, checkpoint_id=folder)
    state_dict.set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    if has_scale:
        amp.load_state_dict(loaded["amp"])


def saved(rank, level, folder):
    model, optimizer = pair_at(level, seed=rank)
    found = trained_on(rank, model, optimizer, range(2))
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    # In torch 2.6 `get_state_dict` keeps a model alive, and so its casts.
    amp.restore(model, optimizer)
    return found


def loaded(rank, level, folder, has_scale):
    model, optimizer = pair_at(level, seed=7)
    load(model, optimizer, folder, has_scale=has_scale)
    return full(model, optimizer)


# -- by name -------------------------------------------------------------------------------------


def by_name(rank, level, flattens):
    """What torch's functions return, and what the objects themselves hold."""
    model, optimizer = pair_at(level)
    loops.train(model, optimizer, data=(rank_batch(rank, step) for step in range(2)))
    options = state_dict.StateDictOptions(flatten_optimizer_state_dict=flattens)
    weights = state_dict.get_model_state_dict(model, options=options)
    state = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    own = dict(zip(model.module.state_dict(), loops.masters(optimizer), strict=True))
    for name, param in model.module.named_parameters():
        for key, value in optimizer.state[param].items():
            own[f"{name}.{key}"] = value
    both = dict(weights)
    for name in weights:
        for key in ("step", "exp_avg", "exp_avg_sq"):
            entry = state[f"state.{name}.{key}"] if flattens else state["state"][name][key]
            both[f"{name}.{key}"] = entry
    return both, own


@loops.every(flattens=[False, True], level=loops.MIXED)
def test_state_dicts_of_torch_are_fp32_by_name(on_two_ranks, level, flattens):
    for found, own in on_two_ranks(by_name, level, flattens):
        assert {value.dtype for value in found.values()} == {torch.float32}
        assert loops.same(found, own)


# -- on other numbers of ranks -------------------------------------------------------------------

MOVES = [("O5", 2, "O5", 1), ("O5", 2, "O5", 4), ("O2", 4, "O5", 2), ("O4", 1, "O5", 2)]
SHARDED = [("O0", 2, "O5", 2), ("O0", 4, "O5", 1), ("O5", 2, "O0", 4), ("O2", 1, "O0", 2)]


@pytest.mark.parametrize(
    ("level", "ranks", "new_level", "new_ranks"),
    [*MOVES, *[pytest.param(*move, marks=shards_on_cpu) for move in SHARDED]],
)
def test_a_checkpoint_loads_elsewhere(on_ranks, tmp_path, level, ranks, new_level, new_ranks):
    expected = on_ranks(ranks, saved, level, tmp_path / "saved")
    has_scale = (level in loops.DYNAMIC) == (new_level in loops.DYNAMIC)
    found = on_ranks(new_ranks, loaded, new_level, tmp_path / "saved", has_scale)
    assert loops.same(found, expected[:1] * new_ranks)


# -- the same run --------------------------------------------------------------------------------


def goes_on(rank, level, folder, is_async):
    """Whether a run that goes on from a checkpoint is the run that never stopped."""
    model, optimizer = pair_at(level, seed=rank)
    trained_on(rank, model, optimizer, range(2))
    if is_async:  # while training goes on
        group = dist.new_group()
        saving = dcp.async_save(states(model, optimizer), checkpoint_id=folder, process_group=group)
    else:
        dcp.save(states(model, optimizer), checkpoint_id=folder)
    expected = trained_on(rank, model, optimizer, range(2, 5)), amp.state_dict()
    if is_async:
        saving.result()
    del model, optimizer
    gc.collect()  # the session ends, and with it its scale in amp.state_dict()
    model, optimizer = pair_at(level, seed=9)
    load(model, optimizer, folder)
    return loops.same((trained_on(rank, model, optimizer, range(2, 5)), amp.state_dict()), expected)


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=copies_before_saving)])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_resumed_run_is_the_uninterrupted_one(on_two_ranks, tmp_path, level, is_async):
    assert on_two_ranks(goes_on, level, tmp_path / "saved", is_async) == [True, True]


# -- a lost rank ---------------------------------------------------------------------------------


def test_a_run_that_lost_a_rank_restarts_as_the_uninterrupted_one(on_two_ranks, tmp_path):
    (tmp_path / "whole").mkdir()
    expected = on_two_ranks(restarts.trained_on, tmp_path / "whole")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1", "-m", restarts.__name__, str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=600)
    assert (tmp_path / "attempt1").exists()
    found = [torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(2)]
    assert loops.same(found, expected)
