"""torch's own GradScaler steps the optimizers without a host sync and without a warning."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from apex import optimizers
from apex.parallel import LARC
from tests.optimizers import cases

every = pytest.mark.parametrize("name", cases.MAKERS)


def scaled(params, scaler, factor=1.0):
    """Leaves scaled gradients of a quadratic loss."""
    for param in params:
        param.grad = None
    loss = sum(((p.float() - 1.0) ** 2).sum() for p in params) * factor
    scaler.scale(loss).backward()


def pair(name):
    params, twins = cases.parameters(), cases.parameters()
    return (
        cases.MAKERS[name](params), params, cases.MAKERS[name](twins), twins,
        torch.amp.GradScaler("cpu", init_scale=64.0),
    )  # fmt: skip


@every
def test_step_is_that_of_unscaled_gradients(name):
    optimizer, params, reference, twins, scaler = pair(name)
    scaled(params, scaler)
    scaler.step(optimizer)
    scaler.update()
    scaled(twins, torch.amp.GradScaler("cpu", enabled=False))
    reference.step()
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_left_unscaled_in_their_memory(name, dtype):
    params = cases.parameters(dtype)
    optimizer = cases.MAKERS[name](params)
    scaler = torch.amp.GradScaler("cpu", init_scale=48.0)
    scaled(params, scaler)
    grads = [p.grad for p in params]
    expected = [(g.float() / 48.0).to(dtype) for g in grads]
    where = [g.data_ptr() for g in grads]
    scaler.step(optimizer)
    cases.assert_same(grads, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert [g.data_ptr() for g in grads] == where


@pytest.mark.parametrize("factor", [1.0, float("inf")])
@every
def test_gradients_end_as_those_of_torchs_fused_adam(name, factor):
    """After a skipped step, too: they stay as they came."""
    optimizer, params, _, twins, scaler = pair(name)
    other = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled(params, scaler, factor)
    scaled(twins, other, factor)
    scaler.step(optimizer)
    other.step(torch.optim.Adam(twins, fused=True))
    cases.assert_same([p.grad for p in params], [p.grad for p in twins], rtol=0, atol=0)


@every
def test_step_reads_nothing_on_the_host(name):
    optimizer, params, _, _, scaler = pair(name)
    scaled(params, scaler)
    scaler.step(optimizer)  # dampening asks once, for the start of the momentum
    scaler.update()
    for factor in (1.0, float("inf")):
        scaled(params, scaler, factor)
        with cases.HostReads() as reads:
            scaler.step(optimizer)
            scaler.update()
        assert reads.count == 0


@every
def test_step_under_a_scheduler_and_of_a_copy_warns_of_nothing(name):
    optimizer, _, _, _, scaler = pair(name)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = [p for group in each.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in own]
        scaled(own, scaler)
        scaler.step(each)
        assert not any(torch.equal(a, b) for a, b in zip(before, own, strict=True))


@every
def test_overflow_is_skipped(name):
    optimizer, params, _, twins, scaler = pair(name)
    scaled(params, scaler, factor=float("inf"))
    scaler.step(optimizer)
    scaler.update()
    cases.assert_same(params, twins, rtol=0, atol=0)
    assert scaler.get_scale() == 32.0


@every
def test_gradients_that_were_unscaled_are_not_divided_again(name):
    optimizer, params, reference, twins, scaler = pair(name)
    scaled(params, scaler)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaled(twins, torch.amp.GradScaler("cpu", enabled=False))
    reference.step()
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
def test_grad_scaler_may_be_an_argument_of_step(name, unscaled):
    optimizer, params, reference, twins, scaler = pair(name)
    scaled(params, scaler)
    if unscaled:
        scaler.unscale_(optimizer)
    optimizer.step(grad_scaler=scaler)
    scaled(twins, torch.amp.GradScaler("cpu", enabled=False))
    reference.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
def test_class_shows_grad_scaler_and_an_instance_does_not(name):
    optimizer = cases.MAKERS[name](cases.parameters())
    assert "grad_scaler" in inspect.signature(type(optimizer).step).parameters
    assert "grad_scaler" not in inspect.signature(optimizer.step).parameters


class OwnProtocol(optimizers.FusedAdam):
    """Takes the scaler as an argument, as its signature says."""

    def step(self, closure=None, grad_scaler=None):
        self.given = grad_scaler
        return super().step(closure, grad_scaler=grad_scaler)


def test_own_step_that_shows_grad_scaler_gets_it():
    params = cases.parameters()
    optimizer, scaler = OwnProtocol(params), torch.amp.GradScaler("cpu")
    scaled(params, scaler)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(optimizer)
    assert optimizer.given is scaler


def test_step_hooks_run_once():
    params = cases.parameters()
    optimizer = cases.MAKERS["FusedAdam"](params)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    cases.run(optimizer, params, 1)
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("ours_inside", [True, False])
def test_larc_sees_unscaled_gradients(ours_inside):
    """Its ratio of norms is wrong with any others, and it passes no flag on."""
    ours, theirs = cases.parameters(), cases.parameters()
    plain = lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1, fused=True)  # noqa: E731
    make = cases.MAKERS["FusedSGD"] if ours_inside else plain
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled(ours, scaler)
    scaler.step(LARC(make(ours)))
    scaled(theirs, torch.amp.GradScaler("cpu", enabled=False))
    LARC(make(theirs)).step()
    cases.assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


def network(dtype=torch.float32):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))
    model[0].to(dtype)
    return model


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"capturable": False}),
        (torch.float32, {"capturable": True}),
        (torch.float16, {"capturable": True, "master_weights": True}),
    ],
    ids=["plain", "capturable", "masters"],
)
def test_adam_trains_as_torchs(dtype, options):
    """As apex's own test goes: weights and gradients after each of several iterations."""
    reference, model = network(), network(dtype)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-4)
    ours = optimizers.FusedAdam(model.parameters(), lr=1e-4, **options)
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    generator = torch.Generator().manual_seed(6)
    for _ in range(12):
        x, y = torch.rand(4, 1, 5, 5, generator=generator), torch.rand(4, 4, generator=generator)
        x = x.to(memory_format=torch.channels_last)
        for net, optimizer, scaler in zip((reference, model), (theirs, ours), scalers, strict=True):
            with torch.autocast("cpu", torch.float16):
                out = net(x)
            scaler.scale(((y - out.float()) ** 2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        for one, other in zip(reference.parameters(), model.parameters(), strict=True):
            cases.assert_same([one], [other.float()], rtol=1e-3, atol=1e-3)
            cases.assert_same([one.grad], [other.grad.float()], rtol=1e-3, atol=1e-3)
        theirs.zero_grad()
        ours.zero_grad()
        model.load_state_dict(copy.deepcopy(reference.state_dict()))
