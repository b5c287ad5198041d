"""One optimizer under amp: masters in its groups, gradients in, the skip, values back."""

import copy
import gc

import pytest
import torch

from apex._core.scale import ScaleRule
from apex._engine.masters import Masters
from apex._engine.optimizer import step as stepping
from apex._engine.optimizer.binding import Binding
from apex._engine.scaler import scaler_for

LOW = torch.bfloat16


def param(value=1.0, dtype=LOW, requires_grad=True):
    return torch.nn.Parameter(torch.full((2,), value, dtype=dtype), requires_grad=requires_grad)


def bound(*params, kind=torch.optim.SGD, source=None, master_weights=True, **options):
    optimizer = kind(list(params), lr=0.5, **options)
    return optimizer, Binding(
        optimizer,
        master_weights=master_weights,
        source=source,
    )


def begin(binding):
    binding.gradients.absorb_changes()
    binding.gradients.begin(identity=False)


def unscale(binding, scaler):
    binding.gradients.current.accumulate(binding, scaler.unscale_)
    binding.gradients.commit()


def step(optimizer, binding):
    return stepping.step(binding, optimizer.step, None)


def test_low_precision_parameters_get_masters_and_others_stay():
    low, full = param(), param(dtype=torch.float32)
    optimizer, binding = bound(low, full)
    master, direct = optimizer.param_groups[0]["params"]
    assert [(pair.model, pair.master) for pair in binding.pairs] == [(low, master)]
    assert direct is full
    assert binding.direct() == [full]


def test_without_master_weights_every_parameter_stays():
    low = param()
    optimizer, binding = bound(low, master_weights=False)
    assert optimizer.param_groups[0]["params"] == [low]
    assert binding.pairs == []


def test_two_optimizers_of_one_session_step_the_same_master():
    low, source = param(1 / 3), Masters()
    exact = torch.full((2,), 1 / 3)
    pair = source.make(low, source, exact)
    for _ in range(2):
        optimizer, _ = bound(low, source=source)
        assert optimizer.param_groups[0]["params"] == [pair.master]
    assert torch.equal(pair.master, exact)


def test_the_state_of_a_parameter_goes_to_its_master():
    low = param()
    optimizer = torch.optim.SGD([low], lr=0.5, momentum=0.9)
    low.grad = torch.ones_like(low)
    optimizer.step()
    momentum = optimizer.state[low]["momentum_buffer"]
    binding = Binding(optimizer, master_weights=True)
    assert list(optimizer.state) == [binding.pairs[0].master]
    assert optimizer.state[binding.pairs[0].master]["momentum_buffer"] is momentum


def test_close_puts_parameters_and_state_back():
    low = param()
    optimizer, binding = bound(low, momentum=0.9)
    params = optimizer.param_groups[0]["params"]
    low.grad = torch.ones_like(low)
    step(optimizer, binding)
    binding.close()
    assert optimizer.param_groups[0]["params"] is params
    assert params[0] is low
    assert list(optimizer.state) == [low]
    assert binding.pairs == []


def test_a_step_moves_the_master_and_rounds_it_into_the_model():
    low = param(1.0)
    optimizer, binding = bound(low)
    for _ in range(8):
        low.grad = torch.full_like(low, 2.0**-9)
        step(optimizer, binding)
    # One step alone is below half a rounding step of bf16; eight are not.
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.full((2,), 1 - 2.0**-7))
    assert torch.equal(low.detach(), torch.full((2,), 1 - 2.0**-7, dtype=LOW))


@pytest.mark.parametrize("dtype", [LOW, torch.float32])
def test_a_pass_sets_earlier_gradients_aside_and_adds_them_afterwards(dtype):
    own = param(dtype=dtype)
    optimizer, binding = bound(own)
    scaler = scaler_for(8.0, ScaleRule())
    for scaled in (8.0, 16.0):
        begin(binding)
        assert own.grad is None
        own.grad = torch.full_like(own, scaled)
        unscale(binding, scaler)
    (stepped,) = optimizer.param_groups[0]["params"]
    assert torch.equal(stepped.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("dtype", [LOW, torch.float32])
def test_an_earlier_gradient_without_a_fresh_one_stays(dtype):
    own = param(dtype=dtype)
    optimizer, binding = bound(own)
    scaler = scaler_for(8.0, ScaleRule())
    begin(binding)
    own.grad = torch.full_like(own, 8.0)
    unscale(binding, scaler)
    begin(binding)
    unscale(binding, scaler)
    (stepped,) = optimizer.param_groups[0]["params"]
    assert torch.equal(stepped.grad, torch.ones(2))


@pytest.mark.parametrize("raised", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])
def test_a_raised_flag_skips_the_step(fused, raised):
    low = param()
    optimizer, binding = bound(low, kind=torch.optim.Adam, fused=fused)
    low.grad = torch.ones_like(low)
    binding.gradients.overflow.raise_by(torch.tensor(raised))
    step(optimizer, binding)
    assert torch.equal(low.detach(), torch.ones_like(low)) is bool(raised)


