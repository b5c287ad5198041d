"""apex's ``LossScaler``: the views in ``_amp_state.loss_scalers``, and one made by a script."""

import pytest
import torch

import amp_C
import apex.amp as amp
from apex.amp.scaler import (
    LossScaler,
    axpby_check_overflow_python,
    scale_check_overflow_python,
)
from tests.amp.cases import (
    backward,
    loss_of,
    one_weight,
    overflow,
    prepared,
    scale,
    slope,
    train,
    unskipped,
)

# -- scripts that share the overflow flag over ranks -----------------------------------------


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
    amp._amp_state.loss_scalers[0] = Shared("dynamic")


@pytest.mark.parametrize("update", [apex_update, then_the_original])
@pytest.mark.parametrize("put", [on_the_class, on_one_object, in_a_subclass])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_may_share_the_overflow_flag(level, put, update, monkeypatch, capsys):
    model, optimizer = one_weight(level, loss_scale="dynamic", verbosity=1)
    put(monkeypatch, update)
    scaler().elsewhere = False
    train_slope(model, optimizer)
    assert (model.weight, scale(), unskipped()) == (0.9375, 2.0**16, 1)
    scaler().elsewhere = True
    train_slope(model, optimizer)
    assert (model.weight, scale(), unskipped()) == (0.9375, 2.0**15, 0)
    assert capsys.readouterr().out.count("reducing loss scale to 32768.0") == 1


