"""Rule C: masters follow weights at the step, and the model follows masters at the forward."""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from apex import amp
from apex._torch import parameters
from tests.support import loops
from tests.support.wrapping_optimizers import SAM, Lookahead

level = loops.at_levels(*loops.WITH_MASTERS)
still = functools.partial(loops.sgd, lr=0.0)
"""An optimizer whose steps move nothing."""


def forward(model):
    with torch.no_grad():
        return model(loops.batch()[0])


def test_batch_norm_parameters_are_their_own_masters(level):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = loops.prepared(level, model=model, loss_scale=8.0)
    stepped, before = list(amp.master_params(optimizer)), loops.masters(optimizer)
    loops.train_step(model, optimizer, *loops.batch())
    assert stepped[2] is model[1].weight
    assert stepped[3] is model[1].bias
    assert not any(map(torch.equal, loops.masters(optimizer), before))


# -- masters are written ---------------------------------------------------------------------


@pytest.mark.parametrize("write", ["copy_", "data.copy_", "data", "foreach"])
def test_what_is_written_into_masters_reaches_the_model(level, write):
    model, optimizer = loops.trained(level, steps=1)
    params = [*model.parameters()]
    new = [torch.full_like(p, 1 / 3) for p in amp.master_params(optimizer)]
    if write == "foreach":
        with torch.no_grad():
            torch._foreach_copy_(list(amp.master_params(optimizer)), new)
    else:
        loops.change(amp.master_params(optimizer), new, write)
    if write != "data":  # which reaches the model at once
        forward(model)
    assert all(torch.equal(param, torch.full_like(param, 1 / 3)) for param in params)


def test_a_master_refuses_data_of_another_dtype(level):
    _, optimizer = loops.prepared(level)
    before = loops.masters(optimizer)
    for param in amp.master_params(optimizer):
        with pytest.raises(TypeError, match=r"master\.data\.copy_\(value\)"):
            param.data = param.data.half()
    assert loops.same(loops.masters(optimizer), before)


# -- weights are written ---------------------------------------------------------------------


@pytest.mark.parametrize("write", ["copy_", "data"])
def test_written_weights_reach_the_masters_where_they_differ(level, write):
    model, optimizer = loops.trained(level, steps=1)
    before = loops.masters(optimizer)
    new = loops.values(model.parameters())
    for value in new:
        value.view(-1)[0] = 0.5
    loops.change(model.parameters(), new, write)
    after = loops.masters(optimizer)
    for old, value in zip(before, after, strict=True):
        assert value.view(-1)[0] == 0.5
        assert torch.equal(old.view(-1)[1:], value.view(-1)[1:])


@pytest.mark.parametrize("side", ["model", "masters"])
def test_data_of_another_shape_train_on(level, side):
    """As of a script that prunes neurons."""
    model, optimizer = loops.prepared(level, model=nn.Linear(4, 2), loss_scale=8.0)
    pruned = nn.Linear(4, 1)
    params = model.parameters() if side == "model" else amp.master_params(optimizer)
    for param, kept in zip([*params], pruned.parameters(), strict=True):
        param.data = param.data[:1].clone()
        kept.data.copy_(param.data)
    pair = loops.prepared(level, model=pruned, loss_scale=8.0)
    x, y = loops.batch()
    for each in ((model, optimizer), pair):
        loops.train_step(*each, x, y[:, :1])
        assert loops.agree(*each)
    assert loops.same(loops.masters(optimizer), loops.masters(pair[1]))


def test_the_memory_of_a_weight_whose_data_was_replaced_is_freed_by_the_step(level):
    model, optimizer = loops.prepared(level, loss_scale=8.0)
    weight = model[0].weight
    memory = StorageWeakRef(weight.untyped_storage())
    loops.train_step(model, optimizer, *loops.batch())
    weight.data = weight.detach().clone()
    loops.train_step(model, optimizer, *loops.batch())
    assert memory.expired()


def test_what_a_fused_kernel_writes_in_a_step_with_a_closure_reaches_the_model(level):
    model, optimizer = loops.prepared(level, loops.fused_adamw_of, loss_scale=8.0)
    before = loops.values(model.parameters())

    def closure():
        optimizer.zero_grad()
        return loops.backward(model, optimizer, *loops.batch())

    optimizer.step(closure)
    weights = loops.values(model.parameters())
    assert not any(map(torch.equal, weights, before))
    rounded = [master.to(model[0].weight.dtype) for master in loops.masters(optimizer)]
    assert loops.same(weights, rounded)


FILLS = {"data": lambda w: w.data.fill_(2.0), "init": lambda w: nn.init.constant_(w, 2.0)}


