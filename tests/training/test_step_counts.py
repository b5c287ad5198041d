"""The step counts of torch's fused optimizers on a CPU are raised together."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from apex import amp

KINDS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
}
ADD = torch.ops.aten._foreach_add_


class Operators(TorchDispatchMode):
    """Notes the operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def trained(kind, level, layers, *, prepare=True, noted=None):
    """Three steps of a network of so many linear layers; its optimizer and weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    optimizer = KINDS[kind](model.parameters(), lr=1e-2, fused=True)
    if prepare:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(torch.randn(2, 4)).float().pow(2).sum()
        with amp.scale_loss(loss, optimizer) if prepare else nullcontext(loss) as scaled_loss:
            scaled_loss.backward()
        with nullcontext() if noted is None or seed < 2 else noted:
            optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_bits_of_the_optimizer_alone(kind):
    model, optimizer = trained(kind, "O0", layers=40)
    plain, own = trained(kind, "O0", layers=40, prepare=False)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other)
    state, expected = state_of(optimizer), state_of(own)
    assert state.keys() == expected.keys()
    for index, entries in expected.items():
        assert entries["step"] == 3
        assert all(torch.equal(state[index][name], value) for name, value in entries.items())


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
@pytest.mark.parametrize("kind", KINDS)
def test_many_counts_are_raised_without_a_tensor_for_each(kind, level):
    noted = Operators()
    trained(kind, level, layers=40, noted=noted)
    assert ADD.Tensor in noted.seen
    assert ADD.Scalar not in noted.seen


def test_a_step_in_one_pass_raises_them_so_too(monkeypatch):
    monkeypatch.setattr("apex._engine.optimizer.one_pass.least_elements", 0)
    noted = Operators()
    trained("AdamW", "O5", layers=2, noted=noted)
    assert ADD.Scalar not in noted.seen


def test_few_counts_run_no_mode():
    noted = Operators()
    trained("AdamW", "O4", layers=2, noted=noted)
    assert ADD.Scalar in noted.seen


def test_a_skipped_step_leaves_the_counts():
    _, optimizer = trained("AdamW", "O1", layers=40)
    before = state_of(optimizer)
    loss = sum(p.float().sum() for p in amp.master_params(optimizer)) * float("inf")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    after = state_of(optimizer)
    assert all(torch.equal(after[i]["step"], entries["step"]) for i, entries in before.items())


def test_a_failed_step_leaves_no_mode():
    _, optimizer = trained("AdamW", "O4", layers=40)

    def fail(*_):
        raise ZeroDivisionError

    loss = sum(p.float().sum() for p in amp.master_params(optimizer))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.register_step_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert _get_current_dispatch_mode() is None
