"""Mistakes in a loop that raise nothing are found without a host read, and warned of once."""

import copy
import re
import sys
import warnings

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as cases

FP16 = pytest.mark.parametrize("level", ["O1", "O2"])
EVERY = pytest.mark.parametrize("level", cases.LEVELS)

NOT_FROM_SCALED = r"did not start at scaled_loss.*(?s:.*)scaled_loss\.backward\(\)"
LATE = r"after the end of its amp\.scale_loss block(?s:.*)Call it inside"
CLIPPED = r"Gradients were changed inside amp\.scale_loss(?s:.*)Clip after the block"
MASTERS = r"master_params was called inside(?s:.*)Clip after the block"
PLAIN = r"gradients of a plain loss\.backward\(\)(?s:.*)with amp\.scale_loss"
EMPTY = r"before any backward pass(?s:.*)optimizer\.step\(\)"


def unscaled(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = cases.loss_of(model, x, y)
    with amp.scale_loss(loss, optimizer):
        loss.backward()
    optimizer.step()


def after_the_block(model, optimizer, x, y):
    optimizer.zero_grad()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        pass
    scaled_loss.backward()
    optimizer.step()


def clipped_inside(model, optimizer, x, y):
    optimizer.zero_grad()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def clipped_by_value_inside(model, optimizer, x, y):
    optimizer.zero_grad()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.zero_grad()


def masters_inside(model, optimizer, x, y):
    optimizer.zero_grad()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()


def plain(model, optimizer, x, y):
    optimizer.zero_grad()
    cases.loss_of(model, x, y).backward()
    optimizer.step()


def plain_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = cases.loss_of(model, x, y)
        loss.backward()
        return loss

    optimizer.step(closure)


def swapped(model, optimizer, x, y):
    optimizer.zero_grad()
    optimizer.step()
    cases.backward(model, optimizer, x, y)


def no_backward(model, optimizer, x, y):
    optimizer.zero_grad()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer):
        pass
    optimizer.step()


def cleared_inside(model, optimizer, x, y):
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.zero_grad()
    optimizer.step()


