"""``explain`` changes nothing, and explains bad input."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from apex import amp
from apex.debug import explain
from tests.debug.explain_cases import Body
from tests.training.cases import batches, grads, masters, net, prepared, same, train_step


def hooks_of(model):
    names = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [len(getattr(m, name)) for m in model.modules() for name in names]


def everything(model):
    """What a run could change: values, gradients, mode, hooks, random numbers, casts."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": grads(model.parameters()),
        "training": [module.training for module in model.modules()],
        "hooks": [hooks_of(model), len(modules._global_forward_hooks)],
        "pre hooks": len(modules._global_forward_pre_hooks),
        "random": [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
        "numpy": repr(np.random.get_state()),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()],
        "grad mode": torch.is_grad_enabled(),
        "scales": dict(amp.state_dict()),
    }


def noisy():
    """A model that changes buffers and draws random numbers of every kind."""

    def forward(self, x):
        x = self.norm(self.layer(x)) * random.random() * np.random.rand()
        self.count += 1
        self.seen = self.seen + 1
        return self.drop(x)

    layers = {"layer": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "drop": nn.Dropout(0.5)}
    model = Body(forward, **layers)
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("seen", torch.zeros(()))
    return model


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
def test_nothing_changes(level):
    model, optimizer = prepared(level, model=noisy())
    train_step(model, optimizer, torch.randn(3, 4), torch.randn(3, 4))
    buffers = dict(model.named_buffers())
    before = everything(model)
    found = explain(model, torch.randn(3, 4, generator=torch.Generator()))
    assert found.ops
    assert same(everything(model), before)
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_training_continues_unchanged(level):
    def trained(explained):
        model, optimizer = prepared(level)
        for x, y in batches(4, overflow_at={1}):
            if explained:
                explain(model, x, loss_fn=lambda out, y=y: nn.functional.mse_loss(out.float(), y))
            train_step(model, optimizer, x, y)
        return masters(optimizer), amp.state_dict()["loss_scaler0"]

    assert same(trained(True), trained(False))


def test_a_pending_graph_of_the_user_can_still_go_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(3, 4)).sum()
        explain(model.train(), torch.randn(3, 4))
        again = model(torch.randn(3, 4)).sum()
    loss.backward()
    again.backward()
    assert model[0].weight.grad is not None


def test_no_weight_cast_stays_in_the_cache():
    model = nn.Linear(4, 2, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        explain(model, torch.randn(3, 4))
        with torch.no_grad():
            model.weight.zero_()
        assert not model(torch.ones(3, 4)).any()


def test_inputs_that_the_model_changes_in_place_are_restored():
    x = torch.randn(3, 4)
    before = x.clone()
    found = explain(Body(lambda self, x: self.layer(x.mul_(2)), layer=nn.Linear(4, 2)), x)
    assert same(x, before)
    assert "aten.mul_" in {row.op for row in found.ops}


# -- errors --------------------------------------------------------------------------------------


def failing(self, x):
    raise KeyError("the model's own")


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("the model's own")


@pytest.mark.parametrize("fails", [failing, lambda self, x: FailsBackward.apply(self.layer(x))])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_model_that_raises_is_left_as_it_was(fails, level):
    def forward(self, x):
        return fails(self, self.norm(x))

    model = Body(forward, norm=nn.BatchNorm1d(4), layer=nn.Linear(4, 4))
    model, _ = prepared(level, model=model)
    before = everything(model)
    with pytest.raises(KeyError, match="the model's own"):
        explain(model, torch.randn(3, 4, generator=torch.Generator()))
    assert same(everything(model), before)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: explain(lambda x: x, torch.ones(1)), TypeError, "takes a torch.nn.Module"),
        (lambda: explain(net()), ValueError, "no tensor among the inputs"),
        (lambda: explain(net(), torch.ones(1), loss_fn=3), TypeError, "got int as loss_fn"),
        (lambda: explain(net(), 3, [None]), ValueError, "no tensor among the inputs"),
        (lambda: explain(nn.LazyLinear(2), torch.ones(1, 2)), ValueError, "'weight' has no values"),
        (
            lambda: explain(nn.Linear(2, 2, device="meta"), torch.ones(1, 2)),
            ValueError,
            "'weight' has no values",
        ),
        (
            lambda: explain(net(), torch.ones(3, 4), loss_fn=lambda out: out),
            ValueError,
            r"shape \(3, 2\).*Reduce it in loss_fn",
        ),
        (
            lambda: explain(net(), torch.ones(3, 4), loss_fn=lambda out: out.argmax()),
            ValueError,
            "torch.int64.*one floating-point number",
        ),
        (
            lambda: explain(net(), torch.ones(3, 4), loss_fn=lambda out: 1.0),
            TypeError,
            "loss_fn returned float",
        ),
        (
            lambda: explain(net().requires_grad_(False), torch.ones(3, 4)),
            ValueError,
            "Pass backward=False",
        ),
        (
            lambda: explain(Body(lambda self, x: x.argmax()), torch.ones(3, 4)),
            ValueError,
            "holds no floating-point tensor",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_bad_input_is_explained(call, error, message):
    with pytest.raises(error, match=message):
        call()
