"""What is wrong with weights and gradients: updates that are lost, numbers that are not finite."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.report import NonfiniteGradient
from apex.debug import frozen_updates
from apex.debug.check import FrozenUpdates, why_skipped
from tests.support import loops

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, foreach=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


def weight_of(values, dtype, grad=1.0):
    weight = nn.Parameter(torch.tensor(values, dtype=dtype))
    weight.grad = torch.full_like(weight, grad)
    return weight


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_update_below_half_the_rounding_step_is_frozen(make, dtype):
    # The rounding step below 1 is 2**-9 (bf16) and 2**-12 (fp16); the update is 1e-3.
    still = 1.0 if dtype is torch.bfloat16 else 8.0
    optimizer = make([weight_of([still, 0.01], dtype)])
    with frozen_updates(optimizer) as updates:
        optimizer.step()
    assert (updates.frozen, updates.wanted, updates.share) == (1, 2, 0.5)


def test_a_few_frozen_weights_are_healthy():
    optimizer = torch.optim.SGD([weight_of([1.0] + [0.01] * 5, torch.bfloat16)], lr=1e-3)
    with frozen_updates(optimizer) as updates:
        optimizer.step()
    assert str(updates).startswith("Updates arrive: 16.7 % of the weights ")
    assert updates.worst is None


def test_only_a_decay_that_rounds_to_1_keeps_an_average_from_falling():
    found = []
    for decay in (0.9997, 0.9998):  # half of fp16's least step is 2**-12, of a number below 1
        weight = weight_of([0.01], torch.float16)
        optimizer = torch.optim.Adam([weight], betas=(0.9, decay))
        optimizer.step()
        with frozen_updates(optimizer) as updates:
            optimizer.step()
        found.append(updates.worst is not None)
    assert found == [False, True]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_count_by_their_own_state_until_the_block_ends(make):
    optimizer = make([weight_of([1.0, 0.01], torch.bfloat16)])
    with frozen_updates(optimizer) as updates:
        assert str(updates).startswith("No optimizer stepped.")
        for _ in range(2):
            optimizer.step()
    optimizer.step()
    assert updates.wanted == 4


@pytest.mark.parametrize("grad", [torch.inf, torch.nan])
def test_a_weight_without_a_finite_update_does_not_count(grad):
    optimizer = torch.optim.SGD([weight_of([1.0], torch.bfloat16, grad)], lr=1e-3)
    with frozen_updates(optimizer) as updates:
        optimizer.step()
    assert updates.wanted == 0
    assert str(updates).startswith("No weight was to move in 1 step: the learning rate was 0, ")
    assert "`apex trace` names the operator behind inf or NaN" in str(updates)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [False, True], ids=["", "overflow"])
def test_a_grad_scaler_may_step_inside(fused, bad):
    weight = nn.Parameter(torch.tensor([1.0, 0.01]))
    optimizer = torch.optim.SGD([weight], lr=1e-8, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((weight * (torch.inf if bad else 1.0)).sum()).backward()
    with frozen_updates(optimizer) as updates:
        scaler.step(optimizer)
    assert (updates.frozen, updates.wanted) == ((0, 0) if bad else (1, 2))
    assert ("`apex trace` names the operator behind inf or NaN" in str(updates)) is bad


def pair_with_grads(**options):
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    model, optimizer = loops.prepared("O5", lambda p: torch.optim.SGD(p, lr=1e-4), model, **options)
    loops.scaled_backward(model(torch.rand(2, 4)).sum(), optimizer)
    return model, optimizer


def test_an_amp_optimizer_steps_the_same_as_without_the_block():
    results = []
    for counts in (True, False):
        torch.manual_seed(0)
        model, optimizer = pair_with_grads()
        if counts:
            with frozen_updates(optimizer):
                optimizer.step()
        else:
            optimizer.step()
        results.append([*model.parameters(), *amp.master_params(optimizer)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Noisy(torch.optim.SGD):
    """Langevin dynamics: a step adds random numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.add_(torch.randn_like(param))


def test_an_optimizer_that_draws_gets_its_own_numbers():
    steps = []
    for context in (frozen_updates, lambda _: nullcontext()):
        torch.manual_seed(0)
        weight = weight_of([1.0, 2.0], torch.float32)
        optimizer = Noisy([weight], lr=0.5)
        with context(optimizer):
            optimizer.step()
        steps.append(weight)
    assert torch.equal(*steps)


