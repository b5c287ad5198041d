"""Which gradients hold inf or NaN, by name."""

import torch

from apex import amp
from apex.amp.nonfinite import nonfinite_gradients
from tests.training import cases


def test_non_finite_gradients_are_named():
    model, optimizer = cases.prepared("O4")
    cases.backward(model, optimizer, *cases.batch())
    model[2].bias.grad[1] = float("nan")
    (session,) = amp._amp_state.sessions()
    ((name, grad),) = nonfinite_gradients(session)
    assert name == "2.bias"
    assert grad is model[2].bias.grad


def test_non_finite_sparse_gradients_are_named():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4, sparse=True))
    model, optimizer = cases.prepared("O5", model=model)
    loss = model(torch.tensor([1, 1])).float().sum() * float("inf")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    (session,) = amp._amp_state.sessions()
    ((name, _),) = nonfinite_gradients(session)
    assert name == "0.weight"
