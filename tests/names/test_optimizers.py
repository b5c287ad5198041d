"""What scripts, GradScaler and amp do with an optimizer of apex."""

import contextlib
import copy
import pickle

import pytest
import torch

from apex import optimizers
from apex.multi_tensor_apply import multi_tensor_applier
from tests.support import fused, loops
from tests.support.host_reads import HostReads, waits_are_errors

name = loops.each_of(*fused.MAKERS)
EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def step(optimizer, params, grads, found_inf):
    fused.give(params, grads)
    optimizer.found_inf = torch.tensor(float(found_inf))
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


# -- skipped steps and torch's GradScaler --------------------------------------------------------


def test_a_set_flag_leaves_all_as_it_is_and_nobody_waits_for_it(name):
    for dtype in (torch.float32, torch.bfloat16):
        params, twins = fused.parameters(dtype), fused.parameters(dtype)
        optimizer, reference = fused.MAKERS[name](params), fused.MAKERS[name](twins)
        bad = fused.gradients(params, 50)
        bad[0].view(-1)[0], bad[1].view(-1)[1] = float("inf"), float("nan")
        step(optimizer, params, bad, 2)  # counts as none
        for index in range(3):
            step(optimizer, params, fused.gradients(params, index), 0)
            step(reference, twins, fused.gradients(twins, index), 0)
            before = fused.snapshot(optimizer)
            with HostReads() as reads:
                step(optimizer, params, bad, 2)
            assert reads.count == 0
            assert loops.same(fused.snapshot(optimizer), before)
        fused.assert_same(params, twins, **EXACT)


def scaled(params, scaler, factor=1.0):
    """Leaves scaled gradients of a quadratic loss."""
    for param in params:
        param.grad = None
    scaler.scale(sum(((p.float() - 1.0) ** 2).sum() for p in params) * factor).backward()


def test_grad_scaler_steps_by_unscaled_gradients(name):
    by_argument = () if name.startswith("contrib.") else ("argument", "disabled")
    for how in ("step", "unscale_", *by_argument):
        params, twins = fused.parameters(), fused.parameters()
        optimizer, reference = fused.MAKERS[name](params), fused.MAKERS[name](twins)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=how != "disabled")
        scaled(params, scaler)
        if how == "unscale_":
            scaler.unscale_(optimizer)
        if how in by_argument:
            optimizer.step(grad_scaler=scaler)
        else:
            scaler.step(optimizer)
            scaler.update()
        scaled(twins, torch.amp.GradScaler("cpu", enabled=False))
        reference.step()
        fused.assert_same(params, twins, **CLOSE)
        fused.assert_same([p.grad for p in params], [p.grad for p in twins], **EXACT)


def test_grad_scaler_skips_without_a_wait_and_warns_of_nothing_under_a_scheduler(name):
    params = fused.parameters()
    optimizer, scaler = fused.MAKERS[name](params), torch.amp.GradScaler("cpu", init_scale=64.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for index, factor in enumerate((1.0, 1.0, float("inf"))):
        scaled(params, scaler, factor)
        before = fused.snapshot(optimizer)
        with HostReads() as reads:
            scaler.step(optimizer)
            scaler.update()
        assert not reads.count or index == 0  # dampening asks once, for the start of the momentum
        assert loops.same(fused.snapshot(optimizer), before) is (index == 2)
    assert scaler.get_scale() == 32.0


# -- checkpoints and copies ----------------------------------------------------------------------


def test_checkpoints_and_copies_continue_as_the_uninterrupted_run(name):
    for dtype, flag in ((torch.float32, None), (torch.bfloat16, torch.zeros(()))):
        params = fused.parameters(dtype)
        optimizer = fused.MAKERS[name](params)
        settings = {key: each for key, each in vars(optimizer).items() if isinstance(each, int)}
        optimizer.found_inf = flag
        torch.optim.lr_scheduler.StepLR(optimizer, 9)
        fused.run(optimizer, params, 2)
        saved = loops.saved_and_loaded(optimizer.state_dict(), weights_only=True)
        loaded = fused.MAKERS[name]([torch.nn.Parameter(p.detach().clone()) for p in params])
        loaded.load_state_dict(saved)
        others = [loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        fused.run(optimizer, params, 3, first=2)
        for other in others:
            assert [*map(set, other.param_groups)] == [*map(set, optimizer.param_groups)]
            own = [p for group in other.param_groups for p in group["params"]]
            other.found_inf = flag
            fused.run(other, own, 3, first=2)
            fused.assert_same(params, own, **EXACT)
            assert {key: getattr(other, key) for key in settings} == settings


OF_TORCH = [
    ("FusedAdam", lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)),
    ("FusedSGD", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)),
]


