"""One master per weight: what is written on either side, by whoever steps, reaches the other."""

import copy
import functools
import io
import threading
from itertools import product

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as cases

MASTERS = cases.WITH_MASTERS
OPTIMIZERS = ("SGD", "fused AdamW", "fused SGD", "Adam")


def agree(model, optimizer):
    """Whether every 16-bit weight of the model is its rounded master."""
    stash = optimizer._amp_stash
    return all(
        torch.equal(low, master.to(low.dtype))
        for low, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
    )


def forward(model):
    with torch.no_grad():
        return model(cases.batch()[0])


def rounded(model, optimizer):
    """A plain fp32 model with the rounded masters as weights."""
    plain = cases.net()
    low = next(model.parameters()).dtype
    with torch.no_grad():
        for param, master in zip(plain.parameters(), amp.master_params(optimizer), strict=True):
            param.copy_(master.to(low))
    return plain


# -- masters are written ---------------------------------------------------------------------


def write_in_place(param):
    param.mul_(0.5)


def write_through_data(param):
    param.data.clamp_(-0.01, 0.01)


def write_through_a_view(param):
    param.data.view(-1)[::2].fill_(1 / 3)


def assign_data(param):
    param.data = torch.full_like(param.data, 1 / 3)


WRITES = [write_in_place, write_through_data, write_through_a_view, assign_data]


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("read", ["state_dict", "deepcopy", "pickle", "restore"])
def test_what_is_written_into_masters_reaches_copies_and_files(level, read):
    model, optimizer = cases.prepared(level)
    cases.train_step(model, optimizer, *cases.batch())
    for param in amp.master_params(optimizer):
        param.data.fill_(1 / 3)
    if read == "state_dict":
        found = list(model.state_dict().values())
    elif read == "deepcopy":
        found = [p.float() for p in copy.deepcopy(model).parameters()]
    elif read == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        found = [p.float() for p in torch.load(file, weights_only=False).parameters()]
    else:
        amp.restore(model, optimizer)
        found = list(model.parameters())
    exact = read in ("state_dict", "restore")
    low = torch.float16 if level == "O2" else torch.bfloat16
    third = torch.tensor(1 / 3) if exact else torch.tensor(1 / 3).to(low).float()
    assert all(torch.equal(value, third.expand_as(value)) for value in found)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as scripts write it: a base optimizer over the same groups."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


def sam(params, **options):
    return SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9, **options)


def sam_reference(level, steps):
    """The same steps on explicit masters and a 16-bit model, by hand."""
    low = torch.float16 if level == "O2" else torch.bfloat16
    model, plain = cases.net().to(low), cases.net()
    masters = list(plain.parameters())
    optimizer = sam(masters, rho=0.5)
    scale = 128.0

    def gradients(x, y):
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        model.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(low)).float(), y)
        (loss * scale).backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float() / scale

    for x, y in cases.batches(steps):
        gradients(x, y)
        optimizer.first_step()
        gradients(x, y)
        optimizer.second_step()
    return cases.values(masters)


