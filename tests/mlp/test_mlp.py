"""MLP against a chain of torch's linear layers."""

import copy
import functools

import pytest
import torch
from torch import nn

from apex import amp, mlp
from apex.mlp import MLP, MlpFunction, mlp_function

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [6, 5, 4, 3]
ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


def chain(model, activation):
    """The same layers of torch's modules, with copies of the parameters."""
    layers = []
    for index, weight in enumerate(model.weights):
        linear = nn.Linear(*reversed(weight.shape), bias=bool(model.bias))
        linear.weight = nn.Parameter(weight.detach().clone())
        if model.bias:
            linear.bias = nn.Parameter(model.biases[index].detach().clone())
        layers += [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_gradients_are_those_of_linear_layers_with_activations(activation, bias, device):
    model = MLP(SIZES, bias, activation).to(device)
    torchs, x = chain(model, activation), torch.randn(7, 6, device=device)
    ours, wanted = model(x), torchs(x)
    assert torch.equal(ours, wanted)
    ours.square().sum().backward()
    wanted.square().sum().backward()
    expected = [param.grad for param in torchs.parameters()]
    grads = [getattr(model, name).grad for name in names(bias)]
    assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True))


def names(bias):
    return [
        f"{kind}_{layer}"
        for layer in range(3)
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_have_apexs_names_and_layout(bias):
    shapes = {name: tuple(param.shape) for name, param in MLP(SIZES, bias).named_parameters()}
    wanted = {"weight_0": (5, 6), "bias_0": (5,), "weight_1": (4, 5), "bias_1": (4,)}
    wanted |= {"weight_2": (3, 4), "bias_2": (3,)}
    assert shapes == {name: shape for name, shape in wanted.items() if bias or "weight" in name}


def test_weights_and_biases_start_normal_with_apexs_deviations():
    model = MLP([300, 500])
    assert model.weight_0.std().item() == pytest.approx((2 / 800) ** 0.5, rel=0.05)
    assert model.bias_0.std().item() == pytest.approx((1 / 500) ** 0.5, rel=0.2)
    assert abs(model.weight_0.mean().item()) < 1e-3


def test_relu_with_bias_is_the_default():
    model = MLP(SIZES)
    assert (model.bias, model.activation) == (1, 1)


def test_apexs_attributes_are_there():
    model = MLP(tuple(SIZES))
    assert (model.num_layers, model.mlp_sizes) == (3, SIZES)
    assert repr(model) == "MLP(MLP sizes: [6, 5, 4, 3], Bias=1, activation=1)"


@pytest.mark.parametrize("call", [mlp_function, MlpFunction.apply, mlp.mlp.mlp_function])
def test_functions_take_weights_then_biases(call):
    model, x = MLP(SIZES), torch.randn(2, 6)
    assert torch.equal(call(1, 1, x, *model.weights, *model.biases), model(x))


def function_and_chain(bias, code, x, args):
    """Returns MlpFunction's gradients and those that autograd finds."""
    pairs = []
    for call in (MlpFunction.apply, mlp_function):
        result = call(bias, code, x, *args)
        scale = torch.linspace(-1, 1, result.numel()).view_as(result).to(result.dtype)
        pairs.append(torch.autograd.grad((result * scale).sum(), [x, *args]))
    return zip(*pairs, strict=True)


@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (6,), (0, 6)])
@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("code", [0, 1, 2])
def test_backward_of_the_autograd_function_is_autograds(code, bias, shape):
    model, x = MLP(SIZES, bool(bias)), torch.randn(shape, requires_grad=True)
    for one, other in function_and_chain(bias, code, x, [*model.weights, *model.biases]):
        torch.testing.assert_close(one, other)
    assert issubclass(MlpFunction, torch.autograd.Function)


def test_backward_follows_autocast_with_gradients_in_the_dtypes_of_their_tensors():
    model, x = MLP(SIZES), torch.randn(7, 6, requires_grad=True)
    # Before 2.11 autocast's cache keeps the casts of the function's forward, without gradients.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert MlpFunction.apply(1, 2, x, *model.weights, *model.biases).dtype is torch.bfloat16
        both = function_and_chain(1, 2, x, [*model.weights, *model.biases])
    for one, other in both:
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("code", [0, 2])
def test_backward_has_derivatives_of_its_own(code):
    model, x = MLP([3, 4, 2]).double(), torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    args = [*model.weights, *model.biases]
    assert torch.autograd.gradgradcheck(lambda *a: MlpFunction.apply(1, code, *a), [x, *args])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_autograd_function_compiles_whole():
    model, x = MLP(SIZES), torch.randn(7, 6, requires_grad=True)
    args = [*model.weights, *model.biases]
    calls = [functools.partial(call, 1, 1) for call in (MlpFunction.apply, mlp_function)]
    calls[0] = torch.compile(calls[0], fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(call(x, *args).sum(), [x, *args]) for call in calls]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()


def test_a_copy_computes_with_its_own_parameters():
    model, x = MLP(SIZES), torch.randn(2, 6)
    before, twin = model(x), copy.deepcopy(model)
    nn.init.zeros_(twin.weight_2)
    assert torch.equal(model(x), before)
    assert not torch.equal(twin(x), before)


def test_a_loaded_state_dict_is_what_it_computes_with():
    model, other, x = MLP(SIZES), MLP(SIZES), torch.randn(2, 6)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model(x), other(x))


def test_inputs_of_more_dimensions_are_taken_by_rows():
    model, x = MLP(SIZES), torch.randn(2, 3, 6)
    torch.testing.assert_close(model(x), model(x.view(6, 6)).view(2, 3, 3))


def test_an_empty_batch_gives_an_empty_result():
    assert MLP(SIZES)(torch.ones(0, 6)).shape == (0, 3)


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_layers_run_in_low_precision_where_amp_casts(level, dtype):
    model = MLP(SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model(torch.randn(2, 6)).dtype is dtype


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_module_compiles_whole():
    model, x = MLP(SIZES), torch.randn(2, 6)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(x), model(x))
    torch.compiler.reset()


def test_another_activation_is_refused_with_the_choices():
    with pytest.raises(TypeError, match="'gelu'; it takes 'none', 'relu' or 'sigmoid'"):
        MLP(SIZES, activation="gelu")


@pytest.mark.parametrize(
    ("error", "sizes", "words"),
    [
        (ValueError, [4], r"mlp_sizes is \[4\]; it must have at least 2 items"),
        (ValueError, [4, 0], r"mlp_sizes\[1\] is 0; it must be an integer of at least 1"),
        (ValueError, ["4", 5], r"mlp_sizes\[0\] is '4'; it must be an integer"),
        (TypeError, 4, "mlp_sizes is 4; it must be a sequence of at least 2 integers"),
        (TypeError, "4,5", "mlp_sizes is '4,5'; it must be a sequence"),
        (TypeError, None, "mlp_sizes is None; it must be a sequence"),
    ],
)
def test_what_are_no_sizes_is_refused(error, sizes, words):
    with pytest.raises(error, match=words):
        MLP(sizes)


def test_an_input_of_another_size_is_refused_with_both():
    with pytest.raises(ValueError, match=r"shape \[2, 5\]; its last dimension must have size 6"):
        MLP(SIZES)(torch.ones(2, 5))


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_tensors_that_are_not_pairs_are_refused(count):
    with pytest.raises(ValueError, match="as many biases"):
        mlp_function(1, 1, *[torch.ones(2, 2)] * count)


def test_another_activation_code_is_refused():
    with pytest.raises(ValueError, match="activation=7; it takes 0"):
        mlp_function(0, 7, torch.ones(2, 2), torch.ones(2, 2))
