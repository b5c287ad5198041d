"""Ctrl-C in the middle of a pass: the gradients are those from before, and the next pass works."""

import copy
import signal

import pytest
import torch

from apex import amp
from tests.training import cases


@pytest.fixture(autouse=True)
def _heeds_ctrl_c():
    """As in a terminal: a shell's background jobs ignore SIGINT, and so do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting(torch.autograd.Function):
    """Sends this process SIGINT from inside its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        signal.raise_signal(signal.SIGINT)
        return grad


def by_hook(model, batch):
    def interrupt(grad):
        raise KeyboardInterrupt

    def add_hook(module, args, output):
        output.register_hook(interrupt)

    # The last layer's gradients are there by then, the first one's are not.
    with model[1].register_forward_hook(add_hook):
        return cases.loss_of(model, *batch)


def by_signal(model, batch):
    with model[1].register_forward_hook(lambda *args: Interrupting.apply(args[-1])):
        return cases.loss_of(model, *batch)


def state(model, optimizer):
    params = list(amp.master_params(optimizer))
    # The model's own gradients of an interrupted pass are gone: they are scaled.
    return cases.values(params), cases.grads(params), dict(amp.state_dict()), optimizer.state_dict()


@pytest.mark.parametrize("loss", [by_hook, by_signal], ids=["hook", "signal"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_interrupt_inside_backward_leaves_the_gradients_from_before(level, loss):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["Adam"])
    cases.train_step(model, optimizer, *cases.batch())
    optimizer.zero_grad()
    cases.backward(model, optimizer, *cases.batch(2))
    before = copy.deepcopy(state(model, optimizer))
    interrupted = loss(model, cases.batch(3))
    with (
        pytest.raises(KeyboardInterrupt),
        amp.scale_loss(interrupted, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert cases.same(state(model, optimizer), before)
    assert torch._C._len_torch_function_stack() == 0
    assert torch.is_autocast_enabled("cpu") is (level == "O1")


@pytest.mark.parametrize("loss", [by_hook, by_signal], ids=["hook", "signal"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_after_an_interrupt_training_goes_on_as_if_nothing_had_happened(level, loss):
    interrupted, plain = (cases.prepared(level, cases.OPTIMIZERS["Adam"]) for _ in range(2))
    for step, (x, y) in enumerate(cases.batches(3)):
        cases.train_step(*plain, x, y)
        model, optimizer = interrupted
        if step == 1:
            with (
                pytest.raises(KeyboardInterrupt),
                amp.scale_loss(loss(model, (x, y)), optimizer) as scaled_loss,
            ):
                scaled_loss.backward()
        cases.train_step(model, optimizer, x, y)
    assert cases.same(cases.masters(interrupted[1]), cases.masters(plain[1]))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_interrupt_inside_forward_leaves_no_cast_region(level):
    model, _ = cases.prepared(level)

    def interrupt(*args):
        signal.raise_signal(signal.SIGINT)

    with model[2].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        model(cases.batch()[0])
    assert torch._C._len_torch_function_stack() == 0
    with amp.disable_casts():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
    assert model(cases.batch()[0]).dtype is cases.LEVELS[level].compute
