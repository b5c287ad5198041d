"""Memory runs out at one operator after another: nothing is lost, and the call works again."""

import copy
import functools

import pytest
import torch

from apex import amp
from apex._engine.autocast.blocks import autocast_depth
from apex._engine.optimizer import one_pass
from apex._engine.optimizer.optimizer_class import binding_of
from apex._torch import blocks
from tests.faults.memory import live_sessions, snapshot, sweep
from tests.training import cases

pytestmark = pytest.mark.usefixtures("kernels_stay")

every_failure = pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
LEVELS = ("O1", "O2", "O3", "O5")
ADDING = (
    *("aten::as_strided", "aten::_foreach_copy_"),
    *("aten::_foreach_mul_.Tensor", "aten::_foreach_add_.List"),
)
"""Operators that add to sums in fp32 block by block: views, and writes to memory that is there."""


def adam(params):
    first, *rest = params
    return torch.optim.Adam([{"params": [first]}, {"params": rest}], lr=0.1, foreach=True)


@functools.cache
def trained():
    model = cases.net()
    optimizer = adam(model.parameters())
    for x, y in cases.batches(2):
        cases.loss_of(model, x, y).backward()
        optimizer.step()
    return model, optimizer


def plain():
    """A model and an optimizer that have trained without amp, gradients included."""
    model, optimizer = copy.deepcopy(trained())
    for param, source in zip(model.parameters(), trained()[0].parameters(), strict=True):
        param.grad = source.grad.clone()
    return model, optimizer


def trained_on(model, optimizer):
    for x, y in cases.batches(2):
        cases.train_step(model, optimizer, x, y)
    return cases.values(model.parameters())


def prepared(level):
    """The same, prepared, after one pass and a step; a second pass has its gradients there."""
    model, optimizer = plain()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    cases.train_step(model, optimizer, *cases.batch())
    cases.backward(model, optimizer, *cases.batch(2))
    return model, optimizer


@pytest.mark.parametrize(
    ("level", "lasting"),
    [*((level, False) for level in LEVELS), ("O3", True), ("O5", True)],
    ids=str,
)
def test_initialize_is_all_or_nothing(level, lasting):
    def prepare(model, optimizer):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    trained()  # before any casts are on
    alive = live_sessions()
    for made, before in sweep(plain, prepare, lasting=lasting):
        assert [snapshot(each) for each in made] == before
        assert len(amp._amp_state.sessions()) == alive
        assert not torch.is_autocast_enabled("cpu")
        prepare(*made)
    result = trained_on(*made)
    made = plain()
    prepare(*made)
    assert cases.same(result, trained_on(*made))


@every_failure
@pytest.mark.parametrize("level", LEVELS)
def test_forward_leaves_nothing_behind(level, lasting):
    x, _ = cases.batch(3)
    expected = prepared(level)[0](x).detach()

    def forward(model, optimizer):
        model(x)

    for (model, optimizer), before in sweep(lambda: prepared(level), forward, lasting=lasting):
        # By repr: fp16 Adam, at O3, makes NaNs, which equal nothing.
        assert repr([snapshot(each) for each in (model, optimizer)]) == repr(before)
        assert torch.is_autocast_enabled("cpu") is (level == "O1")
        assert casts_off_depth() == 0
        assert cases.same(model(x).detach(), expected)


# -- one pass and one step -----------------------------------------------------------------


def two_optimizers(level, device="cpu"):
    """A model with two optimizers, after one step, with the gradients of a second pass."""
    model = cases.net().to(device)
    optimizers = [cases.sgd(model[2].parameters()), adam(list(model[0].parameters()))]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    for seed in (1, 2):
        x, y = cases.batch(seed)
        block(model, *optimizers, x.to(device), y.to(device)).__exit__(None, None, None)
        if seed == 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return model, *optimizers


def block(model, first, second, x, y):
    """Enters a ``scale_loss`` block, runs backward, and leaves the end to the caller."""
    made = amp.scale_loss(cases.loss_of(model, x, y), [first, second])
    made.__enter__().backward()
    return made


def facts(model, *optimizers):
    """What can be seen of one pass: masters and their gradients, state, scale, pending skips."""
    bindings = [binding_of(optimizer) for optimizer in optimizers]
    flags = [
        (each.gradients.overflow.checked, each.gradients.state, each.gradients.open_pass)
        for each in bindings
    ]
    scaler = bindings[0].owner.scalers[0]
    seen = [snapshot(each)[2:] for each in optimizers]
    return seen, flags, scaler.read_scale(), scaler.read_clean_steps(), len(scaler.open_blocks)


