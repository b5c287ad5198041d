"""One gradient, in one place: the model's ``.grad`` is the gradient, of its master, too.

Each rule against a plain loop in fp32. The gradient of a weight is its factor in the loss, so sums
of few-bit factors are exact at every level.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex
from apex import amp
from tests.support import loops

OPTIONS = {
    "O0": {},
    "O1": {"loss_scale": 8.0},
    "O1 dynamic": {"loss_scale": "dynamic", "max_loss_scale": 2.0**8},
    "O2": {"loss_scale": 8.0},
    "O2 dynamic": {"loss_scale": "dynamic", "max_loss_scale": 2.0**8},
    "O3": {"loss_scale": 8.0},
    "O4": {},
    "O5": {},
    "O5 scaled": {"loss_scale": 8.0},
}
level = loops.at_levels(*[*OPTIONS][1:])
some_levels = pytest.mark.parametrize("level", ["O1", "O2 dynamic", "O3", "O4", "O5"])
masters = pytest.mark.parametrize("level", ["O2", "O2 dynamic", "O5", "O5 scaled"])
rounded = {"rel": 2**-7, "abs": 1e-6}
"""What one product in bf16 may be off."""


def initialize(models, optimizers, level, **options):
    options = {**OPTIONS[level], "opt_level": level[:2], "verbosity": 0, **options}
    return amp.initialize(models, optimizers, **options)


class Training:
    """Parts ``f`` and ``g`` with weights ``a`` and ``b``; without a level in plain fp32."""

    def __init__(self, level, make_optimizer=loops.sgd, optimizers=1):
        self.level = level
        self.model = nn.ModuleDict({"f": loops.Weights(), "g": loops.Weights()})
        parts = [[*self.model.parameters()]]
        if optimizers == 2:
            parts = [[*part.parameters()] for part in self.model.values()]
        self.optimizers = [make_optimizer(params) for params in parts]
        if level:
            initialize(self.model, self.optimizers, level)
        self.optimizer = self.optimizers[0]

    def loss(self, *factors):
        fa, fb, ga, gb = factors
        return self.model["f"](a=fa, b=fb) + self.model["g"](a=ga, b=gb)

    def block(self, *factors, of=None, **options):
        if not self.level:
            self.loss(*factors).backward()
            return
        loops.scaled_backward(self.loss(*factors), of or self.optimizers, **options)

    def plain(self, *factors):
        self.loss(*factors).backward()

    def side(self, name):
        """The parameters, or masters, as a script reaches them."""
        if name == "model":
            return [*self.model.parameters()]
        if name == "submodules":
            return [p for part in self.model.values() for p in part.parameters()]
        if name == "masters" and self.level:
            return [p for each in self.optimizers for p in amp.master_params(each)]
        groups = [group for each in self.optimizers for group in each.param_groups]
        return [p for group in groups for p in group["params"]]

    def grads(self, side="groups"):
        return [0.0 if p.grad is None else p.grad[0].item() for p in self.side(side)]

    def weights(self):
        return [p[0].item() for p in self.side("masters")]


SIDES = ["model", "submodules", "masters", "groups"]
ONE, TWO = (3.0, 4.0, 1.0, 2.0), (1.0, -2.0, 0.5, 4.0)


# -- 1: either side is the same --------------------------------------------------------------


def replace(params):
    for param in params:
        param.grad = param.grad * 0.5


def replace_by_second_name(params):
    """As programs of A3C hand gradients over."""
    for param in params:
        param._grad = param._grad * 0.5


def mask(params):
    for param in params:
        param.grad.mul_(torch.tensor([1.0, 0.0]))


def write_data(params):
    for param in params:
        param.grad.data.clamp_(-2.0, 2.0)


def zero_some(params):
    params[0].grad = None
    params[1].grad.zero_()


EDITS = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "inf norm": lambda params: nn.utils.clip_grad_norm_(params, 1.0, float("inf")),
    "value": lambda params: nn.utils.clip_grad_value_(params, 2.0),
    "replace": replace,
    "replace by second name": replace_by_second_name,
    "mask": mask,
    "data": write_data,
    "zero some": zero_some,
    "read": lambda params: [param.grad.float().norm() for param in params],
}


def edited(level, edits):
    training = Training(level)
    training.block(*ONE)
    for name, side in edits:
        EDITS[name](training.side(side))
    training.block(*TWO)
    training.optimizer.step()
    return training.weights()


@pytest.mark.parametrize("edit", EDITS)
@some_levels
def test_an_edit_of_either_side_is_the_edit(level, edit):
    expected = edited(None, [(edit, "model")])
    for side in SIDES:
        assert edited(level, [(edit, side)]) == pytest.approx(expected, **rounded)


def edit_all(training, side, *_):
    for name in ("norm", "replace"):
        EDITS[name](training.side(side))


@pytest.mark.parametrize("side", SIDES)
def test_a_hook_of_the_step_edits_what_is_stepped(level, side):
    stepped = []
    for each in (level, None):
        training = Training(each)
        training.optimizer.register_step_pre_hook(functools.partial(edit_all, training, side))
        training.block(*ONE)
        training.optimizer.step()
        stepped.append(training.weights())
    assert stepped[0] == pytest.approx(stepped[1], **rounded)


# -- clearing --------------------------------------------------------------------------------


def to_none(params):
    for param in params:
        param.grad = None


CLEARS = {
    "optimizer": lambda training: training.optimizer.zero_grad(),
    "optimizer's zeros": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "model": lambda training: training.model.zero_grad(),
    "model's zeros": lambda training: training.model.zero_grad(set_to_none=False),
    "parts": lambda training: [part.zero_grad() for part in training.model.values()],
    "none": lambda training: to_none(training.side("model")),
    "masters' none": lambda training: to_none(training.side("masters")),
    "masters' del": lambda training: [delattr(param, "grad") for param in training.side("masters")],
    "zero_": lambda training: [param.grad.zero_() for param in training.side("model")],
    "masters' zero_": lambda training: [param.grad.zero_() for param in training.side("groups")],
}


@loops.every(name=["SGD", "FusedSGD's zeros", "FusedAdam"], clear=CLEARS)
@some_levels
def test_what_is_cleared_is_gone_on_either_side(level, clear, name):
    make_optimizer = {
        "SGD": loops.sgd,
        "FusedSGD's zeros": lambda p: apex.optimizers.FusedSGD(p, lr=0.1, set_grad_none=False),
        "FusedAdam": lambda p: apex.optimizers.FusedAdam(p, lr=0.1),
    }[name]
    training = Training(level, make_optimizer)
    for compute in (training.block, training.plain):
        training.block(*ONE)
        CLEARS[clear](training)
        assert training.grads("model") == training.grads("masters") == [0.0] * 4
        compute(*TWO)
        assert training.grads("model") == training.grads("masters") == [*TWO]
        CLEARS[clear](training)


@pytest.mark.filterwarnings("ignore:Gradients were changed")
@pytest.mark.parametrize("clear", ["optimizer", "optimizer's zeros", "model", "model's zeros"])
@some_levels
def test_what_is_cleared_after_the_pass_of_a_block_is_gone_with_what_was_before(level, clear):
    training = Training(level)
    training.block(*ONE)
    with amp.scale_loss(training.loss(*TWO), training.optimizer) as scaled_loss:
        scaled_loss.backward()
        CLEARS[clear](training)
    assert training.grads("model") == [0.0] * 4


class ClearsOne(loops.Weights):
    """Has a ``zero_grad`` of its own, which leaves ``b``."""

    def zero_grad(self):
        self.a.grad = None


@some_levels
def test_a_zero_grad_of_the_models_own_clears_what_it_clears(level):
    model, optimizer = loops.prepared(level[:2], model=ClearsOne(), **OPTIONS[level])
    loops.scaled_backward(model(a=1.0, b=1.0), optimizer, delay_unscale=True)
    model.zero_grad()
    loops.scaled_backward(model(a=2.0, b=2.0), optimizer)
    assert [param.grad[0].item() for param in model.parameters()] == [2.0, 3.0]
    with amp.scale_loss(model(a=3.0, b=3.0), optimizer) as scaled_loss:
        model.zero_grad()
        scaled_loss.backward()
    assert model.a.grad[0].item() == 3.0


@pytest.mark.parametrize("compute", ["block", "plain"])
def test_what_a_script_writes_into_cleared_gradients_is_added(level, compute):
    """Also in ways that torch does not count."""
    training = Training(level)
    training.block(*ONE)
    training.optimizer.zero_grad(set_to_none=False)
    for param in training.model.parameters():
        param.grad.data.add_(0.5)
    getattr(training, compute)(*TWO)
    assert training.grads("model") == [factor + 0.5 for factor in TWO]


def test_two_parameters_may_have_one_gradient(level):
    """As in programs of A3C, where the shared model's gradients are the local one's."""
    shared, local = loops.Weights(), loops.Weights()
    optimizer = loops.sgd(shared.parameters())
    initialize([shared, local], optimizer, level)
    for factor in (1.0, 2.0, 3.0):
        local.zero_grad(set_to_none=False)
        loops.scaled_backward(local(a=factor, b=1.0), optimizer)
        for param, other in zip(shared.parameters(), local.parameters(), strict=True):
            param._grad = other.grad
        assert [param.grad[0].item() for param in shared.parameters()] == [factor, 1.0]
        optimizer.step()


@pytest.mark.parametrize("kept", ["model", "masters"])
@masters
def test_zeros_take_no_memory_of_fp32(level, kept):
    """A step over 16-bit gradients stays one: autograd adds to 16-bit zeros exactly."""
    training = Training(level, lambda p: apex.optimizers.FusedSGD(p, lr=0.1, set_grad_none=False))
    training.block(*ONE)
    assert training.grads(kept) == [*ONE]
    training.optimizer.zero_grad()
    dtypes = {param.grad.dtype for param in training.model.parameters()}
    assert dtypes <= {torch.float16, torch.bfloat16}
    training.plain(*TWO)
    assert {param.grad.dtype for param in training.model.parameters()} == dtypes


# -- 2 and 4: passes add up, in fp32 ---------------------------------------------------------

PASSES = ["block", "delayed", "plain"]


@pytest.mark.parametrize("kinds", [*itertools.product(PASSES, PASSES, ["block"])], ids="-".join)
@some_levels
def test_passes_of_all_kinds_add_up(level, kinds):
    training = Training(level)
    total = [0.0] * 4
    for index, kind in enumerate(kinds):
        factors = [0.5 * factor * (index + 1) for factor in ONE]
        total = [a + b for a, b in zip(total, factors, strict=True)]
        if kind == "plain":
            training.plain(*factors)
        else:
            training.block(*factors, delay_unscale=kind == "delayed")
    assert training.grads("model") == training.grads("masters") == total
    training.optimizer.step()
    assert training.weights() == pytest.approx([1.0 - 0.1 * each for each in total], rel=4e-3)


class KeepsItsLoss(loops.Weights):
    """Shows its loss as an attribute, not as its output."""

    def forward(self, **factors):
        self.loss = super().forward(**factors)


KINDS = [
    *PASSES,
    "plain before blocks",
    "of one forward",
    "after all forwards",
    "kept by the model",
    "of a part",
]


@pytest.mark.parametrize("kind", KINDS)
@masters
def test_many_small_gradients_add_up_in_fp32(level, kind):
    """In 16 bits, a sum of 300 would stand still at 256, or be 7 % off."""
    model = loops.Weights()
    called = model
    if kind == "kept by the model":
        model = called = KeepsItsLoss()
    elif kind == "of a part":
        model = nn.ModuleList([model])
    _, optimizer = loops.prepared(level[:2], model=model, **OPTIONS[level])
    outputs = (called(a=1.0, b=1.0) for _ in range(300))
    losses = (called.loss if output is None else output for output in outputs)
    if kind == "after all forwards":
        losses = [*losses]
    elif kind == "of one forward":
        losses = itertools.repeat(called(a=1.0, b=1.0), 300)
    for index, loss in enumerate(losses):
        is_block = kind in ("block", "delayed") or (kind == "plain before blocks" and index > 0)
        if is_block:
            delays = kind == "delayed" and index < 299
            loops.scaled_backward(loss, optimizer, delay_unscale=delays)
        else:
            loss.backward(retain_graph=True)
    assert [master.grad[0].item() for master in amp.master_params(optimizer)] == [300.0, 300.0]


@masters
def test_what_a_script_writes_into_a_cleared_gradient_adds_up_in_fp32(level):
    training = Training(level)
    training.block(*[1.0] * 4)
    training.optimizer.zero_grad(set_to_none=False)
    for param in training.side("model"):
        param.grad.fill_(1.0)
    training.block(*[2.0**-12] * 4)
    assert training.grads("model") == [1.0 + 2.0**-12] * 4


@masters
def test_the_gradient_of_a_penalty_on_the_masters_adds_up_in_fp32(level):
    """A gradient in 16 bits has no room for it."""
    training = Training(level)
    masters = training.side("masters")  # before, as a look at them makes gradients fp32
    training.block(*[1.0] * 4)
    (sum(master.sum() for master in masters) * 2.0**-12).backward()
    assert training.grads("model") == [1.0 + 2.0**-12] * 4


def views_of_a_flat_tensor(training):
    params = training.side("model")
    flat = torch.zeros(sum(map(torch.numel, params)), dtype=params[0].dtype)
    views = flat.split([param.numel() for param in params])
    for param, view in zip(params, views, strict=True):
        param.grad = view.view_as(param)
    return flat


@loops.every(compute=["block", "plain"], read=["model", "masters"])
def test_a_gradient_stays_the_tensor_that_a_script_keeps(level, read, compute):
    """As for ``torch._foreach_`` functions."""
    training = Training(level)
    training.block(*ONE)
    kept = [param.grad for param in training.side("model")]
    for factors in (TWO, ONE):
        torch._foreach_zero_(kept)
        getattr(training, compute)(*factors)
        getattr(training, compute)(*factors)
        assert training.grads(read) == [2.0 * factor for factor in factors]
        torch._foreach_mul_(kept, 0.5)
        training.optimizer.step()
        assert training.grads("model") == [*factors]
    expected = [1.0 - 0.1 * (a + b) for a, b in zip(ONE, TWO, strict=True)]
    assert training.weights() == pytest.approx(expected, rel=4e-3)


@pytest.mark.filterwarnings("ignore:optimizer.step.. got gradients that no amp.scale_loss")
@pytest.mark.parametrize(
    ("compute", "clear"),
    [("block", "flat"), ("block", "masters"), ("plain", "flat"), ("plain", "zero_grad")],
)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_gradients_stay_views_of_a_flat_tensor(level, optimizers, compute, clear):
    training = Training(level, optimizers=optimizers)
    flat = views_of_a_flat_tensor(training)
    for factors in (ONE, TWO):
        getattr(training, compute)(*factors)
        getattr(training, compute)(*factors)
        assert flat.view(4, -1)[:, 0].tolist() == [2.0 * factor for factor in factors]
        flat.mul_(0.5)
        assert training.grads("model" if clear == "flat" else "masters") == [*factors]
        for optimizer in training.optimizers:
            optimizer.step()
        assert flat.view(4, -1)[:, 0].tolist() == [*factors]
        if clear == "flat":
            flat.zero_()
        elif clear == "zero_grad":
            for optimizer in training.optimizers:
                optimizer.zero_grad(set_to_none=False)
        else:
            torch._foreach_zero_([param.grad for param in training.side("masters")])
    expected = [1.0 - 0.1 * (a + b) for a, b in zip(ONE, TWO, strict=True)]
    assert training.weights() == pytest.approx(expected, rel=4e-3)


def test_a_view_that_was_cleared_stays_cleared(level):
    """A script reads the masters' gradients, as a clip does, and then drops them."""
    training = Training(level)
    views_of_a_flat_tensor(training)
    training.block(*ONE)
    assert training.grads("masters") == [*ONE]
    training.optimizer.zero_grad()
    training.optimizer.step()
    assert [param.grad for param in training.side("model")] == [None] * 4
    assert training.weights() == [1.0] * 4


