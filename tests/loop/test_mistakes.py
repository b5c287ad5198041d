"""Mistakes in a loop that raise nothing are found without a host read, and warned of once."""

import copy
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex.optimizers import FusedAdam
from tests.support import loops

fp16 = pytest.mark.parametrize("level", ["O1", "O2"])

NOT_FROM_SCALED = r"^A backward pass inside(?s:.*)scaled_loss\.backward\(\)"
LATE = r"after the end of its amp\.scale_loss block(?s:.*)Call it inside"
CLIPPED = r"Gradients were changed, or amp\.master_params(?s:.*)Clip after the block"
SECOND = r"second backward pass inside(?s:.*)loss \+ other_loss"
PLAIN = r"gradients of a plain loss\.backward\(\)(?s:.*)with amp\.scale_loss"
EMPTY = r"before any backward pass(?s:.*)optimizer\.step\(\)(?s:.*)another model's"
ASSIGNED = r"assigned inside amp\.scale_loss(?s:.*)optimizer\.zero_grad\(\)"
FORGOTTEN = "block that did not get this optimizer"
UNPREPARED = r"amp has not prepared(?s:.*)amp\.initialize"


class Script:
    """One iteration of a training; each method is a line that a script may have in it."""

    def __init__(self, model, optimizer, x, y):
        self.model, self.optimizer, self.data = model, optimizer, (x, y)

    def clear(self):
        self.optimizer.zero_grad()

    def scale(self, model=None, **options):
        self.loss = loops.loss_of(model or self.model, *self.data)
        self.block = amp.scale_loss(self.loss, self.optimizer, **options)
        self.scaled_loss = self.block.__enter__()

    def delay(self):
        self.scale(delay_unscale=True)

    def scale_copy(self):
        self.scale(copy.deepcopy(self.model))

    def scaled(self):
        self.scaled_loss.backward()

    def assign(self):
        params = [*self.model.parameters()]
        for param, grad in zip(params, torch.autograd.grad(self.scaled_loss, params), strict=True):
            param.grad = grad

    def unscaled(self):
        self.loss.backward()

    def end(self):
        self.block.__exit__(None, None, None)

    def plain(self):
        loops.loss_of(self.model, *self.data).backward()

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)

    def clip_values(self):
        nn.utils.clip_grad_value_(self.model.parameters(), 1.0)

    def clip_masters(self):
        nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 1e-3)

    def clip_data(self):  # as torch's own clip did until 1.10, and no version counts it
        for param in amp.master_params(self.optimizer):
            param.grad.data.mul_(1e-3)

    def zero(self):
        for param in self.model.parameters():
            param.grad.zero_()

    def step(self):
        self.optimizer.step()

    def step_closure(self):
        def closure():
            self.clear()
            self.plain()

        self.optimizer.step(closure)


def run(lines, model, optimizer, x, y):
    script = Script(model, optimizer, x, y)
    for line in lines.split():
        getattr(script, line)()


CLIPPED_INSIDE = "clear scale scaled clip end step"
UNSCALED = "clear scale unscaled end step"
LATE_BACKWARD = "clear scale end scaled step"
WITHOUT_AMP = "clear plain step"
ZEROED = "scale scaled end step zero"


