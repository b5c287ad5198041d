"""FP16_Optimizer against a plain loop with masters, and its state."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from apex import amp
from apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, network_to_half
from tests.training.cases import same

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
MODES = [
    {"static_loss_scale": 128.0},
    {"static_loss_scale": 1.0},
    {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2}},
    {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2.0}},
]


def net(dtype=torch.float16):
    """16-bit layers around a batch norm in fp32."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    model[1].float()
    return model


def batch(step=0, overflow=False):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    return x * float("inf") if overflow else x


def loss_of(model, x):
    return model(x.to(model[0].weight.dtype)).float().square().mean()


def sgd(model):
    return OPTIMIZERS["SGD"](model.parameters())


def masters(optimizer):
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


class Reference:
    """A loop by hand: fp32 copies of all parameters, gradients divided by the scale."""

    def __init__(self, make, scale, dynamic, window=2):
        self.model = net()
        self.params = [nn.Parameter(p.detach().float().clone()) for p in self.model.parameters()]
        self.optimizer = make(self.params)
        self.scale, self.dynamic, self.window, self.clean = scale, dynamic, window, 0

    def step(self, x):
        self.model.zero_grad()
        (loss_of(self.model, x) * self.scale).backward()
        grads = [p.grad.float() / self.scale for p in self.model.parameters()]
        finite = all(grad.isfinite().all() for grad in grads)
        if self.dynamic and not finite:
            self.scale, self.clean = self.scale / 2, 0
            return
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.clean += 1
        if self.dynamic and self.clean == self.window:
            self.scale, self.clean = self.scale * 2, 0
        self.optimizer.step()
        for param, own in zip(self.model.parameters(), self.params, strict=True):
            param.data.copy_(own.data)


# -- the loop --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:FP16_Optimizer got gradients of a backward pass")
def test_passes_that_a_script_scales_itself_are_divided_by_the_scale(mode):
    model = net()
    dynamic = mode.get("dynamic_loss_scale", False)
    reference = Reference(OPTIMIZERS["SGD"], mode.get("static_loss_scale", 64.0), dynamic)
    optimizer = FP16_Optimizer(sgd(model), **mode)
    for step in range(4):
        optimizer.zero_grad()
        (loss_of(model, batch(step)) * optimizer.loss_scale).backward()
        optimizer.update_master_grads()
        optimizer.step()
        reference.step(batch(step))
        assert same(masters(optimizer), [p.detach() for p in reference.params])


def test_a_step_after_a_plain_backward_pass_says_what_is_missing():
    model = net()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=128.0)
    before = masters(optimizer)
    loss_of(model, batch()).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\) in place of loss\."):
        optimizer.step()
    assert same(masters(optimizer), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_like_a_loop_by_hand(name, mode):
    dynamic = mode.get("dynamic_loss_scale", False)
    reference = Reference(OPTIMIZERS[name], mode.get("static_loss_scale", 64.0), dynamic)
    model = net()
    optimizer = FP16_Optimizer(OPTIMIZERS[name](model.parameters()), **mode)
    for step in range(6):
        x = batch(step, overflow=dynamic and step in (1, 4))
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, x))
        optimizer.step()
        reference.step(x)
        assert same(masters(optimizer), [p.detach() for p in reference.params])
        assert optimizer.loss_scale == reference.scale
    assert same(dict(model.state_dict()), dict(reference.model.state_dict()))


def test_an_overflow_skips_the_step_and_halves_the_scale(caplog):
    model = net()
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True)
    before = masters(optimizer)
    optimizer.backward(loss_of(model, batch(overflow=True)))
    assert optimizer.overflow
    assert optimizer.step() is None
    assert same(masters(optimizer), before)
    assert optimizer.loss_scale == 2.0**15
    assert "Skipping step, reducing loss scale to 32768.0" in caplog.text


def test_not_verbose_it_says_nothing(caplog):
    model = net()
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True, verbose=False)
    optimizer.backward(loss_of(model, batch(overflow=True)))
    optimizer.step()
    assert caplog.text == ""


def test_a_static_scale_checks_nothing():
    model = net()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=8.0)
    optimizer.backward(loss_of(model, batch(overflow=True)))
    optimizer.step()
    assert not optimizer.overflow
    assert not masters(optimizer)[0].isfinite().all()


def test_bfloat16_models_have_masters_too():
    model = net(torch.bfloat16)
    optimizer = FP16_Optimizer(sgd(model))
    optimizer.backward(loss_of(model, batch()))
    optimizer.step()
    assert same(optimizer.all_fp32_from_fp16_params[0].bfloat16(), model[0].weight)


