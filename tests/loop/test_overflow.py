"""Rule B: an overflow skips the next step, once."""

import copy
import warnings

import pytest
import torch

from apex import amp
from tests.support import loops
from tests.support.host_reads import HostReads
from tests.support.wrapping_optimizers import SAM, Lookahead

DYNAMIC = {"loss_scale": "dynamic"}


def held(model, optimizer):
    return loops.values(model.parameters()), loops.masters(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_the_block_is_skipped_and_moves_the_scale_once(level):
    model, optimizer = loops.prepared(level)
    before = loops.masters(optimizer)
    with amp.scale_loss(loops.loss_of(model, *loops.overflowing()), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert loops.same(before, loops.masters(optimizer))
    assert loops.loss_scale() == 2.0**15


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_of_one_loss_moves_its_scale_and_skips_the_optimizers_given_with_it(level, bad):
    """Of three losses the first two are for two optimizers, and the last is for the third."""
    nets = [loops.net(seed) for seed in range(3)]
    optimizers = [loops.sgd(net.parameters()) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, verbosity=0, num_losses=3, **DYNAMIC)
    before = list(map(loops.masters, optimizers))
    for loss_id, steps in enumerate((optimizers[:2], optimizers[:2], optimizers[2])):
        data = loops.overflowing() if loss_id == bad else loops.batch()
        loss = sum(loops.loss_of(net, *data) for net in (nets[2:] if loss_id == 2 else nets[:2]))
        loops.scaled_backward(loss / 256, steps, loss_id=loss_id)
    for optimizer in optimizers:
        optimizer.step()
    after = list(map(loops.masters, optimizers))
    same = [loops.same(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [bad < 2, bad < 2, bad == 2]
    scales = [loops.loss_scale(loss_id) for loss_id in range(3)]
    assert scales == [2.0**15 if loss_id == bad else 2.0**16 for loss_id in range(3)]


@loops.every(level=["O1", "O2"], is_first=[True, False], together=[True, False])
def test_a_check_moves_the_scales_of_the_delayed_passes_too(level, is_first, together):
    """Each of two losses has its scale; the first pass, or the second, overflows from 2**15 on."""
    options = {**DYNAMIC, "num_losses": 2, "growth_interval": 8}
    model, (first, second) = loops.two_optimizers(level, **options)
    names = [first, second] if together else [first]
    large = 2.0 if level == "O2" else 2.0**113
    taken = 0
    for _ in range(16):
        for optimizer in (first, second):
            optimizer.zero_grad()
        for loss_id in (0, 1):
            size = 0.0 if is_first == loss_id else large
            loss = model(a=size, b=0.5)
            loops.scaled_backward(loss, names, loss_id=loss_id, delay_unscale=loss_id == 0)
        first.step()
        taken += not amp.step_was_skipped(first, on_host=True)
    assert taken == 13  # of 16: two are skipped at first, and one after eight that are not
    assert loops.loss_scale(0) == loops.loss_scale(1)


@loops.every(level=["O1", "O2"], bad=[0, 1, 2])
def test_the_check_of_the_last_of_three_passes_moves_the_scales_of_all(level, bad):
    model, optimizer = loops.one_weight(level, num_losses=3, **DYNAMIC)
    for loss_id in range(3):
        loss = loops.slope(model, torch.inf if loss_id == bad else 0.5)
        loops.scaled_backward(loss, optimizer, loss_id=loss_id, delay_unscale=loss_id < 2)
    assert [loops.loss_scale(loss_id) for loss_id in range(3)] == [2.0**15] * 3


@loops.every(level=["O1", "O2"], cleared=[True, False])
def test_an_overflow_of_an_optimizer_that_the_block_was_not_given_moves_its_scale(level, cleared):
    model, (given, other) = loops.two_optimizers(level, **DYNAMIC)
    loops.scaled_backward(model(a=0.5, b=torch.inf), given)
    assert loops.loss_scale() == 2.0**16
    if cleared:  # as a GAN's discriminator after the generator's block
        other.zero_grad()
    for optimizer in (given, other):
        optimizer.step()
    assert not amp.step_was_skipped(given, on_host=True)
    assert amp.step_was_skipped(other, on_host=True) is not cleared
    assert loops.loss_scale() == (2.0**16 if cleared else 2.0**15)


@pytest.fixture
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@loops.every(level=["O1", "O2"], is_late=[True, False])
def test_a_skipped_first_step_of_a_group_leaves_no_momentum(level, is_late):
    """torch's fused SGD would leave one that it has not written (2.13)."""

    def trained(fused):
        options = {"lr": 0.125, "momentum": 0.5, "fused": fused}
        model, optimizer = loops.prepared(
            level,
            lambda params: torch.optim.SGD([{"params": [param]} for param in params], **options),
            loops.Weights(),
            max_loss_scale=2.0**8,
        )
        if is_late:
            loops.descend(model(a=1.0), optimizer)
        for size in (torch.inf, 1.0, 1.0):
            loops.descend(model(a=size, b=size), optimizer)
        return loops.masters(optimizer)

    assert loops.same(trained(fused=True), trained(fused=False))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("overflows", [True, False])
def test_a_pass_that_creates_a_graph_is_checked(level, overflows):
    model, optimizer = loops.prepared(level, **DYNAMIC)
    before = loops.masters(optimizer)
    loss = loops.loss_of(model, *(loops.overflowing() if overflows else loops.batch()))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    optimizer.step()
    assert loops.same(before, loops.masters(optimizer)) == overflows
    for param in model.parameters():
        param.grad = None  # and so the graph, which refers to the parameters


# -- closures, hooks and schedulers ----------------------------------------------------------


@pytest.mark.parametrize("name", ["LBFGS closure", "SGD closure"])
def test_a_closure_is_refused_under_a_dynamic_scale_before_anything_changes(level, name):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name], **DYNAMIC)
    loops.backward(model, optimizer, *loops.batch())
    before = held(model, optimizer), loops.grads(model.parameters())
    evaluations = []
    with pytest.raises(RuntimeError, match=r"loss scale is dynamic.*loss_scale=128\.0.*bf16"):
        optimizer.step(lambda: evaluations.append(loops.batch()))
    assert not evaluations
    assert loops.same(before, (held(model, optimizer), loops.grads(model.parameters())))
    if name == "SGD closure":
        optimizer.step()
        assert not loops.same(before[0], held(model, optimizer))


@loops.every(overflows_at=[1, 2], base=["SGD", "fused AdamW"])
def test_an_overflow_skips_the_step_of_the_optimizer_inside_a_sam(level, base, overflows_at):
    """In the form with two calls, which ``SAM.step`` does not see."""

    def make(params):
        return SAM(params, loops.OPTIMIZERS[base])

    def train(first, second):
        loops.backward(model, optimizer, *first)
        optimizer.first_step()
        loops.backward(model, optimizer, *second)
        optimizer.second_step()

    model, optimizer = loops.prepared(level, make, **DYNAMIC)
    train(loops.batch(), loops.batch(2))
    before = held(model, optimizer)
    state = copy.deepcopy(optimizer.base_optimizer.state_dict()["state"])
    train(*[loops.overflowing() if n == overflows_at else loops.batch() for n in (1, 2)])
    assert loops.same(before, held(model, optimizer))
    assert loops.same(state, optimizer.base_optimizer.state_dict()["state"])
    train(loops.batch(), loops.batch())
    assert not loops.same(before[1], loops.masters(optimizer))


@loops.every(early=[True, False], name=["fused AdamW", "SGD"])
def test_a_scheduler_neither_warns_nor_bypasses_the_skip(level, name, early):
    model, optimizer = loops.plain_pair(loops.OPTIMIZERS[name])

    def made():
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* is emulated on this CPU")
        scheduler = made() if early else None
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **DYNAMIC)
        scheduler = scheduler or made()
        before, lr = held(model, optimizer), optimizer.param_groups[0]["lr"]
        loops.train_step(model, optimizer, *loops.overflowing())
        scheduler.step()
        assert loops.same(before, held(model, optimizer))
        loops.train_step(model, optimizer, *loops.batch())
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == lr / 4
    assert not loops.same(before, held(model, optimizer))


# -- optimizers that know of loss scaling ----------------------------------------------------


class Scaling(torch.optim.Optimizer):
    """SGD that declares torch's ``_step_supports_amp_scaling``."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self._step_supports_amp_scaling = True
        self.flags = []

    @torch.no_grad()
    def descend(self, skips):
        for group in self.param_groups:
            for param in group["params"]:
                stepped = param - group["lr"] * param.grad
                param.copy_(torch.where(skips, param, stepped))


class AsksTheScaler(Scaling):
    """As NVIDIA's ``FusedAdam(capturable=True)``: only a ``grad_scaler`` tells it of inf."""

    def step(self, closure=None, grad_scaler=None):
        assert closure is None
        found = {} if grad_scaler is None else grad_scaler._check_inf_per_device(self)
        self.flags.append(torch.tensor(any(map(bool, found.values()))))
        self.descend(self.flags[-1])


class ReadsTheFlag(Scaling):
    """As torch's fused optimizers: an attribute tells it of inf, on the device."""

    def step(self, closure=None):
        assert closure is None
        self.flags.append(self.found_inf.bool())
        self.descend(self.flags[-1])


@pytest.mark.parametrize("kind", [AsksTheScaler, ReadsTheFlag])
def test_an_optimizer_that_skips_by_itself_gets_the_flag(level, kind):
    pairs = [loops.prepared(level, make, **DYNAMIC) for make in (kind, loops.sgd)]
    for x, y in loops.batches(4, overflow_at={1}):
        for pair in pairs:
            loops.train_step(*pair, x, y)
    found, expected = (loops.masters(optimizer) for _, optimizer in pairs)
    torch.testing.assert_close(found, expected)
    if kind is ReadsTheFlag:
        assert list(map(bool, pairs[0][1].flags)) == [False, True, False, False]


def partly_fused(params):
    first, *others = params
    groups = [{"params": [first]}, {"params": others, "fused": False}]
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def test_a_group_without_a_fused_kernel_is_skipped_too(level):
    model, optimizer = loops.prepared(level, partly_fused, **DYNAMIC)
    before = held(model, optimizer)
    loops.train_step(model, optimizer, *loops.overflowing())
    assert loops.same(before, held(model, optimizer))
    loops.train_step(model, optimizer, *loops.batch())
    assert not loops.same(before, held(model, optimizer))


# -- step_was_skipped ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_step_was_skipped_tells_each_step(level, name):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name], **DYNAMIC)
    assert not amp.step_was_skipped(optimizer)
    answers = []
    for x, y in loops.batches(5, overflow_at={0, 3}):
        loops.train_step(model, optimizer, 0.01 * x, 0.01 * y)
        answer = amp.step_was_skipped(optimizer)
        assert (answer.dtype, answer.shape) == (torch.bool, ())
        assert amp.step_was_skipped(optimizer, on_host=True) is answer.item()
        answers.append(answer)
    assert [answer.item() for answer in answers] == [True, False, False, True, False]


@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_the_answer_stays_until_the_next_step_whatever_blocks_find(level, name):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name], **DYNAMIC)
    for stepped, later in ((loops.overflowing, loops.batch), (loops.batch, loops.overflowing)):
        loops.train_step(model, optimizer, *stepped())
        optimizer.zero_grad()
        loops.backward(model, optimizer, *later())
        assert bool(amp.step_was_skipped(optimizer)) is (stepped is loops.overflowing)