@every_failure
@pytest.mark.parametrize("data", [cases.batch, cases.overflowing], ids=["finite", "overflow"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_the_end_of_a_block_unscales_all_or_leaves_the_gradients_from_before(
    device, level, data, lasting, by_blocks, monkeypatch
):
    x, y = (tensor.to(device) for tensor in data(3))
    expected = two_optimizers(level, device)
    block(*expected, x, y).__exit__(None, None, None)
    before = []

    def make():
        made = two_optimizers(level, device)
        before.append(facts(*made))
        return *made, block(*made, x, y)

    def end(*made):
        made[-1].__exit__(None, None, None)

    # The clamp of the scale, one number in place, and its copy, into memory that is there, come
    # after the scale has moved.
    spare = ("aten::clamp_", "aten::copy_") if device == "cuda" else ("aten::clamp_",)
    if by_blocks:
        monkeypatch.setattr(one_pass, "least_elements", 1)
        monkeypatch.setattr(blocks, "_LEAST", 16)
        spare += ADDING
    for (*made, _), _ in sweep(make, end, lasting=lasting, spare=spare):
        assert same_facts(facts(*made), before[-1])
        assert casts_off_depth() == 0
        block(*made, x, y).__exit__(None, None, None)
        assert same_facts(facts(*made), facts(*expected))


@every_failure
@pytest.mark.parametrize("level", ["O1", "O2"])  # at a scale of 1 no operator runs
def test_a_block_that_cannot_begin_leaves_the_gradients_from_before(level, lasting):
    x, y = cases.batch(3)
    expected = two_optimizers(level)
    block(*expected, x, y).__exit__(None, None, None)

    def make():
        made = two_optimizers(level)
        return *made, amp.scale_loss(cases.loss_of(made[0], x, y).double(), list(made[1:]))

    def begin(*made):
        made[-1].__enter__()
        made[-1].__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    first = facts(*two_optimizers(level))
    # Without memory for it, the model does not show the earlier gradients again: nothing is lost.
    for (*made, _), _ in sweep(make, begin, lasting=lasting, spare=("aten::_to_copy",)):
        assert same_facts(facts(*made), first)
        block(*made, x, y).__exit__(None, None, None)
        assert same_facts(facts(*made), facts(*expected))


def same_facts(first, second):
    """Compares with NaN equal to NaN: the gradients of an overflow hold some."""
    return repr(without_ids(first)) == repr(without_ids(second))


def without_ids(value):
    (seen, *rest) = value
    return [(state, [tensors[1:] for tensors in kept]) for state, kept in seen], rest


def casts_off_depth():
    return autocast_depth() + torch._C._len_torch_function_stack()


# The rounding of the masters into the model is written where there is memory.
ROUNDING = ("aten::_foreach_copy_",)


@every_failure
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_failed_keeps_gradients_and_the_model_follows_the_masters(level, name, lasting):
    def make():
        model, optimizer = cases.prepared(level, cases.OPTIMIZERS[name])
        cases.train_step(model, optimizer, *cases.batch())
        cases.backward(model, optimizer, *cases.batch(2))
        return model, optimizer

    def step(model, optimizer):
        optimizer.step()

    grads = cases.grads(amp.master_params(make()[1]))
    for (model, optimizer), _ in sweep(make, step, lasting=lasting, spare=ROUNDING):
        agree(optimizer)
        assert cases.same(cases.grads(amp.master_params(optimizer)), grads)
        assert casts_off_depth() == 0
        optimizer.step()
        agree(optimizer)
        cases.train_step(model, optimizer, *cases.batch(3))
        agree(optimizer)


@every_failure
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_with_a_closure_that_failed_has_changed_nothing(level, lasting):
    def make():
        model, optimizer = cases.prepared(level, cases.OPTIMIZERS["LBFGS closure"])
        cases.train_step_with_closure(model, optimizer, *cases.batch())
        return model, optimizer

    def step(model, optimizer):
        cases.train_step_with_closure(model, optimizer, *cases.batch(2))

    expected = make()
    step(*expected)
    made_values = cases.masters(make()[1])
    for (model, optimizer), _ in sweep(make, step, lasting=lasting, spare=ROUNDING, every=5):
        assert cases.same(cases.masters(optimizer), made_values)
        agree(optimizer)
        step(model, optimizer)
        assert cases.same(cases.masters(optimizer), cases.masters(expected[1]))


def agree(optimizer):
    stash = optimizer._amp_stash
    for low, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        assert cases.same(low.detach(), master.detach().to(low.dtype))


# -- the rest ------------------------------------------------------------------------------


@every_failure
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_zero_grad_works_when_called_again(level, lasting):
    def zero(model, optimizer):
        optimizer.zero_grad(set_to_none=False)

    for (_, optimizer), _ in sweep(lambda: prepared(level), zero, lasting=lasting):
        zero(None, optimizer)
        assert all(not grad.any() for grad in cases.grads(amp.master_params(optimizer)))


@every_failure
@pytest.mark.parametrize("level", ["O2", "O5"])  # without masters no operator runs
def test_a_group_is_added_whole_or_not_at_all(level, lasting):
    def make():
        model = cases.net()
        optimizer = adam(list(model[0].parameters()))
        model[2].requires_grad_(False)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        model[2].requires_grad_(True)  # without masters yet, which others have from the beginning
        return model, optimizer

    def add(model, optimizer):
        optimizer.add_param_group({"params": list(model[2].parameters())})

    for (model, optimizer), before in sweep(make, add, lasting=lasting):
        assert [snapshot(each) for each in (model, optimizer)] == before
        add(model, optimizer)
        cases.train_step(model, optimizer, *cases.batch())
        agree(optimizer)
        assert len(optimizer.param_groups) == 3


@every_failure
@pytest.mark.parametrize("level", LEVELS)
def test_loading_leaves_masters_and_model_alike_and_works_when_called_again(level, lasting):
    source = prepared(level)
    states = copy.deepcopy([each.state_dict() for each in source])
    trained_on(*source)

    def load(model, optimizer):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])

    def make():
        model, optimizer = prepared(level)
        trained_on(model, optimizer)
        return model, optimizer

    expected = cases.masters(prepared(level)[1])
    for (model, optimizer), _ in sweep(make, load, lasting=lasting):
        agree(optimizer)
        load(model, optimizer)
        assert cases.same(cases.masters(optimizer), expected)
        assert cases.same(optimizer.state_dict(), states[1])
        agree(optimizer)


@every_failure
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_restore_works_when_called_again(level, lasting):
    def restore(model, optimizer):
        amp.restore(model, optimizer)

    expected = prepared(level)
    restore(*expected)
    for made, _ in sweep(lambda: prepared(level), restore, lasting=lasting):
        restore(*made)
        assert cases.same(
            cases.values(made[0].parameters()), cases.values(expected[0].parameters())
        )
        assert cases.same(made[1].state_dict(), expected[1].state_dict())
