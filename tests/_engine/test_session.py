"""What one ``initialize`` built: it lives with its objects and ends with them."""

import copy
import gc
import weakref

import pytest
import torch

from apex import amp
from apex._core.policy import Policy
from apex._engine import model as conversion
from apex._engine.model import ModelPlan
from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.session import Session
from tests.training import cases


def session_of(pair):
    return binding_of(pair[1]).owner


@pytest.fixture
def no_collection():
    """Only reference counts free what a test drops."""
    # torch imports its compiler with the first optimizer, and that import holds frames.
    cases.sgd(cases.net().parameters())
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", cases.OPTIMIZERS)
@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_session_ends_with_its_model_and_optimizer_without_a_collection(level, name):
    pair = cases.prepared(level, cases.OPTIMIZERS[name])
    alive = weakref.ref(session_of(pair))
    for x, y in cases.batches(2):
        cases.stepper(cases, name)(*pair, x, y)
    assert pair[1]._amp_stash.all_fp32_params
    del pair
    assert alive() is None


@pytest.mark.parametrize("keep", [0, 1])
def test_a_session_lives_while_its_model_or_optimizer_does(keep):
    pair = cases.prepared("O1")
    alive = weakref.ref(session_of(pair))
    kept = pair[keep]
    del pair
    gc.collect()
    assert alive() is not None
    del kept
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_op_casts_end_with_the_session(level):
    pair = cases.prepared(level)
    assert torch.is_autocast_enabled("cpu")
    del pair
    gc.collect()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", cases.LEVELS)
def test_restore_ends_the_session(level):
    pair = cases.prepared(level)
    alive = weakref.ref(session_of(pair))
    amp.restore(*pair)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("level", cases.LEVELS)
def test_rounds_of_init_train_delete_give_the_results_of_the_first(level):
    def trained():
        pair = cases.prepared(level, cases.OPTIMIZERS["Adam"])
        for x, y in cases.batches(2):
            cases.train_step(*pair, x, y)
        return cases.masters(pair[1]), cases.loss_scale()

    first = trained()
    assert all(cases.same(first, trained()) for _ in range(5))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_exact_values_are_the_masters_of_original_and_copy(level):
    pair = cases.prepared(level)
    copied = copy.deepcopy(pair)
    cases.train_step(*copied, *cases.batch())
    session = session_of(pair)
    for model, optimizer in (pair, copied):
        for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert session.master_of(param) is master


class Unconvertible(torch.optim.SGD):
    """Cannot be bound: its groups refuse masters."""

    refuses = False

    @property
    def param_groups(self):
        if self.refuses:
            raise ZeroDivisionError
        return self._groups

    @param_groups.setter
    def param_groups(self, value):
        self._groups = value


def test_a_failed_preparation_leaves_everything_as_it_was():
    model = cases.net()
    before = cases.values(model.parameters())
    good, bad = cases.sgd(model.parameters()), Unconvertible(model.parameters())
    bad.__dict__["refuses"] = True
    policy = Policy("O5", torch.bfloat16, None, torch.float32, True, True, 1.0)
    plan = ModelPlan(torch.bfloat16, torch.bfloat16, torch.float32)
    with pytest.raises(ZeroDivisionError):
        Session(policy).prepare([model], [good, bad], plan)
    assert not conversion.is_converted(model)
    assert type(good) is torch.optim.SGD
    assert good.param_groups[0]["params"][0] is model[0].weight
    assert cases.same(before, list(model.parameters()))
