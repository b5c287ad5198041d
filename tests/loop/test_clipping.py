"""``amp.clip_grad_norm_``: one factor for everything that an optimizer steps."""

import pickle

import pytest
import torch
from torch import nn

from apex import amp
from apex._engine import block_step
from apex.parallel import LARC
from tests.support import training as cases
from tests.support.host_reads import reads_of

NORMS = [2.0, 1.0, float("inf")]
OPTIMIZERS = ("fused AdamW", "Adam", "fused SGD")
levels = pytest.mark.parametrize("level", cases.LEVELS)
with_masters = pytest.mark.parametrize("level", cases.WITH_MASTERS)
norm_types = pytest.mark.parametrize("norm_type", NORMS)
names = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.fixture(autouse=True, params=["one pass", "two passes"])
def way(request, monkeypatch):
    monkeypatch.setattr(block_step, "least_elements", 1)
    monkeypatch.setattr(block_step, "enabled", request.param == "one pass")
    monkeypatch.setattr(block_step, "_LEAST", 16)
    return request.param


def after_backward(level, name="fused AdamW", passes=1, **options):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS[name], **options)
    for x, y in cases.batches(passes):
        cases.backward(model, optimizer, x, y)
    return model, optimizer


def eps_of(level):
    dtypes = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
    return torch.finfo(dtypes.get(level, torch.float32)).eps


@levels
@names
@norm_types
@pytest.mark.parametrize("max_norm", [0.05, float("inf")])
def test_it_clips_as_torch_does_the_masters(level, name, norm_type, max_norm):
    _, optimizer = after_backward(level, name)
    _, expected = after_backward(level, name)
    true = nn.utils.clip_grad_norm_(amp.master_params(expected), max_norm, norm_type)
    norm = amp.clip_grad_norm_(optimizer, max_norm, norm_type)
    assert norm.shape == ()
    assert norm.dtype is torch.float32
    rtol = 4 * eps_of(level if level == "O3" else "O0")
    torch.testing.assert_close(norm, true.float(), rtol=rtol, atol=0.0)
    found, clipped = (cases.grads(amp.master_params(each)) for each in (optimizer, expected))
    torch.testing.assert_close(found, clipped, rtol=rtol, atol=1e-8)


@with_masters
def test_clipping_twice_and_a_pass_after_it(level):
    model, optimizer = after_backward(level)
    first = amp.clip_grad_norm_(optimizer, 0.05)
    second = amp.clip_grad_norm_(optimizer, 0.05)
    assert first > 0.1
    torch.testing.assert_close(second, torch.tensor(0.05))
    kept = cases.grads(amp.master_params(optimizer))
    x, y = cases.batch()
    cases.backward(model, optimizer, x, y)
    _, alone = after_backward(level)
    for param, before, fresh in zip(
        amp.master_params(optimizer),
        kept,
        cases.grads(amp.master_params(alone)),
        strict=True,
    ):
        torch.testing.assert_close(param.grad, before + fresh)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_gives_a_norm_that_is_not_finite_and_a_skipped_step(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["fused AdamW"])
    cases.backward(model, optimizer, *cases.overflowing())
    before = cases.masters(optimizer)
    with pytest.raises(RuntimeError, match="not finite, so they cannot be clipped"):
        amp.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert not amp.clip_grad_norm_(optimizer, 1.0).isfinite()
    optimizer.step()
    assert cases.same(cases.masters(optimizer), before)
    assert amp.step_was_skipped(optimizer)


@levels
def test_it_reads_nothing_on_the_host(level):
    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        cases.backward(model, optimizer, x, y)
        amp.clip_grad_norm_(optimizer, 0.05)
        optimizer.step()

    assert reads_of(*cases.prepared(level, cases.OPTIMIZERS["fused AdamW"]), train) == 0


def test_the_norm_of_fp64_gradients_is_torchs():
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", cast_model_type=False)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e100)
    norm = amp.clip_grad_norm_(optimizer, 2.0)
    torch.testing.assert_close(norm, torch.tensor(8.0).double().sqrt() * 1e100, rtol=1e-15, atol=0)
    expected = torch.full((3,), 0.5**0.5).double()
    torch.testing.assert_close(model.bias.grad, expected[:2], rtol=1e-7, atol=0)


def test_without_gradients_the_norm_is_zero():
    _, optimizer = cases.prepared("O5")
    assert torch.equal(amp.clip_grad_norm_(optimizer, 1.0), torch.tensor(0.0))


def test_an_optimizer_inside_larc():
    _, optimizer = after_backward("O5", "fused SGD")
    _, expected = after_backward("O5", "fused SGD")
    norm = amp.clip_grad_norm_(LARC(optimizer), 0.05)
    assert torch.equal(norm, amp.clip_grad_norm_(expected, 0.05))


def test_a_disabled_optimizer_is_clipped_by_torch():
    model = cases.net()
    optimizer = cases.sgd(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", enabled=False)
    cases.backward(model, optimizer, *cases.batch())
    norm = amp.clip_grad_norm_(optimizer, 0.05)
    assert norm > 0.05
    clipped = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    torch.testing.assert_close(clipped, torch.tensor(0.05))


# -- mistakes --------------------------------------------------------------------------------


def test_an_unprepared_optimizer_is_refused():
    _, prepared = cases.prepared("O5")
    optimizer = cases.sgd(cases.net().parameters())
    with pytest.raises(RuntimeError, match=r"amp.clip_grad_norm_ got no optimizer that amp has"):
        amp.clip_grad_norm_(optimizer, 1.0)
    loaded = pickle.loads(pickle.dumps(prepared))
    with pytest.raises(RuntimeError, match=r"amp.clip_grad_norm_ got an unpickled optimizer"):
        amp.clip_grad_norm_(loaded, 1.0)
    with pytest.raises(TypeError, match="instead of an optimizer"):
        amp.clip_grad_norm_(cases.net().parameters(), 1.0)


@pytest.mark.parametrize("name", ["max_norm", "norm_type"])
@pytest.mark.parametrize(
    ("error", "value", "words"),
    [
        (ValueError, -1.0, "must be 0 or greater"),
        (ValueError, float("nan"), "must be 0 or greater"),
        (TypeError, "x", "'x'; it must be a number"),
        (TypeError, None, "None; it must be a number"),
        (TypeError, [1.0], r"\[1\.0\]; it must be a number"),
    ],
)
def test_a_norm_that_is_none_is_refused(name, error, value, words):
    _, optimizer = after_backward("O5")
    before = cases.grads(amp.master_params(optimizer))
    with pytest.raises(error, match=words):
        amp.clip_grad_norm_(optimizer, **{"max_norm": 1.0, name: value})
    assert cases.same(cases.grads(amp.master_params(optimizer)), before)


@pytest.mark.parametrize("level", cases.MIXED)
def test_gradients_that_are_still_scaled_are_refused(level):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    x, y = cases.batch()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match="still scaled"):
            amp.clip_grad_norm_(optimizer, 1.0)
    cases.backward(model, optimizer, x, y, delay_unscale=True)
    with pytest.raises(RuntimeError, match="still scaled"):
        amp.clip_grad_norm_(optimizer, 1.0)


def test_a_sparse_gradient_is_refused_before_anything_changes():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O5", verbosity=0
    )
    with amp.scale_loss(model(torch.arange(3)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = cases.grads(model[1].parameters())
    with pytest.raises(TypeError, match="sparse gradient"):
        amp.clip_grad_norm_(optimizer, 1e-3)
    assert cases.same(cases.grads(model[1].parameters()), before)