@pytest.mark.parametrize("flags", [(1.0, 0.0), (0.0, 1.0)])
def test_a_flag_raised_once_holds_until_the_gradients_are_cleared(flags):
    low = param()
    optimizer, binding = bound(low)
    low.grad = torch.ones_like(low)
    for flag in flags:
        binding.gradients.overflow.raise_by(torch.tensor(flag))
    for _ in range(2):
        step(optimizer, binding)
        assert torch.equal(low.detach(), torch.ones_like(low))
    binding.gradients.zero(set_to_none=True)
    binding.gradients.overflow.raise_by(torch.tensor(0.0))
    assert binding.gradients.overflow.found_inf == 0.0


def test_the_flag_is_a_copy_that_the_scaler_may_clear():
    _, binding = bound(param())
    flag = torch.tensor(1.0)
    binding.gradients.overflow.raise_by(flag)
    flag.zero_()
    assert binding.gradients.overflow.found_inf == 1.0


def test_a_fused_optimizer_keeps_no_flag_after_the_step():
    low = param()
    optimizer, binding = bound(low, kind=torch.optim.Adam, fused=True)
    low.grad = torch.ones_like(low)
    binding.gradients.overflow.raise_by(torch.tensor(1.0))
    step(optimizer, binding)
    assert "found_inf" not in vars(optimizer)


def full(**options):
    return {"params": [param(dtype=torch.float32)], **options}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.Adam([full()], fused=True), True),
        (torch.optim.AdamW([full()], fused=True), True),
        (torch.optim.Adagrad([full()], fused=True), True),
        (torch.optim.SGD([full()], fused=True), True),
        (torch.optim.Adam([full()]), False),
        (torch.optim.RMSprop([full()]), False),
        (torch.optim.Adam([full(), full(fused=False)], fused=True), False),
        # The first momentum is made in the step: torch's kernel would leave it uninitialized.
        (torch.optim.SGD([full()], momentum=0.9, fused=True), False),
    ],
)
def test_which_optimizers_skip_by_themselves(optimizer, expected):
    assert stepping.skips_in_kernel(optimizer) is expected


def test_fused_sgd_skips_by_itself_once_it_has_momentum():
    own = param(dtype=torch.float32)
    optimizer = torch.optim.SGD([own], momentum=0.9, fused=True)
    own.grad = torch.ones(2)
    optimizer.step()
    assert stepping.skips_in_kernel(optimizer)


def test_a_group_added_to_fused_sgd_starts_its_momentum_anew():
    own = param(dtype=torch.float32)
    optimizer = torch.optim.SGD([own], momentum=0.9, fused=True)
    own.grad = torch.ones(2)
    optimizer.step()
    optimizer.add_param_group(full())
    assert not stepping.skips_in_kernel(optimizer)


def test_a_frozen_parameter_gets_its_master_once_it_is_unfrozen():
    frozen = param(requires_grad=False)
    optimizer, binding = bound(frozen, param())
    assert optimizer.param_groups[0]["params"][0] is frozen
    frozen.requires_grad_()
    binding.read_model()
    assert optimizer.param_groups[0]["params"][0] is binding.pairs[-1].master


def test_a_binding_does_not_keep_its_optimizer():
    optimizer, binding = bound(param())
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="has been deleted"):
        _ = binding.optimizer


def test_a_copied_fused_optimizer_still_skips_in_its_kernel():
    optimizer = torch.optim.AdamW([param(dtype=torch.float32)], fused=True)
    assert stepping.skips_in_kernel(copy.deepcopy(optimizer))
