"""``torch.compile(optimizer.step)``: the optimizer's own step is compiled, amp's part is not."""

import pytest
import torch

from apex import amp
from tests.compiled.cases import SAME_BITS, assert_close, compiled, training_state
from tests.support.loops import OPTIMIZERS, backward, batches, net, prepared, same

pytestmark = pytest.mark.filterwarnings(  # of torch's own making
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
)

ADAMW = {
    "foreach AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "capturable Adam": lambda params: torch.optim.Adam(params, lr=1e-2, capturable=True),
}
CASES = [
    *[(level, name) for level in ("O1", "O2", "O4", "O5") for name in ("SGD", "Adam")],
    *[("O2", name) for name in ("fused AdamW", "fused SGD", "foreach AdamW", "LBFGS closure")],
]


def optimize(level, name):
    loss_scale = 64.0 if name == "LBFGS closure" else "dynamic"
    return prepared(level, {**OPTIMIZERS, **ADAMW}[name], loss_scale=loss_scale)


def take(model, optimizer, step, x, y):
    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, x, y)

    if isinstance(optimizer, torch.optim.LBFGS):
        step(closure)
    else:
        closure()
        step()


@pytest.mark.parametrize(("level", "name"), CASES)
def test_compiled_step_equals_eager_and_skips_overflows(level, name):
    (model, optimizer), (reference, plain) = optimize(level, name), optimize(level, name)
    step, _ = compiled(optimizer.step, backend="eager", fullgraph=False)
    overflows = () if name == "LBFGS closure" else {1, 4}
    for x, y in batches(6, overflows):
        take(model, optimizer, step, x, y)
        take(reference, plain, plain.step, x, y)
        pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
        assert all(same(param.data, master.data.to(param.dtype)) for param, master in pairs)
    if name in ("fused AdamW", "fused SGD") or (name == "SGD" and SAME_BITS):
        assert same(training_state(optimizer), training_state(plain))
    assert_close(training_state(optimizer)[0], training_state(plain)[0], "O0")
    assert training_state(optimizer)[1] == 2.0**14 or not overflows


@pytest.mark.gpu(kernels="inductor writes and compiles them")
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_compiled_capturable_step_equals_eager_on_a_gpu(level):
    def parts():
        model = net().cuda()
        optimizer = ADAMW["capturable Adam"](model.parameters())
        return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")

    (model, optimizer), (reference, plain) = parts(), parts()
    step, _ = compiled(optimizer.step, backend="inductor", fullgraph=False)
    for x, y in batches(5, {1}):
        take(model, optimizer, step, x.cuda(), y.cuda())
        take(reference, plain, plain.step, x.cuda(), y.cuda())
    assert_close(training_state(optimizer)[0], training_state(plain)[0], "O0", 64)