@pytest.mark.parametrize(("name", "torch_s"), OF_TORCH)
def test_the_state_of_torch_s_own_class_loads_and_continues_it(name, torch_s):
    params = fused.parameters()
    optimizer = torch_s(params)
    fused.run(optimizer, params, 2)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = fused.MAKERS[name](resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fused.run(optimizer, params, 3, first=2)
    fused.run(other, resumed, 3, first=2)
    fused.assert_same(params, resumed, **CLOSE)


OTHER_STATES = [
    # torch's fused kernels would write outside the memory of what is too small.
    ("FusedAdam", "FusedAdam", [(3, 2)], r".*shape \(3, 2\) instead of \(3, 4\)"),
    ("FusedSGD", "FusedSGD", [(3, 2)], r".*shape \(3, 2\) instead of \(3, 4\)"),
    ("FusedAdam", "FusedNovoGrad", [(3, 4)], "exp_avg_sq has the shape"),
    ("FusedNovoGrad", "FusedAdam", [(3, 4)], r".*instead of \(\)"),
]


@pytest.mark.parametrize(("name", "saved", "shapes", "message"), OTHER_STATES)
def test_the_state_of_another_model_or_optimizer_is_refused(name, saved, shapes, message):
    params = fused.parameters(shapes=shapes)
    other = fused.MAKERS[saved](params)
    fused.run(other, params, 1)
    optimizer = fused.MAKERS[name](fused.parameters(shapes=[(3, 4)]))
    before = copy.deepcopy(optimizer.state_dict())
    words = f"{name} got the state of another model or optimizer: {message}"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict() == before


# -- the interface of torch's optimizers ---------------------------------------------------------


def test_closure_scheduler_groups_and_rates(name):
    params = fused.parameters()
    groups = [{"params": params[:2]}, {"params": params[2:3], "lr": 0.0}, {"params": []}]
    optimizer = fused.MAKERS[name](groups)
    before = loops.values(params)
    fused.give(params, fused.gradients(params, 0))
    assert optimizer.step(torch.is_grad_enabled) is True
    moved = [not torch.equal(a, b) for a, b in zip(before, params, strict=True)]
    assert moved == [True, True, False, False]
    optimizer.add_param_group({"params": params[3:]})
    fused.run(optimizer, params, 1)
    assert not torch.equal(before[3], params[3])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    fused.run(optimizer, params, 1)
    scheduler.step()
    before = loops.values(params)
    fused.run(optimizer, params, 1)
    fused.assert_same(params, before, **EXACT)


def test_what_no_rule_steps_is_refused_before_anything_changes(name):
    params = fused.parameters(shapes=[(3,), (4, 2)])
    optimizer = fused.MAKERS[name](params)
    before = fused.snapshot(optimizer)
    grads = fused.gradients(params, 0)
    params[0].grad, params[1].grad = grads[0], grads[1].to_sparse()
    with pytest.raises(RuntimeError, match="not support sparse gradients"):
        optimizer.step()
    assert loops.same(fused.snapshot(optimizer), before)
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="complex64"):
        fused.MAKERS[name]([param]).step()


def test_groups_on_the_device_have_rates_of_their_own():
    params, rate = fused.parameters(), torch.tensor(0.5)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = optimizers.FusedAdam(groups, lr=rate, capturable=True)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    assert [*map(float, (rate, optimizer.param_groups[1]["lr"]))] == [0.5, 0.5]


def test_zero_grad_drops_gradients_only_if_set_so():
    for set_grad_none in (True, False):
        params = fused.parameters()
        optimizer = optimizers.FusedAdam(params, set_grad_none=set_grad_none)
        fused.give(params, fused.gradients(params, 0))
        optimizer.zero_grad()
        assert all((p.grad is None) is set_grad_none for p in params)


