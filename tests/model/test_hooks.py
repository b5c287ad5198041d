"""Hooks of models, tensors and optimizers: once each, in order, in the level's dtypes."""

from contextlib import contextmanager

import pytest
import torch

from apex import amp
from tests.model.cases import LEVELS
from tests.support import training as cases
from tests.support.reference.loops import Loop

every_level = pytest.mark.parametrize("level", LEVELS)
before_and_after = pytest.mark.parametrize("when", ["before initialize", "after initialize"])


def initialized(level, model, optimizers):
    return amp.initialize(model, optimizers, opt_level=level, verbosity=0)


class Log(list):
    """What the hooks of a model and its optimizer saw, in order."""

    def note(self, name, *tensors):
        self.append((name, *(tensor.dtype for tensor in tensors)))

    def attach(self, model, optimizer):
        last = model[2]
        note = self.note
        model.register_forward_pre_hook(lambda m, args: note("forward pre", *args))
        model.register_forward_hook(lambda m, args, out: note("forward", *args, out))
        last.register_forward_pre_hook(lambda m, args: note("layer pre", *args))
        last.register_forward_hook(lambda m, args, out: note("layer", *args, out))
        model.register_full_backward_pre_hook(lambda m, grads: note("backward pre", *grads))
        model.register_full_backward_hook(lambda m, inner, outer: note("backward", *inner, *outer))
        last.register_full_backward_hook(lambda m, inner, outer: note("layer back", *inner, *outer))
        last.weight.register_hook(lambda grad: note("gradient", grad))
        last.weight.register_post_accumulate_grad_hook(lambda p: note("accumulated", p, p.grad))
        model.register_state_dict_pre_hook(lambda *args: note("save pre"))
        model.register_state_dict_post_hook(lambda *args: note("save"))
        model.register_load_state_dict_pre_hook(lambda m, state, *args: note("load pre"))
        model.register_load_state_dict_post_hook(lambda *args: note("load"))
        optimizer.register_step_pre_hook(lambda *args: note("step pre"))
        optimizer.register_step_post_hook(lambda *args: note("step"))
        optimizer.register_state_dict_pre_hook(lambda *args: note("opt save pre"))
        optimizer.register_state_dict_post_hook(lambda *args: note("opt save"))
        optimizer.register_load_state_dict_pre_hook(lambda *args: note("opt load pre"))
        optimizer.register_load_state_dict_post_hook(lambda *args: note("opt load"))

    def taken(self):
        """Returns the entries and forgets them."""
        entries = list(self)
        self.clear()
        return entries


def use(model, optimizer, backward):
    x, y = cases.batch()
    backward(model, optimizer, x.requires_grad_(), y)
    optimizer.step()
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def plain_backward(model, optimizer, x, y):
    cases.loss_of(model, x, y).backward()


def plain_log():
    log, model = Log(), cases.net()
    optimizer = cases.sgd(model.parameters())
    log.attach(model, optimizer)
    use(model, optimizer, plain_backward)
    return log.taken()


@before_and_after
@every_level
def test_every_hook_runs_once_and_in_order_also_after_restore(level, when):
    expected = plain_log()
    log, model = Log(), cases.net()
    optimizer = cases.sgd(model.parameters())
    if when == "before initialize":
        log.attach(model, optimizer)
    initialized(level, model, optimizer)
    if when == "after initialize":
        log.attach(model, optimizer)
    use(model, optimizer, cases.backward)
    assert [name for name, *_ in log.taken()] == [name for name, *_ in expected]
    amp.restore(model, optimizer)
    optimizer.zero_grad()
    use(model, optimizer, plain_backward)
    assert log.taken() == expected


@before_and_after
@every_level
def test_hooks_see_the_dtypes_of_the_level(level, when):
    rules = cases.LEVELS[level]
    log, model = Log(), cases.net()
    optimizer = cases.sgd(model.parameters())
    if when == "before initialize":
        log.attach(model, optimizer)
    initialized(level, model, optimizer)
    if when == "after initialize":
        log.attach(model, optimizer)
    use(model, optimizer, cases.backward)
    seen = {name: set(dtypes) for name, *dtypes in log}
    for name in ("layer pre", "layer", "layer back"):
        assert seen[name] == {rules.compute}
    for name in ("gradient", "accumulated"):
        assert seen[name] == {rules.stored}
    # The model as a whole takes fp32; it gives it, too, where amp casts outputs.
    assert seen["forward pre"] == {torch.float32}
    assert seen["backward pre"] == {rules.compute if level in ("O1", "O4") else torch.float32}


def optimizer_each(model):
    return {param: cases.sgd([param]) for param in model.parameters()}


@contextmanager
def stepping_in_backward(optimizers):
    """Steps each parameter as soon as its gradient is there."""

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [param.register_post_accumulate_grad_hook(step) for param in optimizers]
    try:
        yield
    finally:  # a hook that holds its parameter is never collected
        for handle in handles:
            handle.remove()


@before_and_after
@pytest.mark.parametrize("scaled", [False, True], ids=["plain backward", "scale_loss"])
@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_optimizers_may_step_in_the_backward_pass(level, scaled, when):
    model = cases.net()
    optimizers = optimizer_each(model)
    loop = Loop(level, model.parameters(), cases.sgd)
    if when == "after initialize":
        initialized(level, model, list(optimizers.values()))
    with stepping_in_backward(optimizers):
        if when == "before initialize":
            initialized(level, model, list(optimizers.values()))
        for x, y in cases.batches(3):
            if scaled:
                cases.backward(model, list(optimizers.values()), x, y)
            else:
                cases.loss_of(model, x, y).backward()
            loop.train_step(x, y)
    assert cases.same(cases.values(model.parameters()), cases.values(loop.model))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_in_the_backward_pass_of_a_scaled_loss_is_refused(level):
    model = cases.net()
    optimizers = optimizer_each(model)
    initialized(level, model, list(optimizers.values()))
    before = cases.values(model.parameters())
    refused = pytest.raises(RuntimeError, match="Step after the pass, or use a loss scale of 1")
    with stepping_in_backward(optimizers), refused:
        cases.backward(model, list(optimizers.values()), *cases.batch())
    assert cases.same(before, cases.values(model.parameters()))