@pytest.mark.parametrize("form", ["two steps", "closure"])
@pytest.mark.parametrize("level", MASTERS)
def test_sharpness_aware_steps_perturb_the_model(level, form):
    model, optimizer = cases.prepared(level, lambda params: sam(params, rho=0.5), loss_scale=128.0)
    for x, y in cases.batches(3):
        if form == "two steps":
            cases.backward(model, optimizer, x, y)
            optimizer.first_step()
            cases.backward(model, optimizer, x, y)
            optimizer.second_step()
        else:
            cases.backward(model, optimizer, x, y)
            optimizer.step(lambda x=x, y=y: cases.backward(model, optimizer, x, y))
    assert cases.same(cases.masters(optimizer), sam_reference(level, 3))
    forward(model)
    assert agree(model, optimizer)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that pull the fast ones back every second step."""

    def __init__(self, base):
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults, self.steps = base.defaults, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.add_(p.data - q, alpha=0.5)
                    p.data.copy_(q)
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


@pytest.mark.parametrize("base", ["SGD", "fused AdamW"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", MASTERS)
def test_lookahead_moves_model_and_masters(level, order, base):
    model = cases.net()
    optimizer = cases.OPTIMIZERS[base](model.parameters())
    if order == "before":
        outer = Lookahead(optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if order == "after":
        outer = Lookahead(optimizer)
    for x, y in cases.batches(4):
        cases.backward(model, optimizer, x, y)
        outer.step()
        outer.zero_grad()
    forward(model)
    assert agree(model, optimizer)
    flat = [q for slow in outer.slow for q in slow]
    assert all(map(torch.equal, flat, amp.master_params(optimizer)))


@pytest.mark.parametrize("level", MASTERS)
def test_an_optimizer_that_amp_has_not_seen_may_step_the_masters(level):
    model, optimizer = cases.prepared(level)
    cases.backward(model, optimizer, *cases.batch())
    before = forward(model)
    torch.optim.AdamW(list(amp.master_params(optimizer)), lr=0.1, fused=True).step()
    assert not torch.equal(forward(model), before)
    assert agree(model, optimizer)


@pytest.mark.parametrize("clears_first", [False, True])
@pytest.mark.parametrize("base", ["SGD", "fused AdamW"])
@pytest.mark.parametrize("level", MASTERS)
def test_an_optimizer_that_amp_has_not_seen_trains_after_plain_passes(level, base, clears_first):
    """The same optimizer as the prepared one, made anew by the script, over its groups."""

    def trained(anew):
        model, optimizer = cases.prepared(level, cases.OPTIMIZERS[base], loss_scale=1.0)
        steps = cases.OPTIMIZERS[base](optimizer.param_groups) if anew else optimizer
        for step, (x, y) in enumerate(cases.batches(4)):
            if clears_first:
                steps.zero_grad()
            cases.loss_of(model, x, y).backward()
            steps.step()
            if not clears_first:
                steps.zero_grad()
            if step == 1:
                model[0].load_state_dict(cases.net(seed=3)[0].state_dict())
        assert agree(model, optimizer)
        return cases.masters(optimizer)

    assert all(map(torch.equal, trained(anew=True), trained(anew=False)))


@pytest.mark.parametrize("level", MASTERS)
def test_parameters_follow_a_step_of_an_optimizer_inside_the_prepared_one(level):
    model, optimizer = cases.prepared(level, lambda params: sam(params, rho=0.5), loss_scale=1.0)
    cases.backward(model, optimizer, *cases.batch())
    optimizer.first_step()
    cases.backward(model, optimizer, *cases.batch())
    optimizer.second_step()
    assert agree(model, optimizer)  # as an average of model.parameters() reads them


def here(fn):
    fn()


def in_a_thread(fn):
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [here, in_a_thread])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", MASTERS)
def test_a_model_that_runs_during_a_step_gets_what_the_step_writes_after_it(level, name, run):
    """Fused kernels write without counting."""
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS[name])
    plain, expected = cases.prepared(level, cases.OPTIMIZERS[name])
    optimizer.register_step_pre_hook(lambda *_: run(lambda: forward(model)))
    for x, y in cases.batches(2):
        cases.train_step(model, optimizer, x, y)
        cases.train_step(plain, expected, x, y)
        assert agree(model, optimizer)
    assert cases.same(cases.masters(optimizer), cases.masters(expected))


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("by", ["copy_", "data"])
def test_weights_perturbed_after_a_pass_leave_masters_as_they_were(level, by):
    model, optimizer = cases.prepared(level, lambda params: cases.sgd(params, lr=0.0))
    cases.train_step(model, optimizer, *cases.batch())
    before = cases.masters(optimizer)
    params = list(model.parameters())
    backup = [param.data.clone() for param in params]
    for perturbation in (0.5, 0.25, 0.0):  # adversarial: Madry et al., ICLR 2018
        with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
            scaled_loss.backward()
        cases.change(params, [value + perturbation for value in backup], by)
    optimizer.step()
    assert cases.same(cases.masters(optimizer), before)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
@pytest.mark.parametrize("clips", ["", "amp"])
@pytest.mark.parametrize(
    ("by", "back"),
    [("data", "data"), *product(("data", "copy_"), ("data.copy_", "copy_"))],
)
def test_weights_changed_for_the_passes_alone_leave_masters_as_they_were(level, by, back, clips):
    make = functools.partial(cases.sgd, lr=0.0)
    model, optimizer = cases.prepared(level, make)
    before = cases.masters(optimizer)
    params = list(model.parameters())
    own = [param.data.clone() for param in params]
    for _ in range(2):  # as binary networks do: Courbariaux et al., NeurIPS 2015
        for _ in range(2):
            cases.change(params, map(torch.sign, own), by)
            with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
                scaled_loss.backward()
            if clips == "amp":
                amp.clip_grad_norm_(optimizer, 1.0)
            cases.change(params, own, back)
        assert cases.same([*model.state_dict().values()], before)
        optimizer.step()
        optimizer.zero_grad()
        assert cases.same(cases.masters(optimizer), before)
        forward(model)
        assert cases.same(cases.values(params), own)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
@pytest.mark.parametrize("back", ["data", "data.copy_", "copy_"])
def test_weights_changed_for_the_first_pass_uncounted_are_back_at_the_step(level, back):
    make = functools.partial(cases.sgd, lr=0.0)
    model, optimizer = cases.prepared(level, make)
    params = list(model.parameters())
    own = [param.data.clone() for param in params]
    for _ in range(2):
        cases.change(params, map(torch.sign, own), "data.copy_")
        with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        cases.change(params, own, back)
        optimizer.step()
        optimizer.zero_grad()
        forward(model)
        assert cases.same(cases.values(params), own)
        assert agree(model, optimizer)


@pytest.mark.parametrize("level", MASTERS)
def test_a_master_refuses_data_of_another_dtype(level):
    _, optimizer = cases.prepared(level)
    before = cases.masters(optimizer)
    for param in amp.master_params(optimizer):
        with pytest.raises(TypeError, match=r"master\.data\.copy_\(value\)"):
            param.data = param.data.half()
    assert cases.same(cases.masters(optimizer), before)


# -- several optimizers ----------------------------------------------------------------------


@pytest.mark.parametrize("names", [("SGD", "SGD"), ("SGD", "fused AdamW"), ("fused SGD", "Adam")])
@pytest.mark.parametrize("joined", ["initialize", "add_param_group"])
def test_two_optimizers_over_the_same_weights_share_one_master(names, joined):
    model, plain = cases.net(), cases.net()
    own = [cases.OPTIMIZERS[name](model.parameters()) for name in names[:1]]
    if joined == "initialize":
        own.append(cases.OPTIMIZERS[names[1]](model.parameters()))
        model, own = amp.initialize(model, own, opt_level="O5", verbosity=0)
    else:
        extra = nn.Parameter(torch.zeros(1))
        own.append(cases.OPTIMIZERS[names[1]]([*model[2].parameters(), extra]))
        model, own = amp.initialize(model, own, opt_level="O5", verbosity=0)
        own[1].add_param_group({"params": list(model[0].parameters())})
    reference = [cases.OPTIMIZERS[name](plain.parameters()) for name in names]
    shadow = cases.net().bfloat16()
    for x, y in cases.batches(4):
        own[0].zero_grad()
        cases.backward(model, own, x, y)
        for optimizer in own:
            optimizer.step()
        with torch.no_grad():
            for low, param in zip(shadow.parameters(), plain.parameters(), strict=True):
                low.copy_(param)
        shadow.zero_grad()
        torch.nn.functional.mse_loss(shadow(x.bfloat16()).float(), y).backward()
        for low, param in zip(shadow.parameters(), plain.parameters(), strict=True):
            param.grad = low.grad.float()
        for optimizer in reference:
            optimizer.step()
    assert cases.same(cases.masters(own[0]), cases.values(plain.parameters()))
    assert agree(model, own[0])


# -- layout and restore ----------------------------------------------------------------------


def conv_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD", "Adam"])
@pytest.mark.parametrize("moved", ["before the first step", "after it"])
def test_a_model_moved_to_channels_last_trains_alike(name, moved):
    x = torch.randn(2, 3, 8, 8)
    results = []
    for channels_last in (False, True):
        model, optimizer = cases.prepared("O5", cases.OPTIMIZERS[name], model=conv_net())
        for step in range(3):
            if channels_last and step == (moved == "after it"):
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with amp.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        results.append(cases.masters(optimizer))
    # Some CPUs round convolutions differently in the other layout.
    for plain, moved_master in zip(*results, strict=True):
        torch.testing.assert_close(moved_master.contiguous(), plain, rtol=0.0, atol=5e-3)


@pytest.mark.parametrize("level", MASTERS)
def test_a_weight_with_gaps_in_memory_trains_as_one_without(level):
    """torch's fused kernels on a CPU write over gaps; masters take over memory without."""
    results = []
    for gaps in (False, True):
        model = cases.net()
        wide = torch.zeros(8, 8)
        wide[:, ::2] = model[0].weight.detach()
        model[0].weight.data = wide[:, ::2] if gaps else wide[:, ::2].clone()
        model, optimizer = cases.prepared(level, cases.OPTIMIZERS["fused AdamW"], model)
        for x, y in cases.batches(3):
            cases.train_step(model, optimizer, x, y)
        results.append(cases.masters(optimizer))
    assert cases.same(*results)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x):
        return self.unused(self.frozen(self.trained(x))) @ self.table


@pytest.mark.parametrize("level", MASTERS)
def test_restore_gives_trained_weights_and_buffers_back_to_the_last_bit(level):
    model = Mixed()
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = cases.sgd([*model.trained.parameters(), *model.frozen.parameters()])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.restore(model, optimizer)
    held = {k: v for k, v in exact.items() if not k.startswith("frozen")}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in held.items())


@pytest.mark.parametrize("optimizers", [True, False])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_keep_fp32_values_gives_every_weight_back_to_the_last_bit(level, optimizers):
    model = Mixed()
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = cases.sgd(model.trained.parameters()) if optimizers else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, keep_fp32_values=True)
    assert cases.same(dict(model.state_dict()), exact)
    amp.restore(model, optimizer)
    assert cases.same(dict(model.state_dict()), exact)
