"""Networks of cells against torch's own recurrent modules and the formulas."""

import copy

import pytest
import torch
from torch import nn

from apex import RNN
from apex.RNN import GRU, LSTM, ReLU, RNNBackend, Tanh, cells, mLSTM
from apex.RNN.models import toRNNBackend
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [LSTM, GRU, ReLU, Tanh, mLSTM]
TORCHS = {LSTM: nn.LSTM, GRU: nn.GRU, ReLU: nn.RNN, Tanh: nn.RNN}
STEPS, BATCH, FEATURES, HIDDEN = 5, 3, 4, 6


NAMES = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}


def torchs(kind, network, **kwargs):
    """torch's module with the parameters of ``network``."""
    options = {"nonlinearity": "relu"} if kind is ReLU else {}
    module = TORCHS[kind](FEATURES, HIDDEN, len(stacks(network)[0].rnns), **options, **kwargs)
    with torch.no_grad():
        for stack, suffix in zip(stacks(network), ("", "_reverse"), strict=False):
            for layer, cell in enumerate(stack.rnns):
                for ours, its in NAMES.items():
                    if getattr(cell, ours) is not None:
                        getattr(module, f"{its}_l{layer}{suffix}").copy_(getattr(cell, ours))
    return module


def stacks(network):
    return network.rnns if isinstance(network, bidirectionalRNN) else [network]


def final_states(kind, returned):
    """torch's final states as a list."""
    return list(returned) if kind is LSTM else [returned]