@pytest.mark.filterwarnings("ignore:optimizer.step.. got gradients that no amp.scale_loss")
def test_a_gradient_may_be_an_expanded_number(level):
    training = Training(level)
    for param in training.side("model"):
        param.grad = torch.ones((), dtype=param.dtype).expand_as(param)
    training.optimizer.step()
    assert training.weights() == pytest.approx([0.9] * 4, rel=4e-3)


# -- 3: nothing outside a block is scaled ----------------------------------------------------


@loops.every(sessions=[1, 2], stepper=["prepared", "plain", "none"])
def test_a_block_unscales_whatever_its_pass_reaches(level, stepper, sessions):
    """What the gradients of others are afterwards: the sums of a plain loop."""
    parts = [loops.Weights(), loops.Weights()]
    first, second = [loops.sgd(part.parameters()) for part in parts]
    if stepper == "prepared" and sessions == 1:
        initialize(parts, [first, second], level)
    elif stepper == "prepared":
        for part, optimizer in zip(parts, (first, second), strict=True):
            initialize(part, optimizer, level)
    else:
        initialize(parts, first, level)
    total = 0.0
    for index in range(3):
        loss = parts[0](a=1.0, b=1.0) + parts[1](a=index + 1.0, b=2.0)
        loops.scaled_backward(loss, first)
        total += index + 1.0
        assert parts[1].a.grad[0].item() == total
        assert parts[0].a.grad[0].item() == index + 1.0
    if stepper == "plain" and level[:2] in ("O1", "O4"):
        second.step()
        assert parts[1].a[0].item() == pytest.approx(1.0 - 0.1 * total)
    if stepper == "prepared":
        loops.scaled_backward(parts[1](a=1.0, b=1.0), second)
        second.step()
        stepped = next(iter(amp.master_params(second)))[0].item()
        assert stepped == pytest.approx(1.0 - 0.1 * (total + 1.0), rel=1e-3)