def train_slope(model, optimizer):
    optimizer.zero_grad()
    with amp.scale_loss(slope(model, 0.5), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


# -- scalers ---------------------------------------------------------------------------------


def scaler():
    return amp._amp_state.loss_scalers[0]


def test_loss_scale_reads_as_a_plain_float():
    model, optimizer = prepared("O2")
    overflow(model, optimizer)
    assert type(scaler()._loss_scale) is type(scaler().loss_scale()) is float
    assert scaler()._loss_scale == scaler().loss_scale() == 2.0**15


@pytest.mark.parametrize("value", [2**20, 2.0**20])
def test_loss_scale_is_writable_and_the_next_pass_uses_it(value):
    model, optimizer = one_weight("O1")
    amp._amp_state.loss_scalers[0]._loss_scale = value
    loss = slope(model, 1.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == 2.0**20
        scaled_loss.backward()
    assert model.weight.grad == 1.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**20


def test_a_static_loss_scale_is_writable_too():
    model, optimizer = one_weight("O1", loss_scale=1.0)
    scaler()._loss_scale = 8
    with amp.scale_loss(slope(model, 1.0), optimizer) as scaled_loss:
        assert scaled_loss == 8.0
        scaled_loss.backward()
    assert model.weight.grad == 1.0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_loss_scale_that_makes_no_sense_cannot_be_written(value):
    keep = prepared("O2")
    with pytest.raises(ValueError, match="positive, finite"):
        scaler()._loss_scale = value
    assert scale() == 2.0**16
    del keep


def test_unskipped_reads_as_an_int_and_restarts_on_overflow():
    model, optimizer = prepared("O2")
    train(model, optimizer, steps=2)
    assert (type(scaler()._unskipped), scaler()._unskipped) == (int, 2)
    overflow(model, optimizer)
    assert scaler()._unskipped == 0


def test_unskipped_is_writable():
    keep = prepared("O2")
    scaler()._unskipped = 7
    assert unskipped() == 7
    del keep


def test_has_overflow_tells_of_the_last_pass():
    model, optimizer = prepared("O2")
    found = [scaler()._has_overflow]
    overflow(model, optimizer)
    found.append(scaler()._has_overflow)
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    found.append(scaler()._has_overflow)
    assert found == [False, True, False]
    assert type(found[1]) is bool


def test_overflow_buf_is_one_number_that_is_not_0_after_an_overflow():
    model, optimizer = prepared("O2")
    assert scaler()._overflow_buf.shape == (1,)
    assert scaler()._overflow_buf.item() == 0
    overflow(model, optimizer)
    assert scaler()._overflow_buf.item() == 1


def test_bounds_and_window_read_and_write():
    model, optimizer = prepared("O2", min_loss_scale=2.0, max_loss_scale=2.0**20)
    assert (scaler()._min_loss_scale, scaler()._max_loss_scale) == (2.0, 2.0**20)
    assert scaler()._scale_seq_len == 2000
    scaler()._scale_seq_len = 1
    scaler()._max_loss_scale = 2.0**17
    train(model, optimizer, steps=3)
    assert scale() == 2.0**17
    scaler()._min_loss_scale = 2.0**17
    overflow(model, optimizer)
    assert scale() == 2.0**17


@pytest.mark.parametrize("window", [2, 2.0])  # NVIDIA's GNMT parses it as a float
def test_a_window_set_below_the_count_grows_at_the_next_clean_step(window):
    model, optimizer = prepared("O2")
    train(model, optimizer, steps=3)
    scaler()._scale_seq_len = window
    train(model, optimizer, steps=1)
    assert (scale(), unskipped()) == (2.0**17, 0)


def test_a_window_that_is_no_whole_number_is_refused():
    made = LossScaler("dynamic", scale_window=3.0)
    assert made._scale_seq_len == 3
    with pytest.raises(TypeError, match=r"is 2\.5; it must be an integer"):
        made._scale_seq_len = 2.5
    assert made._scale_seq_len == 3


def test_a_scale_set_above_its_maximum_halves_from_where_it_is():
    made = LossScaler("dynamic")
    made._loss_scale = 2.0**30
    for _ in range(10):
        made.clear_overflow_state()
        made.unscale([torch.tensor([torch.inf])], [torch.empty(1)])
        made.update_scale()
    assert made.loss_scale() == 2.0**20


@pytest.mark.parametrize(("given", "dynamic"), [("dynamic", True), (1.0, False), ("128", False)])
def test_dynamic_tells_the_kind(given, dynamic):
    keep = prepared("O2", loss_scale=given)
    assert scaler().dynamic is dynamic
    del keep


def test_clear_overflow_state_forgets_the_overflow():
    model, optimizer = prepared("O2")
    overflow(model, optimizer)
    scaler().clear_overflow_state()
    assert (scaler()._has_overflow, scale()) == (False, 2.0**15)


def test_each_scaler_has_one_view_which_keeps_what_scripts_put_on_it():
    keep = prepared("O2", num_losses=2)
    one, two = amp._amp_state.loss_scalers
    one.mark = 3
    assert scaler() is one
    assert scaler().mark == 3
    assert one is not two
    del keep


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_flag_that_a_script_sets_decides_the_update(found, dtype):
    keep = prepared("O2")
    flag = torch.tensor([int(found)], dtype=dtype)
    scaler()._overflow_buf = flag
    assert scaler()._overflow_buf is flag
    assert scaler().update_scale() is found
    assert (scaler()._has_overflow, scale()) == (found, 2.0**15 if found else 2.0**16)
    del keep


def test_a_flag_set_once_is_read_at_every_update_and_cleared_with_the_state():
    made = LossScaler("dynamic")
    flag = torch.zeros(1, dtype=torch.int32)
    made._overflow_buf = flag
    decisions = []
    for grad in (torch.inf, 1.0, torch.nan):
        made.clear_overflow_state()
        amp_C.multi_tensor_scale(65536, flag, [[torch.tensor([grad])], [torch.empty(1)]], 1.0)
        decisions.append(made.update_scale())
    assert decisions == [True, False, True]
    assert (made.loss_scale(), made._unskipped) == (2.0**14, 0)


def test_a_flag_set_on_a_static_scaler_skips_nothing():
    made = LossScaler(8.0)
    made._overflow_buf = torch.ones(1, dtype=torch.int32)
    assert made.update_scale() is False
    assert made.loss_scale() == 8.0


@pytest.mark.parametrize("found", [True, False])
def test_has_overflow_can_be_set_before_the_update(found):
    model, optimizer = prepared("O2")
    overflow(model, optimizer, delay_overflow_check=True)
    scaler()._has_overflow = found
    assert scaler()._has_overflow is found
    assert scaler().update_scale() is found
    assert scale() == (2.0**15 if found else 2.0**16)


@pytest.mark.parametrize("bad", [torch.ones(2), 1, None])
def test_a_flag_that_is_no_single_number_is_refused(bad):
    made = LossScaler("dynamic")
    with pytest.raises((TypeError, ValueError), match=r"_overflow_buf .* one element"):
        made._overflow_buf = bad


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_averaged_by_a_script_after_accumulation_train_and_skip(level):
    """``--allreduce_post_accumulation`` of NVIDIA's BERT, on one process."""
    model, optimizer = one_weight(level)
    scaler()._loss_scale = 2.0**10
    flag = torch.zeros(1, dtype=torch.int32)
    weights, scales = [], []
    for slopes in ((1.0, 3.0), (1.0, torch.inf), (2.0, 2.0)):
        for value in slopes:
            with amp.scale_loss(slope(model, value), optimizer, delay_overflow_check=True) as loss:
                loss.backward()
        grads = [p.grad for p in amp.master_params(optimizer)]
        sent = [torch.empty_like(grad) for grad in grads]
        flag.zero_()
        amp_C.multi_tensor_scale(65536, flag, [grads, sent], scaler().loss_scale() / 2)
        flag.zero_()
        amp_C.multi_tensor_scale(65536, flag, [sent, grads], 1.0 / scaler().loss_scale())
        scaler()._overflow_buf = flag
        if scaler().update_scale():
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
        else:
            optimizer.step()
        for param in model.parameters():
            param.grad = None
        weights.append(model.weight.item())
        scales.append(scale())
    assert weights == [0.75, 0.75, 0.5]
    assert scales == [2.0**10, 2.0**9, 2.0**9]


# -- a LossScaler of one's own ---------------------------------------------------------------


def test_a_static_scaler_can_be_made():
    made = LossScaler(128.0)
    assert (made.loss_scale(), made.dynamic, made._unskipped) == (128.0, False, 0)


def test_a_dynamic_scaler_can_be_made_with_apex_s_arguments():
    made = LossScaler(
        "dynamic",
        init_scale=2.0**10,
        scale_factor=4.0,
        scale_window=3,
        min_loss_scale=2.0,
        max_loss_scale=2.0**12,
    )
    assert (made.loss_scale(), made.dynamic, made._scale_seq_len) == (2.0**10, True, 3)
    assert (made._min_loss_scale, made._max_loss_scale) == (2.0, 2.0**12)
    for _ in range(3):
        made.update_scale()
    assert made.loss_scale() == 2.0**12


def test_a_dynamic_scaler_starts_at_2_to_the_16_with_a_window_of_2000():
    made = LossScaler("dynamic")
    assert (made.loss_scale(), made._scale_seq_len) == (2.0**16, 2000)
    assert (made._min_loss_scale, made._max_loss_scale) == (None, 2.0**24)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unscale_writes_divided_gradients(dtype):
    made = LossScaler(8.0)
    model_grads = [torch.full((3,), 16.0, dtype=dtype)]
    master_grads = [torch.empty(3)]
    made.unscale(model_grads, master_grads, 8.0)
    assert master_grads[0].tolist() == [2.0, 2.0, 2.0]
    assert model_grads[0].tolist() == [16.0, 16.0, 16.0]


def test_unscale_works_in_place():
    grads = [torch.full((2,), 16.0)]
    LossScaler(8.0).unscale(grads, grads, models_are_masters=True)
    assert grads[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("given", [8.0, "dynamic"])
def test_unscale_takes_another_scale(given):
    grads = [torch.full((2,), 16.0)]
    LossScaler(given).unscale(grads, grads, scale_override=4.0)
    assert grads[0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_dynamic_unscale_finds_the_overflow_and_update_scale_tells_to_skip(bad):
    made = LossScaler("dynamic")
    made.clear_overflow_state()
    made.unscale([torch.tensor([1.0, bad])], [torch.empty(2)])
    assert made._has_overflow is True
    assert made.update_scale() is True
    assert (made.loss_scale(), made._unskipped) == (2.0**15, 0)
    made.clear_overflow_state()
    made.unscale([torch.ones(2)], [torch.empty(2)])
    assert made.update_scale() is False
    assert (made.loss_scale(), made._unskipped) == (2.0**15, 1)


def test_a_static_unscale_finds_nothing():
    made = LossScaler(8.0)
    made.unscale([torch.tensor([torch.inf])], [torch.empty(1)])
    assert (made._has_overflow, made.update_scale(), made._unskipped) == (False, False, 1)


def test_unscale_with_stashed_adds_earlier_gradients():
    made = LossScaler(8.0)
    master = [torch.empty(2)]
    made.unscale_with_stashed([torch.full((2,), 16.0).half()], [torch.full((2,), 3.0)], master)
    assert master[0].tolist() == [5.0, 5.0]


def test_unscale_with_stashed_may_write_into_the_stash():
    made = LossScaler("dynamic", init_scale=8.0)
    stash = [torch.full((2,), 3.0)]
    made.unscale_with_stashed([torch.full((2,), 16.0)], stash, stash)
    assert stash[0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("given", ["abc", None, True])
def test_what_is_no_loss_scale_is_refused(given):
    with pytest.raises(ValueError, match=r"positive, finite number.*, or a string with one"):
        LossScaler(given)


@pytest.mark.parametrize(
    ("error", "arguments", "words"),
    [
        (ValueError, ("dynamic", "x"), "loss_scale is 'x'; it must be a positive"),
        (ValueError, ("dynamic", 8.0, 0), "growth_factor is 0; it must be above 1"),
        (TypeError, ("dynamic", 8.0, "2"), "growth_factor is '2'; it must be a number"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(error, arguments, words):
    with pytest.raises(error, match=words):
        LossScaler(*arguments)


def test_unscale_with_stashed_takes_the_scales_of_both_and_of_the_result():
    master = [torch.empty(2)]
    stash = [torch.full((2,), 3.0)]
    LossScaler(8.0).unscale_with_stashed([torch.full((2,), 16.0)], stash, master, (4.0, 0.5, 2.0))
    assert master[0].tolist() == [20.0, 20.0]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_python_forms_write_unless_they_are_to_check_and_find_an_overflow(bad):
    grad, out = torch.tensor([2.0, bad]), torch.zeros(2)
    assert scale_check_overflow_python(grad, out, 0.5, check_overflow=True) is True
    assert axpby_check_overflow_python(grad, out, out, 0.5, 1.0, check_overflow=True) is True
    assert out.tolist() == [0.0, 0.0]
    assert scale_check_overflow_python(grad, out, 0.5) is False
    assert out[0] == 1.0
    assert axpby_check_overflow_python(grad, torch.full((2,), 3.0), out, 0.5, 2.0) is False
    assert out[0] == 7.0


def test_python_methods_do_as_the_fused_ones():
    made = LossScaler("dynamic")
    grads, out = [torch.tensor([8.0]).half()], [torch.zeros(1)]
    made.unscale_python(grads, out, 4.0)
    assert out[0] == 2.0
    made.unscale_with_stashed_python(grads, [torch.tensor([3.0])], out, 0.5, 2.0)
    assert (out[0], made._has_overflow) == (10.0, False)
    made.unscale_python([torch.tensor([torch.inf])], out, 4.0)
    assert made.update_scale() is True


def test_a_kernel_is_always_there():
    assert LossScaler.has_fused_kernel
    assert not LossScaler.warned_no_fused_kernel
    assert not LossScaler.warned_unscaling_non_fp32_grad
