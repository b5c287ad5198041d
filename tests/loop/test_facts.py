"""Facts about gradients and overflows live with what they describe: none outlives it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex import amp
from tests.support import loops

SCALE = {"loss_scale": "dynamic", "max_loss_scale": 2.0**8}
"""A loss scale that fp16 gradients of a few units survive."""


def initialize(models, optimizers, level):
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **SCALE)


def made(level):
    return loops.prepared(level, model=loops.Weights(), **SCALE)


def failing_block(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise KeyError


def gradients(optimizer):
    return [param.grad[0].item() for param in amp.master_params(optimizer)]


def weights(model):
    return [param[0].item() for param in model.parameters()]


# -- gradients from before a pass, and delayed passes ----------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_group_added_inside_a_block_is_refused(level):
    model = loops.Weights()
    optimizer = loops.sgd([model.a])
    initialize(model, optimizer, level)
    with amp.scale_loss(model(a=1.0, b=1.0), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match="before the block, or after"):
            optimizer.add_param_group({"params": [model.b]})
    optimizer.add_param_group({"params": [model.b]})
    assert gradients(optimizer) == [1.0, 1.0]


def test_an_exception_leaves_what_was_added_to_a_delayed_pass_and_says_so(level):
    model, optimizer = made(level)
    loops.scaled_backward(model(a=1.0, b=1.0), optimizer, delay_unscale=True)
    said = pytest.warns(UserWarning, match=r"exception(?s:.*)optimizer\.zero_grad\(\)")
    with said, pytest.raises(KeyError):
        failing_block(model(a=4.0, b=4.0), optimizer)
    assert model.a.grad[0].item() == 5.0
    optimizer.zero_grad()
    loops.scaled_backward(model(a=2.0, b=2.0), optimizer)
    assert gradients(optimizer) == [2.0, 2.0]


def test_an_exception_leaves_the_gradients_of_others_as_before_the_block(level):
    """Those of another optimizer, and of a parameter that none steps."""
    model, optimizers = loops.two_optimizers(level, "abc", **SCALE)
    model(a=1.0, b=1.0, c=1.0).backward()
    with pytest.raises(KeyError):
        failing_block(model(a=4.0, b=4.0, c=4.0), optimizers[0])
    assert [param.grad[0].item() for param in model.parameters()] == [1.0] * 3


class Full(TorchDispatchMode):
    """Raises at one operator, as a device does that has no memory left."""

    def __init__(self, operators):
        super().__init__()
        self.left = operators + 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@loops.every(level=loops.MIXED, delay_unscale=[False, True])
def test_a_block_that_runs_out_of_memory_at_any_operator_leaves_earlier_gradients(
    level, delay_unscale
):
    """Its pass also reaches another optimizer, and a parameter that none steps."""
    model, optimizers = loops.two_optimizers(level, "abc", **SCALE)
    loops.scaled_backward(model(a=1.0, b=2.0, c=3.0), optimizers)
    for operators in range(100):
        loss = model(a=4.0, b=4.0, c=4.0)
        try:
            with Full(operators):
                loops.scaled_backward(loss, optimizers[0], delay_unscale=delay_unscale)
        except torch.OutOfMemoryError:
            assert model.a.grad[0] % 4.0 == 1.0  # with or without the block's own
        else:
            break
    assert 5 < operators < 99


def test_a_block_that_runs_out_of_memory_as_it_begins_leaves_the_gradients_of_all(level):
    """It takes over what another block has left of the second, before it puts those aside."""
    for operators in range(100):
        model, optimizers = loops.two_optimizers(level, **SCALE)
        loops.scaled_backward(model(a=1.0, b=2.0), optimizers[0])
        loss = model(a=4.0, b=4.0)
        try:
            with Full(operators):
                block = amp.scale_loss(loss, optimizers)
                block.__enter__()
        except torch.OutOfMemoryError:
            assert [*map(gradients, optimizers)] == [[1.0], [2.0]]
        else:
            block.__exit__(None, None, None)
            break
    assert 3 < operators < 99


def test_a_step_inside_a_delayed_block_takes_and_leaves_unscaled_gradients(level):
    model, optimizer = made(level)
    with amp.scale_loss(model(a=1.0, b=2.0), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert gradients(optimizer) == [1.0, 2.0]
    assert weights(model) == pytest.approx([0.9, 0.8], abs=0.01)


def test_gradients_cleared_after_a_delayed_block_are_not_checked_with_those_that_are_left(level):
    model, optimizers = loops.two_optimizers(level, **SCALE)
    loops.scaled_backward(model(a=1.0, b=1.0), optimizers, delay_unscale=True)
    optimizers[0].zero_grad()
    model(a=float("inf")).backward()
    optimizers[1].step()
    assert model.b[0].item() == pytest.approx(0.9, abs=0.01)


# -- an overflow -----------------------------------------------------------------------------


def test_an_overflow_in_another_s_block_lowers_only_the_scales_of_what_was_not_cleared(level):
    model, optimizers = loops.two_optimizers(level, num_losses=2, **SCALE)
    loops.scaled_backward(model(a=1.0, b=1.0), optimizers[0], loss_id=0)
    optimizers[1].zero_grad()
    loops.scaled_backward(model(a=1.0, b=float("inf")), optimizers[0], loss_id=1)
    optimizers[1].step()
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == [2.0**8, 2.0**7]


# What blocks of another optimizer, own ones and the script do to one gradient; whether it steps.
BLOCKS = {
    "inf": False,
    "inf other": False,
    "inf other own": False,
    "inf zero own": True,
    "inf none own": True,
    "inf none other own": True,
    "inf other zero own": True,
    "inf zero other own": True,
    "inf own zero own": False,
    "inf zeros own": True,
    "inf step fill own": True,
    "own inf step other own": False,
}


@pytest.mark.filterwarnings("ignore:Gradients of a skipped step")
@pytest.mark.parametrize(("moves", "steps"), BLOCKS.items())
@pytest.mark.parametrize("level", ["O1"])
def test_an_overflow_in_another_s_block_skips_unless_it_is_cleared(level, moves, steps):
    """In an own block, it skips also if it is cleared."""
    model, (other, own) = loops.two_optimizers(level, **SCALE)
    for move in moves.split():
        if move in ("zero", "zeros"):
            own.zero_grad(set_to_none=move == "zero")
        elif move == "none":
            model.b.grad = None
        elif move == "fill":
            model.b.grad.fill_(1.0)
        elif move == "step":
            own.step()
        elif move == "own":
            loops.scaled_backward(model(b=1.0), own)
        else:
            value = float("inf") if move == "inf" else 1.0
            loops.scaled_backward(model(a=1.0, b=value), other)
    own.step()
    assert (model.b[0].item() != 1.0) == steps


def overflowed(level, forgets, make_optimizer=loops.sgd):
    """An optimizer with an overflow, and what might make amp forget it."""
    nets = [loops.Weights(), loops.Weights()]
    first, second = make_optimizer(nets[0].parameters()), loops.sgd(nets[1].parameters())
    initialize(nets, [first, second], level)
    delays = forgets == "another's pass"
    loops.scaled_backward(nets[0](a=float("inf"), b=1.0), first, delay_overflow_check=delays)
    if delays:
        loops.scaled_backward(nets[1](a=1.0, b=1.0), second)
    elif forgets == "a step that raised":
        handle = first.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            first.step()
        handle.remove()
    elif forgets == "another device":
        loops.scaled_backward(nets[0](a=1.0, b=1.0).cuda(), first)
    return nets[0], first


FORGETTING = [
    ("another's pass", "SGD"),
    ("another's pass", "fused AdamW"),
    ("a step that raised", "fused AdamW"),
]


@pytest.mark.parametrize(("forgets", "name"), FORGETTING)
def test_an_overflow_is_remembered_until_a_step(level, forgets, name):
    model, optimizer = overflowed(level, forgets, loops.OPTIMIZERS[name])
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert weights(model) == [1.0, 1.0]
    loops.descend(model(a=1.0, b=1.0), optimizer)
    assert not amp.step_was_skipped(optimizer)
    assert weights(model) != [1.0, 1.0]


def test_a_delayed_overflow_is_found_after_another_model_of_its_optimizer_was_cleared(level):
    nets = [loops.Weights("a"), loops.Weights("b")]
    optimizer = loops.sgd([nets[0].a, nets[1].b])
    initialize(nets, optimizer, level)
    loss = nets[0](a=1.0) + nets[1](b=float("inf"))
    loops.scaled_backward(loss, optimizer, delay_unscale=True)
    nets[0].zero_grad()
    loops.scaled_backward(nets[0](a=1.0) + nets[1](b=1.0), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)


def test_an_overflow_whose_check_is_delayed_outlives_the_check_of_another_loss(level):
    """That check moves the scale, for a pass of the second optimizer."""
    model, (first, second) = loops.two_optimizers(level, num_losses=2, **SCALE)
    loops.scaled_backward(model(a=float("inf")), first, delay_overflow_check=True)
    loops.scaled_backward(model(b=1.0), second, delay_unscale=True)
    loops.scaled_backward(model(b=1.0), second, loss_id=1)
    loops.scaled_backward(model(a=1.0), first)
    first.step()
    assert amp.step_was_skipped(first)
    assert weights(model)[0] == 1.0


@pytest.mark.gpu
def test_an_overflow_is_remembered_when_the_next_loss_is_on_another_device(level):
    model, optimizer = overflowed(level, "another device")
    assert loops.loss_scale() == 2.0**7
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert weights(model) == [1.0, 1.0]


@pytest.mark.parametrize("delays", [False, True])
def test_restore_drops_the_gradients_of_an_overflow(level, delays):
    model, optimizer = made(level)
    loops.scaled_backward(model(a=float("inf"), b=1.0), optimizer, delay_unscale=delays)
    with pytest.warns(UserWarning, match=r"amp\.restore(?s:.*)overflow"):
        amp.restore(model, optimizer)
    optimizer.step()
    assert weights(model) == [1.0, 1.0]


@loops.every(hook=["register_step_pre_hook", "register_step_post_hook"], clips=[True, False])
def test_a_step_that_raised_in_a_hook_can_be_tried_again(level, clips, hook):
    """A post-hook runs after the update, which a second step then does again, as torch's does."""
    stepped = []
    for fails in (False, True):
        model, optimizer = made(level)
        loops.scaled_backward(model(a=3.0, b=4.0), optimizer)
        if clips:
            amp.clip_grad_norm_(optimizer, 1.0)
        if fails:
            handle = getattr(optimizer, hook)(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            handle.remove()
        elif "post" in hook:
            kept = [param.grad.clone() for param in amp.master_params(optimizer)]
            optimizer.step()
            for param, grad in zip(amp.master_params(optimizer), kept, strict=True):
                param.grad = grad
        optimizer.step()
        stepped.append(loops.masters(optimizer))
    assert loops.same(*stepped)
