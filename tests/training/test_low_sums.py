"""``grad_accum_dtype``: gradients of several passes add up in the model's own 16 bits."""

import copy
import pickle

import pytest
import torch
from torch import nn

from apex import amp
from apex._engine.optimizer import deferred, one_pass
from apex._torch import blocks
from benchmarks.loops import with_amp
from benchmarks.memory import peak_bytes
from tests.support.reference.loops import Loop
from tests.training import cases
from tests.training.test_cost import reads_of

LOW = {"O2": torch.float16, "O5": torch.bfloat16}
SCALES = [("O2", 1.0), ("O2", 128.0), ("O2", "dynamic"), ("O5", 1.0), ("O5", "dynamic")]
OPTIMIZERS = {
    **{name: cases.OPTIMIZERS[name] for name in ("fused AdamW", "Adam", "fused SGD")},
    "one by one": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
}

levels = pytest.mark.parametrize("level", LOW)
level_scales = pytest.mark.parametrize(("level", "scale"), SCALES)
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.fixture(params=["large", "small"], autouse=True)
def size(request, monkeypatch):
    """Models that are large enough for the step in one pass, and those that are not."""
    if request.param == "large":
        monkeypatch.setattr(one_pass, "least_elements", 1)
        monkeypatch.setattr(blocks, "_LEAST", 16)


def prepared(level, name="fused AdamW", **options):
    return cases.prepared(level, OPTIMIZERS[name], grad_accum_dtype=LOW[level], **options)


def accumulate(model, optimizer, data, **options):
    for x, y in data:
        cases.backward(model, optimizer, x, y, **options)


def steps(count, passes, overflow_at=()):
    data = list(cases.batches(count * passes, overflow_at))
    return [data[step * passes : (step + 1) * passes] for step in range(count)]


class SumsInLow(Loop):
    """Gradients of several passes add up in ``param.grad``, as plain torch leaves them there."""

    def accumulate(self, batches):
        """Returns whether any pass overflowed."""
        overflowed = False
        for param in self.model:
            param.grad = None
        for x, y in batches:
            for param in self.model if overflowed else ():
                param.grad.zero_()
            before = self.scale
            loss = nn.functional.mse_loss(self.forward(x).float(), y)
            (loss * self.scale).backward()
            overflow = self.dynamic and not all(
                (param.grad.float() / before).isfinite().all() for param in self.model
            )
            overflowed |= overflow
            self.end_pass(overflow)
            for param, stepped in zip(self.model, self.stepped, strict=True):
                stepped.grad = param.grad.float() / before
                param.grad = (param.grad.float() * (self.scale / before)).to(param.grad.dtype)
        return overflowed

    def train_step(self, batches):
        if not self.accumulate(batches):
            self.optimizer.step()
            self.round_to_model()


# -- the bits --------------------------------------------------------------------------------


@optimizers
@level_scales
def test_training_equals_the_plain_loop(level, scale, name):
    overflow_at = {1, 9} if scale == "dynamic" else ()
    model, optimizer = prepared(level, name, loss_scale=scale, growth_interval=2)
    loop = SumsInLow(level, cases.net().parameters(), OPTIMIZERS[name], scale=scale, interval=2)
    for batches in steps(5, 3, overflow_at):
        optimizer.zero_grad()
        accumulate(model, optimizer, batches)
        optimizer.step()
        loop.train_step(batches)
        assert cases.loss_scale() == loop.scale
        assert cases.same(cases.grads(amp.master_params(optimizer)), cases.grads(loop.stepped))
        assert cases.same(cases.masters(optimizer), cases.values(loop.stepped))
        assert cases.same(cases.values(model.parameters()), cases.values(loop.model))


@levels
def test_one_pass_has_the_gradient_of_the_default(level):
    for scale in (128.0, "dynamic"):
        low, plain = prepared(level, loss_scale=scale), cases.prepared(level, loss_scale=scale)
        for model, optimizer in (low, plain):
            accumulate(model, optimizer, cases.batches(1))
        grads = [cases.grads(amp.master_params(optimizer)) for _, optimizer in (low, plain)]
        assert cases.same(*grads)


