"""apex.RNN against torch's own recurrent modules and the formulas."""

import copy

import pytest
import torch
from torch import nn

from apex import RNN
from apex.RNN import GRU, LSTM, ReLU, Tanh, cells, mLSTM
from apex.RNN.models import toRNNBackend
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN
from tests.support import loops

KINDS = [LSTM, GRU, ReLU, Tanh, mLSTM]
TORCHS = {LSTM: nn.LSTM, GRU: nn.GRU, ReLU: nn.RNN, Tanh: nn.RNN}
STEPS, BATCH, FEATURES, HIDDEN = 5, 3, 4, 6
NAMES = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}


def torchs(kind, network, **kwargs):
    """torch's module with the parameters of ``network``."""
    options = {"nonlinearity": "relu"} if kind is ReLU else {}
    stacks = network.rnns if isinstance(network, bidirectionalRNN) else [network]
    module = TORCHS[kind](FEATURES, HIDDEN, len(stacks[0].rnns), **options, **kwargs)
    with torch.no_grad():
        for stack, suffix in zip(stacks, ("", "_reverse"), strict=False):
            for layer, cell in enumerate(stack.rnns):
                for ours, its in NAMES.items():
                    if getattr(cell, ours) is not None:
                        getattr(module, f"{its}_l{layer}{suffix}").copy_(getattr(cell, ours))
    return module


def inputs():
    return torch.randn(STEPS, BATCH, FEATURES)


