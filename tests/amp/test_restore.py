import copy
import warnings

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.parallel import LARC
from tests.amp.cases import (
    LEVELS,
    Net,
    backward,
    live_sessions,
    loss_of,
    nothing_changes,
    prepared,
    sgd,
    slope,
    train,
)

every_level = pytest.mark.parametrize("level", LEVELS)


def hooks(model):
    return sum(len(v) for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks"))


@every_level
def test_the_same_objects_come_back_plain(level):
    model = Net()
    optimizer = sgd(model)
    before = set(vars(model)), set(vars(optimizer)), hooks(model)
    params = list(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert amp.restore(model, optimizer) == (model, optimizer)
    assert (type(model), type(optimizer)) == (Net, torch.optim.SGD)
    assert (set(vars(model)), set(vars(optimizer)), hooks(model)) == before
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert all(a is b for a, b in zip(amp.master_params(optimizer), params, strict=True))


@every_level
def test_what_comes_back_has_the_shape_of_what_was_given(level):
    model, optimizer = prepared(level)
    assert amp.restore([model], (optimizer,)) == ([model], (optimizer,))
    model = amp.initialize(Net(), opt_level=level, verbosity=0)
    assert amp.restore(model) is model


@every_level
def test_parameters_and_buffers_are_fp32_again(level):
    model, optimizer = prepared(level)
    train(model, optimizer)
    amp.restore(model, optimizer)
    tensors = [*model.parameters(), *model.buffers()]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_restored_at_once_the_values_are_those_from_before(level):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.restore(model, optimizer)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@every_level
def test_sparse_buffers_come_back_to_the_last_bit(level, layout):
    torch.manual_seed(0)
    model = Net()
    dense = torch.rand(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on sparse tensors
        model.register_buffer("near", getattr(dense, f"to_sparse_{layout}", dense.to_sparse)())
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert torch.equal(model.state_dict()["near"].to_dense(), dense)
        train(model, optimizer)
        if layout == "coo":
            dense = 2 * dense
            model.load_state_dict({**model.state_dict(), "near": dense.to_sparse()})
        amp.restore(model, optimizer)
        assert torch.equal(model.near.to_dense(), dense)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parameters_have_their_masters_values(level):
    model, optimizer = prepared(level)
    train(model, optimizer)
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.restore(model, optimizer)
    assert all(map(torch.equal, model.parameters(), masters))


@every_level
def test_training_goes_on_in_fp32(level):
    model, optimizer = prepared(level)
    first = train(model, optimizer, steps=4)
    amp.restore(model, optimizer)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] < first[0]
    assert model(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_the_optimizer_keeps_its_state(level):
    model, optimizer = prepared(level, optimizer=lambda m: sgd(m, momentum=0.5))
    train(model, optimizer)
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in amp.master_params(optimizer)]
    amp.restore(model, optimizer)
    after = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(map(torch.equal, before, after))


@every_level
def test_optimizer_state_has_the_dtype_of_its_parameter_again(level):
    model, optimizer = prepared(level, optimizer=lambda m: sgd(m, momentum=0.5))
    train(model, optimizer)
    amp.restore(model, optimizer)
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.float32}


@every_level
def test_gradients_go_with_their_parameters(level):
    model, optimizer = prepared(level)
    backward(slope(model.last, 0.25), optimizer)
    amp.restore(model, optimizer)
    grad = model.last.weight.grad
    assert (grad.dtype, grad.unique().tolist()) == (torch.float32, [0.25])


@every_level
def test_group_dicts_keep_their_identity(level):
    model, optimizer = prepared(level)
    group = optimizer.param_groups[0]
    params = group["params"]
    amp.restore(model, optimizer)
    assert optimizer.param_groups[0] is group
    assert group["params"] is params


@every_level
def test_a_scheduler_made_under_amp_works_on(level):
    model, optimizer = prepared(level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, steps=1)
    scheduler.step()
    amp.restore(model, optimizer)
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125 / 4


@every_level
def test_a_scheduler_made_before_initialize_works_on(level):
    model = Net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, steps=1)
    scheduler.step()
    amp.restore(model, optimizer)
    before = model.last.weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125 / 4
    assert not torch.equal(model.last.weight, before)


@every_level
def test_larc_around_the_optimizer_is_accepted(level):
    model = Net()
    larc = LARC(sgd(model))
    amp.initialize(model, larc, opt_level=level, verbosity=0)
    assert amp.restore(model, larc) == (model, larc)
    assert type(larc.optim) is torch.optim.SGD