def inputs(device="cpu"):
    return torch.randn(STEPS, BATCH, FEATURES, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", TORCHS)
def test_outputs_and_states_are_those_of_torchs_module(kind, bias, device):
    network, x = kind(FEATURES, HIDDEN, 2, bias=bias).to(device), inputs(device)
    output, states = network(x)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wanted, wanted_states = torchs(kind, network, bias=bias).to(device)(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(states, final_states(kind, wanted_states))


@pytest.mark.parametrize("kind", TORCHS)
def test_gradients_are_those_of_torchs_module(kind):
    network, x = kind(FEATURES, HIDDEN, 2), inputs()
    module = torchs(kind, network)
    network(x)[0].square().sum().backward()
    module(x)[0].square().sum().backward()
    for layer, cell in enumerate(network.rnns):
        torch.testing.assert_close(cell.w_hh.grad, getattr(module, f"weight_hh_l{layer}").grad)
        torch.testing.assert_close(cell.b_ih.grad, getattr(module, f"bias_ih_l{layer}").grad)


@pytest.mark.parametrize("kind", TORCHS)
def test_one_bidirectional_layer_is_torchs(kind):
    network, x = kind(FEATURES, HIDDEN, 1, bidirectional=True), inputs()
    module = torchs(kind, network, bidirectional=True)
    output, states = network(x)
    wanted, wanted_states = module(x)
    torch.testing.assert_close(output, wanted)
    for state, want in zip(states, final_states(kind, wanted_states), strict=True):
        torch.testing.assert_close(state[0], torch.cat(list(want), -1))


def mlstm_by_hand(x, cell):
    h = torch.zeros(BATCH, cell.output_size)
    c = torch.zeros(BATCH, HIDDEN)
    outputs = []
    for step in x:
        m = (step @ cell.w_mih.T) * (h @ cell.w_mhh.T)
        gates = step @ cell.w_ih.T + cell.b_ih + m @ cell.w_hh.T + cell.b_hh
        i, f, g, o = gates.split(HIDDEN, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        if cell.output_size != HIDDEN:
            h = h @ cell.w_ho.T
        outputs.append(h)
    return torch.stack(outputs), c


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("output_size", [None, 2])
def test_mlstm_is_the_formula_of_its_paper(output_size, device):
    network, x = mLSTM(FEATURES, HIDDEN, 1, output_size=output_size), inputs()
    wanted, wanted_state = mlstm_by_hand(x, network.rnns[0])
    output, states = network.to(device)(x.to(device))
    torch.testing.assert_close(output.cpu(), wanted)
    torch.testing.assert_close(states[1].cpu(), wanted_state[None])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstm_with_output_size_is_torchs_with_a_projection():
    network, x = LSTM(FEATURES, HIDDEN, 1, output_size=2), inputs()
    module, cell = nn.LSTM(FEATURES, HIDDEN, proj_size=2), network.rnns[0]
    params = (cell.w_ih, cell.w_hh, cell.b_ih, cell.b_hh, cell.w_ho)
    with torch.no_grad():
        for its, ours in zip(module.parameters(), params, strict=True):
            its.copy_(ours)
    output, states = network(x)
    wanted, wanted_states = module(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(states, list(wanted_states))


@pytest.mark.parametrize("kind", [ReLU, Tanh])
def test_elman_networks_project_their_output(kind):
    network = kind(FEATURES, HIDDEN, 2, output_size=2)
    output, states = network(inputs())
    assert output.shape == (STEPS, BATCH, 2)
    assert states[0].shape == (2, BATCH, 2)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_collected_states_are_those_of_every_step(kind, bidirectional):
    network, x = kind(FEATURES, HIDDEN, 2, bidirectional=bidirectional), inputs()
    output, states = network(x, collect_hidden=True)
    assert [len(steps) for steps in states] == [STEPS] * len(states)
    for step in range(STEPS):
        assert torch.equal(states[0][step][-1], output[step])


@pytest.mark.parametrize("kind", KINDS)
def test_states_carry_over_to_the_next_call(kind):
    network, x = kind(FEATURES, HIDDEN, 2), inputs()
    whole, _ = network(x)
    network.reset_hidden(BATCH)
    parts = [network(part)[0] for part in x.split([2, 3])]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_reset_hidden_starts_from_zeros(bidirectional):
    network, x = LSTM(FEATURES, HIDDEN, 1, bidirectional=bidirectional), inputs()
    first, _ = network(x)
    carried, _ = network(x)
    network.reset_hidden(BATCH)
    assert not torch.equal(carried, first)
    assert torch.equal(network(x)[0], first)


def test_another_batch_size_starts_from_zeros():
    network, x = LSTM(FEATURES, HIDDEN, 1), inputs()
    network(x)
    narrow = network(x[:, :2])[0]
    network.reset_hidden(2)
    assert torch.equal(network(x[:, :2])[0], narrow)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_detach_hidden_lets_the_next_backward_start_anew(bidirectional):
    network = LSTM(FEATURES, HIDDEN, 1, bidirectional=bidirectional)
    for _ in range(2):
        network.init_hidden(BATCH)
        network.detach_hidden()
        network(inputs())[0].sum().backward()


def test_without_detach_a_second_backward_reaches_the_freed_graph():
    network = LSTM(FEATURES, HIDDEN, 1)
    network(inputs())[0].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        network(inputs())[0].sum().backward()


def test_states_follow_the_parameters_dtype():
    network, x = LSTM(FEATURES, HIDDEN, 1), inputs()
    network(x)
    network.bfloat16()
    assert network(x.bfloat16())[0].dtype is torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_states_survive_a_call_under_autocast(kind):
    network, x = kind(FEATURES, HIDDEN, 1), inputs()
    wanted, _ = network(x)
    network.reset_hidden(BATCH)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = network(x)
    torch.testing.assert_close(output.float(), wanted, rtol=0.05, atol=0.02)
    network(x)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_first_swaps_the_first_two_dimensions(kind):
    network, x = kind(FEATURES, HIDDEN, 2, batch_first=True), inputs()
    output, _ = network(x.transpose(0, 1))
    network.batch_first = False
    network.reset_hidden(BATCH)
    assert torch.equal(output.transpose(0, 1), network(x)[0])


def test_dropout_is_between_layers_and_in_training_alone():
    network, x = Tanh(FEATURES, HIDDEN, 2, dropout=1.0), inputs()
    dropped, _ = network(x)
    network.reset_hidden(BATCH)
    second = network.rnns[1]
    by_hand, h = [], torch.zeros(BATCH, HIDDEN)
    for _ in range(STEPS):
        h = torch.tanh(second.b_ih + second.b_hh + h @ second.w_hh.T)
        by_hand.append(h)
    torch.testing.assert_close(dropped, torch.stack(by_hand))
    network.eval()
    assert not torch.equal(network(x)[0], dropped)


def test_one_layer_has_no_dropout():
    network, x = Tanh(FEATURES, HIDDEN, 1, dropout=1.0), inputs()
    assert network(x)[0].any()


def test_parameters_have_apexs_names_and_shapes():
    network = mLSTM(FEATURES, HIDDEN, 1, output_size=2)
    shapes = {name: tuple(param.shape) for name, param in network.named_parameters()}
    assert shapes == {
        "rnns.0.w_ih": (24, 4), "rnns.0.w_hh": (24, 2), "rnns.0.w_ho": (2, 6),
        "rnns.0.b_ih": (24,), "rnns.0.b_hh": (24,), "rnns.0.w_mih": (2, 4), "rnns.0.w_mhh": (2, 2),
    }  # fmt: skip


def test_parameters_start_uniform_within_the_root_of_the_hidden_size():
    network = LSTM(50, 400, 1)
    bound = 400**-0.5
    for param in network.parameters():
        assert param.abs().max() <= bound
        assert param.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_reset_parameters_draws_anew(bidirectional):
    network = LSTM(FEATURES, HIDDEN, 2, bidirectional=bidirectional)
    before = [param.detach().clone() for param in network.parameters()]
    network.reset_parameters()
    assert all(
        not torch.equal(one, other) for one, other in zip(before, network.parameters(), strict=True)
    )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_saved_and_loaded_gives_the_same_outputs(kind, bidirectional):
    one, other = (kind(FEATURES, HIDDEN, 2, bidirectional=bidirectional) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x = inputs()
    assert torch.equal(one(x)[0], other(x)[0])


def test_a_copy_has_its_own_parameters_and_states():
    network, x = LSTM(FEATURES, HIDDEN, 1), inputs()
    twin = copy.deepcopy(network)
    network(x)
    first = twin(x)[0]
    network.reset_hidden(BATCH)
    assert torch.equal(network(x)[0], first)


def test_the_backend_takes_a_list_of_cells():
    layers = [
        RNNCell(1, FEATURES, HIDDEN, cells.TanhCell, 1),
        RNNCell(1, HIDDEN, HIDDEN, cells.ReLUCell, 1),
    ]
    network = stackedRNN(layers, 2)
    assert list(network.rnns) == layers
    assert network(inputs())[0].shape == (STEPS, BATCH, HIDDEN)


def test_the_function_toRNNBackend_builds_from_a_cell():
    cell = RNNCell(1, FEATURES, HIDDEN, cells.TanhCell, 1, bias=True)
    assert isinstance(toRNNBackend(cell, 2), stackedRNN)
    assert isinstance(toRNNBackend(cell, 2, bidirectional=True), bidirectionalRNN)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "ReLU", "Tanh", "mLSTM"])
def test_public_names_are_those_of_the_module_models(name):
    assert getattr(RNN, name) is getattr(RNN.models, name)


def test_detach_before_there_are_states_is_refused():
    with pytest.raises(RuntimeError, match="init_hidden"):
        LSTM(FEATURES, HIDDEN, 1).detach_hidden()


@pytest.mark.parametrize("shape", [(STEPS, BATCH, 5), (BATCH, FEATURES), (0, BATCH, FEATURES)])
def test_an_input_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"it takes \[steps, batch, 4\] with at least one step"):
        LSTM(FEATURES, HIDDEN, 1)(torch.ones(shape))


def test_an_empty_batch_gives_an_empty_result():
    assert LSTM(FEATURES, HIDDEN, 2)(torch.ones(STEPS, 0, FEATURES))[0].shape == (STEPS, 0, HIDDEN)


def test_gru_with_another_output_size_is_refused():
    with pytest.raises(ValueError, match="GRU got output_size=2 with hidden_size=6"):
        GRU(FEATURES, HIDDEN, 1, output_size=2)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("4", HIDDEN, 1), "input_size"),
        ((FEATURES, None, 1), "hidden_size"),
        ((FEATURES, HIDDEN, 0), "num_layers"),
        ((FEATURES, HIDDEN, -1), "num_layers"),
        ((FEATURES, HIDDEN, "1"), "num_layers"),
    ],
)
@pytest.mark.parametrize("network", [LSTM, GRU, mLSTM])
def test_sizes_that_are_no_positive_integers_are_refused(network, arguments, name):
    with pytest.raises(ValueError, match=f"{name} is .*; it must be an integer of at least 1"):
        network(*arguments)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_hidden_states_passed_as_to_torchs_networks_are_refused(bidirectional):
    network, state = (
        LSTM(FEATURES, HIDDEN, 1, bidirectional=bidirectional),
        torch.zeros(1, 3, HIDDEN),
    )
    for given in (state, (state, state)):
        with pytest.raises(TypeError, match=r"collect_hidden is a .*; it must be a bool"):
            network(inputs(), given)