@loops.every(bias=[True, False], kind=TORCHS)
def test_networks_are_torchs_with_their_gradients(kind, bias):
    network, x = kind(FEATURES, HIDDEN, 2, bias=bias), inputs()
    module = torchs(kind, network, bias=bias)
    output, states = network(x)
    wanted, wanted_states = module(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(states, list(wanted_states) if kind is LSTM else [wanted_states])
    output.square().sum().backward()
    wanted.square().sum().backward()
    for layer, cell in enumerate(network.rnns):
        torch.testing.assert_close(cell.w_hh.grad, getattr(module, f"weight_hh_l{layer}").grad)
    both = kind(FEATURES, HIDDEN, 1, bias=bias, bidirectional=True)
    torch.testing.assert_close(both(x)[0], torchs(kind, both, bias=bias, bidirectional=True)(x)[0])


def mlstm_by_hand(x, cell):
    h, c, outputs = torch.zeros(BATCH, cell.output_size), torch.zeros(BATCH, HIDDEN), []
    for step in x:
        m = (step @ cell.w_mih.T) * (h @ cell.w_mhh.T)
        gates = step @ cell.w_ih.T + cell.b_ih + m @ cell.w_hh.T + cell.b_hh
        i, f, g, o = gates.split(HIDDEN, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        h = h @ cell.w_ho.T if cell.output_size != HIDDEN else h
        outputs.append(h)
    return torch.stack(outputs), c


@pytest.mark.parametrize("output_size", [None, 2])
def test_mlstm_is_the_formula_of_its_paper(output_size):
    network, x = mLSTM(FEATURES, HIDDEN, 1, output_size=output_size), inputs()
    output, states = network(x)
    wanted, wanted_state = mlstm_by_hand(x, network.rnns[0])
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(states[1], wanted_state[None])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_outputs_are_projected():
    network, x = LSTM(FEATURES, HIDDEN, 1, output_size=2), inputs()
    module, cell = nn.LSTM(FEATURES, HIDDEN, proj_size=2), network.rnns[0]
    params = (cell.w_ih, cell.w_hh, cell.b_ih, cell.b_hh, cell.w_ho)
    with torch.no_grad():
        for its, ours in zip(module.parameters(), params, strict=True):
            its.copy_(ours)
    torch.testing.assert_close(network(x)[0], module(x)[0])
    for kind in (ReLU, Tanh):
        assert kind(FEATURES, HIDDEN, 2, output_size=2)(x)[0].shape == (STEPS, BATCH, 2)


@loops.every(bidirectional=[False, True], kind=KINDS)
def test_states_of_steps_copies_and_checkpoints(kind, bidirectional):
    network, x = kind(FEATURES, HIDDEN, 2, bidirectional=bidirectional), inputs()
    other, twin = kind(FEATURES, HIDDEN, 2, bidirectional=bidirectional), copy.deepcopy(network)
    output, states = network(x, collect_hidden=True)
    assert [len(steps) for steps in states] == [STEPS] * len(states)
    assert all(torch.equal(states[0][step][-1], output[step]) for step in range(STEPS))
    carried = network(x)[0]
    assert not torch.equal(carried, output)
    network.reset_hidden(BATCH)
    assert torch.equal(network(x)[0], output)
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(x)[0], output)
    assert torch.equal(twin(x)[0], output)
    before = loops.values(network.parameters())
    network.reset_parameters()
    assert not any(map(torch.equal, before, network.parameters()))


def test_states_carry_over_follow_the_batch_and_are_detached():
    network, x = LSTM(FEATURES, HIDDEN, 2), inputs()
    whole = network(x)[0]
    network.reset_hidden(BATCH)
    torch.testing.assert_close(torch.cat([network(part)[0] for part in x.split([2, 3])]), whole)
    narrow = network(x[:, :2])[0]  # starts from zeros
    torch.testing.assert_close(narrow, whole[:, :2])
    narrow.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        network(x[:, :2])[0].sum().backward()
    network.detach_hidden()
    network(x[:, :2])[0].sum().backward()
    network.detach_hidden()
    assert network.bfloat16()(x[:, :2].bfloat16())[0].dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="init_hidden"):
        LSTM(FEATURES, HIDDEN, 1).detach_hidden()
    network.init_inference(5)
    assert all(state.shape[0] == 5 for cell in network.rnns for state in cell.hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_networks_train_under_amp(kind, level):
    network, x = kind(FEATURES, HIDDEN, 1), inputs()
    wanted = network(x)[0].detach()
    network.reset_hidden(BATCH)
    _, optimizer = loops.prepared(level, model=network, loss_scale=8.0)
    output, before = network(x)[0], loops.masters(optimizer)
    torch.testing.assert_close(output.float(), wanted, rtol=0.05, atol=0.02)
    loops.descend(output.float().square().sum(), optimizer)
    assert not loops.same(loops.masters(optimizer), before)


@torch.no_grad()
def test_dropout_is_between_layers_in_training():
    network, x = LSTM(FEATURES, HIDDEN, 2, dropout=1.0), inputs()
    first, last = network.rnns
    dropped = network(x)[0]
    network.reset_hidden(BATCH)
    assert torch.equal(dropped, stackedRNN([last])(torch.zeros(STEPS, BATCH, HIDDEN))[0])
    network.reset_hidden(BATCH)
    evaluated = network.eval()(x)[0]
    network.reset_hidden(BATCH)
    assert torch.equal(evaluated, stackedRNN([first, last], 2)(x)[0])


def test_the_backend_takes_cells():
    kinds = (FEATURES, cells.TanhCell), (HIDDEN, cells.ReLUCell)
    layers = [RNNCell(1, size, HIDDEN, cell, 1) for size, cell in kinds]
    network = stackedRNN(layers, 2)
    assert list(network.rnns) == layers
    assert network.nLayers == 2
    assert network(inputs())[0].shape == (STEPS, BATCH, HIDDEN)
    assert isinstance(toRNNBackend(layers[0], 2, bidirectional=True), bidirectionalRNN)
    shapes = {n: tuple(p.shape) for n, p in mLSTM(4, 6, 1, output_size=2).named_parameters()}
    assert shapes == {
        "rnns.0.w_ih": (24, 4), "rnns.0.w_hh": (24, 2), "rnns.0.w_ho": (2, 6),
        "rnns.0.b_ih": (24,), "rnns.0.b_hh": (24,), "rnns.0.w_mih": (2, 4), "rnns.0.w_mhh": (2, 2),
    }  # fmt: skip
    assert list(ReLU(4, 6, 1, bias=False).state_dict()) == ["rnns.0.w_ih", "rnns.0.w_hh"]
    bound = 400**-0.5
    assert LSTM(50, 400, 1).rnns[0].w_ih.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert RNN.LSTM is RNN.models.LSTM


BAD_ARGUMENTS = [
    (ValueError, "batch_first=True, which apex", lambda: GRU(4, 6, 1, batch_first=True)),
    (ValueError, "for 0 layers; it takes at least one", lambda: GRU(4, HIDDEN, 0)),
    (ValueError, r"takes \[steps, batch, 4\] with", lambda: LSTM(4, 6, 1)(torch.ones(2, 4))),
    (ValueError, "at least one step", lambda: LSTM(4, 6, 1)(torch.ones(0, 2, 4))),
    (ValueError, "a list of 2",
     lambda: stackedRNN([RNNCell(1, 4, HIDDEN, cells.TanhCell, 1)], 2)),
    (ValueError, "and an RNNCell or a list of 1", lambda: stackedRNN(nn.LSTM(1, 1), 1)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()
