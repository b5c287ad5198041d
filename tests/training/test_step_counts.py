"""The step counts of torch's fused optimizers on a CPU are raised together."""

import copy
from contextlib import nullcontext

import pytest
import torch

from apex import amp
from apex._torch import step_counts

KINDS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.fixture
def additions(monkeypatch):
    """The calls that add to a list of tensors: its length, and whether they add a tensor."""
    calls, own = [], torch._foreach_add_

    def add_(tensors, other, **kwargs):
        calls.append((len(tensors), isinstance(other, torch.Tensor)))
        return own(tensors, other, **kwargs)

    monkeypatch.setattr(torch, "_foreach_add_", add_)
    return calls


def trained(kind, level, layers, *, prepare=True):
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
def test_many_counts_are_raised_by_one_tensor(kind, level, additions):
    trained(kind, level, layers=40)
    assert additions.count((80, True)) == 3


def test_a_step_in_one_pass_raises_them_so_too(monkeypatch, additions):
    monkeypatch.setattr("apex._engine.optimizer.one_pass.least_elements", 0)
    trained("AdamW", "O5", layers=4)
    assert additions.count((8, True)) == 3


def test_a_skipped_step_leaves_the_counts():
    _, optimizer = trained("AdamW", "O1", layers=40)
    before = state_of(optimizer)
    loss = sum(p.float().sum() for p in amp.master_params(optimizer)) * float("inf")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    after = state_of(optimizer)
    assert all(torch.equal(after[i]["step"], entries["step"]) for i, entries in before.items())


@pytest.mark.parametrize(
    ("groups", "fused", "device", "registers"),
    [
        ([8], True, "cpu", True),
        ([2, 0, 22], True, "cpu", True),
        ([6], True, "cpu", False),
        ([2] * 40, True, "cpu", False),  # a group for every layer, as in some old scripts
        ([80], None, "cpu", False),
        ([80], True, "meta", False),
    ],
)
def test_torch_keeps_its_own_kernel_where_ours_would_not_pay(
    groups, fused, device, registers, monkeypatch
):
    made = []
    monkeypatch.setattr(step_counts, "_register", lambda: made.append(True))
    params = [[torch.nn.Parameter(torch.ones(4, device=device)) for _ in range(n)] for n in groups]
    optimizer = torch.optim.AdamW([{"params": each, "fused": fused} for each in params])
    step_counts.raise_together(optimizer)
    assert bool(made) is registers


def test_a_kernel_of_another_library_or_of_torch_stays(monkeypatch, additions):
    step_counts._register()  # that of the other
    monkeypatch.setattr(step_counts, "_registered", [])
    trained("AdamW", "O0", layers=4)
    assert step_counts._registered == []
    assert additions.count((8, True)) == 3


def values(dtype, shape):
    if dtype is torch.bool:
        return torch.tensor(True).expand(shape).clone()
    return torch.linspace(-3, 300, torch.Size(shape).numel()).to(dtype).reshape(shape)


LISTS = {
    "counts": [(torch.float32, ())] * 5,
    "fp32": [(torch.float32, (3, 4)), (torch.float32, ()), (torch.float32, (0,))],
    "fp64": [(torch.float64, ()), (torch.float64, (2,))],
    "mixed": [(torch.float32, ()), (torch.float64, ()), (torch.bfloat16, (4,))],
    "bf16": [(torch.bfloat16, (16,)), (torch.bfloat16, ())],
    "fp16": [(torch.float16, (16,))],
    "int": [(torch.float32, ()), (torch.int64, ()), (torch.int32, (2,))],
    "bool": [(torch.bool, ())],
    "complex": [(torch.complex64, (2,)), (torch.float32, ())],
}


@pytest.mark.parametrize("number", [1, 1.0, True, 2, 0.5, -1, 1 + 0j, 1e300, float("nan")])
@pytest.mark.parametrize("name", LISTS)
def test_any_list_gets_what_torch_adds_to_each(name, number):
    step_counts._register()
    ours = [values(*each) for each in LISTS[name]]
    alone = [values(*each) for each in LISTS[name]]
    raised = [None, None]
    try:
        torch._foreach_add_(ours, number)
    except RuntimeError as error:
        raised[0] = str(error)
    try:
        for each in alone:
            each.add_(number)
    except RuntimeError as error:
        raised[1] = str(error)
    assert raised[0] == raised[1]
    for one, other in zip(ours, alone, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one[~one.isnan()], other[~other.isnan()])


def test_the_kernel_is_one_write_and_has_a_gradient():
    step_counts._register()
    source = torch.ones(3, requires_grad=True)
    written = source * 2
    version = written._version
    torch._foreach_add_([written], 1)
    assert written._version == version + 1
    written.square().sum().backward()
    assert source.grad.tolist() == [12.0] * 3


def test_the_kernel_runs_whatever_the_default_device_and_dtype():
    step_counts._register()
    before = torch.get_default_dtype()
    counts = [torch.zeros((), dtype=torch.float32) for _ in range(3)]
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.inference_mode():
            torch._foreach_add_(counts, 1)
    finally:
        torch.set_default_dtype(before)
    assert [count.item() for count in counts] == [1.0] * 3