def test_it_takes_what_network_to_half_returns():
    model = network_to_half(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=128.0)
    before = masters(optimizer)
    optimizer.backward(model(batch()).float().square().sum())
    optimizer.step()
    assert not same(masters(optimizer), before)


# -- gradients -------------------------------------------------------------------------------


def two_losses(update, scale_changes):
    model = net()
    args = {"init_scale": 64.0, "scale_window": 1 if scale_changes else 100}
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True, dynamic_loss_args=args)
    for step in range(2):
        optimizer.backward(loss_of(model, batch(step)), update_master_grads=update)
    if not update:
        optimizer.update_master_grads()
    return optimizer


@pytest.mark.parametrize("scale_changes", [False, True])
@pytest.mark.parametrize("update", [False, True])
def test_gradients_of_two_losses_add_up(update, scale_changes):
    optimizer = two_losses(update, scale_changes)
    model = net().float()
    sum(loss_of(model, batch(step)) for step in range(2)).backward()
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for grad, param in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=2**-6, atol=2**-8)


def test_a_retained_graph_can_be_used_again():
    model = net()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=4.0)
    loss = loss_of(model, batch())
    optimizer.backward(loss, update_master_grads=False, retain_graph=True)
    optimizer.backward(loss)
    twice = optimizer.inspect_master_grad_data()[0][0].clone()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, batch()))
    assert same(twice, 2 * optimizer.inspect_master_grad_data()[0][0])


def test_a_parameter_without_a_gradient_has_a_master_without_one():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]).half()
    optimizer = FP16_Optimizer(sgd(model))
    for part in model:
        model.zero_grad()
        optimizer.backward(part(torch.ones(1, 1).half()).sum())
    assert [grad is None for grad in optimizer.inspect_master_grad_data()[0]] == [
        *(True, True),
        *(False, False),
    ]


def test_sparse_gradients_are_unscaled():
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = FP16_Optimizer(torch.optim.SGD(table.parameters(), lr=1.0), static_loss_scale=8.0)
    optimizer.backward(table(torch.tensor([1, 1])).sum())
    assert table.weight.grad.to_dense().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


def test_an_overflow_in_fp32_parameters_alone_is_seen():
    params = [nn.Parameter(torch.ones(1).half()), nn.Parameter(torch.ones(1))]
    optimizer = FP16_Optimizer(OPTIMIZERS["SGD"](params), dynamic_loss_scale=True)
    optimizer.backward(params[0].float().sum() + (params[1] * float("inf")).sum())
    assert optimizer.overflow


def test_rows_of_a_sparse_gradient_are_checked_by_their_sum():
    table = nn.Embedding(3, 2, sparse=True)
    nn.init.zeros_(table.weight)
    inner = torch.optim.SGD(table.parameters(), lr=1.0)
    args = {"init_scale": 1.0}
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=args)
    optimizer.backward((table(torch.tensor([1, 1])) * 3e38).sum())
    assert optimizer.overflow


@pytest.mark.parametrize("options", [{}, {"set_grads_to_None": True}, {"set_to_none": True}])
def test_zero_grad_clears_masters_and_model(options):
    model = net()
    optimizer = FP16_Optimizer(sgd(model))
    optimizer.backward(loss_of(model, batch()))
    optimizer.zero_grad(**options)
    params = [*model.parameters(), *optimizer.all_fp32_from_fp16_params]
    if options:
        assert all(p.grad is None for p in params)
    else:
        assert all(p.grad.count_nonzero() == 0 for p in params)


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
def test_clip_master_grads_clips_the_unscaled_gradients(norm_type):
    model = net()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=64.0)
    optimizer.backward(loss_of(model, batch()))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    expected = nn.utils.get_total_norm([p.grad for p in params], norm_type)
    assert torch.equal(optimizer.clip_master_grads(0.01, norm_type), expected)
    clipped = nn.utils.get_total_norm([p.grad for p in params], norm_type)
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


def test_after_an_overflow_clipping_returns_minus_1_and_inspection_none():
    model = net()
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True)
    optimizer.backward(loss_of(model, batch(overflow=True)))
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None


def test_a_step_before_the_masters_have_their_gradients_is_refused():
    model = net()
    optimizer = FP16_Optimizer(sgd(model))
    optimizer.backward(loss_of(model, batch()), update_master_grads=False)
    with pytest.raises(RuntimeError, match="Call update_master_grads"):
        optimizer.step()


# -- closures --------------------------------------------------------------------------------