def messages(train, *given):
    """What ``train`` warns of, at lines of this file (Python 3.12 on)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*given)
    assert {each.filename for each in caught} <= {__file__, loops.__file__}
    return [str(each.message) for each in caught]


def run_iterations(lines, pair):
    for x, y in loops.batches(3):
        run(lines, *pair, 0.01 * x, 0.01 * y)


def assert_warns_once(level, lines, message, optimizer="SGD", **options):
    """Three iterations warn once, also in another thread than that of ``initialize``."""
    pair = loops.prepared(level, loops.OPTIMIZERS[optimizer], **options)
    (found,) = messages(loops.in_a_thread, lambda: run_iterations(lines, pair))
    assert re.search(message, found)


MISTAKES = [
    (UNSCALED, NOT_FROM_SCALED),
    (LATE_BACKWARD, LATE),
    (CLIPPED_INSIDE, CLIPPED),
    ("clear delay scaled clip_values end clear", CLIPPED),
    ("clear scale scaled clip_masters end step", CLIPPED),
    ("clear scale scaled plain end step", SECOND),
    ("scale assign end step", ASSIGNED),
    (WITHOUT_AMP, PLAIN),
    ("step_closure", PLAIN),
]


@pytest.mark.parametrize(("lines", "message"), MISTAKES)
@fp16
def test_a_mistake_of_fp16_levels_is_warned_of_once(level, lines, message):
    if lines != "step_closure":  # a dynamic scale refuses closures
        assert_warns_once(level, lines, message, "fused AdamW")
    assert_warns_once(level, lines, message, loss_scale=128.0)


def test_a_clip_of_masters_that_torch_does_not_count_is_warned_of():
    assert_warns_once("O2", "clear scale scaled clip_data end step", CLIPPED)


EMPTY_STEPS = [
    "clear step scale scaled end",
    "clear scale end step",
    "clear scale scaled clear end step",
    "scale_copy scaled end step",
]


@pytest.mark.parametrize("lines", EMPTY_STEPS)
def test_a_step_before_any_backward_pass_is_warned_of(level, lines):
    assert_warns_once(level, lines, EMPTY)


def clip_on_a_rank(rank, level):
    model, optimizer = loops.prepared(level)
    parallel = DistributedDataParallel(model)
    return messages(run, "scale scaled clip end step", parallel, optimizer, *loops.batch())


@pytest.mark.distributed
@pytest.mark.parametrize("level", loops.DYNAMIC)
def test_a_clip_inside_the_block_is_named_on_ranks(on_two_ranks, level):
    """An average of the ranks there is none: tests/distributed/test_data_parallel.py."""
    for (found,) in on_two_ranks(clip_on_a_rank, level):
        assert re.search(CLIPPED, found)


def test_a_mistake_does_not_change_what_the_step_does():
    stepped = []
    for show in ("ignore", "error"):
        model, optimizer = loops.prepared("O1", loss_scale=128.0)
        with warnings.catch_warnings():
            warnings.simplefilter(show)
            try:
                run(UNSCALED, model, optimizer, *loops.batch())
            except UserWarning:
                optimizer.step()
        stepped.append(loops.values(model.parameters()))
    assert loops.same(*stepped)
    assert not loops.same(stepped[0], loops.values(loops.net().parameters()))


# -- several optimizers ----------------------------------------------------------------------


def two(level, **options):
    nets = [loops.net(), loops.net()]
    optimizers = [loops.sgd(net.parameters(), lr=1e-9) for net in nets]
    return amp.initialize(nets, optimizers, opt_level=level, verbosity=0, **options)


@fp16
def test_other_optimizers_passes_in_other_threads_are_no_mistake(level):
    nets, (first, second) = two(level)
    x, y = loops.batch()

    def train_second(_):
        loops.in_a_thread(lambda: loops.train_step(nets[1], second, 0.01 * x, y))

    with amp.scale_loss(loops.loss_of(nets[0], 0.01 * x, y), first) as scaled_loss:
        nets[0][0].bias.register_hook(train_second)
        scaled_loss.backward()
    loops.backward(nets[1], second, 0.01 * x, y)
    second.step()
    first.step()


@fp16
def test_a_step_with_gradients_of_another_session_s_block_is_no_mistake(level):
    nets, optimizers = zip(*[loops.prepared(level, loss_scale=8.0) for _ in range(2)], strict=True)

    def train():
        for x, y in loops.batches(2):
            loops.scaled_backward(sum(loops.loss_of(net, x, y) for net in nets), optimizers[0])
            for optimizer in optimizers:
                optimizer.step()

    assert not messages(train)


@loops.every(other_scale=[False, True], at_once=[False, True], level=["O1", "O2"])
def test_a_pass_may_reach_the_optimizer_of_a_block_around_it_with_the_same_scale(
    level, at_once, other_scale
):
    nets, (first, second) = two(level, num_losses=2, loss_scale=128.0)

    def train():
        for x, y in loops.batches(2):
            loss = loops.loss_of(nets[0], x, y)
            losses = sum(loops.loss_of(net, x, y) for net in nets)
            with amp.scale_loss(loss, first) as scaled_loss:
                if not at_once:
                    scaled_loss.backward()
                with amp.scale_loss(losses, second, loss_id=other_scale) as scaled_losses:
                    if at_once:
                        scaled_loss.backward()
                    scaled_losses.backward()
            first.step()
            second.step()

    found = messages(train)
    assert [bool(re.search(SECOND, message)) for message in found] == [True] * other_scale


@pytest.mark.parametrize("way", ["given", "cleared", "own pass", "beside", "inside", "late"])
def test_a_step_with_gradients_that_stay_scaled_is_warned_of(level, way):
    nets, optimizers = two(level, loss_scale=128.0)
    first, second = optimizers
    is_plain = way in ("beside", "inside", "late")  # parameters of no prepared optimizer
    if is_plain:
        amp.restore(nets[1], second)

    def train():
        for x, y in loops.batches(3):
            loss = sum(loops.loss_of(net, x, y) for net in nets)
            with amp.scale_loss(loss, optimizers if way == "given" else first) as scaled_loss:
                scaled_loss.backward()
                if way == "inside":
                    second.step()
            first.step()
            if way == "late":
                if len(first.param_groups) == 1:
                    first.add_param_group({"params": nets[1].parameters()})
                continue
            if way in ("cleared", "own pass"):
                second.zero_grad(set_to_none=way != "cleared")
            if way == "own pass":
                loops.backward(nets[1], second, x, y)
            second.step()
            first.zero_grad()
            second.zero_grad()

    named = sum(FORGOTTEN in message for message in messages(train))
    assert named == is_plain


@pytest.mark.parametrize("clears", [False, True])
def test_a_step_with_gradients_of_a_loss_that_was_only_scaled_is_warned_of(level, clears):
    model, optimizer = loops.prepared(level, loss_scale=128.0)

    def train():
        for x, y in loops.batches(2):
            loops.scaled_backward(loops.loss_of(model, x, y), [])
            if clears:  # as after an attack on the inputs
                optimizer.zero_grad()
                loops.backward(model, optimizer, x, y)
            optimizer.step()

    assert [FORGOTTEN in message for message in messages(train)] == [True] * (not clears)


@loops.every(name=["SGD", "fused AdamW"], with_masters=[True, False], level=loops.WITH_MASTERS)
def test_an_optimizer_of_the_models_own_16_bit_weights_is_warned_of_once(level, with_masters, name):
    """With masters it changes nothing; without, small updates round to nothing."""
    model = loops.net()
    optimizer = loops.sgd(model.parameters()) if with_masters else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if with_masters:
        loops.train_step(model, optimizer, *loops.batch())
    other = loops.OPTIMIZERS[name](model.parameters())

    def train():
        for x, y in loops.batches(2):
            run(WITHOUT_AMP, model, other, x, y)

    (message,) = messages(train)
    assert re.search(UNPREPARED, message)
    if with_masters:
        assert loops.agree(model, optimizer)


# -- torch's GradScaler ----------------------------------------------------------------------


@loops.every(name=["SGD", "fused AdamW"], unscale=[False, True])
def test_torch_s_grad_scaler_in_place_of_scale_loss_trains_masters_in_silence(name, unscale):
    trained = []
    for loss_scale in (1.0, None):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        for value in net.state_dict().values():
            value.fill_(1)
        model, optimizer = loops.prepared("O2", loops.OPTIMIZERS[name], net, loss_scale=loss_scale)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=loss_scale is None)
        for x, _ in loops.batches(2):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        trained.append(loops.masters(optimizer))
    torch.testing.assert_close(*trained, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("make_optimizer", [loops.sgd, FusedAdam])
def test_torch_s_grad_scaler_around_scale_loss_steps_alike_and_is_warned_of(level, make_optimizer):
    stepped = []
    for enabled in (False, True):
        scale = {"loss_scale": "dynamic", "max_loss_scale": 2.0}
        model, optimizer = loops.prepared(level, make_optimizer, **scale)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        loops.scaled_backward(scaler.scale(loops.loss_of(model, *loops.batch())), optimizer)
        with pytest.warns(match="both scales") if enabled else nullcontext():
            scaler.step(optimizer)
        stepped.append(loops.masters(optimizer))
    assert loops.same(*stepped)


# -- what is no mistake ----------------------------------------------------------------------


FINE_AT_1 = [UNSCALED, LATE_BACKWARD, CLIPPED_INSIDE, WITHOUT_AMP, "step_closure", ZEROED]


@loops.every(level=["O4", "O5"], lines=FINE_AT_1)
def test_the_same_at_a_scale_of_1_is_no_mistake(level, lines):
    run_iterations(lines, loops.prepared(level))


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_plain_pass_in_bf16_is_no_mistake(level):
    run_iterations(WITHOUT_AMP, loops.prepared(level, loss_scale=128.0))


@fp16
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_a_step_in_a_block_or_a_clip_after_a_delayed_one_is_no_mistake(level, loss_scale):
    pair = loops.prepared(level, loss_scale=loss_scale)
    lines = "clear delay scaled end clip_masters scale scaled end clip step"
    assert not messages(run_iterations, lines, pair)
    assert not messages(run_iterations, "clear scale scaled step end", pair)


def with_slopes(model, scaled_loss):
    """Gradients that autograd only returns, of a loss without a scale."""
    torch.autograd.grad(model(loops.batch()[0]).float().sum(), [*model.parameters()])
    scaled_loss.backward()


def one_changed(model, scaled_loss):
    scaled_loss.backward()
    model[0].weight.grad[0].zero_()


PASSES = {
    "halved": lambda model, scaled_loss: (scaled_loss / 2).backward(),
    "autograd": lambda model, scaled_loss: torch.autograd.backward([scaled_loss]),
    "twice": lambda model, loss: [loss.backward(retain_graph=True) for _ in range(2)],
    "slopes": with_slopes,
    "one changed": one_changed,
    "no pass": lambda model, scaled_loss: None,
}


@pytest.mark.parametrize("backward", PASSES.values(), ids=PASSES)
@fp16
def test_other_ways_to_run_the_pass_are_no_mistake(level, backward):
    model, optimizer = loops.prepared(level, loss_scale=128.0)
    with amp.scale_loss(loops.loss_of(model, *loops.batch()), optimizer) as scaled_loss:
        backward(model, scaled_loss)
    if model[0].weight.grad is not None:
        optimizer.step()


CLEARS = {
    "none": lambda optimizer: None,
    "to zeros": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "by hand": lambda optimizer: [p.grad.zero_() for p in amp.master_params(optimizer)],
}


@loops.every(make_optimizer=[loops.sgd, loops.fused_adamw_of], clear=CLEARS)
@fp16
def test_gradients_of_a_skipped_step_that_are_not_cleared_are_warned_of(
    level, clear, make_optimizer
):
    """amp skips every later step, and the loss scale stays as it is."""
    model, optimizer = loops.prepared(level, make_optimizer)
    before = loops.masters(optimizer)

    def train():
        for x, y in loops.batches(6, overflow_at={1}):
            loops.backward(model, optimizer, x, y)
            optimizer.step()
            CLEARS[clear](optimizer)

    found = [re.search(r"not cleared(?s:.*)zero_grad\(\)", text) for text in messages(train)]
    assert [*map(bool, found)] == [True] * (clear == "none")
    assert not loops.same(loops.masters(optimizer), before)


def test_a_loss_that_uses_masters_is_no_mistake(level):
    model, optimizer = loops.prepared(level, loss_scale="dynamic", max_loss_scale=2.0**8)
    for x, y in loops.batches(2):
        penalty = sum(master.square().sum() for master in amp.master_params(optimizer))
        loops.descend(loops.loss_of(model, x, y) + penalty, optimizer)


@fp16
def test_a_step_that_only_makes_optimizer_state_is_no_mistake(level):
    _, optimizer = loops.prepared(level, lambda params: loops.sgd(params, lr=0.0))
    for param in amp.master_params(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()


class Preconditioner(torch.optim.Optimizer):
    """As those of K-FAC: writes the gradients of the model's parameters, and no weight.

    Its step may run another optimizer's step.
    """

    def __init__(self, params, inner=None):
        super().__init__(params, {"lr": 0.1})
        self.inner = inner

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(0.5)
        if self.inner is not None:
            self.inner.step()


@pytest.mark.parametrize("nested", [False, True])
def test_optimizers_of_other_weights_or_of_gradients_alone_are_no_mistake(level, nested):
    model, optimizer = loops.prepared(level, loss_scale=1.0)
    other, inner = loops.plain_pair()
    run(WITHOUT_AMP, other, inner, *loops.batch())
    preconditioner = Preconditioner(model.parameters(), inner if nested else None)
    loops.loss_of(model, *loops.batch()).backward()
    preconditioner.step()
    optimizer.step()


WRITES = {
    "clip": lambda w: w.clamp_(-0.01, 0.01),  # old scripts of Wasserstein GANs
    "decay": lambda w: w.mul_(0.99),
    "norm": lambda w: w.renorm_(2, 0, 0.1),
    "noise": lambda w: w.add_(torch.randn_like(w), alpha=1e-3),
    "new": nn.init.normal_,
    "a row": lambda w: w[1].zero_(),
}


@loops.every(before_step=[False, True], name=WRITES, level=loops.WITH_MASTERS)
def test_a_write_to_the_model_that_torch_does_not_count_is_warned_of_once(level, name, before_step):
    model, optimizer = loops.prepared(level)

    def train():
        for x, y in loops.batches(6):
            loops.backward(model, optimizer, x, y)
            if before_step:
                WRITES[name](model[0].weight.data)
            optimizer.step()
            optimizer.zero_grad()
            if not before_step:
                WRITES[name](model[0].weight.data)

    (message,) = messages(train)
    assert re.search(r"the write is lost(?s:.*)amp\.master_params\(optimizer\)", message)


@loops.every(written=range(6), after=[1, 2])
def test_it_is_found_once_in_any_weight_of_a_small_model(written, after):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = loops.prepared("O5", model=model)

    def train():
        for step, (x, y) in enumerate(loops.batches(6)):
            loops.train_step(model, optimizer, x, y)
            if step == after:
                [*model.parameters()][written].data[0] = 0.0

    assert len(messages(train)) == 1


@pytest.mark.parametrize("first_write", [0, 40])
def test_it_is_found_in_large_weights_of_a_deep_model_and_late(first_write):
    model = nn.Sequential(*[nn.Linear(150, 150) for _ in range(6)])
    model, optimizer = loops.prepared("O5", lambda params: loops.sgd(params, lr=1e-6), model)

    def train():
        for step in range(first_write + 36):
            if step > first_write:
                model[5].weight.data[7] *= 0.99
            optimizer.zero_grad()
            model(torch.ones(1, 150)).float().mean().backward()
            optimizer.step()

    assert len(messages(train)) == 1


@loops.every(name=["SGD", "fused AdamW"], level=loops.WITH_MASTERS)
def test_a_write_to_a_weight_without_a_gradient_stays_and_is_no_mistake(level, name):
    parts = {"used": loops.net(), "unused": nn.Linear(1, 1)}
    model = loops.Body(lambda self, x: self.used(x), **parts)
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name], model)
    model.unused.weight.data.fill_(3.0)
    for x, y in loops.batches(6):
        model.unused.weight.data += 1
        loops.train_step(model, optimizer, x, y)
    assert model.unused.weight == 9.0


@loops.every(scaled=[True, False], level=["O1", "O4", "O5"])
def test_a_step_after_steps_in_hooks_is_no_mistake(level, scaled):
    model, optimizer = loops.prepared(level, loss_scale=1.0)

    def step_now(_):
        optimizer.step()
        optimizer.zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step_now) for p in model.parameters()]
    for x, y in loops.batches(2):
        loss = loops.loss_of(model, x, y)
        loops.scaled_backward(loss, optimizer) if scaled else loss.backward()
        optimizer.step()  # pytest makes warnings errors
    for handle in handles:  # the collector does not see into them
        handle.remove()


def test_a_block_inside_one_of_another_optimizer_leaves_no_hooks_and_hides_no_mistake():
    nets, optimizers = two("O1")
    first, second = (loops.loss_of(net, *loops.batch()) for net in nets)
    told = pytest.warns(UserWarning, match="inside amp.scale_loss did not start at scaled_loss")
    with told, amp.scale_loss(first, optimizers[0]):
        loops.scaled_backward(second, optimizers[1])
        first.backward()
    for net in nets:
        assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


@fp16
def test_zeros_by_hand_after_a_step_are_no_mistake(level):
    run_iterations(ZEROED, loops.prepared(level, loss_scale=128.0))