@pytest.mark.parametrize("dropout", [-0.1, 1.1])
def test_dropout_that_is_no_probability_is_refused(dropout):
    with pytest.raises(ValueError, match="it must be at least 0 and at most 1"):
        LSTM(FEATURES, HIDDEN, 2, dropout=dropout)


def test_a_list_of_another_length_is_refused():
    with pytest.raises(ValueError, match="1 cells for num_layers=2"):
        stackedRNN([RNNCell(1, FEATURES, HIDDEN, cells.TanhCell, 1)], 2)


def test_anything_but_cells_is_refused():
    with pytest.raises(TypeError, match="takes an RNNCell"):
        stackedRNN(nn.LSTM(1, 1), 1)


def test_tensors_of_one_shape_are_stacked_and_a_tensor_stays():
    tensors = [torch.ones(2, 3), torch.zeros(2, 3)]
    assert RNNBackend.is_iterable(tensors)
    assert not RNNBackend.is_iterable(tensors[0])
    assert torch.equal(RNNBackend.flatten_list(tensors), torch.stack(tensors))
    assert RNNBackend.flatten_list(tensors[0]) is tensors[0]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_init_inference_makes_the_states(bidirectional):
    network = LSTM(3, 4, 2, bidirectional=bidirectional)
    network.init_inference(5)
    stacks = network.rnns if bidirectional else [network]
    assert all(state.shape[0] == 5 for s in stacks for cell in s.rnns for state in cell.hidden)
