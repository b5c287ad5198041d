"""apex's ``LossScaler``: the views in ``_amp_state.loss_scalers``, and one made by a script."""

import copy

import pytest
import torch

from apex import amp
from apex.amp.scaler import LossScaler
from tests.support import loops


def scaler():
    return amp._amp_state.loss_scalers[0]


# -- the views -------------------------------------------------------------------------------


def test_values_read_as_plain_numbers():
    def values():
        return scaler()._loss_scale, scaler()._unskipped, scaler()._has_overflow

    model, optimizer = loops.prepared("O2")
    loops.train(model, optimizer, data=loops.small_batches(2))
    assert values() == (2.0**16, 2, False)
    loops.overflow(model, optimizer)
    assert values() == (scaler().loss_scale(), 0, True) == (2.0**15, 0, True)
    assert [*map(type, values())] == [float, int, bool]
    assert scaler()._overflow_buf.tolist() == [1]
    scaler().clear_overflow_state()
    assert (scaler()._has_overflow, scaler()._overflow_buf.item()) == (False, 0)
    optimizer.zero_grad()
    loops.scaled_backward(loops.small_loss(model), optimizer)
    assert scaler()._has_overflow is False


@pytest.mark.parametrize(("given", "dynamic"), [("dynamic", True), (1.0, False), ("128", False)])
def test_the_scale_and_its_count_can_be_set(given, dynamic):
    model, optimizer = loops.one_weight("O1", loss_scale=given)
    assert scaler().dynamic is dynamic
    scaler()._loss_scale, scaler()._unskipped = 2**20, 7
    with amp.scale_loss(loops.slope(model, 1.0), optimizer) as scaled_loss:
        assert scaled_loss == 2.0**20
        scaled_loss.backward()
    assert model.weight.grad == 1.0
    assert (loops.scale(), loops.unskipped()) == (2.0**20, 8)
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive, finite"):
            scaler()._loss_scale = value
    assert loops.scale() == 2.0**20


def test_bounds_and_window_can_be_set():
    model, optimizer = loops.prepared("O2", min_loss_scale=2.0, max_loss_scale=2.0**20)
    assert (scaler()._min_loss_scale, scaler()._max_loss_scale) == (2.0, 2.0**20)
    loops.train(model, optimizer, data=loops.small_batches(3))
    scaler()._scale_seq_len = 2.0  # NVIDIA's GNMT parses it as a float
    scaler()._max_loss_scale = 2.0**17
    loops.train(model, optimizer, data=loops.small_batches(1))  # past the window: grows at once
    assert (loops.scale(), loops.unskipped()) == (2.0**17, 0)
    loops.train(model, optimizer, data=loops.small_batches(2))
    assert loops.scale() == 2.0**17
    scaler()._min_loss_scale = 2.0**17
    loops.overflow(model, optimizer)
    assert loops.scale() == 2.0**17
    with pytest.raises(TypeError, match=r"is 2\.5; it must be an integer"):
        scaler()._scale_seq_len = 2.5


def test_each_scaler_has_one_view_which_keeps_what_scripts_put_on_it():
    _keep = loops.prepared("O2", num_losses=2)
    one, two = amp._amp_state.loss_scalers
    one.mark = 3
    assert scaler() is one is not two


def test_scalers_can_be_exchanged_and_added():
    amp._amp_state.loss_scalers = [LossScaler(2.0)]  # as in apex, initialize makes others
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0  # also without a session
    model, optimizer = loops.prepared("O2")
    amp._amp_state.loss_scalers[0] = made = LossScaler(4.0)
    assert [*amp._amp_state.loss_scalers] == [made]
    loops.scaled_backward(model[2].weight.float().sum(), optimizer)
    assert loops.scale() == 4.0
    amp._amp_state.loss_scalers = [LossScaler(2.0), *map(LossScaler, ["dynamic", "dynamic"])]
    optimizer.zero_grad()
    loops.overflow(model, optimizer, loss_id=2)
    assert [loops.scale(index) for index in range(3)] == [2.0, 2.0**16, 2.0**15]
    assert len(amp.state_dict()) == 3
    amp._amp_state.loss_scalers.append(LossScaler(8.0))
    assert loops.scale(3) == 8.0
    with pytest.raises(AttributeError):
        amp._amp_state.loss_scalers[0] = 2.0
    del amp._amp_state.loss_scalers[1:3]
    amp._amp_state.loss_scalers.extend([LossScaler(16.0)])
    assert [loops.scale(index) for index in range(3)] == [2.0, 8.0, 16.0]