@pytest.mark.parametrize("level", ["O1 dynamic", "O2 dynamic"])
def test_restore_drops_what_overflowed_in_another_s_block(level):
    training = Training(level, optimizers=2)
    training.block(1.0, 1.0, float("inf"), 1.0, of=training.optimizers[0])
    with pytest.warns(UserWarning, match="between an overflow and the step"):
        amp.restore(training.model, training.optimizers)
    assert training.grads() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("level", ["O1 dynamic", "O2 dynamic"])
def test_an_overflow_that_no_prepared_optimizer_steps_reaches_no_weight(level):
    part, beside = loops.Weights(), loops.Weights()
    optimizer, _plain = loops.sgd(part.parameters()), loops.sgd(beside.parameters())
    amp.initialize([part, beside], optimizer, opt_level=level[:2], verbosity=0)
    loops.scaled_backward(part(a=1.0) + beside(a=float("inf"), b=1.0), optimizer)
    assert beside.a.grad.isfinite().all()


@loops.every(level=["O1 dynamic", "O2 dynamic"], over=["model", "masters"], others=[False, True])
@pytest.mark.filterwarnings("ignore:An optimizer that amp has not prepared")
def test_an_overflow_skips_the_step_of_an_optimizer_in_another_s_place(level, over, others):
    """Of the one that replaces it later; also if the block was of another optimizer."""
    training = Training(level, optimizers=2)
    later = loops.sgd(training.side(over)[:2])
    of = training.optimizers[others]
    for factors in (ONE, (float("inf"), 1.0, 0.0, 0.0), TWO):
        later.zero_grad()
        training.block(*factors, of=of)
        later.step()
    expected = [1.0 - 0.1 * (a + b) for a, b in zip(ONE[:2], TWO[:2], strict=True)]
    assert training.weights()[:2] == pytest.approx(expected, rel=4e-3)