@pytest.mark.parametrize("write", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("when", ["at first", "after a look at the masters", "before a closure"])
def test_a_write_before_the_first_pass_reaches_the_masters(level, write, when):
    model, optimizer = loops.prepared(level, still, loss_scale=64.0)
    unread = loops.values(loops.net().parameters())
    exact = loops.masters(optimizer) if when.startswith("after") else unread
    write(model[0].weight)
    step = loops.train_step_with_closure if when == "before a closure" else loops.train_step
    step(model, optimizer, *loops.batch())
    assert (model[0].weight == 2.0).all()
    found = loops.masters(optimizer)
    assert (found[0] == 2.0).all()
    assert loops.same(found[1:], exact[1:])


def test_a_write_between_loading_and_the_first_pass_counts(level):
    """As prototypes that are normalized before each pass, in a run that is resumed."""
    model, optimizer = loops.trained(level)
    other, other_optimizer = loops.prepared(level, model=loops.net(5))
    other.load_state_dict(model.state_dict())
    for x, y in loops.batches(2, seed=2):
        for net in (model, other):
            with torch.no_grad():
                net[0].weight.copy_(torch.nn.functional.normalize(net[0].weight))
        loops.train(model, optimizer, data=[(x, y)])
        loops.train(other, other_optimizer, data=[(x, y)])
    assert loops.same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("write", ["data", "data.copy_"])
def test_masters_that_a_script_reads_before_the_first_pass_hold_what_it_wrote(level, write):
    model, optimizer = loops.prepared(level, still)
    exact = loops.masters(optimizer)
    weights = [next(model.parameters())]
    loops.change(weights, [torch.full_like(weights[0], 2.0)], write)
    assert (loops.masters(optimizer)[0] == 2.0).all()
    for master in amp.master_params(optimizer):  # as a WGAN clips
        master.data.clamp_(-1.0, 1.0)
    loops.train_step(model, optimizer, *loops.batch())
    assert (model[0].weight == 1.0).all()
    assert loops.same(loops.masters(optimizer)[1:], exact[1:])


THERE_AND_BACK = [("data", "data"), ("data", "copy_"), ("copy_", "copy_"), ("data.copy_", "copy_")]


@pytest.mark.parametrize(("by", "back"), THERE_AND_BACK)
def test_weights_changed_for_the_passes_alone_leave_masters_as_they_were(level, by, back):
    """Binary networks: Courbariaux et al., NeurIPS 2015."""
    model, optimizer = loops.prepared(level, still)
    before = loops.masters(optimizer)
    params = list(model.parameters())
    own = [param.data.clone() for param in params]
    for _ in range(2):
        for _ in range(2):
            loops.change(params, map(torch.sign, own), by)
            loops.backward(model, optimizer, *loops.batch())
            loops.change(params, own, back)
        assert loops.same([*model.state_dict().values()], before)
        optimizer.step()
        optimizer.zero_grad()
        assert loops.same(loops.masters(optimizer), before)
        forward(model)
        assert loops.same(loops.values(params), own)


# -- other optimizers ------------------------------------------------------------------------


def sam(params):
    return SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9, rho=0.5)


def sam_by_hand(level, steps):
    """Steps on explicit masters and a 16-bit model; returns the masters."""
    low = loops.LEVELS[level].stored
    model, masters = loops.net().to(low), list(loops.net().parameters())
    optimizer = sam(masters)
    for x, y in loops.batches(steps):
        for step in (optimizer.first_step, optimizer.second_step):
            loops.change(model.parameters(), masters, "copy_")
            model.zero_grad()
            (loops.loss_of(model, x.to(low), y) * 128.0).backward()
            for param, master in zip(model.parameters(), masters, strict=True):
                master.grad = param.grad.float() / 128.0
            step()
    return loops.values(masters)


@pytest.mark.parametrize("write", ["copy_", "data"])
def test_masters_that_a_script_steps_by_hand_start_from_the_weights_that_it_wrote(level, write):
    model, optimizer = loops.trained(level, loss_scale=1.0)
    clamped = [param.detach().clamp(-0.125, 0.125) for param in model.parameters()]
    loops.backward(model, optimizer, *loops.batch())
    loops.change(model.parameters(), clamped, write)
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            step = 0.01 * param.grad
            param.sub_(step)
            assert (param.abs() <= 0.125 + step.abs()).all()