def test_a_closure_steps_like_the_usual_loop():
    def trained(closure):
        model = net()
        optimizer = FP16_Optimizer(sgd(model), static_loss_scale=16.0)

        def evaluate():
            optimizer.zero_grad()
            loss = loss_of(model, batch())
            optimizer.backward(loss)
            return loss

        if closure:
            loss = optimizer.step(evaluate)
        else:
            loss = evaluate()
            optimizer.step()
        return loss.detach(), masters(optimizer), dict(model.state_dict())

    assert same(trained(closure=True), trained(closure=False))


def test_lbfgs_sees_the_model_move_between_evaluations():
    model = nn.Linear(3, 1).half()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5))
    losses = []

    def evaluate():
        optimizer.zero_grad()
        loss = (model(batch().half()).float() - 1.0).square().mean()
        optimizer.backward(loss)
        losses.append(loss.item())
        return loss

    optimizer.step(evaluate)
    assert losses[-1] < losses[0] / 2


def test_an_overflow_in_a_closure_is_tried_again_at_a_lower_scale():
    model = net()
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True)
    overflows = [True, True, False]

    def evaluate():
        optimizer.zero_grad()
        loss = loss_of(model, batch(overflow=overflows.pop(0)))
        optimizer.backward(loss)
        return loss

    assert optimizer.step(evaluate).isfinite()
    assert optimizer.loss_scale == 2.0**14


def test_a_closure_that_always_overflows_is_refused():
    model = net()
    args = {"init_scale": 4.0, "min_loss_scale": 1.0}
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True, dynamic_loss_args=args)

    def evaluate():
        loss = loss_of(model, batch(overflow=True))
        optimizer.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match="even at the smallest loss scale, 1"):
        optimizer.step(evaluate)


# -- construction ----------------------------------------------------------------------------


def test_groups_keep_their_identity_and_hold_the_masters():
    model = net()
    inner = sgd(model)
    group = inner.param_groups[0]
    optimizer = FP16_Optimizer(inner)
    assert optimizer.param_groups[0] is group
    assert {p.dtype for p in group["params"]} == {torch.float32}
    assert optimizer.fp16_groups[0][0] is model[0].weight
    assert optimizer.fp32_from_fp32_groups[0][0] is model[1].weight is group["params"][2]


def test_state_of_a_used_optimizer_moves_to_the_masters_in_fp32():
    model = nn.Linear(1, 1).half()
    inner = OPTIMIZERS["Adam"](model.parameters())
    model(torch.ones(1, 1).half()).sum().backward()
    inner.step()
    optimizer = FP16_Optimizer(inner)
    state = optimizer.state[optimizer.all_fp32_from_fp16_params[0]]
    assert state["exp_avg"].dtype is torch.float32
    assert state["step"] == 1


def test_frozen_parameters_stay():
    model = net().requires_grad_(False)
    model[2].weight.requires_grad_()
    optimizer = FP16_Optimizer(sgd(model))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert len(optimizer.all_fp32_from_fp16_params) == 1


def test_loss_scale_groups_and_state_can_be_set():
    model = net()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=2.0)
    optimizer.loss_scale = 32.0
    optimizer.state = state = {}
    optimizer.param_groups = groups = list(optimizer.param_groups)
    assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale() == 32.0
    assert optimizer.optimizer.state is state
    assert optimizer.optimizer.param_groups is groups


def test_a_scheduler_takes_the_optimizer_inside():
    model = net()
    optimizer = FP16_Optimizer(sgd(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    optimizer.backward(loss_of(model, batch()))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_other_dtypes_are_refused_and_nothing_changed(dtype):
    params = [nn.Parameter(torch.ones(1).half()), nn.Parameter(torch.ones(1, dtype=dtype))]
    inner = torch.optim.SGD(params, lr=0.1)
    with pytest.raises(TypeError, match=f"got a parameter of {dtype}"):
        FP16_Optimizer(inner)
    assert inner.param_groups[0]["params"][0] is params[0]


def test_anything_but_an_optimizer_is_refused():
    with pytest.raises(TypeError, match="FP16_Optimizer got Linear; it wraps an optimizer"):
        FP16_Optimizer(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="FP16_Optimizer got FP16_Optimizer; it wraps an optimizer"):
        FP16_Optimizer(FP16_Optimizer(sgd(net())))


def test_unknown_dynamic_loss_args_are_refused():
    inner = sgd(net())
    with pytest.raises(TypeError, match=r"holds \['window'\]; it takes init_scale"):
        FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args={"window": 3})
    assert inner.param_groups[0]["params"][0].dtype is torch.float16


@pytest.mark.parametrize("given", ["window", [("init_scale", 8.0)]])
def test_dynamic_loss_args_must_be_a_dict(given):
    with pytest.raises(
        TypeError, match=r"dynamic_loss_args is .*; it must be a dict of init_scale"
    ):
        FP16_Optimizer(sgd(net()), dynamic_loss_scale=True, dynamic_loss_args=given)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), None, "dynamic"])
