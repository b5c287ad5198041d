"""Sums of several passes in fp32: added block by block, with the bits of whole gradients."""

import pytest
import torch
from torch import nn

from apex import amp
from apex._engine.optimizer import fp32_sums, one_pass
from apex._torch import blocks
from apex.optimizers import FusedLAMB
from benchmarks.loops import with_amp
from benchmarks.memory import peak_bytes
from tests.support.two_pass import two_pass_steps
from tests.training import cases

MAKE = {**cases.OPTIMIZERS, "FusedLAMB": lambda p: FusedLAMB(p, lr=1e-2)}
levels = pytest.mark.parametrize("level", cases.WITH_MASTERS)
scales = pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Tiny models add up in blocks of half a layer."""
    monkeypatch.setattr(one_pass, "least_elements", 1)
    monkeypatch.setattr(blocks, "_LEAST", 16)


@pytest.fixture
def adds(monkeypatch):
    """Counts the elements that are added in place."""
    counted = []
    add = fp32_sums.Sums.add

    def counting(self):
        counted.extend(total.numel() for total in self._totals)
        add(self)

    monkeypatch.setattr(fp32_sums.Sums, "add", counting)
    return counted


def gradients(model, optimizer):
    return cases.grads(amp.master_params(optimizer)), cases.grads(model.parameters())


def assert_same_without_blocks(train):
    """``train`` returns what a training leaves."""
    with two_pass_steps():
        expected = train()
    assert cases.same(train(), expected)


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "FusedLAMB"])
@levels
@scales
def test_sums_have_the_bits_of_whole_gradients_for_optimizers_in_python(level, scale, name, adds):
    def train():
        model, optimizer = cases.prepared(level, MAKE[name], loss_scale=scale, growth_interval=2)
        kept = []
        for step in range(3):
            optimizer.zero_grad()
            for x, y in cases.batches(3, seed=step):
                cases.backward(model, optimizer, x, y)
                kept.append(gradients(model, optimizer))
            optimizer.step()
        return kept, cases.masters(optimizer), cases.loss_scale()

    assert_same_without_blocks(train)
    assert sum(adds) == 3 * 2 * sum(param.numel() for param in cases.net().parameters())


@levels
@scales
def test_gradients_add_up_in_place_as_autograd_does(level, scale):
    model, optimizer = cases.prepared(level, cases.sgd, loss_scale=scale)
    cases.backward(model, optimizer, *cases.batch())
    first = [param.grad for param in amp.master_params(optimizer)]
    cases.backward(model, optimizer, *cases.batch(seed=2))
    assert all(
        param.grad is grad for param, grad in zip(amp.master_params(optimizer), first, strict=True)
    )


@levels
@scales
@pytest.mark.parametrize("overflows", [0, 1, 2])
def test_an_overflow_in_any_pass_of_a_sum_skips_the_step(level, scale, overflows):
    def train():
        model, optimizer = cases.prepared(level, MAKE["fused AdamW"], loss_scale=scale)
        for x, y in cases.batches(3, overflow_at={overflows}):
            cases.backward(model, optimizer, x, y)
        optimizer.step()
        return gradients(model, optimizer), cases.masters(optimizer), cases.loss_scale()

    assert_same_without_blocks(train)


@levels
@scales
def test_a_loss_of_the_master_itself_is_added(level, scale):
    def train():
        model, optimizer = cases.prepared(level, cases.sgd, loss_scale=scale)
        master = next(iter(amp.master_params(optimizer)))
        for x, y in cases.batches(3):
            loss = cases.loss_of(model, x, y) + master.pow(2).sum()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        return gradients(model, optimizer)

    assert_same_without_blocks(train)


@levels
def test_one_tensor_as_the_gradient_of_two_masters_counts_for_each(level):
    def train():
        model, optimizer = cases.prepared(level, cases.sgd, nn.ModuleList([nn.Linear(3, 3)] * 1)[0])
        weight, bias = amp.master_params(optimizer)
        whole = torch.ones(3, 3)
        weight.grad, bias.grad = whole, whole[0]
        loss = model(torch.ones(2, 3)).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return gradients(model, optimizer)

    assert_same_without_blocks(train)


@levels
@pytest.mark.parametrize("kind", ["inference", "expanded", "with a graph", "sparse"])
def test_gradients_that_a_script_assigns_are_added(level, kind):
    def assigned(grad):
        if kind == "inference":
            with torch.inference_mode():
                return grad * 0.5
        if kind == "expanded":
            return torch.ones(()).expand(grad.shape)
        if kind == "with a graph":
            return grad * torch.ones((), requires_grad=True)
        return grad.to_sparse() if kind == "sparse" else grad

    def train():
        model, optimizer = cases.prepared(level, cases.sgd, loss_scale=1.0)
        for x, y in cases.batches(3):
            cases.backward(model, optimizer, x, y)
            for param in amp.master_params(optimizer):
                param.grad = assigned(param.grad)
        cases.backward(model, optimizer, x, y)
        optimizer.step()
        return cases.masters(optimizer)

    assert_same_without_blocks(train)


@levels
@scales
def test_optimizers_that_share_weights_add_them_once(level, scale):
    def train():
        model = cases.net()
        one, two = cases.sgd(model.parameters()), cases.sgd(model[2].parameters())
        model, (one, two) = amp.initialize(
            model, [one, two], opt_level=level, loss_scale=scale, verbosity=0
        )
        for x, y in cases.batches(3):
            cases.backward(model, [one, two], x, y)
        return gradients(model, one), gradients(model, two)

    assert_same_without_blocks(train)


@levels
@scales
def test_a_pass_that_fails_leaves_the_sums(level, scale, monkeypatch):
    """The second optimizer's memory runs out after the first one's gradients were computed."""
    model, other = cases.net(), cases.net(1)
    owners = [cases.sgd(each.parameters()) for each in (model, other)]
    (model, other), owners = amp.initialize(
        [model, other], owners, opt_level=level, loss_scale=scale, verbosity=0
    )

    def backward():
        x, y = cases.batch()
        loss = cases.loss_of(model, x, y) + cases.loss_of(other, x, y)
        with amp.scale_loss(loss, owners) as scaled_loss:
            scaled_loss.backward()

    backward()
    before = [cases.grads(amp.master_params(owner)) for owner in owners]
    split, calls = fp32_sums.split, []

    def fail(*args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return split(*args)

    monkeypatch.setattr(fp32_sums, "split", fail)
    with pytest.raises(torch.OutOfMemoryError):
        backward()
    assert cases.same([cases.grads(amp.master_params(owner)) for owner in owners], before)


@levels
def test_an_iteration_peaks_at_the_sums_and_16_bit_gradients(level, monkeypatch):
    """By itself, at the sizes for which it is meant: 3 M parameters."""
    monkeypatch.undo()
    task, params = cases.large_task(), 3 * 1024**2
    peak = peak_bytes(with_amp(task, level, passes=3), 14 * params) / params
    # One block of 2**19 elements is 0.67 bytes per parameter.
    assert 20.0 <= peak <= 20.7
    with two_pass_steps():
        work = with_amp(task, level, passes=3)
        assert peak_bytes(work, 14 * params) / params >= 23.9
