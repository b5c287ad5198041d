"""``amp.clip_grad_norm_``: one factor for everything that an optimizer steps."""

import pickle

import pytest
import torch
from torch import nn

from apex import amp
from apex.parallel import LARC
from tests.support import loops


def after_backward(level, name="fused AdamW", **options):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name], **options)
    loops.backward(model, optimizer, *loops.batch())
    return model, optimizer


@loops.every(norm_type=[2.0, 1.0, float("inf")], level=["O1", "O2", "O3", "O5"])
def test_it_clips_as_torch_does_the_masters(level, norm_type):
    dtype = {"O3": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)  # of gradients
    eps = torch.finfo(dtype).eps
    for max_norm in (0.05, float("inf")):
        (_, optimizer), (_, expected) = after_backward(level), after_backward(level)
        true = nn.utils.clip_grad_norm_(amp.master_params(expected), max_norm, norm_type)
        norm = amp.clip_grad_norm_(optimizer, max_norm, norm_type)
        assert (norm.shape, norm.dtype) == ((), torch.float32)
        torch.testing.assert_close(norm, true.float(), rtol=4 * eps, atol=0.0)
        found, clipped = (loops.grads(amp.master_params(each)) for each in (optimizer, expected))
        torch.testing.assert_close(found, clipped, rtol=4 * eps, atol=1e-8)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_clipping_twice_and_a_pass_after_it(level):
    model, optimizer = after_backward(level)
    alone = loops.grads(amp.master_params(after_backward(level)[1]))
    assert amp.clip_grad_norm_(optimizer, 0.05) > 0.1
    again = amp.clip_grad_norm_(optimizer, 0.05)
    torch.testing.assert_close(again, torch.tensor(0.05), rtol=2**-8, atol=0.0)
    kept = loops.grads(amp.master_params(optimizer))
    loops.backward(model, optimizer, *loops.batch())
    found = loops.grads(amp.master_params(optimizer))
    torch.testing.assert_close(found, list(map(torch.add, kept, alone)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_gives_a_norm_that_is_not_finite_and_a_skipped_step(level):
    model, optimizer = loops.prepared(level, loops.fused_adamw_of)
    loops.backward(model, optimizer, *loops.overflowing())
    before = loops.masters(optimizer)
    with pytest.raises(RuntimeError, match="not finite, so they cannot be clipped"):
        amp.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert not amp.clip_grad_norm_(optimizer, 1.0).isfinite()
    optimizer.step()
    assert loops.same(loops.masters(optimizer), before)
    assert amp.step_was_skipped(optimizer)


def test_the_norm_of_fp64_gradients_is_torchs():
    net = nn.Linear(3, 2).double()
    model, optimizer = loops.prepared("O0", model=net, cast_model_type=False)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e100)
    norm = amp.clip_grad_norm_(optimizer, 2.0)
    torch.testing.assert_close(norm, torch.tensor(8.0).double().sqrt() * 1e100, rtol=1e-15, atol=0)
    expected = torch.full((2,), 0.5**0.5).double()
    torch.testing.assert_close(model.bias.grad, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_without_gradients_the_norm_is_zero(norm_type):
    _, optimizer = loops.prepared("O5")
    norm = amp.clip_grad_norm_(optimizer, 1.0, norm_type)
    assert torch.equal(norm, torch.tensor(0.0))


def test_an_optimizer_inside_larc_and_a_disabled_one_are_clipped():
    (_, optimizer), (_, expected) = (after_backward("O5", "fused SGD") for _ in range(2))
    norm = amp.clip_grad_norm_(LARC(optimizer), 0.05)
    assert torch.equal(norm, amp.clip_grad_norm_(expected, 0.05))
    for norm_type in (2.0, 1.0):
        model, optimizer = after_backward("O5", enabled=False)
        assert amp.clip_grad_norm_(optimizer, 0.05, norm_type) > 0.05
        clipped = nn.utils.get_total_norm([param.grad for param in model.parameters()], norm_type)
        torch.testing.assert_close(clipped, torch.tensor(0.05))


# -- mistakes --------------------------------------------------------------------------------


def test_an_unprepared_optimizer_is_refused():
    _, prepared = loops.prepared("O5")
    with pytest.raises(RuntimeError, match=r"amp.clip_grad_norm_ takes optimizers that amp has"):
        amp.clip_grad_norm_(loops.sgd(loops.net().parameters()), 1.0)
    with pytest.raises(
        RuntimeError, match=r"takes optimizers that amp has .* copies of these are plain"
    ):
        amp.clip_grad_norm_(pickle.loads(pickle.dumps(prepared)), 1.0)
    with pytest.raises(TypeError, match="instead of an optimizer"):
        amp.clip_grad_norm_(loops.net().parameters(), 1.0)


NO_NORMS = [
    (ValueError, -1.0, "must be at least 0"),
    (ValueError, float("nan"), "must be at least 0"),
    (ValueError, "x", "'x'"),
    (TypeError, None, "NoneType"),
]


@pytest.mark.parametrize("name", ["max_norm", "norm_type"])
@pytest.mark.parametrize(("error", "value", "words"), NO_NORMS)
def test_a_norm_that_is_none_is_refused(name, error, value, words):
    _, optimizer = after_backward("O5")
    before = loops.grads(amp.master_params(optimizer))
    with pytest.raises(error, match=words):
        amp.clip_grad_norm_(optimizer, **{"max_norm": 1.0, name: value})
    assert loops.same(loops.grads(amp.master_params(optimizer)), before)


@pytest.mark.parametrize("scale", [128.0, 1.0])
def test_gradients_that_are_still_scaled_or_incomplete_are_refused(level, scale):
    model, optimizer = loops.prepared(level, loss_scale=scale)
    with amp.scale_loss(loops.loss_of(model, *loops.batch()), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match="still scaled or incomplete"):
            amp.clip_grad_norm_(optimizer, 1.0)


def test_a_sparse_gradient_is_refused_before_anything_changes():
    net = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    model, optimizer = loops.prepared("O5", model=net)
    loops.scaled_backward(model(torch.arange(3)).float().sum(), optimizer)
    before = loops.grads(model[1].parameters())
    with pytest.raises(TypeError, match="sparse gradient"):
        amp.clip_grad_norm_(optimizer, 1e-3)
    assert loops.same(loops.grads(model[1].parameters()), before)