@pytest.mark.parametrize("form", ["two steps", "closure"])
def test_sharpness_aware_steps_perturb_the_model(level, form):
    model, optimizer = loops.prepared(level, sam, loss_scale=128.0)
    for x, y in loops.batches(3):
        loops.backward(model, optimizer, x, y)
        if form == "two steps":
            optimizer.first_step()
            loops.backward(model, optimizer, x, y)
            optimizer.second_step()
            assert loops.agree(model, optimizer)  # as an average of model.parameters() reads them
        else:
            optimizer.step(lambda x=x, y=y: loops.backward(model, optimizer, x, y))
    assert loops.same(loops.masters(optimizer), sam_by_hand(level, 3))
    forward(model)
    assert loops.agree(model, optimizer)


@loops.every(base=["SGD", "fused AdamW"], order=["before", "after"])
def test_lookahead_moves_model_and_masters(level, order, base):
    model = loops.net()
    optimizer = loops.OPTIMIZERS[base](model.parameters())
    outer = Lookahead(optimizer) if order == "before" else None
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    outer = outer or Lookahead(optimizer)
    for x, y in loops.batches(4):
        loops.backward(model, optimizer, x, y)
        outer.step()
        outer.zero_grad()
    forward(model)
    assert loops.agree(model, optimizer)
    assert loops.same([q for slow in outer.slow for q in slow], loops.masters(optimizer))


@loops.every(clears_first=[False, True], base=["SGD", "fused AdamW"])
def test_an_optimizer_that_amp_has_not_seen_steps_the_masters(level, base, clears_first):
    """The same optimizer as the prepared one, made anew by the script, over its groups."""

    def trained(anew):
        model, optimizer = loops.prepared(level, loops.OPTIMIZERS[base], loss_scale=1.0)
        steps = loops.OPTIMIZERS[base](optimizer.param_groups) if anew else optimizer
        for step, (x, y) in enumerate(loops.batches(4)):
            if clears_first:
                steps.zero_grad()
            loops.loss_of(model, x, y).backward()
            steps.step()
            if not clears_first:
                steps.zero_grad()
            if step == 1:
                model[0].load_state_dict(loops.net(seed=3)[0].state_dict())
                nn.init.constant_(model[2].weight, 0.5)
        forward(model)
        assert loops.agree(model, optimizer)
        return loops.masters(optimizer)

    assert loops.same(trained(anew=True), trained(anew=False))


@pytest.mark.parametrize("side", ["model", "masters"])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])
def test_a_hook_of_the_step_writes_weights_that_stay(level, name, when, scheduled, side):
    def trained(each):
        model = loops.Weights()
        weights = [model.a, model.b]
        optimizer = loops.OPTIMIZERS[name](model.parameters())
        if scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        amp.initialize(model, optimizer, opt_level=each, verbosity=0, loss_scale=8.0)

        @torch.no_grad()
        def clamp(*_):
            for param in weights if side == "model" else amp.master_params(optimizer):
                param.clamp_(-0.5, 0.5)

        getattr(optimizer, f"register_step_{when}_hook")(clamp)
        stepped = []
        for _ in range(3):
            loops.descend(model(a=1.0, b=-2.0), optimizer)
            stepped.append([model.state_dict()[key][0].item() for key in "ab"])
        return stepped

    for found, expected in zip(trained(level), trained("O0"), strict=True):
        assert found == pytest.approx(expected, rel=2**-8)


@loops.every(in_thread=[False, True], name=["SGD", "fused AdamW"])
def test_a_model_that_runs_during_a_step_gets_what_the_step_writes_after_it(level, name, in_thread):
    """Fused kernels write without counting."""
    (model, optimizer), plain = (loops.prepared(level, loops.OPTIMIZERS[name]) for _ in range(2))

    def run(*_):
        loops.in_a_thread(lambda: forward(model)) if in_thread else forward(model)

    optimizer.register_step_pre_hook(run)
    for x, y in loops.batches(2):
        loops.train_step(model, optimizer, x, y)
        loops.train_step(*plain, x, y)
        assert loops.agree(model, optimizer)
    assert loops.same(loops.masters(optimizer), loops.masters(plain[1]))


@pytest.mark.parametrize("read", [nn.Module.state_dict, forward])
def test_a_model_that_the_step_itself_reads_gets_what_it_writes_after_it(level, read):
    """A signal's handler may save the model anywhere."""

    class Reading(torch.optim.AdamW):
        def step(self, closure=None):
            read(model)
            return super().step(closure)

    model, optimizer = loops.prepared(level, lambda params: Reading(params, fused=True))
    for x, y in loops.batches(3):
        loops.train_step(model, optimizer, x, y)
        assert loops.agree(model, optimizer)


