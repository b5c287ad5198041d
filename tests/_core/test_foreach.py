"""The forms for devices without fused kernels give what those give."""

import pytest
import torch

from apex._core.foreach.adagrad import AdagradRule, adagrad_, foreach_adagrad_
from apex._core.foreach.adam import AdamRule, adam_, foreach_adam_
from apex._core.foreach.gate import Gate
from apex._core.foreach.sgd import SGDRule, foreach_sgd_, sgd_
from apex._torch.foreach import has_fused
from tests.optimizers import cases

FLAGS = {"no flag": None, "flag down": torch.zeros(()), "flag up": torch.ones(())}
SCALES = {"no scale": None, "scale": torch.tensor(3.0)}
GATES = {f"{f}, {s}": Gate(FLAGS[f], SCALES[s]) for f in FLAGS for s in SCALES}
gates = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


def lists(buffers):
    params = [p.detach() for p in cases.parameters()]
    return [params, cases.gradients(params, 0)] + [
        [g.abs() for g in cases.gradients(params, 7 + index)] for index in range(buffers)
    ]


def compare(fused, foreach, buffers):
    left, right = lists(buffers), lists(buffers)
    fused(*left)
    foreach(*right)
    for a, b in zip(left, right, strict=True):
        cases.assert_same(a, b, rtol=1e-5, atol=1e-6)


@gates
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(gate, decoupled):
    rule = AdamRule(0.05, 0.9, 0.999, 1e-8, 0.1, decoupled=decoupled)
    options = {"rule": rule, "step": 3, "gate": gate}
    compare(lambda *x: adam_(*x, **options), lambda *x: foreach_adam_(*x, **options), 2)


@gates
@pytest.mark.parametrize("first_run", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd(gate, first_run, nesterov):
    rule = SGDRule(0.05, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    options = {"rule": rule, "first_run": first_run, "gate": gate}

    def fused(params, grads, buffers):
        sgd_(params, grads, started(buffers), **options)

    def foreach(params, grads, buffers):
        foreach_sgd_(params, grads, started(buffers), **options)

    def started(buffers):
        if first_run:
            torch._foreach_zero_(buffers)
        return buffers

    compare(fused, foreach, 1)


@gates
def test_adagrad(gate):
    options = {"rule": AdagradRule(0.05, 1e-10, 0.1, decoupled=False), "gate": gate}
    compare(lambda *x: adagrad_(*x, **options), lambda *x: foreach_adagrad_(*x, **options), 1)


@pytest.mark.parametrize("name", ["fused_adam_", "fused_adamw_", "fused_sgd_", "fused_adagrad_"])
def test_cpu_has_the_fused_kernel(name):
    assert has_fused(name, torch.device("cpu"))


def test_a_device_without_kernels_has_none():
    assert not has_fused("fused_adam_", torch.device("meta"))
