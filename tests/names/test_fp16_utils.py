"""``apex.fp16_utils``: half models, masters and loss scales for loops written by hand."""

import pytest
import torch
from torch import nn

from apex import fp16_utils
from apex.fp16_utils import DynamicLossScaler, LossScaler
from tests.support.loops import same

HALF = torch.float16


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain_norm = nn.BatchNorm1d(4, affine=False)
        self.last = nn.Linear(4, 2)
        self.register_buffer("steps", torch.tensor([3]))

    def forward(self, rows, shift=0.0):
        return self.last(self.plain_norm(self.norm(self.table(rows) + shift)))


# -- half models -----------------------------------------------------------------------------


TO_HALF = [
    lambda net: fp16_utils.network_to_half(net)[1],
    lambda net: fp16_utils.FP16Model(net).network,
    lambda net: fp16_utils.convert_network(net, HALF),
    lambda net: fp16_utils.BN_convert_float(net.half()),
]


@pytest.mark.parametrize("to_half", TO_HALF)
def test_a_half_network_keeps_affine_batch_norm_in_fp32(to_half):
    model = EmbeddingNet()
    before = list(model.parameters())
    model.last.weight.grad = torch.ones(2, 4)
    found = {name: t.dtype for name, t in to_half(model).state_dict().items()}
    halves = {"table.weight", "last.weight", "last.bias"}
    halves |= {"plain_norm.running_mean", "plain_norm.running_var"}
    assert {name for name, dtype in found.items() if dtype is HALF} == halves
    assert found["norm.weight"] is found["norm.running_var"] is torch.float32
    assert found["steps"] is torch.int64
    assert all(map(lambda a, b: a is b, before, model.parameters()))
    assert model.last.weight.grad.dtype is HALF


def test_half_networks_cast_their_inputs():
    assert fp16_utils.tofp16()(torch.ones(1)).dtype is HALF
    assert fp16_utils.network_to_half(nn.Linear(2, 2))(torch.ones(1, 2)).dtype is HALF
    rows = torch.tensor([0, 1, 2])  # integers stay
    assert fp16_utils.FP16Model(EmbeddingNet())(rows, shift=torch.ones(1)).dtype is HALF


# -- masters ---------------------------------------------------------------------------------


def half_net():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    model[1].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("net", [half_net, lambda: fp16_utils.network_to_half(EmbeddingNet())])
@pytest.mark.parametrize("flat", [False, True])
def test_a_loop_by_masters_steps_like_fp32(flat, net):
    params, masters = fp16_utils.prep_param_lists(net(), flat_master=flat)
    reference = [nn.Parameter(p.detach().float()) for p in params]
    optimizers = [torch.optim.SGD(ps, lr=2.0**-12, momentum=0.5) for ps in (masters, reference)]
    for step in range(4):
        for param, own in zip(params, reference, strict=True):
            param.grad = torch.full_like(param, step + 1.0)
            own.grad = param.grad.float()
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        for optimizer in optimizers:
            optimizer.step()
        fp16_utils.master_params_to_model_params(iter(params), iter(masters), flat_master=flat)
    rounded = [own.detach().to(p.dtype) for p, own in zip(params, reference, strict=True)]
    assert same([p.detach() for p in params], rounded)


def test_masters_are_fp32_leaves_that_share_nothing_with_the_model():
    for model in (nn.Linear(2, 2), nn.Linear(2, 2).half()):
        for flat in (False, True):
            params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
            assert {own.dtype for own in masters} == {torch.float32}
            assert all(own.requires_grad and own.is_leaf for own in masters)
            assert not {p.data_ptr() for p in params} & {own.data_ptr() for own in masters}
    assert masters[0].grad.count_nonzero() == 0  # of a flat master, at once


def test_masters_get_no_gradient_that_their_parameters_lack():
    params, masters = fp16_utils.prep_param_lists(half_net())
    assert len(params) == 3  # one is frozen
    masters[0].grad, params[1].grad = torch.ones(4, 3), torch.ones(4).half()
    fp16_utils.model_grads_to_master_grads(params, masters)
    assert [master.grad is None for master in masters] == [True, False, True]