def test_nothing_is_skipped_where_amp_is_disabled_or_absent():
    _, disabled = loops.prepared("O1", enabled=False)
    for optimizer in (disabled, loops.sgd(loops.net().parameters())):
        assert amp.step_was_skipped(optimizer).item() is False
        assert amp.step_was_skipped(optimizer, on_host=True) is False
    with pytest.raises(TypeError, match="instead of an optimizer"):
        amp.step_was_skipped(loops.net())


def test_neither_asking_nor_a_wrapper_reads_on_the_host(level):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS["fused AdamW"], **DYNAMIC)
    outer = Lookahead(optimizer)
    with HostReads() as reads:
        for x, y in loops.batches(3, overflow_at={2}):
            loops.backward(model, optimizer, x, y)
            outer.step()
            outer.zero_grad()
            skipped = amp.step_was_skipped(optimizer)
    assert (reads.count, bool(skipped)) == (0, True)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_uncounted_write_before_a_first_step_that_is_skipped_is_kept(level):
    model, optimizer = loops.prepared(level, model=loops.Weights("a"), **DYNAMIC)
    model.a.data.fill_(0.5)
    for factor in (float("inf"), 1.0):
        loops.descend(model(a=factor), optimizer)
    assert loops.masters(optimizer)[0][0].item() == pytest.approx(0.4)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_restored_optimizer_steps_whatever_amp_has_skipped(level):
    model, optimizer = loops.prepared(level, loops.fused_adamw_of, **DYNAMIC)
    loops.overflow(model, optimizer)
    optimizer.step()
    amp.restore(model, optimizer)
    before = loops.values(model.parameters())
    loops.plain_step(model, optimizer, *loops.batch())
    assert not loops.same(before, loops.values(model.parameters()))