@level_scales
def test_reading_a_gradient_between_passes_changes_nothing(level, scale):
    def train(read):
        model, optimizer = prepared(level, loss_scale=scale)
        for batch in cases.batches(3):
            accumulate(model, optimizer, [batch])
            read(model, optimizer)
        optimizer.step()
        return cases.masters(optimizer)

    def read_masters(model, optimizer):
        cases.grads(amp.master_params(optimizer))

    def read_models(model, optimizer):
        cases.grads(model.parameters())

    expected = train(lambda model, optimizer: None)
    assert cases.same(expected, train(read_masters))
    if scale == 1.0:
        assert cases.same(expected, train(read_models))


@level_scales
def test_a_gradient_that_a_script_holds_shows_the_sum(level, scale):
    model, optimizer = prepared(level, loss_scale=scale)
    batches = list(cases.batches(2))
    accumulate(model, optimizer, batches[:1])
    held = [param.grad for param in model.parameters()]
    accumulate(model, optimizer, batches[1:])
    assert cases.same([grad.clone() for grad in held], cases.grads(model.parameters()))


@level_scales
def test_delayed_passes_add_up_to_the_same(level, scale):
    def train(delay):
        model, optimizer = prepared(level, loss_scale=scale)
        for batches in steps(2, 3):
            accumulate(model, optimizer, batches[:-1], delay_unscale=delay)
            accumulate(model, optimizer, batches[-1:])
            optimizer.step()  # without zero_grad: the next step's sum goes on
        return cases.masters(optimizer)

    assert cases.same(train(delay=False), train(delay=True))


@levels
def test_losses_of_different_scales_add_up(level):
    model, optimizer = prepared(level, num_losses=3, loss_scale="dynamic")
    scales = [2.0**12, 2.0**4, 1000.0]
    amp.load_state_dict(
        {f"loss_scaler{i}": {"loss_scale": s, "unskipped": 0} for i, s in enumerate(scales)}
    )
    batches = list(cases.batches(3))
    for loss_id, batch in enumerate(batches):
        accumulate(model, optimizer, [batch], loss_id=loss_id)
    assert [cases.loss_scale(loss_id) for loss_id in range(3)] == scales
    other = prepared(level, loss_scale=128.0)
    accumulate(*other, batches)
    eps = torch.finfo(LOW[level]).eps
    both = (amp.master_params(each) for each in (optimizer, other[1]))
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("masters", [True, "split", "stochastic"])
@optimizers
def test_packed_masters_step_the_same_sums(masters, name):
    model, optimizer = prepared("O5", name, master_weights=masters)
    loop = SumsInLow("O5", cases.net().parameters(), OPTIMIZERS[name])
    batches = list(cases.batches(2))
    accumulate(model, optimizer, batches)
    loop.accumulate(batches)
    optimizer.step()
    loop.optimizer.step()
    assert cases.same(cases.grads(amp.master_params(optimizer)), cases.grads(loop.stepped))
    if masters != "stochastic":
        assert cases.same(cases.masters(optimizer), cases.values(loop.stepped))


@levels
def test_optimizers_that_share_a_weight_step_one_sum(level):
    def train(passes):
        model = cases.net()
        owners = [
            OPTIMIZERS["fused AdamW"](model.parameters()),
            OPTIMIZERS["Adam"](model[2].parameters()),
        ]
        model, owners = amp.initialize(
            model, owners, opt_level=level, grad_accum_dtype=LOW[level], verbosity=0
        )
        for batch in cases.batches(passes):
            accumulate(model, owners, [batch])
        grads = [cases.grads(amp.master_params(owner)) for owner in owners]
        for owner in owners:
            owner.step()
        return grads

    every, last = train(3)
    assert cases.same(every[2:], last)
    plain = prepared(level)
    accumulate(*plain, cases.batches(3))
    assert cases.same(every, cases.grads(amp.master_params(plain[1])))


