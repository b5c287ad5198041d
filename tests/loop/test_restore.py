"""``amp.restore``: the same objects, plain and in fp32, go on as if amp had never been there."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from apex import amp
from apex.parallel import LARC
from tests.support import loops

masters = pytest.mark.parametrize("level", loops.WITH_MASTERS)


def hooks(model):
    found = [v for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks")]
    for param in model.parameters():
        found += [param._backward_hooks or (), param._post_accumulate_grad_hooks or ()]
    return sum(map(len, found))


@pytest.mark.parametrize("level", loops.LEVELS)
def test_the_same_objects_come_back_plain(level):
    model, optimizer = loops.plain_pair()
    exact = loops.values(model.parameters())
    before = set(vars(model)), set(vars(optimizer)), hooks(model)
    params, group = list(model.parameters()), optimizer.param_groups[0]
    listed = group["params"]
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert amp.restore(model, optimizer) == (model, optimizer)
    assert (type(model), type(optimizer)) == (nn.Sequential, torch.optim.SGD)
    assert (set(vars(model)), set(vars(optimizer)), hooks(model)) == before
    assert all(map(lambda a, b: a is b, model.parameters(), params))
    assert all(map(lambda a, b: a is b, amp.master_params(optimizer), params))
    assert optimizer.param_groups[0] is group
    assert group["params"] is listed
    if level != "O3":
        assert loops.same(exact, loops.values(params))
    assert (loops.live_sessions(), amp.state_dict()) == (0, {})
    assert not torch.is_autocast_enabled("cpu")


def test_a_block_that_is_open_or_delayed_ends(level):
    grads = []
    for delays in (False, True):
        model, optimizer = loops.prepared(level, loss_scale="dynamic")
        loss = loops.loss_of(model, *loops.batch())
        with amp.scale_loss(loss, optimizer, delay_unscale=delays) as scaled_loss:
            scaled_loss.backward()
            if not delays:
                amp.restore(model, optimizer)
        if delays:
            amp.restore(model, optimizer)
        grads.append(loops.grads(model.parameters()))
    assert loops.same(*grads)
    assert max(grad.abs().max() for grad in grads[0]) < 4.0


def test_a_step_that_a_script_has_kept_steps_on(level):
    model, optimizer = loops.prepared(level)
    step = optimizer.step
    amp.restore(model, optimizer)
    before = loops.values(model.parameters())
    model(loops.batch()[0]).sum().backward()
    step()
    assert not loops.same(before, loops.values(model.parameters()))


@loops.every(keeps=[True, False], optimizers=[True, False], level=["O2", "O3", "O5"])
def test_what_was_held_in_fp32_comes_back_to_the_last_bit(level, optimizers, keeps):
    parts = {"trained": nn.Linear(4, 4), "frozen": nn.Linear(4, 4).requires_grad_(False)}
    model = loops.Body(None, **parts, table=nn.Buffer(torch.randn(4, 4)))
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = loops.sgd(model.trained.parameters()) if optimizers else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, keep_fp32_values=keeps)
    saved = model.state_dict()
    amp.restore(model, optimizer)
    has_masters = optimizers and level != "O3"
    held = {k for k in exact if keeps or k == "table" or (k.startswith("t") and has_masters)}
    for name in held:
        assert loops.same(saved[name], exact[name])
        assert loops.same(model.state_dict()[name], exact[name])


@masters
def test_an_optimizer_that_a_later_call_has_prepared_gives_its_masters_back(level):
    model = amp.initialize(loops.net(), opt_level=level, verbosity=0)
    optimizer = loops.sgd(model.parameters())
    amp.initialize([], optimizer, opt_level=level, verbosity=0)
    loops.train_step(model, optimizer, *loops.batch())
    exact = loops.masters(optimizer)
    amp.restore(model, optimizer)
    assert loops.same(exact, loops.values(model.parameters()))


@masters
def test_a_master_that_a_script_has_moved_to_another_optimizer_comes_back_there(level):
    model = loops.net()
    first, second = loops.sgd(model[0].parameters()), loops.sgd(model[2].parameters())
    amp.initialize(model, [first, second], opt_level=level, verbosity=0)
    second.param_groups[0]["params"].append(first.param_groups[0]["params"].pop())
    amp.restore(model, [first, second])
    assert second.param_groups[0]["params"][-1] is model[0].bias


@masters
def test_an_optimizer_that_is_not_restored_shares_its_masters_with_the_next_call(level):
    options = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
    model = loops.net()
    first, second = loops.sgd(model[0].parameters()), loops.sgd(model.parameters())
    amp.initialize(model, [first, second], **options)
    loops.train(model, second)
    amp.restore(model, first)
    with torch.no_grad():
        model[0].weight.add_(2.0**-14)
    exact = loops.values(model.parameters())
    amp.initialize(model, first, **options)
    assert loops.same(loops.masters(second), exact)
    loops.train(model, first)
    assert loops.agree(model, second)
    amp.restore(model, [first, second])
    assert second.param_groups[0]["params"][0] is model[0].weight


@masters
def test_a_module_that_is_no_part_of_the_model_any_more_comes_back_too(level):
    model, optimizer = loops.trained(level)
    exact = loops.masters(optimizer)
    head = model[2]
    model[2] = nn.Identity()
    amp.restore(model, optimizer)
    assert loops.same(exact[2:], loops.values(head.parameters()))
    assert optimizer.param_groups[0]["params"][2] is head.weight


@masters
def test_masters_are_gone_with_their_model_while_another_trains_on(level):
    models, optimizers = zip(loops.plain_pair(), loops.plain_pair(), strict=True)
    amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    master = weakref.ref(optimizers[0].param_groups[0]["params"][0])
    amp.restore(models[0], optimizers[0])
    gc.collect()
    assert master() is None


@masters
def test_a_part_that_outlives_its_model_stays_exact_and_keeps_no_other_weight(level):
    model, optimizer = loops.trained(level)
    part = model[0]
    exact = part.state_dict()["weight"].clone()
    other = weakref.ref(model[2].weight)
    del model, optimizer
    gc.collect()
    assert torch.equal(part.state_dict()["weight"], exact)
    assert other() is None


@masters
def test_a_master_begins_with_the_fp32_value_that_an_earlier_call_keeps(level):
    part = nn.Linear(2, 2)
    exact = part.weight.detach().clone()
    options = {"opt_level": level, "keep_fp32_values": True, "verbosity": 0}
    amp.initialize(part, **options)
    optimizer = loops.sgd(part.parameters())
    amp.initialize(nn.Sequential(part, nn.ReLU()), optimizer, **options)
    assert torch.equal(optimizer.param_groups[0]["params"][0], exact)


@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_works_on(level, early):
    model, optimizer = loops.plain_pair()

    def make():
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    scheduler = make() if early else None
    larc = LARC(optimizer)
    amp.initialize(model, larc, opt_level=level, verbosity=0)
    scheduler = scheduler or make()
    loops.train_step(model, optimizer, *loops.batch())
    scheduler.step()
    assert amp.restore([model], (larc,)) == ([model], (larc,))
    before = loops.values(model.parameters())
    loops.plain_step(model, optimizer, *loops.batch())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value.add(param.grad, alpha=-0.05))


@pytest.mark.parametrize("fails", ["forward", "step"])
def test_the_session_ends_also_while_the_traceback_of_a_failure_lives(level, fails):
    model, optimizer = loops.prepared(level)

    def fail(*given):
        raise ValueError

    owner = model[2] if fails == "forward" else optimizer
    handle = getattr(owner, f"register_{fails}_pre_hook")(fail)
    try:
        loops.train_step(model, optimizer, *loops.batch())
    except ValueError:  # falls back to fp32
        handle.remove()
        amp.restore(model, optimizer)
        assert loops.product() is torch.float32
        assert amp.state_dict() == {}


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_stay_on_for_a_model_that_is_not_restored(level):
    models = [loops.net(), loops.net()]
    amp.initialize(models, opt_level=level, verbosity=0)
    amp.restore(models[0])
    x = torch.ones(2, 4)
    assert models[1](x).dtype is loops.LEVELS[level].compute
    with amp.disable_casts():
        assert models[0](x).dtype is torch.float32


@pytest.mark.parametrize("call", ["restore", "half"])
def test_a_part_that_was_prepared_too_becomes_plain_with_its_model(level, call):
    model = loops.net()
    amp.initialize([model[0], model], opt_level=level, verbosity=0)
    if call == "restore":
        amp.restore(model)
    else:
        model.half().float()
    assert type(model[0]) is nn.Linear
    assert model(torch.ones(2, 4)).dtype is loops.product() is torch.float32


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, nn.Sequential])
def test_a_model_in_a_wrapper_becomes_plain(level, wrap):
    model, optimizer = loops.trained(level)
    expected = loops.masters(optimizer)
    wrapper = wrap(model)
    assert amp.restore(wrapper, optimizer) == (wrapper, optimizer)
    assert type(model) is nn.Sequential
    assert loops.same(loops.values(model.parameters()), expected)
    assert wrapper(torch.ones(2, 4)).dtype is torch.float32


@masters
def test_a_model_restored_alone_is_fp32_and_its_prepared_optimizer_trains_it_on(level):
    model, optimizer = loops.prepared(level)
    first = loops.train_step(model, optimizer, *loops.batch())
    amp.restore(model)
    assert loops.same(loops.values(model.parameters()), loops.masters(optimizer))
    assert loops.train_step(model, optimizer, *loops.batch()) < first


# -- refusals --------------------------------------------------------------------------------


def refused(error, words, model, optimizer=None):
    parts = [part if type(part) is list else [part] for part in (model, optimizer)]
    objects = [*parts[0], *parts[1]]
    with loops.nothing_changes(*objects), pytest.raises(error, match=words):
        amp.restore(model, optimizer)


def test_what_amp_has_not_prepared_is_refused_and_nothing_changes(level):
    model, optimizer = loops.prepared(level)
    other = loops.net()
    words = r"model \(Sequential\) that amp has not prepared\. Pass the model that amp\.initialize"
    refused(ValueError, words, [model, other], optimizer)
    words = r"optimizer \(SGD\) that amp has not prepared"
    refused(ValueError, words, model, loops.sgd(model.parameters()))
    refused(ValueError, "same model twice. Pass each model once", [model, model], optimizer)
    refused(TypeError, "got str instead of a model", "net")
    refused(TypeError, "got str instead of an optimizer", model, "sgd")
    amp.restore(model, optimizer)
    assert amp.restore(model) is model


def test_a_notebook_cell_that_makes_the_optimizer_anew_leaves_a_way_on(level):
    model, optimizer = loops.trained(level)
    expected = loops.prepared(level, model=copy.deepcopy(model))
    optimizer = loops.sgd(model.parameters())
    refused(ValueError, "or none if it is gone", model, optimizer)
    amp.restore(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert loops.train(model, optimizer) == loops.train(*expected)


@masters
def test_an_optimizer_with_masters_is_refused_without_its_model(level):
    first, second = loops.prepared(level), loops.prepared(level)
    words = r"masters of a model that was not passed.*amp\.restore\(model, optimizer\)"
    with loops.nothing_changes(*first, *second), pytest.raises(ValueError, match=words):
        amp.restore(first[0], second[1])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode.*no_grad\(\)"):
        amp.restore(*first)
    with torch.no_grad():
        amp.restore(*first)
    loops.plain_step(*first, *loops.batch())


def test_an_optimizer_may_be_named_twice(level):
    model, optimizer = loops.trained(level)
    amp.restore(model, [optimizer, optimizer])
    assert type(optimizer) is torch.optim.SGD
    assert not torch.is_autocast_enabled("cpu")


@masters
def test_a_restored_model_whose_gradients_have_its_dtype_again_is_prepared_anew(level):
    model, optimizer = amp.restore(*loops.prepared(level))
    for param in model.parameters():
        param.grad_dtype = param.dtype
    loops.plain_step(model, optimizer, *loops.batch())
    amp.initialize(model, opt_level=level, verbosity=0)
    for param in model.parameters():
        assert param.grad.dtype is param.grad_dtype is param.dtype
        assert param.dtype is not torch.float32


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_restored_model_that_a_script_casts_is_prepared_as_any_16_bit_model(level):
    model = loops.net().requires_grad_(False)
    model[2].requires_grad_(True)
    amp.restore(*loops.prepared(level, model=model, keep_fp32_values=True))
    plain = loops.net().half()
    for each in (model.half(), plain):
        loops.prepared("O0", model=each)
    assert loops.same(loops.values(model.parameters()), loops.values(plain.parameters()))