def of_a_copy(model, optimizer, x, y):
    copied = copy.deepcopy(model)
    with amp.scale_loss(cases.loss_of(copied, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def assert_warns_once(level, train, message, optimizer="SGD", **options):
    """Three iterations warn once, at a line of this file (Python 3.12 on)."""
    pair = cases.prepared(level, cases.OPTIMIZERS[optimizer], **options)
    data = [[0.01 * value for value in batch] for batch in cases.batches(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data:
            train(*pair, x, y)
    (warning,) = caught
    assert re.search(message, str(warning.message))
    assert warning.filename == __file__ or sys.version_info < (3, 12)


def clipped_weights(model, optimizer, x, y):
    optimizer.zero_grad()
    cases.backward(model, optimizer, x, y)
    optimizer.step()
    for param in model.parameters():
        param.data.clamp_(-0.01, 0.01)


def perturbed_weights(model, optimizer, x, y):
    """Finite differences, which restore the weights but for their rounding."""
    for share in (0.01, -0.02, 0.01):
        for param in model.parameters():
            param.data.add_(share)
    cases.train_step(model, optimizer, x, y)


class Preconditioner(torch.optim.Optimizer):
    """As those of K-FAC: writes the gradients of the model's parameters, and no weight."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(0.5)


@pytest.mark.parametrize("kind", ["SGD", "fused AdamW"])
@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_an_optimizer_of_the_models_own_16_bit_weights_is_warned_of_once(level, kind):
    model, optimizer = cases.prepared(level)
    cases.train_step(model, optimizer, *cases.batch())
    other = cases.OPTIMIZERS[kind](model.parameters())

    def train(x, y):
        other.zero_grad()
        cases.loss_of(model, x, y).backward()
        other.step()

    with pytest.warns(UserWarning, match=r"amp has not prepared(?s:.*)amp\.initialize"):
        train(*cases.batch())
    train(*cases.batch())  # pytest makes warnings errors
    pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
    assert all(torch.equal(param, master.to(param.dtype)) for param, master in pairs)


@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_optimizer_of_other_weights_or_of_gradients_alone_is_no_mistake(level):
    model, optimizer = cases.prepared(level, loss_scale=1.0)
    x, y = cases.batch()
    plain = cases.net()
    cases.loss_of(plain, x, y).backward()
    cases.sgd(plain.parameters()).step()
    preconditioner = Preconditioner(model.parameters())
    cases.loss_of(model, x, y).backward()
    preconditioner.step()
    optimizer.step()


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_weights_put_back_but_for_their_rounding_are_no_mistake(level):
    pair = cases.prepared(level)
    for x, y in cases.batches(4):
        perturbed_weights(*pair, x, y)


@FP16
@pytest.mark.parametrize(
    ("train", "message"),
    [
        (unscaled, NOT_FROM_SCALED),
        (after_the_block, LATE),
        (clipped_inside, CLIPPED),
        (clipped_by_value_inside, CLIPPED),
        (plain, PLAIN),
        (plain_closure, PLAIN),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("loss_scale", [None, 128.0])
@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
def test_a_mistake_of_fp16_levels_is_warned_of_once(level, train, message, loss_scale, optimizer):
    assert_warns_once(level, train, message, optimizer, loss_scale=loss_scale)


@EVERY
@pytest.mark.parametrize("given", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
def test_a_pass_for_the_parameters_of_another_optimizer_is_warned_of(level, given, loss_scale):
    """It reaches only those of the first."""
    nets = [cases.net(), cases.net()]
    optimizers = [cases.OPTIMIZERS["SGD"](net.parameters()) for net in nets]
    nets, optimizers = amp.initialize(
        nets, optimizers, opt_level=level, loss_scale=loss_scale, verbosity=0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = cases.loss_of(nets[0], *cases.batch())
            with amp.scale_loss(loss, [optimizers[index] for index in given]) as scaled_loss:
                scaled_loss.backward()
    mistaken = given == [1] and loss_scale != 1.0
    assert ["reached no parameter of the optimizer" in str(w.message) for w in caught] == [
        True
    ] * mistaken
    assert not any(p._post_accumulate_grad_hooks for net in nets for p in net.parameters())


@pytest.mark.parametrize("level", cases.MIXED)
@pytest.mark.parametrize("way", ["forgotten", "given", "cleared", "zeroed", "own pass"])
def test_a_step_with_gradients_that_stay_scaled_is_warned_of(level, way):
    nets = [cases.net(), cases.net()]
    optimizers = [cases.sgd(net.parameters(), lr=1e-9) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
    first, second = optimizers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in cases.batches(3):
            loss = sum(cases.loss_of(net, x, y) for net in nets)
            with amp.scale_loss(loss, optimizers if way == "given" else first) as scaled_loss:
                scaled_loss.backward()
            first.step()
            if way in ("cleared", "zeroed", "own pass"):
                second.zero_grad(set_to_none=way != "zeroed")
            if way == "own pass":
                cases.backward(nets[1], second, x, y)
            second.step()
            first.zero_grad()
            second.zero_grad()
    found = ["did not get this optimizer" in str(each.message) for each in caught]
    assert sum(found) == (way == "forgotten")


@pytest.mark.parametrize("level", cases.MIXED)
@pytest.mark.parametrize("clears", [False, True])
def test_a_step_with_gradients_of_a_loss_that_was_only_scaled_is_warned_of(level, clears):
    model, optimizer = cases.prepared(level, cases.sgd, loss_scale=128.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in cases.batches(2):
            with amp.scale_loss(cases.loss_of(model, x, y), []) as scaled_loss:
                scaled_loss.backward()
            if clears:  # as after an attack on the inputs
                optimizer.zero_grad()
                cases.backward(model, optimizer, x, y)
            optimizer.step()
    assert ["did not get this optimizer" in str(each.message) for each in caught] == [True] * (
        not clears
    )


def test_clipping_the_masters_inside_the_block_is_warned_of():
    assert_warns_once("O1", masters_inside, CLIPPED)
    assert_warns_once("O2", masters_inside, MASTERS)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])
def test_an_optimizer_made_after_initialize_of_the_model_alone_is_warned_of(level, name):
    model = amp.initialize(cases.net(), opt_level=level, verbosity=0)
    optimizer = cases.OPTIMIZERS[name](model.parameters())
    cases.loss_of(model, *cases.batch()).backward()
    with pytest.warns(UserWarning, match="has not prepared steps 16-bit weights"):
        optimizer.step()


@EVERY
@pytest.mark.parametrize("train", [swapped, no_backward, cleared_inside, of_a_copy])
def test_a_step_before_any_backward_pass_is_warned_of(level, train):
    assert_warns_once(level, train, EMPTY)


@EVERY
def test_one_of_two_optimizers_without_a_gradient_is_no_mistake(level):
    model = cases.net()
    halves = [cases.OPTIMIZERS["SGD"](part.parameters()) for part in (model[:2], model[2:])]
    model, optimizers = amp.initialize(model, halves, opt_level=level, verbosity=0)
    with amp.scale_loss(model[0].weight.float().pow(2).mean(), optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in reversed(optimizers):
        optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
@pytest.mark.parametrize("train", [unscaled, after_the_block, clipped_inside, plain, plain_closure])
def test_the_same_at_a_scale_of_1_is_no_mistake(level, train):
    pair = cases.prepared(level)
    for x, y in cases.batches(2):
        train(*pair, x, y)


@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])
@pytest.mark.parametrize("unscale", [False, True])
def test_torch_s_grad_scaler_is_refused_where_it_would_not_unscale_masters(name, unscale):
    """Batch norm's fp32 gradients, which it does unscale, made it accept the others."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer = cases.prepared("O2", cases.OPTIMIZERS[name], model=net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = cases.masters(optimizer)
    scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"Remove the GradScaler(?s:.*)with amp\.scale_loss"):
        scaler.step(optimizer)
    assert cases.same(cases.masters(optimizer), before)


@EVERY
def test_torch_s_grad_scaler_may_scale_what_scale_loss_unscales(level):
    stepped = []
    for enabled in (False, True):
        model, optimizer = cases.prepared(level, loss_scale=2.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        loss = scaler.scale(cases.loss_of(model, *cases.batch()))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if level == "O3" and enabled:  # which GradScaler refuses for fp16 gradients
            continue
        scaler.step(optimizer)
        stepped.append(cases.masters(optimizer))
    assert cases.same(stepped[0], stepped[-1])


def test_a_mistake_does_not_change_what_the_step_does():
    stepped = []
    for show in ("ignore", "error"):
        model, optimizer = cases.prepared("O1", loss_scale=128.0)
        with warnings.catch_warnings():
            warnings.simplefilter(show)
            try:
                unscaled(model, optimizer, *cases.batch())
            except UserWarning:
                optimizer.step()
        stepped.append(cases.values(model.parameters()))
    assert cases.same(*stepped)
    assert not cases.same(stepped[0], cases.values(cases.net().parameters()))


@FP16
def test_inspection_ends(level):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    for _ in range(40):
        with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
            observed = scaled_loss._backward_hooks
            scaled_loss.backward()
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    assert observed is None


# -- what is no mistake ----------------------------------------------------------------------


def halve_and_backward(scaled_loss):
    (scaled_loss / 2).backward()


def twice(scaled_loss):
    scaled_loss.backward(retain_graph=True)
    scaled_loss.backward()


def by_autograd(scaled_loss):
    torch.autograd.backward([scaled_loss])


@FP16
@pytest.mark.parametrize("backward", [halve_and_backward, twice, by_autograd])
def test_other_ways_to_run_the_pass_are_no_mistake(level, backward):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
        backward(scaled_loss)
    optimizer.step()


@FP16
def test_one_gradient_changed_inside_the_block_is_no_mistake(level):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
        scaled_loss.backward()
        model[0].weight.grad[0].zero_()
    optimizer.step()


@FP16
def test_a_block_without_a_backward_pass_is_no_mistake(level):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    loss = cases.loss_of(model, *cases.batch())
    with amp.scale_loss(loss, optimizer):
        pass


@FP16
def test_a_step_that_only_makes_optimizer_state_is_no_mistake(level):
    _, optimizer = cases.prepared(level)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in amp.master_params(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()