def test_a_thread_that_follows_the_masters_leaves_gradients_as_they_are():
    model, optimizer = loops.trained("O5")
    optimizer.zero_grad()
    loops.backward(model, optimizer, *loops.batch())
    followed = loops.in_a_thread(lambda: loops.masters(optimizer))
    assert {grad.dtype for grad in loops.grads(model.parameters())} == {torch.bfloat16}
    assert loops.same(followed, loops.masters(optimizer))


@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])
def test_threads_may_evaluate_while_optimizers_step(level, name):
    """Python switches between the threads at almost every line."""

    def trained(evaluate):
        model = loops.net()
        optimizers = [loops.OPTIMIZERS[name](model[part].parameters()) for part in (0, 2)]
        model, optimizers = amp.initialize(model, optimizers, opt_level=level, verbosity=0)
        loops.backward(model.eval(), optimizers, *loops.batch())
        with ThreadPoolExecutor(2) as threads:
            passes = [threads.submit(evaluate, model) for _ in range(100)]
            for _ in range(100):
                for optimizer in optimizers:
                    optimizer.step()
            assert all(each.result() is not None for each in passes)
        assert loops.agree(model[0], optimizers[0])
        assert loops.agree(model[2], optimizers[1])
        return [loops.masters(optimizer) for optimizer in optimizers]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        beside = trained(forward)
    finally:
        sys.setswitchinterval(interval)
    alone = trained(lambda model: model)
    assert all(map(loops.same, beside, alone))


@pytest.mark.parametrize("names", [("SGD", "SGD"), ("SGD", "fused AdamW"), ("fused SGD", "Adam")])
@pytest.mark.parametrize("joined", ["initialize", "add_param_group"])
def test_two_optimizers_over_the_same_weights_share_one_master(names, joined):
    model = loops.net()
    first, second = (loops.OPTIMIZERS[name] for name in names)
    extra = [*model[2].parameters(), nn.Parameter(torch.zeros(1))]
    late = joined == "add_param_group"
    optimizers = [first(model.parameters()), second(extra if late else model.parameters())]
    model, optimizers = amp.initialize(model, optimizers, opt_level="O5", verbosity=0)
    if late:
        optimizers[1].add_param_group({"params": list(model[0].parameters())})
    plain, shadow = loops.net(), loops.net().bfloat16()
    by_hand = [make(plain.parameters()) for make in (first, second)]
    for x, y in loops.batches(4):
        optimizers[0].zero_grad()
        loops.backward(model, optimizers, x, y)
        loops.change(shadow.parameters(), list(plain.parameters()), "copy_")
        shadow.zero_grad()
        loops.loss_of(shadow, x.bfloat16(), y).backward()
        for low, param in zip(shadow.parameters(), plain.parameters(), strict=True):
            param.grad = low.grad.float()
        for optimizer in (*optimizers, *by_hand):
            optimizer.step()
    assert loops.same(loops.masters(optimizers[0]), loops.values(plain.parameters()))
    assert loops.agree(model, optimizers[0])


# -- memory ----------------------------------------------------------------------------------


@loops.every(name=["fused AdamW", "fused SGD", "Adam"], moved=[0, 1])
def test_a_model_moved_to_channels_last_trains_alike(name, moved):
    x, results = torch.randn(2, 3, 4, 4), []
    for channels_last in (False, True):
        model, optimizer = loops.prepared("O5", loops.OPTIMIZERS[name], model=loops.conv_net())
        for step in range(3):
            if channels_last and step == moved:
                model.to(memory_format=torch.channels_last)
            loops.train_step(model, optimizer, x, torch.zeros(2, 2))
        results.append(loops.masters(optimizer))
    # Some CPUs round convolutions differently in the other layout.
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.contiguous(), one, rtol=0.0, atol=5e-3)


def test_a_weight_with_gaps_in_memory_trains_as_one_without(level):
    """torch's fused kernels on a CPU write over gaps; masters take over memory without."""
    results = []
    for gaps in (False, True):
        model = loops.net()
        wide = torch.zeros(8, 8)
        wide[:, ::2] = model[0].weight.detach()
        model[0].weight.data = wide[:, ::2] if gaps else wide[:, ::2].clone()
        model, optimizer = loops.trained(level, loops.fused_adamw_of, model, steps=3)
        results.append(loops.masters(optimizer))
    assert loops.same(*results)


def test_before_torch_2_10_masters_are_refused_and_nothing_has_changed(level, monkeypatch):
    monkeypatch.setattr(parameters, "keeps_any_grad", False)
    model = loops.net()
    optimizer = loops.sgd(model.parameters())
    with loops.nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=r"torch 2\.10"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for without in ("O0", "O1", "O4"):
        loops.train(*loops.prepared(without))