def test_a_block_leaves_what_another_thread_trains(level):
    models = [loops.net(seed) for seed in range(2)]
    optimizers = [loops.sgd(model.parameters()) for model in models]
    models, optimizers = initialize(models, optimizers, level)
    x, y = loops.batch()
    loops.in_a_thread(lambda: loops.backward(models[1], optimizers[1], x, y))
    before = loops.grads(models[1].parameters())
    with amp.scale_loss(loops.loss_of(models[0], x, y), optimizers[0]) as scaled_loss:
        assert loops.same(loops.grads(models[1].parameters()), before)
        scaled_loss.backward()
    assert loops.same(loops.grads(models[1].parameters()), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_body_is_left_to_the_thread_that_trains_its_head(level):
    pairs = []
    for _ in range(2):
        model = loops.net()
        head = loops.sgd(model[2].parameters())
        pairs.append(amp.initialize(model, head, opt_level=level, verbosity=0, loss_scale=8.0))
    (model, optimizer), (other, others) = pairs
    x, y = loops.batch()
    loops.in_a_thread(lambda: loops.train_step(other, others, x, y))
    before = loops.grads(other.parameters())
    with amp.scale_loss(loops.loss_of(model, x, y), optimizer) as scaled_loss:
        assert loops.same(loops.grads(other.parameters()), before)
        scaled_loss.backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_pool_trains_is_left_to_its_own_blocks(level):
    first, second = (loops.prepared(level, loss_scale=8.0) for _ in range(2))
    x, y = loops.batch()

    def work():
        loops.train_step(*second, x, y)
        before = loops.grads(second[0].parameters())
        with amp.scale_loss(loops.loss_of(first[0], x, y), first[1]) as scaled_loss:
            assert loops.same(loops.grads(second[0].parameters()), before)
            scaled_loss.backward()
        return True

    assert loops.in_a_thread(work)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_that_cannot_begin_leaves_all_gradients(level):
    training = Training(level, optimizers=2)
    training.block(*ONE)
    first, second = training.optimizers
    training.block(*ONE, delay_unscale=True, of=first)
    with amp.scale_loss(training.loss(*ONE), second) as scaled_loss:
        before = training.grads("model")
        with pytest.raises(RuntimeError, match="inside another"):
            training.block(*ONE, of=[first, second])
        assert training.grads("model") == before
        scaled_loss.backward()
    assert training.grads("model") == [3.0 * each for each in ONE]


def test_an_optimizer_may_step_inside_the_block_of_another(level):
    training = Training(level, optimizers=2)
    first, second = training.optimizers
    with amp.scale_loss(training.loss(*ONE), first) as scaled_loss:
        scaled_loss.backward()
        second.step()
    assert training.grads() == [*ONE]
    assert training.weights()[2:] == pytest.approx([0.9, 0.8], rel=1e-3)


# -- 5: a step reads gradients and leaves them -----------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "fused AdamW", "fused SGD", "RMSprop"])
def test_a_step_leaves_the_gradients(level, name):
    training = Training(level, loops.OPTIMIZERS[name])
    training.block(*ONE)
    for _ in range(2):
        training.optimizer.step()
        assert training.grads("model") == training.grads("masters") == [*ONE]
    training.block(*TWO)
    assert training.grads() == [a + b for a, b in zip(ONE, TWO, strict=True)]


# -- 6, and what a master answers for --------------------------------------------------------


def test_amps_clip_multiplies_the_gradients_where_they_are(level):
    training = Training(level)
    training.block(*ONE)
    dtypes = [param.grad.dtype for param in training.model.parameters()]
    norm = amp.clip_grad_norm_(training.optimizer, 1.0).item()
    assert norm == pytest.approx(60.0**0.5, **rounded)
    assert [param.grad.dtype for param in training.model.parameters()] == dtypes
    clipped = [factor / norm for factor in ONE]
    assert training.grads("model") == pytest.approx(clipped, **rounded)
    for param in training.model.parameters():
        param.grad = param.grad - 0.25
    training.optimizer.step()
    expected = [1.0 - 0.1 * (each - 0.25) for each in clipped]
    assert training.weights() == pytest.approx(expected, **rounded)


@masters
def test_attributes_that_a_script_sets_are_the_same_on_both_sides(level):
    training = Training(level)
    (weight, *_), (master, *_) = training.side("model"), training.side("masters")
    for one, other in ((weight, master), (master, weight)):
        assert not hasattr(other, "mask")
        one.mask = 1
        other.mask += 1
        assert one.mask == other.mask == 2
        one.mask = None
        assert other.mask is None
        del other.mask
        assert not hasattr(one, "mask")
    with pytest.raises(AttributeError, match="mask"):
        del master.mask


class Unit(nn.Parameter):
    """Rows of norm 1, as a parameter on a manifold, whose class takes another argument."""

    def __new__(cls, data, *, dim):
        param = super().__new__(cls, data)
        param.dim_of_norm = dim
        return param

    @torch.no_grad()
    def project(self):
        self.div_(self.norm(dim=self.dim_of_norm, keepdim=True))


class ProjectedSGD(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            if isinstance(param, Unit):
                param.project()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_are_of_the_class_of_their_parameters_too(level):
    def unprepared():
        model = loops.net()
        model[0].weight = Unit(F.normalize(model[0].weight.detach()), dim=-1)
        return model, ProjectedSGD(model.parameters(), lr=0.1)

    plain, reference = unprepared()
    model, optimizer = amp.initialize(*unprepared(), opt_level=level, loss_scale=1.0, verbosity=0)
    for x, y in loops.batches(3):
        loops.plain_step(plain, reference, x, y)
        loops.train_step(model, optimizer, x, y)
    master = optimizer.param_groups[0]["params"][0]
    torch.testing.assert_close(master.norm(dim=-1), torch.ones(8))
    torch.testing.assert_close(master.detach(), plain[0].weight.detach(), rtol=0.0, atol=0.01)
    amp.restore(model, optimizer)
    assert type(optimizer.param_groups[0]["params"][0]) is Unit


@masters
def test_a_loss_of_a_master_itself_adds_to_the_gradient(level):
    training = Training(level)
    training.block(*ONE)
    loss = sum((2.0 * master).sum() for master in training.side("masters"))
    loss.backward(retain_graph=True)
    loops.scaled_backward(loss, training.optimizer)
    assert training.grads("model") == [factor + 4.0 for factor in ONE]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.filterwarnings("ignore:A hook on a 16-bit parameter")
def test_hooks_on_what_an_optimizer_steps_run(level):
    def halve(param):
        param.grad.mul_(0.5)

    training = Training(level)
    first, second, *_ = training.side("groups")
    handles = [
        first.register_hook(lambda grad: grad * 0.5),
        second.register_post_accumulate_grad_hook(halve),
    ]
    training.block(*ONE)
    assert training.grads() == [1.5, 2.0, 1.0, 2.0]
    for handle in handles:
        handle.remove()
    training.block(*ONE)
    assert training.grads() == [4.5, 6.0, 2.0, 4.0]


@pytest.mark.parametrize("side", ["model", "groups"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.filterwarnings("ignore:A hook on a 16-bit parameter")
def test_a_hook_that_returns_fp32_is_told_the_cast(level, side):
    training = Training(level)
    param = training.side(side)[0]
    handle = param.register_hook(lambda grad: grad * torch.ones(1))
    with pytest.raises(RuntimeError, match=r"changed the type(.|\n)*\(grad \* mask\)\.to\(grad"):
        training.block(*ONE)
    handle.remove()
    param.register_hook(lambda grad: (grad * torch.zeros(1)).to(grad.dtype))
    training.block(*ONE)
    assert training.grads()[0] == 0.0


@pytest.mark.parametrize("level", ["O2", "O3", "O5 scaled"])
def test_a_hook_on_a_16_bit_parameter_is_said_to_see_scaled_gradients(level):
    training = Training(level)
    seen = []
    handle = training.model["f"].a.register_hook(lambda grad: seen.append(grad[0].item()))
    with pytest.warns(UserWarning, match="A hook on a 16-bit parameter"):
        training.block(*ONE)
    training.block(*ONE)
    handle.remove()
    assert seen == [3.0 * loops.loss_scale()] * 2


@pytest.mark.parametrize("make", ["swap", "moved", "gradients before"])
@masters
def test_gradients_survive_what_happens_to_parameters(level, make):
    model = loops.Weights()
    optimizer = loops.sgd(model.parameters())
    if make == "gradients before":
        model(a=3.0, b=4.0).backward()
    initialize(model, optimizer, level)
    if make == "swap":
        fresh = nn.Parameter(torch.ones(2, dtype=model.a.dtype))
        torch.utils.swap_tensors(model.a, fresh)
    elif make == "moved":
        model.to("cpu", memory_format=torch.preserve_format)
    if make != "gradients before":
        loops.scaled_backward(model(a=3.0, b=4.0), optimizer)
    loops.scaled_backward(model(a=1.0, b=1.0), optimizer)
    assert [p.grad[0].item() for p in amp.master_params(optimizer)] == [4.0, 5.0]


def test_the_gradient_of_a_swapped_weight_may_be_a_view_of_a_script_s_buffer():
    model, optimizer = loops.prepared("O5", model=loops.Weights("a"))
    fresh = nn.Parameter(torch.ones(2, dtype=model.a.dtype))
    torch.utils.swap_tensors(model.a, fresh)
    model.a.grad = torch.zeros(4, dtype=model.a.dtype)[:2]
    loops.scaled_backward(model(a=1.0), optimizer)
    optimizer.step()
    assert model.a[0].item() == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("kind", ["block", "plain"])
def test_one_pass_takes_no_memory_of_fp32_without_a_scale(kind):
    training = Training("O5")
    for _ in range(2):
        training.optimizer.zero_grad()
        getattr(training, kind)(*ONE)
        assert all(param.grad.dtype is torch.bfloat16 for param in training.model.parameters())
        training.optimizer.step()
        training.model["f"](a=1.0)  # a forward before zero_grad
        assert all(param.grad.dtype is not torch.float16 for param in training.model.parameters())


class TwoOutputs(nn.Sequential):
    def forward(self, x):
        first, last = self
        hidden = first(x)
        return hidden, last(hidden)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_pass_through_two_outputs_takes_no_memory_of_fp32(is_deleted):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model, _ = loops.prepared("O5", model=TwoOutputs(*layers))
    hidden, output = model(torch.ones(1, 2))
    if is_deleted:
        del model
    (hidden + output).sum().backward()
    assert {layer.weight.grad.dtype for layer in layers} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@masters
def test_a_gradient_with_a_graph_is_differentiated_on_either_side(level):
    model = nn.Linear(2, 1, bias=False)
    optimizer = loops.sgd(model.parameters())
    initialize(model, optimizer, level, loss_scale=1.0)
    for side in (model.parameters, lambda: amp.master_params(optimizer)):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).float().square().sum().backward(create_graph=True)
        (param,) = side()
        (second,) = torch.autograd.grad(param.grad.float().sum(), model.weight)
        assert second.tolist() == [[4.0, 4.0]]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_is_differentiated_after_the_next_pass_too(level):
    """torch adds to such a gradient out of place."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = loops.sgd(model.parameters())
    initialize(model, optimizer, level)
    penalties = []
    for _ in range(2):
        loss = model(torch.ones(1, 2)).float().square().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        penalties.append(model.weight.grad.float().square().sum())
    for penalty, expected in zip(penalties, (32.0, 128.0), strict=True):
        (second,) = torch.autograd.grad(penalty, model.weight, retain_graph=True)
        assert second.tolist() == [[expected] * 2]
    model.weight.grad = None  # and so the graph, which refers to the weight