def test_hooks_and_schedulers_see_one_step_only():
    optimizer = torch.optim.SGD([weight_of([1.0], torch.float32)], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with frozen_updates(optimizer):
        optimizer.step()
    scheduler.step()
    assert calls == [1]


def test_weights_in_fp64_step_once():
    weight = weight_of([1.0], torch.float64)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with frozen_updates(optimizer):
        optimizer.step()
    assert weight.item() == 0.5


def test_a_context_inside_another_counts_the_same():
    optimizer = torch.optim.SGD([weight_of([1.0, 0.01], torch.bfloat16)], lr=1e-3)
    with frozen_updates(optimizer) as outer, frozen_updates(optimizer) as inner:
        optimizer.step()
    assert (outer.frozen, outer.wanted) == (inner.frozen, inner.wanted) == (1, 2)


def test_the_line_is_the_step_s_that_freezes_most_weights():
    sound = torch.optim.SGD([weight_of([1.0] * 20, torch.float32)], lr=1e-3)
    _, prepared = pair_with_grads()
    frozen = torch.optim.SGD([weight_of([1.0] * 16, torch.bfloat16)], lr=1e-3)
    with FrozenUpdates() as updates:
        sound.step()
        frozen.step()
        prepared.step()
    assert updates.worst.source == "frozen.step()"
    assert updates.worst.what.endswith("16 of 56 (bfloat16)")
    assert updates.worst.remedies[0].startswith("keep fp32 masters")


@pytest.mark.parametrize("make", [torch.optim.LBFGS, OPTIMIZERS["sgd"]])
def test_a_step_with_a_closure_has_no_verdict(make):
    optimizer = make([weight_of([1.0], torch.float32)])
    with pytest.raises(TypeError, match="closure"), frozen_updates(optimizer):
        optimizer.step(lambda: 1.0)
    with FrozenUpdates() as updates:
        optimizer.step(lambda: torch.zeros(()))
    assert "has no verdict" in str(updates)
    assert "No weight" not in str(updates)


def test_each_role_is_told_with_its_counts():
    model, optimizer = loops.trained("O5", loops.OPTIMIZERS["Adam"], steps=1)
    assert amp.debug.check_numerics(model, optimizer) == []
    master = next(amp.master_params(optimizer))
    optimizer.state[master]["exp_avg"][0, :2] = torch.inf
    master.data[1, 1] = torch.nan
    model[2].weight.data[0, 0] = torch.nan
    model[2].weight.data[0, 1] = -torch.inf
    found = amp.debug.check_numerics(model, optimizer)
    assert {(i.name, i.role, i.dtype, i.inf, i.nan) for i in found} == {
        ("0.weight", "master", "float32", 0, 1),
        ("0.weight", "state exp_avg", "float32", 2, 0),
        ("2.weight", "parameter", "bfloat16", 1, 1),
    }
    assert "2.weight (1 inf, 1 nan of 16), parameter in bfloat16" in map(str, found)


def test_a_parameter_that_only_the_optimizer_has_is_told():
    model, loose = loops.net(), torch.nn.Parameter(torch.tensor(torch.nan))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    (found,) = amp.debug.check_numerics(model, optimizer)
    assert (found.name, found.role) == ("(a parameter of another model)", "parameter")


def test_infinities_of_a_mask_are_no_fault_in_a_buffer():
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    assert amp.debug.check_numerics(model) == []
    model.running_var[1] = torch.inf  # the others are 1
    model.mask[0, 0] = torch.nan
    model.register_buffer("full", torch.full((2,), -torch.inf))
    nn.init.constant_(model.bias[0], -torch.inf)  # the others are 0
    found = amp.debug.check_numerics(model)
    assert [item.name for item in found] == ["bias", "running_var", "mask", "full"]


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        amp.debug.check_numerics([loops.net()])
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        amp.debug.why_skipped(loops.prepared("O1")[1], model=[loops.net()])
    with pytest.raises(TypeError, match="got Linear instead of an optimizer"):
        amp.debug.check_numerics(loops.net(), torch.nn.Linear(1, 1))


def break_two(model, optimizer):
    first = model.first.weight * torch.tensor([1.0, torch.inf, 1.0, 1.0])
    loss = first.float().sum() + (model.last.bias.float() * torch.nan).sum()
    loops.scaled_backward(loss / 256, optimizer)  # a gradient of 1 is too much for fp16


EXPECTED = [NonfiniteGradient("first.weight", 6, 0, 24), NonfiniteGradient("last.bias", 0, 2, 2)]


@loops.every(stepped=[False, True], level=loops.LEVELS)
def test_nonfinite_gradients_are_named_and_counted(level, stepped):
    model, optimizer = loops.prepared(level, model=loops.Net())
    break_two(model, optimizer)
    if stepped and level in ("O1", "O2"):
        optimizer.step()
    assert why_skipped(optimizer) == EXPECTED


def test_finite_or_cleared_gradients_are_not_listed():
    model, optimizer = loops.prepared("O2", model=loops.Net())
    assert why_skipped(optimizer) == []
    loops.scaled_backward(loops.small_loss(model) / 2**16, optimizer)
    assert why_skipped(optimizer) == []
    break_two(model, optimizer)
    optimizer.zero_grad()
    assert why_skipped(optimizer) == []


def test_why_skipped_names_the_gradients_of_a_plain_loop():
    model, optimizer = loops.plain_pair()
    assert why_skipped(optimizer) == []
    (model(loops.batch()[0]).sum() + model[2].bias[0] * torch.inf).backward()
    for wrapped in (model, nn.DataParallel(model)):
        found = why_skipped(optimizer, model=wrapped)
        assert [(item.name, item.inf) for item in found] == [("2.bias", 1)]
    (unnamed,) = why_skipped(optimizer)
    assert unnamed.name == "parameter 3"