@every_level
def test_what_was_restored_can_be_prepared_again(level):
    model, optimizer = prepared(level)
    train(model, optimizer)
    amp.restore(model, optimizer)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    losses = train(model, optimizer, steps=4)
    assert losses[-1] < losses[0]


@every_level
def test_the_session_ends_with_it(level):
    model, optimizer = prepared(level)
    amp.restore(model, optimizer)
    assert live_sessions() == 0
    assert amp.state_dict() == {}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("fails", ["forward", "step"])
@every_level
def test_the_session_ends_also_while_the_traceback_of_a_failure_lives(level, fails):
    model, optimizer = prepared(level)

    def fail(*given):
        raise ValueError

    owner = model.last if fails == "forward" else optimizer
    register = f"register_{fails}_pre_hook"
    handle = getattr(owner, register)(fail)
    try:
        train(model, optimizer, steps=1)
    except ValueError:  # falls back to fp32
        handle.remove()
        amp.restore(model, optimizer)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert amp.state_dict() == {}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_stay_on_for_a_model_that_is_not_restored(level):
    models = [Net(), Net()]
    amp.initialize(models, opt_level=level, verbosity=0)
    amp.restore(models[0])
    x = torch.ones(2, 4)
    assert models[1](x).dtype is not torch.float32
    with amp.disable_casts():
        assert models[0](x).dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_restored_alone_is_fp32_and_its_prepared_optimizer_trains_it_on(level):
    model, optimizer = prepared(level)
    first = train(model, optimizer)
    amp.restore(model)
    masters = list(amp.master_params(optimizer))
    assert all(map(torch.equal, model.parameters(), masters))
    losses = train(model, optimizer)
    assert losses[-1] < losses[0] < first[0]
    assert all(map(torch.equal, model.parameters(), masters))


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_inference_mode_is_refused_where_the_model_was_converted(level):
    model, optimizer = prepared(level)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode.*no_grad\(\)"):
        amp.restore(model, optimizer)
    with torch.no_grad():
        amp.restore(model, optimizer)
    loss_of(model).backward()


def test_a_plain_model_is_refused():
    model = Net()
    words = r"model \(Net\) that amp has not prepared\. Pass the model that amp\.initialize"
    with nothing_changes(model), pytest.raises(ValueError, match=words):
        amp.restore(model)


def test_a_model_is_restored_once():
    model, optimizer = prepared("O5")
    amp.restore(model, optimizer)
    with nothing_changes(model), pytest.raises(ValueError, match="has not prepared"):
        amp.restore(model)


def test_a_plain_optimizer_is_refused_before_the_model_changes():
    model, _ = prepared("O4")
    optimizer = sgd(model)
    words = r"optimizer \(SGD\) that amp has not prepared"
    with nothing_changes(model, optimizer), pytest.raises(ValueError, match=words):
        amp.restore(model, optimizer)


def test_a_plain_model_in_a_list_is_refused_before_any_changes():
    model, optimizer = prepared("O5")
    other = Net()
    with nothing_changes(model, other, optimizer), pytest.raises(ValueError, match="not prepared"):
        amp.restore([model, other], optimizer)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_with_masters_is_refused_without_its_model(level):
    first, second = prepared(level), prepared(level)
    words = r"masters of a model that was not passed.*amp\.restore\(model, optimizer\)"
    with nothing_changes(*first, *second), pytest.raises(ValueError, match=words):
        amp.restore(first[0], second[1])


def test_a_wrapped_model_is_refused():
    model = nn.DataParallel(prepared("O5")[0])
    with pytest.raises(ValueError, match="without a wrapper"):
        amp.restore(model)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_model_passed_twice_is_refused(level):
    model, optimizer = prepared(level)
    words = "same model twice. Pass each model once"
    with nothing_changes(model, optimizer), pytest.raises(ValueError, match=words):
        amp.restore([model, model], optimizer)


@pytest.mark.parametrize("given", [None, "net", 3])
def test_what_is_no_model_is_a_type_error(given):
    with pytest.raises(TypeError, match="instead of a model"):
        amp.restore(given)


def test_what_is_no_optimizer_is_a_type_error():
    model, _ = prepared("O5")
    with pytest.raises(TypeError, match="instead of an optimizer"):
        amp.restore(model, "sgd")