@level_scales
def test_clipping_between_passes_scales_the_sum(level, scale):
    model, optimizer = prepared(level, loss_scale=scale)
    first, second = cases.batches(2)
    accumulate(model, optimizer, [first])
    amp.clip_grad_norm_(optimizer, 1e-2)
    before = cases.grads(amp.master_params(optimizer))
    accumulate(model, optimizer, [second])
    found = cases.grads(amp.master_params(optimizer))
    alone = prepared(level, loss_scale=scale)
    accumulate(*alone, [second])
    fresh = cases.grads(amp.master_params(alone[1]))
    eps = torch.finfo(LOW[level]).eps
    for total, early, late in zip(found, before, fresh, strict=True):
        torch.testing.assert_close(total, early + late, rtol=2 * eps, atol=2 * eps)


@levels
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("owner", ["optimizer", "model", "hand"])
def test_cleared_sums_start_again(level, set_to_none, owner):
    model, optimizer = prepared(level, loss_scale="dynamic")
    first, second = cases.batches(2)
    accumulate(model, optimizer, [first])
    if owner == "hand":
        for param in model.parameters():
            param.grad = None if set_to_none else torch.zeros_like(param)
    else:
        {"optimizer": optimizer, "model": model}[owner].zero_grad(set_to_none=set_to_none)
    accumulate(model, optimizer, [second])
    other = prepared(level, loss_scale="dynamic")
    accumulate(*other, [second])
    both = [cases.grads(amp.master_params(each)) for each in (optimizer, other[1])]
    assert cases.same(*both)


@levels
def test_a_closure_accumulates(level):
    model, optimizer = prepared(level, "fused SGD")
    batches = list(cases.batches(3))

    def closure():
        optimizer.zero_grad()
        accumulate(model, optimizer, batches)
        return torch.zeros(())

    optimizer.step(closure)
    other = prepared(level, "fused SGD")
    accumulate(*other, batches)
    other[1].step()
    assert cases.same(cases.masters(optimizer), cases.masters(other[1]))


@levels
def test_gradients_of_fp32_modules_add_up_in_fp32(level):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = prepared(level, model=net, loss_scale=128.0)
    first, second = cases.batches(2)
    accumulate(model, optimizer, [first])
    early = model[1].weight.grad.clone()
    accumulate(model, optimizer, [second])
    assert model[1].weight.grad.dtype is torch.float32
    assert not torch.equal(model[1].weight.grad, early)


@levels
def test_a_plain_backward_adds_to_the_sum(level):
    model, optimizer = prepared(level, loss_scale=1.0)
    first, second = cases.batches(2)
    cases.loss_of(model, *first).backward()
    accumulate(model, optimizer, [second])
    other = prepared(level, loss_scale=1.0)
    accumulate(*other, [first, second])
    both = [cases.grads(amp.master_params(each)) for each in (optimizer, other[1])]
    assert cases.same(*both)


# -- memory ----------------------------------------------------------------------------------


@levels
def test_an_iteration_of_several_passes_peaks_as_one_of_one(level, monkeypatch):
    monkeypatch.undo()
    task, params = cases.large_task(), 3 * 1024**2
    work = with_amp(task, level, passes=4, grad_accum_dtype=LOW[level])
    # Autograd adds the gradient of one layer at a time: 2 bytes for a third of the parameters.
    assert 16.6 <= peak_bytes(work, 14 * params) / params <= 16.9


@level_scales
@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD"])
def test_accumulation_has_no_host_read(level, scale, name):
    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        accumulate(model, optimizer, [(x, y)] * 3)
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    assert reads_of(*prepared(level, name, loss_scale=scale), train) == 0