def test_masters_may_be_in_16_bits_where_the_model_is():
    params = list(nn.Linear(2, 2).half().parameters())
    masters = [torch.nn.Parameter(torch.ones_like(param)) for param in params]
    fp16_utils.master_params_to_model_params(params, masters)
    assert all(map(torch.equal, params, masters))


def test_lists_that_do_not_fit_are_refused():
    flat = fp16_utils.prep_param_lists(half_net(), flat_master=True)
    params, masters = fp16_utils.prep_param_lists(half_net())
    for call in (fp16_utils.model_grads_to_master_grads, fp16_utils.master_params_to_model_params):
        with pytest.raises(ValueError, match=r"flat_master=False\)"):
            call(*flat)
        with pytest.raises(ValueError, match="the lists are swapped"):
            call(masters, params)


# -- loss scales -----------------------------------------------------------------------------


def param(*grad, dtype=torch.float32):
    result = nn.Parameter(torch.zeros(len(grad), dtype=dtype))
    result.grad = torch.tensor(grad, dtype=dtype)
    return result


def by_the_rule(overflows, scale, factor, window):
    """apex's rule, said plainly: what the scale is after each update."""
    scales, last = [], -1
    for i, overflow in enumerate(overflows):
        if overflow:
            scale, last = max(scale / factor, 1.0), i
        elif (i - last) % window == 0:
            scale = scale * factor
        scales.append(scale)
    return scales


@pytest.mark.parametrize(("factor", "window"), [(2.0, 1), (2.0, 3), (4.0, 2)])
def test_a_dynamic_scale_follows_the_rule(factor, window):
    overflows = [False, False, True, False, False, False, False, *[True] * 5, *[False] * 6]
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=factor, scale_window=window)
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == by_the_rule(overflows, 8.0, factor, window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_overflow_is_an_inf_or_nan_and_no_large_number(dtype):
    scaler, largest = DynamicLossScaler(), torch.finfo(dtype).max
    for value in (float("inf"), -float("inf"), float("nan")):
        assert scaler.has_overflow(iter([param(1.0), param(1.0, value, dtype=dtype)]))
    large = param(largest, largest, dtype=dtype)  # their sum is beyond the range
    without = nn.Parameter(torch.zeros(1))
    assert not scaler.has_overflow([large, without])
    assert not scaler.has_overflow([without])
    assert large.grad.tolist() == [largest, largest]


def test_overflow_of_a_sparse_gradient_is_that_of_the_sum_of_its_rows():
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1, 1])).mul(2e38).sum().backward()
    assert DynamicLossScaler().has_overflow(table.parameters())


def test_a_scaler_that_apex_pickled_goes_on():
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    state = {"cur_scale": 8.0, "cur_iter": 3, "last_overflow_iter": 1}
    scaler.__dict__.update(**state, scale_factor=2.0, scale_window=2)
    scaler.update_scale(False)
    assert scaler.loss_scale == 16.0
    scaler.update_scale(True)
    assert (scaler.loss_scale, scaler.last_overflow_iter) == (8.0, 4)


@pytest.mark.parametrize("scaler", [LossScaler(4.0), DynamicLossScaler(init_scale=4.0)])
def test_backward_scales_the_loss(scaler):
    weight = nn.Parameter(torch.ones(1))
    loss = weight.square().sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert weight.grad.item() == 16.0
    assert scaler.scale_gradient(None, (torch.ones(1),), None)[0].item() == 4.0


def test_a_host_number_is_the_tensor_s_or_the_first_of_a_sequence():
    for given in (torch.tensor(2.0), torch.tensor([2.0]), [2.0]):
        assert fp16_utils.to_python_float(given) == 2.0


BAD_VALUES = [
    (lambda: LossScaler("x"), ValueError),
    (lambda: DynamicLossScaler(init_scale=-1.0), ValueError),
    (lambda: DynamicLossScaler(scale_factor=1.0), ValueError),
    (lambda: DynamicLossScaler(scale_window=0), ValueError),
    (lambda: LossScaler(8.0).backward(1.0), TypeError),
    (lambda: LossScaler(8.0).backward(torch.tensor(1)), TypeError),
]


@pytest.mark.parametrize(("call", "error"), BAD_VALUES)
def test_bad_values_are_refused(call, error):
    with pytest.raises(error, match=r"it must (be|have) a|it must be (above|at least) 1"):
        call()
