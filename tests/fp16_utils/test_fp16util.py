"""Half models and master parameters for hand-written loops."""

import pytest
import torch
from torch import nn

from apex import fp16_utils
from apex.fp16_utils import fp16util
from tests.training.cases import same

HALF = torch.float16


class Net(nn.Module):
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


def dtypes(model):
    return {name: t.dtype for name, t in model.state_dict().items()}


IN_HALF = {"table.weight", "last.weight", "last.bias", "plain_norm.running_mean"}


@pytest.mark.parametrize(
    "to_half",
    [
        lambda net: fp16_utils.network_to_half(net)[1],
        lambda net: fp16_utils.FP16Model(net).network,
        lambda net: fp16_utils.convert_network(net, HALF),
        lambda net: fp16_utils.BN_convert_float(net.half()),
    ],
)
def test_a_half_network_keeps_affine_batch_norm_in_fp32(to_half):
    model = to_half(Net())
    found = dtypes(model)
    assert {name for name, dtype in found.items() if dtype is HALF} == {
        *IN_HALF,
        "plain_norm.running_var",
    }
    assert found["norm.weight"] is found["norm.running_var"] is torch.float32
    assert found["steps"] is torch.int64


def test_network_to_half_loses_nothing_of_batch_norm():
    model = Net()
    model.norm.running_mean.fill_(1.0 + 2**-20)
    fp16_utils.network_to_half(model)
    assert model.norm.running_mean[0].item() == 1.0 + 2**-20


def test_network_to_half_casts_its_input():
    model = fp16_utils.network_to_half(nn.Linear(2, 2))
    assert model(torch.ones(1, 2)).dtype is HALF


def test_tofp16_casts_its_input():
    assert fp16_utils.tofp16()(torch.ones(1)).dtype is HALF


def test_fp16_model_casts_floating_inputs_and_leaves_integers():
    model = fp16_utils.FP16Model(Net())
    output = model(torch.tensor([0, 1, 2]), shift=torch.ones(1))
    assert output.dtype is HALF


def test_parameters_stay_the_same_objects():
    model = Net()
    before = list(model.parameters())
    fp16_utils.convert_network(model, HALF)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_convert_module_leaves_children():
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_parameter("own", nn.Parameter(torch.ones(1)))
    fp16_utils.convert_module(model, HALF)
    assert dtypes(model) == {"own": HALF, "0.weight": torch.float32, "0.bias": torch.float32}


def test_convert_module_casts_gradients():
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    fp16_utils.convert_module(model, HALF)
    assert model.weight.grad.dtype is HALF


def test_convert_network_takes_rnns():
    model = fp16_utils.convert_network(nn.LSTM(2, 2), torch.bfloat16)
    assert model(torch.ones(1, 1, 2).bfloat16())[0].dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int32, "half", None])
def test_a_dtype_that_is_not_floating_is_refused(dtype):
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="it must be a floating dtype"):
        fp16_utils.convert_network(model, dtype)


@pytest.mark.parametrize("given", [None, "net", [nn.Linear(1, 1)], nn.Linear])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (fp16_utils.network_to_half, "convert_network"),
        (fp16_utils.FP16Model, "convert_network"),
        (fp16_utils.BN_convert_float, "BN_convert_float"),
        (fp16_utils.prep_param_lists, "prep_param_lists"),
        (lambda given: fp16_utils.convert_module(given, torch.float16), "convert_module"),
    ],
)
def test_anything_but_a_module_is_refused(call, name, given):
    with pytest.raises(TypeError, match=rf"{name} got .*; it takes a torch\.nn\.Module"):
        call(given)


# -- masters ---------------------------------------------------------------------------------


def half_net():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    model[1].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("flat", [False, True])
def test_a_loop_by_masters_steps_like_fp32(flat):
    model = half_net()
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    reference = [nn.Parameter(p.detach().float()) for p in params]
    optimizers = [torch.optim.SGD(ps, lr=2.0**-12, momentum=0.5) for ps in (masters, reference)]
    for step in range(4):
        for param, own in zip(params, reference, strict=True):
            param.grad = torch.full_like(param, step + 1.0)
            own.grad = param.grad.float()
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        for optimizer in optimizers:
            optimizer.step()
        fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    assert same([p.detach() for p in params], [p.detach().half() for p in reference])


def test_frozen_parameters_get_no_master():
    params, masters = fp16_utils.prep_param_lists(half_net())
    assert len(params) == len(masters) == 3


def test_masters_are_fp32_leaves_that_share_nothing_with_the_model():
    model = nn.Linear(2, 2)
    params, masters = fp16_utils.prep_param_lists(model)
    for param, own in zip(params, masters, strict=True):
        assert own.dtype is torch.float32
        assert own.requires_grad
        assert own.data_ptr() != param.data_ptr()


def test_a_flat_master_shares_nothing_with_the_model():
    model = nn.Linear(2, 1, bias=False)
    _, (flat,) = fp16_utils.prep_param_lists(model, flat_master=True)
    assert flat.data_ptr() != model.weight.data_ptr()


def test_a_flat_master_has_a_gradient_of_zeros_at_once():
    _, (flat,) = fp16_utils.prep_param_lists(half_net(), flat_master=True)
    assert flat.shape == (3 * 4 + 4 + 4 * 2,)
    assert flat.grad.count_nonzero() == 0


def test_a_master_without_a_model_gradient_has_none():
    params, masters = fp16_utils.prep_param_lists(half_net())
    masters[0].grad = torch.ones_like(masters[0])
    fp16_utils.model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None


def test_a_flat_master_is_zero_where_there_is_no_model_gradient():
    params, masters = fp16_utils.prep_param_lists(half_net(), flat_master=True)
    params[1].grad = torch.ones_like(params[1])
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=True)
    assert masters[0].grad.tolist() == [0.0] * 12 + [1.0] * 4 + [0.0] * 8


def test_a_flat_master_of_several_dtypes_is_refused():
    with pytest.raises(ValueError, match="float16 on cpu', 'float32 on cpu"):
        fp16_utils.prep_param_lists(fp16_utils.network_to_half(Net()), flat_master=True)


@pytest.mark.parametrize(
    "call", [fp16_utils.model_grads_to_master_grads, fp16_utils.master_params_to_model_params]
)
def test_lists_that_do_not_fit_are_refused(call):
    params, masters = fp16_utils.prep_param_lists(half_net(), flat_master=True)
    with pytest.raises(ValueError, match=r"flat_master=False\)"):
        call(params, masters)


@pytest.mark.parametrize(
    "call", [fp16_utils.model_grads_to_master_grads, fp16_utils.master_params_to_model_params]
)
def test_swapped_lists_are_refused(call):
    params, masters = fp16_utils.prep_param_lists(half_net())
    with pytest.raises(ValueError, match="the lists are swapped"):
        call(masters, params)


def test_generators_are_as_good_as_lists():
    params, masters = fp16_utils.prep_param_lists(half_net())
    for param in masters:
        param.data.fill_(2.0)
    fp16_utils.master_params_to_model_params(iter(params), iter(masters))
    assert all(param.eq(2.0).all() for param in params)


def test_to_python_float_takes_tensors_and_sequences():
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5
    assert fp16_utils.to_python_float([2.5]) == 2.5


def test_clip_grad_norm_is_torchs():
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_


def test_a_gradient_that_reaches_a_master_is_an_error():
    master = torch.ones(2, requires_grad=True)
    master.register_hook(fp16util.backwards_debug_hook)
    with pytest.raises(RuntimeError, match=r"A master got a gradient of shape \(2,\)"):
        master.sum().backward()