def test_get_momentums_makes_what_is_missing_and_gives_what_is_there():
    params = fused.parameters()
    optimizer = optimizers.FusedSGD(params, lr=0.1, momentum=0.9)
    momenta, new = optimizer.get_momentums(params)
    assert new
    assert not any(m.any() for m in momenta)
    fused.run(optimizer, params, 1)
    again, new = optimizer.get_momentums(iter(params))
    assert not new
    assert all(a is optimizer.state[p]["momentum_buffer"] for a, p in zip(again, params))  # noqa: B905
    low = [fused.parameters(d, [(3,)])[0] for d in (torch.float16, torch.bfloat16)]
    momenta, _ = optimizers.FusedSGD(low, lr=0.1, momentum=0.9).get_momentums(low)
    assert [m.dtype for m in momenta] == [torch.float16, torch.float32]


BAD_OPTIONS = [
    (RuntimeError, "does not support the AMSGrad", "FusedAdam", {"amsgrad": True}),
    (ValueError, "amp_scale_adjustment is 2", "FusedAdam", {"amp_scale_adjustment": 2.0}),
    (RuntimeError, "capturable=True", "FusedAdam", {"master_weights": True}),
    (ValueError, "lr is -1.0; it must be", "FusedAdam", {"lr": -1.0}),
    (TypeError, "lr is '0.1'; it must be a number", "FusedLAMB", {"lr": "0.1"}),
    (TypeError, "betas is 0.9; it must be two numbers", "FusedNovoGrad", {"betas": 0.9}),
    (TypeError, "bias_correction", "FusedAdam", {"bias_correction": (0.9, 0.99)}),
    (ValueError, "momentum is -1", "FusedSGD", {"lr": 0.1, "momentum": -1.0}),
    (ValueError, "nesterov=True got", "FusedSGD", {"lr": 0.1, "nesterov": True}),
    (ValueError, "nesterov=True got", "FusedSGD",
     {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": True}),
    (ValueError, "lr", "FusedSGD", {}),
    (TypeError, "adam_w_mode is 'no'; it must", "FusedLAMB", {"adam_w_mode": "no"}),
    (RuntimeError, "norm_type=1", "FusedNovoGrad", {"norm_type": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "name", "options"), BAD_OPTIONS)
def test_bad_options_are_refused(error, message, name, options):
    with pytest.raises(error, match=message):
        getattr(optimizers, name)(fused.parameters(), **options)


class OwnStep(optimizers.FusedAdam):
    """Steps by the functions that apex's class holds, as fairseq's subclass does."""

    def step(self, closure=None):
        (group,) = self.param_groups
        group["step"] = group.get("step", 0) + 1
        grads = [p.grad for p in group["params"]]
        averages = [
            [self.state[p].setdefault(name, torch.zeros_like(p)) for p in group["params"]]
            for name in ("exp_avg", "exp_avg_sq")
        ]
        multi_tensor_applier(
            self.multi_tensor_adam, self._dummy_overflow_buf, [grads, group["params"], *averages],
            group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode,
            int(group["bias_correction"]), group["weight_decay"],
        )  # fmt: skip


def test_a_subclass_may_step_by_the_functions_of_its_class():
    own = fused.stepped(lambda params: OwnStep(params, weight_decay=0.1))
    plain = fused.stepped(lambda params: optimizers.FusedAdam(params, weight_decay=0.1))
    fused.assert_same(own, plain, **EXACT)
    held = "FusedSGD sgd, FusedAdagrad adagrad, FusedLAMB l2norm, FusedLAMB lamb, "
    held += "FusedMixedPrecisionLamb lamb, FusedNovoGrad novograd, FusedAdam adam_capturable_master"
    for name, function in map(str.split, held.split(", ")):
        assert callable(getattr(getattr(optimizers, name), f"multi_tensor_{function}"))


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_steps_are_those_of_the_cpu_and_wait_for_nothing(name):
    for dtype in (torch.float32, torch.bfloat16):
        params = fused.parameters(dtype)
        twins = [torch.nn.Parameter(p.detach().cuda()) for p in params]
        optimizer, reference = fused.MAKERS[name](twins), fused.MAKERS[name](params)
        flags = [torch.tensor(float(value), device="cuda") for value in (0, 0, 1)]
        for index, found_inf in enumerate(flags):
            grads = fused.gradients(params, index)
            fused.give(twins, [g.cuda() for g in grads])
            if index == 2:
                twins[0].grad.fill_(float("nan"))
            elif index < 2:
                step(reference, params, grads, 0)
            optimizer.found_inf = found_inf
            # Dampening asks once, at its start.
            with waits_are_errors() if index else contextlib.nullcontext():
                optimizer.step()
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {}
        fused.assert_same([t.cpu() for t in twins], params, **tolerance)