@pytest.mark.gpu
@level_scales
def test_sums_on_a_gpu_are_those_on_the_cpu_and_nothing_waits_for_it(level, scale):
    def train(device):
        model, optimizer = prepared(
            level, model=cases.net().to(device), loss_scale=scale, growth_interval=2
        )
        for batches in steps(4, 3, {4} if scale == "dynamic" else ()):
            moved = [(x.to(device), y.to(device)) for x, y in batches]
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.zero_grad()
                accumulate(model, optimizer, moved)
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return [value.cpu() for value in cases.masters(optimizer)]

    for found, expected in zip(train("cuda"), train("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# -- failures --------------------------------------------------------------------------------


def fail(model, optimizer, x, y):
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
        raise ZeroDivisionError


@level_scales
def test_a_pass_that_fails_skips_the_step_until_the_gradients_are_cleared(level, scale):
    model, optimizer = prepared(level, loss_scale=scale)
    first, second = cases.batches(2)
    before = cases.masters(optimizer)
    accumulate(model, optimizer, [first])
    with pytest.raises(ZeroDivisionError):
        fail(model, optimizer, *second)
    accumulate(model, optimizer, [second])
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert cases.same(before, cases.masters(optimizer))
    optimizer.zero_grad()
    accumulate(model, optimizer, [first])
    optimizer.step()
    other = prepared(level, loss_scale=scale)
    accumulate(*other, [first])
    other[1].step()
    assert cases.same(cases.masters(optimizer), cases.masters(other[1]))


@level_scales
def test_a_change_of_what_a_failed_pass_has_left_runs_no_step(level, scale):
    model, optimizer = prepared(level, loss_scale=scale)
    batches = list(cases.batches(2))
    before = cases.masters(optimizer)
    accumulate(model, optimizer, batches)
    with pytest.raises(ZeroDivisionError):
        fail(model, optimizer, *batches[0])
    accumulate(model, optimizer, batches)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    accumulate(model, optimizer, batches)
    optimizer.step()
    assert cases.same(before, cases.masters(optimizer))
    optimizer.zero_grad()
    accumulate(model, optimizer, batches)
    optimizer.step()
    assert not cases.same(before, cases.masters(optimizer))


@pytest.mark.parametrize("level", LOW)
def test_a_change_of_sums_that_start_again_after_an_overflow_runs_no_step(level):
    model, optimizer = prepared(level, loss_scale="dynamic")
    before = cases.masters(optimizer)
    accumulate(model, optimizer, cases.batches(2, overflow_at={0}))
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    accumulate(model, optimizer, cases.batches(1))
    optimizer.step()
    assert cases.same(before, cases.masters(optimizer))
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("side", ["model", "masters"])
@level_scales
def test_gradients_that_a_script_zeroes_end_what_a_failed_pass_has_left(level, scale, side):
    model, optimizer = prepared(level, loss_scale=scale)
    accumulate(model, optimizer, cases.batches(1))
    with pytest.raises(ZeroDivisionError):
        fail(model, optimizer, *cases.batch())
    for _ in range(3):
        before = cases.masters(optimizer)
        for param in model.parameters() if side == "model" else amp.master_params(optimizer):
            param.grad.zero_()
        accumulate(model, optimizer, cases.batches(2))
        optimizer.step()
    assert not cases.same(before, cases.masters(optimizer))
    assert not amp.step_was_skipped(optimizer)


@level_scales
def test_a_pass_that_fails_skips_the_steps_of_all_that_share_a_weight(level, scale):
    model = cases.net()
    optimizers = [cases.sgd(model.parameters()), cases.sgd(list(model.parameters())[:1])]
    amp.initialize(
        *(model, optimizers),
        opt_level=level,
        grad_accum_dtype=cases.LEVELS[level].stored,
        loss_scale=scale,
        verbosity=0,
    )
    before = cases.masters(optimizers[0])
    accumulate(model, optimizers[0], [cases.batch()])
    with pytest.raises(ZeroDivisionError):
        fail(model, optimizers[0], *cases.batch())
    accumulate(model, optimizers[0], [cases.batch()])
    for optimizer in optimizers:
        optimizer.step()
    assert cases.same(before, cases.masters(optimizers[0]))


@level_scales
def test_a_failed_pass_of_two_optimizers_of_the_same_weights_skips_both_steps(level, scale):
    model = cases.net()
    optimizers = [cases.sgd(model.parameters()) for _ in range(2)]
    dtype, options = cases.LEVELS[level].stored, {"loss_scale": scale, "verbosity": 0}
    amp.initialize(model, optimizers, opt_level=level, grad_accum_dtype=dtype, **options)
    before = cases.masters(optimizers[0])
    accumulate(model, optimizers, [cases.batch()])
    with pytest.raises(ZeroDivisionError):
        fail(model, optimizers, *cases.batch())
    accumulate(model, optimizers, [cases.batch()])
    for optimizer in optimizers:
        optimizer.step()
    assert cases.same(before, cases.masters(optimizers[0]))


@levels
def test_a_pass_that_fails_before_there_is_a_sum_leaves_nothing(level):
    model, optimizer = prepared(level)
    with pytest.raises(ZeroDivisionError):
        fail(model, optimizer, *cases.batch())
    assert cases.grads(model.parameters()) == [None] * 4
    accumulate(model, optimizer, [cases.batch()])
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


# -- objects ---------------------------------------------------------------------------------


@levels
def test_copies_and_files_keep_the_option(level):
    pair = prepared(level)
    for model, optimizer in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert optimizer._apex_binding.sums_low
        assert len(list(model.parameters())) == 4


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "dtype", "options", "message"),
    [
        ("O0", torch.bfloat16, {}, "no meaning at O0"),
        ("O1", torch.float16, {}, "no meaning at O1"),
        ("O4", torch.bfloat16, {}, "no meaning at O4"),
        ("O3", torch.float16, {}, "no meaning at O3 without masters"),
        ("O5", torch.bfloat16, {"master_weights": False}, "no meaning at O5 without masters"),
        ("O5", torch.float16, {}, "does not fit a model in torch.bfloat16"),
        ("O2", torch.float64, {}, "does not fit a model in torch.float16"),
    ],
)
def test_levels_without_16_bit_gradients_beside_masters_are_refused(level, dtype, options, message):
    model = cases.net()
    with pytest.raises(RuntimeError, match=message):
        cases.prepared(level, model=model, grad_accum_dtype=dtype, **options)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("value", ["fp32", True, 16])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="grad_accum_dtype"):
        cases.prepared("O5", grad_accum_dtype=value)