# -- a flag that scripts set -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_flag_that_a_script_sets_decides_the_update(dtype):
    made, decisions = LossScaler("dynamic"), []
    for found in (1, 0, 1):
        made._overflow_buf = torch.full((1,), found, dtype=dtype)
        decisions.append(made.update_scale())
    assert decisions == [True, False, True]
    assert (made.loss_scale(), made._unskipped) == (2.0**14, 0)
    static = LossScaler(8.0)
    static._overflow_buf = torch.ones(1, dtype=dtype)
    assert (static.update_scale(), static.loss_scale()) == (False, 8.0)
    with pytest.raises(RuntimeError, match="is invalid for input of size 2"):
        made._overflow_buf = torch.ones(2)


def apex_update(self):
    """The rule of apex, for a flag that another rank may have raised."""
    self._has_overflow = bool(self._overflow_buf.item()) or self.elsewhere
    if self._has_overflow:
        self._loss_scale, self._unskipped = self._loss_scale / 2.0, 0
    else:
        self._unskipped += 1
    return self._has_overflow


def then_the_original(self, original=LossScaler.update_scale):
    self._has_overflow = self._has_overflow or self.elsewhere
    return original(self)


class Shared(LossScaler):
    """Shares the flag where it is found, as training of a tensor-parallel GPT does."""

    def unscale(self, *args, **kwargs):
        super().unscale(*args, **kwargs)
        self._overflow_buf.fill_(self._overflow_buf.item() or self.elsewhere)


def on_the_class(monkeypatch, update):
    monkeypatch.setattr(LossScaler, "update_scale", update)


def on_one_object(monkeypatch, update):
    monkeypatch.setattr(scaler(), "update_scale", update.__get__(scaler()), raising=False)


def in_a_subclass(monkeypatch, update):
    amp._amp_state.loss_scalers = [Shared("dynamic")]


@pytest.mark.parametrize("update", [apex_update, then_the_original])
@loops.every(put=[on_the_class, on_one_object, in_a_subclass], level=["O1", "O2"])
def test_a_script_may_share_the_overflow_flag_over_ranks(level, put, update, monkeypatch, capsys):
    model, optimizer = loops.one_weight(level, loss_scale="dynamic", verbosity=1)
    put(monkeypatch, update)
    for elsewhere, expected in ((False, (0.9375, 2.0**16, 1)), (True, (0.9375, 2.0**15, 0))):
        scaler().elsewhere = elsewhere
        loops.descend(loops.slope(model, 0.5), optimizer)
        assert (model.weight, loops.scale(), loops.unskipped()) == expected
    assert capsys.readouterr().out.count("reducing loss scale to 32768.0") == 1


@pytest.mark.parametrize("skips", [False, True])
def test_what_a_scripts_update_returns_decides_the_step(skips, monkeypatch):
    model, optimizer = loops.one_weight("O2", loss_scale="dynamic")
    before = model.weight.clone()
    monkeypatch.setattr(LossScaler, "update_scale", lambda self: skips)
    loops.descend(loops.slope(model, 0.5), optimizer)
    assert torch.equal(model.weight, before) == skips


def update_by_the_block(monkeypatch):
    answers = [False, True]
    monkeypatch.setattr(LossScaler, "update_scale", lambda self: answers.pop(0))
    return {}


def update_by_the_script(monkeypatch):
    return {"delay_overflow_check": True}


@pytest.mark.parametrize("updates", [update_by_the_block, update_by_the_script])
def test_an_overflow_after_an_update_skips_no_optimizer_from_before(updates, monkeypatch):
    models = [loops.net(), loops.net()]
    models, optimizers = amp.initialize(
        models, [loops.sgd(model.parameters()) for model in models], opt_level="O2", verbosity=0
    )
    options = updates(monkeypatch)
    before = [loops.masters(optimizer) for optimizer in optimizers]
    loops.backward(models[0], optimizers[0], *loops.batch(), **options)
    if options:
        scaler().update_scale()
    loops.backward(models[1], optimizers[1], *loops.overflowing())
    for optimizer in optimizers:
        optimizer.step()
    assert not loops.same(before[0], loops.masters(optimizers[0]))
    assert loops.same(before[1], loops.masters(optimizers[1]))


