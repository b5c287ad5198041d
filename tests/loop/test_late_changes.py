"""What is written into a model between ``initialize`` and its first backward pass."""

import pytest
import torch

from apex import amp
from tests.support import training as cases

MASTERS = ["O2", "O5"]


def written(level, write, **options):
    """Returns model and optimizer after a write into the model and one step that moves nothing."""
    model, optimizer = cases.prepared(level, lambda params: cases.sgd(params, lr=0.0), **options)
    write(model[0].weight)
    cases.train_step(model, optimizer, *cases.batch())
    return model, optimizer


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize(
    "write",
    [lambda w: w.data.fill_(2.0), lambda w: torch.nn.init.constant_(w, 2.0)],
    ids=["data", "init"],
)
def test_a_write_before_the_first_pass_reaches_the_masters(level, write):
    model, optimizer = written(level, write)
    assert torch.equal(model[0].weight.float(), torch.full((8, 4), 2.0))
    assert torch.equal(next(amp.master_params(optimizer)), torch.full((8, 4), 2.0))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
@pytest.mark.parametrize("counted", [True, False])
def test_masters_that_a_script_asks_for_before_the_first_pass_hold_what_it_wrote(level, counted):
    model, optimizer = cases.prepared(level, lambda params: cases.sgd(params, lr=0.0))
    weights = list(model.parameters())
    exact = cases.masters(optimizer)
    if counted:
        weights[0].data = torch.full_like(weights[0], 2.0)
    else:
        weights[0].data.fill_(2.0)
    read = cases.masters(optimizer)
    assert torch.equal(read[0], torch.full((8, 4), 2.0))
    assert cases.same(read[1:], exact[1:])
    for master in amp.master_params(optimizer):  # as a WGAN clips
        master.data.clamp_(-1.0, 1.0)
    cases.train_step(model, optimizer, *cases.batch())
    assert torch.equal(model[0].weight.float(), torch.ones(8, 4))
    assert cases.same(cases.masters(optimizer)[1:], exact[1:])


@pytest.mark.parametrize("level", MASTERS)
def test_a_write_for_the_first_pass_is_found_after_a_script_has_asked_for_masters(level):
    model, optimizer = cases.prepared(level, lambda params: cases.sgd(params, lr=0.0))
    cases.masters(optimizer)
    model[0].weight.data.fill_(2.0)
    cases.train_step(model, optimizer, *cases.batch())
    assert torch.equal(next(amp.master_params(optimizer)), torch.full((8, 4), 2.0))


@pytest.mark.parametrize("level", MASTERS)
def test_a_write_before_the_first_closure_reaches_the_masters(level):
    model, optimizer = cases.prepared(level, lambda params: cases.sgd(params, lr=0.0))
    model[0].weight.data.fill_(2.0)
    cases.train_step_with_closure(model, optimizer, *cases.batch())
    assert torch.equal(model[0].weight.float(), torch.full((8, 4), 2.0))


@pytest.mark.parametrize("level", MASTERS)
def test_unwritten_masters_keep_their_exact_values(level):
    exact = cases.values(cases.net().parameters())
    _, optimizer = written(level, lambda weight: None)
    assert cases.same(cases.masters(optimizer), exact)


@pytest.mark.parametrize("level", MASTERS)
def test_masters_written_before_the_first_pass_stay(level):
    model, optimizer = cases.prepared(level, lambda params: cases.sgd(params, lr=0.0))
    next(amp.master_params(optimizer)).data.fill_(1 / 3)
    cases.train_step(model, optimizer, *cases.batch())
    assert torch.equal(next(amp.master_params(optimizer)), torch.full((8, 4), 1 / 3))
    assert torch.equal(model[0].weight, torch.full((8, 4), 1 / 3).to(model[0].weight.dtype))