def test_fp32_is_the_default():
    model, optimizer = cases.prepared("O5", grad_accum_dtype=torch.float32)
    assert not optimizer._apex_binding.sums_low
    assert not deferred.of(next(amp.master_params(optimizer)))
    assert model[0].weight.dtype is torch.bfloat16


@level_scales
def test_a_failed_pass_leaves_the_step_of_an_optimizer_whose_sums_are_whole(level, scale):
    model = cases.net()
    params = list(model.parameters())
    optimizers = one, two = cases.sgd(params[:2]), cases.sgd(params[1:])  # they share a weight
    dtype, options = cases.LEVELS[level].stored, {"loss_scale": scale, "verbosity": 0}
    amp.initialize(model, [one, two], opt_level=level, grad_accum_dtype=dtype, **options)

    def penalize(param, optimizer, error=None):
        with amp.scale_loss(1e-2 * param.float().square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            if error is not None:
                raise error

    penalize(params[0], one)
    penalize(params[3], two)
    before = [cases.masters(optimizer) for optimizer in optimizers]
    with pytest.raises(ZeroDivisionError):
        penalize(params[3], two, ZeroDivisionError())
    for optimizer in optimizers:
        optimizer.step()
    same = [cases.same(old, cases.masters(o)) for old, o in zip(before, optimizers, strict=True)]
    assert same == [False, True]