# -- a LossScaler of one's own ---------------------------------------------------------------


def test_a_scaler_can_be_made_with_apexs_arguments():
    made = LossScaler(128.0)
    assert (made.loss_scale(), made.dynamic, made._unskipped) == (128.0, False, 0)
    made = LossScaler("dynamic")
    assert (made.loss_scale(), made._scale_seq_len) == (2.0**16, 2000)
    assert (made._min_loss_scale, made._max_loss_scale) == (None, 2.0**24)
    made = LossScaler("dynamic", 2.0**10, 4.0, 3, min_loss_scale=2.0, max_loss_scale=2.0**12)
    assert (made.loss_scale(), made._min_loss_scale, made._max_loss_scale) == (1024.0, 2.0, 4096.0)
    for _ in range(3):
        made.update_scale()
    assert made.loss_scale() == 2.0**12
    made = copy.deepcopy(LossScaler(8.0, max_loss_scale=2.0**12))
    assert (made.loss_scale(), made.dynamic, made._max_loss_scale) == (8.0, False, 2.0**12)
    assert LossScaler.has_fused_kernel
    assert not LossScaler.warned_no_fused_kernel
    assert not LossScaler.warned_unscaling_non_fp32_grad


def test_unscale_writes_divided_gradients():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        grads, out = [torch.full((3,), 16.0, dtype=dtype)], [torch.empty(3)]
        LossScaler(8.0).unscale(grads, out, 8.0)
        assert (out[0].tolist(), grads[0].tolist()) == ([2.0] * 3, [16.0] * 3)
    for given in (8.0, "dynamic"):
        grads = [torch.full((2,), 16.0)]
        LossScaler(given).unscale(grads, grads, models_are_masters=True, scale_override=4.0)
        assert grads[0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_dynamic_unscale_finds_the_overflow_and_update_scale_says_to_skip(bad):
    made = LossScaler("dynamic")
    for grad, found, state in ((bad, True, (2.0**15, 0)), (1.0, False, (2.0**15, 1))):
        made.clear_overflow_state()
        made.unscale([torch.tensor([1.0, grad])], [torch.empty(2)])
        assert (made._has_overflow, made.update_scale()) == (found, found)
        assert (made.loss_scale(), made._unskipped) == state
    static = LossScaler(8.0)
    static.unscale([torch.tensor([bad])], [torch.empty(1)])
    assert (static._has_overflow, static.update_scale(), static._unskipped) == (False, False, 1)


def test_unscale_with_stashed_adds_earlier_gradients():
    grads, stash, out = [torch.tensor([16.0]).half()], [torch.tensor([3.0])], [torch.empty(1)]
    made = LossScaler(8.0)
    made.unscale_with_stashed(grads, stash, out)
    assert out[0] == 5.0
    made.unscale_with_stashed(grads, stash, out, (4.0, 0.5, 2.0))
    assert out[0] == 20.0
    made.unscale_python(grads, out, 4.0)
    assert out[0] == 4.0
    made.unscale_with_stashed_python(grads, stash, out, 0.5, 2.0)
    assert out[0] == 14.0
    made.unscale_with_stashed(grads, stash, stash)
    assert stash[0] == 5.0


BAD_VALUES = [
    (ValueError, ("abc",), "positive, finite number.*, or a string with one"),
    (ValueError, (None,), "positive, finite number"),
    (ValueError, ("dynamic", "x"), "loss_scale is 'x'; it must be a positive"),
    (ValueError, ("dynamic", 8.0, 0), "growth_factor is 0; it must be above 1"),
    (TypeError, ("dynamic", 8.0, None), "growth_factor is None; it must be a number"),
]


@pytest.mark.parametrize(("error", "arguments", "words"), BAD_VALUES)
def test_bad_values_are_refused(error, arguments, words):
    with pytest.raises(error, match=words):
        LossScaler(*arguments)