def test_a_scale_out_of_range_is_refused(scale):
    with pytest.raises(ValueError, match="positive, finite"):
        FP16_Optimizer(sgd(net()), static_loss_scale=scale)


def test_the_string_false_turns_the_dynamic_scale_off():
    assert not FP16_Optimizer(sgd(net()), dynamic_loss_scale="False").loss_scaler.dynamic
    with pytest.raises(TypeError, match="dynamic_loss_scale is 'no'; it must be a bool"):
        FP16_Optimizer(sgd(net()), dynamic_loss_scale="no")


@pytest.mark.parametrize("loss", [None, "loss", 1.0, (torch.ones(1),)])
def test_what_is_no_loss_is_refused(loss):
    optimizer = FP16_Optimizer(sgd(net()))
    with pytest.raises(TypeError, match=r"FP16_Optimizer\.backward got a loss of type"):
        optimizer.backward(loss)
    optimizer.step()  # nothing is pending


def test_an_optimizer_that_amp_has_prepared_is_refused():
    model = nn.Linear(1, 1)
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O5", verbosity=0)
    before = list(amp.master_params(optimizer))
    with pytest.raises(RuntimeError, match=r"amp\.initialize has prepared.*Use amp\.scale_loss"):
        FP16_Optimizer(optimizer)
    assert list(map(id, amp.master_params(optimizer))) == list(map(id, before))


@pytest.mark.parametrize("given", [None, "state", [], {}])
def test_what_is_no_state_is_refused(given):
    with pytest.raises(ValueError, match="without loss_scaler, dynamic_loss_scale"):
        FP16_Optimizer(sgd(net())).load_state_dict(given)


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_copying_and_pickling_are_refused(way):
    with pytest.raises(RuntimeError, match="state_dict"):
        way(FP16_Optimizer(sgd(net())))


# -- state -----------------------------------------------------------------------------------


def build(mode):
    model = net()
    return model, FP16_Optimizer(OPTIMIZERS["Adam"](model.parameters()), **mode)


def train(model, optimizer, steps, overflow_at=()):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, batch(step, overflow=step in overflow_at)))
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_run_continues_bit_by_bit(mode):
    overflow_at = {2} if "dynamic_loss_scale" in mode else set()
    model, optimizer = build(mode)
    train(model, optimizer, range(3), overflow_at)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(3, 6))

    other, resumed = build(mode)
    file.seek(0)
    of_model, of_optimizer = torch.load(file)
    other.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    train(other, resumed, range(3, 6))
    assert same(masters(resumed), masters(optimizer))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert resumed.loss_scale == optimizer.loss_scale


def test_state_dict_has_apexs_keys():
    assert list(FP16_Optimizer(sgd(net())).state_dict()) == [
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "first_closure_call_this_step",
        "optimizer_state_dict",
        "fp32_from_fp16",
    ]


class Pickled:
    """What unpickling a scaler of apex gives: its attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("scaler", "steps"),
    [
        (Pickled(_loss_scale=512.0, _unskipped=7, dynamic=True), 7),
        (Pickled(cur_scale=512.0, cur_iter=9, last_overflow_iter=4), 4),
        (DynamicLossScaler(init_scale=512.0), 0),
    ],
)
def test_a_scaler_of_apexs_checkpoint_is_read(scaler, steps):
    optimizer = FP16_Optimizer(sgd(net()), dynamic_loss_scale=True)
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler})
    assert optimizer.loss_scale == 512.0
    assert optimizer.loss_scaler._unskipped == steps


def test_loading_writes_the_masters_into_the_model():
    model, optimizer = build(MODES[0])
    state = copy.deepcopy(optimizer.state_dict())
    state["fp32_from_fp16"][0][0].fill_(1.0 + 2**-20)
    optimizer.load_state_dict(state)
    assert masters(optimizer)[0][0, 0].item() == 1.0 + 2**-20
    assert model[0].weight[0, 0].item() == 1.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("fp32_from_fp16"),
        lambda state: state["fp32_from_fp16"][0].pop(),
        lambda state: state["fp32_from_fp16"].append([]),
        lambda state: state.update(loss_scaler=None),
        lambda state: state["optimizer_state_dict"]["param_groups"].append({"params": []}),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changed(damage):
    model, optimizer = build(MODES[2])
    train(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(1, 3))
    damage(state)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"load_state_dict|loss_scaler|parameter group"):
        optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), before)
