"""Models and optimizers in a spawned process: by pickle, in shared memory, prepared there."""

import copy
import pickle
import traceback
import warnings

import pytest
import torch
import torch.multiprocessing

from apex import amp
from tests.model.cases import LEVELS, SCALE, prepared, train
from tests.support import training as cases

pytestmark = pytest.mark.slow

SECONDS = 300  # only a hang reaches it
every_level = pytest.mark.parametrize("level", LEVELS)


def train_unscaled(model, optimizer):
    """What an unpickled optimizer, which has no session, can do."""
    for x, y in cases.batches(2, seed=5):
        optimizer.zero_grad()
        cases.loss_of(model, x, y).backward()
        optimizer.step()


def result_of(model, optimizer):
    """Everything of a training, as numbers that need no shared memory to travel."""
    return pickle.dumps((cases.values(model.parameters()), cases.masters(optimizer)))


def prepared_here(level, model):
    pair = prepared(level, model)
    train(*pair)
    return result_of(*pair)


def prepared_before(pair):
    train_unscaled(*pair)
    return result_of(*pair)


def prepared_again(level, pair):
    with pytest.raises(RuntimeError, match=r"amp\.restore\(model, optimizer\)"):
        cases.backward(*pair, *cases.batch())
    amp.initialize(*amp.restore(*pair), opt_level=level, verbosity=0, loss_scale=SCALE.get(level))
    train(*pair)
    return result_of(*pair)


def child(pipe, jobs):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "fp16 is emulated on this CPU")
    try:
        for key, (work, *arguments) in jobs.items():
            pipe.send((key, work(*arguments)))
    except BaseException:  # noqa: BLE001 - the parent gets it
        pipe.send(("error", traceback.format_exc()))


def run_in_child(jobs):
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs, jobs), daemon=True)
    process.start()
    theirs.close()
    results = {}
    try:
        while len(results) < len(jobs):
            assert ours.poll(SECONDS)
            key, value = ours.recv()
            assert key != "error", value
            results[key] = value
    finally:
        process.terminate()
        process.join()
    return results


@pytest.fixture(scope="module")
def spawned():
    """All levels in one process, for each costs seconds; returns numbers, no sessions."""
    jobs, hogwild, pairs, expected = {}, {}, {}, {}
    for level in LEVELS:
        hogwild[level], pairs[level] = cases.net().share_memory(), prepared(level)
        train(*pairs[level], count=1)
        jobs[level, "hogwild"] = (prepared_here, level, hogwild[level])
        jobs[level, "pair"] = (prepared_before, pairs[level])
        jobs[level, "again"] = (prepared_again, level, copy.deepcopy(pairs[level]))
        expected[level, "here"] = prepared_here(level, cases.net())
        again = copy.deepcopy(pairs[level])
        train(*again)
        expected[level, "again"] = result_of(*again)
        expected[level, "pair"] = prepared_before(copy.deepcopy(pairs[level]))
    results = run_in_child(jobs)
    for level in LEVELS:
        expected[level, "hogwild"] = cases.values(hogwild[level].parameters())
        results[level, "pair here"] = result_of(*pairs[level])
    loaded = [{k: v if isinstance(v, list) else pickle.loads(v) for k, v in each.items()}
              for each in (results, expected)]  # fmt: skip
    return tuple(loaded)


@every_level
def test_a_plain_model_is_prepared_and_trained_there_as_here_in_shared_memory(spawned, level):
    results, expected = spawned
    assert cases.same(results[level, "hogwild"], expected[level, "here"])
    _, masters = results[level, "hogwild"]
    assert cases.same(masters, expected[level, "hogwild"])


@every_level
def test_a_prepared_pair_trains_there_and_the_weights_and_masters_are_shared(spawned, level):
    results, expected = spawned
    assert cases.same(results[level, "pair"], expected[level, "pair"])
    assert cases.same(results[level, "pair"], results[level, "pair here"])


@every_level
def test_an_unpickled_pair_needs_a_session_to_scale_and_gets_one_by_restore(spawned, level):
    results, expected = spawned
    assert cases.same(results[level, "again"], expected[level, "again"])
