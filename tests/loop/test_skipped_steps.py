"""An overflow skips the step: weights and optimizer state stay as they were."""

import copy
import warnings

import pytest
import torch

from apex import amp
from tests.loop.test_written_masters import SAM, Lookahead
from tests.support import training as cases
from tests.support.host_reads import HostReads


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_later_evaluation_of_lbfgs_that_overflows_puts_everything_back(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["LBFGS closure"])
    cases.train_step_with_closure(model, optimizer, *cases.batch())
    before = cases.values(model.parameters()), cases.masters(optimizer)
    evaluations = []

    def closure():
        optimizer.zero_grad()
        evaluations.append(cases.batch() if not evaluations else cases.overflowing())
        return cases.backward(model, optimizer, *evaluations[-1])

    optimizer.step(closure)
    assert len(evaluations) == 2
    assert cases.same(before, (cases.values(model.parameters()), cases.masters(optimizer)))


@pytest.mark.parametrize("overflows_at", [1, 2])
@pytest.mark.parametrize("base", ["SGD", "fused SGD", "fused AdamW", "Adam"])
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_an_overflow_skips_the_step_of_the_optimizer_inside_a_sam(level, base, overflows_at):
    """In the form with two calls, which ``SAM.step`` does not see."""
    make = cases.OPTIMIZERS[base]
    model, optimizer = cases.prepared(
        level, lambda params: SAM(params, lambda groups, **_: make(groups)), loss_scale="dynamic"
    )

    def train(first, second):
        cases.backward(model, optimizer, *first)
        optimizer.first_step()
        cases.backward(model, optimizer, *second)
        optimizer.second_step()

    for batch in cases.batches(2):
        train(batch, batch)
    before = cases.values(model.parameters()), cases.masters(optimizer)
    state = copy.deepcopy(optimizer.base_optimizer.state_dict()["state"])
    train(*[cases.overflowing() if n == overflows_at else cases.batch() for n in (1, 2)])
    assert cases.same(before, (cases.values(model.parameters()), cases.masters(optimizer)))
    assert cases.same(state, optimizer.base_optimizer.state_dict()["state"])
    train(cases.batch(), cases.batch())
    assert not cases.same(before[1], cases.masters(optimizer))


@pytest.mark.parametrize("level", cases.MIXED)
def test_what_wraps_a_prepared_optimizer_adds_no_host_read(level):
    name = "fused AdamW"
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS[name], loss_scale="dynamic")
    outer = Lookahead(optimizer)
    for batch in cases.batches(3):
        cases.backward(model, optimizer, *batch)
        with HostReads() as reads:
            outer.step()
        outer.zero_grad()
        assert reads.count == 0


def cleared(model, optimizer, clear):
    if clear == "optimizer":
        optimizer.zero_grad()
    elif clear == "model":
        model.zero_grad()
    else:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.zero_()


def step_with_kept_gradients(model, optimizer, clear, batches):
    """One pass a batch; the step takes the sum of copies of their gradients, as PCGrad does."""
    kept = []
    for x, y in batches:
        cleared(model, optimizer, clear)
        cases.backward(model, optimizer, x, y)
        kept.append(cases.grads(model.parameters()))
    cleared(model, optimizer, clear)
    for param, *grads in zip(model.parameters(), *kept, strict=True):
        param.grad = sum(grads)
    optimizer.step()


def test_delay_overflow_check_moves_the_scale_once_for_two_passes():
    model, optimizer = cases.prepared("O1")
    cases.backward(model, optimizer, *cases.overflowing(), delay_overflow_check=True)
    assert cases.loss_scale() == 2.0**16
    cases.backward(model, optimizer, *cases.batch())
    assert cases.loss_scale() == 2.0**15


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("name", ["fused AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_scheduler_warns_of_nothing_when_the_first_step_overflows(level, name, scheduler_first):
    model = cases.net()
    optimizer = cases.OPTIMIZERS[name](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "fp16 is emulated")
        if scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic"
        )
        if not scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        lr = optimizer.param_groups[0]["lr"]
        for x, y in cases.batches(3, overflow_at={0}):
            cases.train_step(model, optimizer, x, y)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == lr / 8


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scheduler_made_before_initialize_does_not_bypass_the_skip(level):
    model = cases.net()
    optimizer = cases.sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = cases.values(model.parameters())
    cases.train_step(model, optimizer, *cases.overflowing())
    scheduler.step()
    assert cases.same(before, cases.values(model.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_step_hooks_run_for_taken_steps(level):
    model, optimizer = cases.prepared(level)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    cases.train_step(model, optimizer, *cases.batch())
    assert calls == ["before", "after"]


# -- step_was_skipped ------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_step_was_skipped_tells_each_step(level, name):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS[name], loss_scale="dynamic")
    train = cases.stepper(cases, name)
    assert not amp.step_was_skipped(optimizer)
    answers = []
    for x, y in cases.batches(5, overflow_at={0, 3}):
        train(model, optimizer, 0.01 * x, 0.01 * y)
        answer = amp.step_was_skipped(optimizer)
        assert (answer.dtype, answer.shape) == (torch.bool, ())
        assert amp.step_was_skipped(optimizer, on_host=True) is answer.item()
        answers.append(answer)
    assert [answer.item() for answer in answers] == [True, False, False, True, False]


def test_nothing_is_skipped_where_amp_is_disabled_or_absent():
    _, disabled = cases.prepared("O1", enabled=False)
    for optimizer in (disabled, cases.sgd(cases.net().parameters())):
        assert amp.step_was_skipped(optimizer).item() is False
        assert amp.step_was_skipped(optimizer, on_host=True) is False
    with pytest.raises(TypeError, match="instead of an optimizer"):
        amp.step_was_skipped(cases.net())


def test_asking_reads_nothing_on_the_host():
    model, optimizer = cases.prepared("O2", cases.OPTIMIZERS["fused AdamW"])
    with HostReads() as reads:
        cases.train_step(model, optimizer, *cases.overflowing())
        skipped = amp.step_was_skipped(optimizer)
    assert (reads.count, bool(skipped)) == (0, True)
