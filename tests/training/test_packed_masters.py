"""``master_weights="split"`` and ``"stochastic"``: fp32 masters of a bf16 model in fewer bytes."""

import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex._engine.optimizer import deferred, one_pass
from apex._torch import blocks
from apex.optimizers import FusedAdam, FusedLAMB
from apex.tools.memory import growth
from benchmarks.memory import storages
from tests.support.reference.rounding import half_up
from tests.training import cases

PACKED = ("split", "stochastic")
OPTIMIZERS = {
    **cases.OPTIMIZERS,
    "foreach AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused Adam amsgrad": lambda params: torch.optim.Adam(
        params, lr=1e-2, fused=True, amsgrad=True, weight_decay=0.1, maximize=True
    ),
    "fused Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "foreach SGD": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
}


class Plain:
    """Training by hand: a bf16 model, rounded half up, of plain fp32 masters."""

    def __init__(self, weights, make_optimizer):
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
        self.model = [nn.Parameter(half_up(weight)) for weight in self.masters]
        self.optimizer = make_optimizer(self.masters)

    def evaluate(self, x, y):
        for param, master in zip(self.model, self.masters, strict=True):
            param.grad, param.data = None, half_up(master)
        w1, b1, w2, b2 = self.model
        loss = F.mse_loss(F.linear(F.relu(F.linear(x.bfloat16(), w1, b1)), w2, b2).float(), y)
        loss.backward()
        for param, master in zip(self.model, self.masters, strict=True):
            master.grad = param.grad.float()
        return loss.detach()

    def train_step(self, x, y):
        self.evaluate(x, y)
        self.optimizer.step()

    def train_step_with_closure(self, x, y):
        self.optimizer.step(lambda: self.evaluate(x, y))


def prepared(kind, name="fused AdamW", model=None, **options):
    return cases.prepared("O5", OPTIMIZERS[name], model, master_weights=kind, **options)


def train(model, optimizer, batches):
    for x, y in batches:
        cases.train_step(model, optimizer, x, y)


def state(model, optimizer):
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        copy.deepcopy(optimizer.state_dict()),
        amp.state_dict(),
    ]


# -- split masters are fp32 masters ------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_masters_equal_plain_ones_bit_by_bit(name):
    model, optimizer = prepared("split", name)
    plain = Plain(cases.net().parameters(), OPTIMIZERS[name])
    for x, y in cases.batches(8):
        cases.stepper(cases, name)(model, optimizer, x, y)
        cases.stepper(plain, name)(x, y)
    assert cases.same(cases.masters(optimizer), cases.values(plain.masters))
    rounded = list(map(half_up, plain.masters))
    assert cases.same(cases.values(model.parameters()), rounded)
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.Adam(params, fused=True, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
        lambda params: torch.optim.Adagrad(params, fused=True),
        lambda params: torch.optim.AdamW(params, foreach=True),
    ],
)
def test_large_tensors_are_stepped_in_parts_with_the_same_bits(make):
    model = nn.Sequential(nn.Linear(700, 500), nn.Linear(500, 3, bias=False))
    weights = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    reference = make(weights)
    model, optimizer = cases.prepared("O5", make, model, master_weights="split")
    for step in range(2):
        for master, weight in zip(amp.master_params(optimizer), weights, strict=True):
            generator = torch.Generator().manual_seed(step)
            master.grad = torch.randn(weight.shape, generator=generator)
            weight.grad = master.grad.clone()
        optimizer.step()
        reference.step()
    assert cases.same(cases.masters(optimizer), cases.values(weights))
    assert cases.same(cases.values(model.parameters()), list(map(half_up, weights)))


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD", "fused Adam amsgrad"])
def test_the_step_in_one_pass_has_the_same_bits(name, scale, monkeypatch):
    monkeypatch.setattr(one_pass, "least_elements", 1)
    model, optimizer = prepared("split", name, loss_scale=scale)
    plain = Plain(cases.net().parameters(), OPTIMIZERS[name])
    for x, y in cases.batches(4):
        optimizer.zero_grad()
        cases.backward(model, optimizer, x, y)
        assert deferred.of(next(amp.master_params(optimizer))) is not None
        optimizer.step()
        plain.train_step(x, y)
    assert cases.same(cases.masters(optimizer), cases.values(plain.masters))
    assert cases.same(cases.values(model.parameters()), list(map(half_up, plain.masters)))


def test_a_thousand_steps_are_bit_equal():
    model, optimizer = prepared("split")
    plain = Plain(cases.net().parameters(), OPTIMIZERS["fused AdamW"])
    for x, y in cases.batches(1000):
        cases.train_step(model, optimizer, x, y)
        plain.train_step(x, y)
    assert cases.same(cases.masters(optimizer), cases.values(plain.masters))


@pytest.mark.parametrize(("kind", "expected"), [("split", 12), ("stochastic", 10), (True, 14)])
def test_stored_bytes_per_parameter(kind, expected):
    gc.collect()
    before = storages()
    model, optimizer = prepared(kind, model=nn.Linear(200, 100, bias=False))
    for _ in range(2):
        with amp.scale_loss(model(torch.randn(2, 200)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        del scaled_loss
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    new = sum(size for address, size in storages().items() if address not in before)
    per_param = new / model.weight.numel()
    assert expected <= per_param < expected + 0.01


# -- what is written on either side reaches the other --------------------------------------------


def large(kind, lr=0.0):
    """A model whose weight is larger than what amp remembers of it, after one step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
    model, optimizer = cases.prepared(
        "O5", lambda params: cases.sgd(params, lr=lr), model, master_weights=kind
    )
    large_step(model, optimizer)
    return model, optimizer


def large_step(model, optimizer):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2, 64)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("kind", PACKED)
def test_a_write_to_a_master_is_in_the_model_at_once(kind):
    model, optimizer = prepared(kind, "SGD")
    master = next(amp.master_params(optimizer))
    with torch.no_grad():
        master.fill_(0.5)
        assert (model[0].weight == 0.5).all()
        torch._foreach_mul_([master], 0.5)
        assert (model[0].weight == 0.25).all()
        master.view(-1)[::2] = 1.0
        assert (model[0].weight.view(-1)[::2] == 1.0).all()
        master.data = torch.full_like(master, 2.0)
        assert (model[0].weight == 2.0).all()
    train(model, optimizer, cases.batches(1))
    assert cases.same(model.state_dict()["0.weight"], master.detach().clone())


@pytest.mark.parametrize("kind", PACKED)
def test_inference_mode_reads_copies_and_saves_trained_masters(kind):
    model, optimizer = prepared(kind, "SGD")
    train(model, optimizer, cases.batches(2))
    expected, file = model.state_dict(), io.BytesIO()
    with torch.inference_mode():
        saved = model.state_dict()
        masters = [master.data.view(-1) for master in amp.master_params(optimizer)]
        torch.save(list(amp.master_params(optimizer)), file)
    for value, master in zip(expected.values(), masters, strict=True):
        assert cases.same(value.view(-1), master.clone())
        assert not master.is_inference()
    assert all(cases.same(saved[name], value) for name, value in expected.items())
    train(model, optimizer, cases.batches(1))


@pytest.mark.parametrize("kind", PACKED)
def test_an_array_of_a_master_is_a_copy_that_refuses_writes(kind):
    _, optimizer = prepared(kind, "SGD")
    master = next(amp.master_params(optimizer))
    for array in (master.data.numpy(), master.detach().cpu().numpy()):
        assert array.tolist() == master.tolist()
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 2


@pytest.mark.parametrize("kind", PACKED)
def test_a_master_is_exported_by_dlpack_as_a_copy(kind):
    _, optimizer = prepared(kind, "SGD")
    master = next(amp.master_params(optimizer))
    expected = master.tolist()
    exported = torch.from_dlpack(master.detach())
    assert exported.dtype is torch.float32
    assert exported.tolist() == expected
    exported.fill_(2)
    assert master.tolist() == expected
    with pytest.raises(BufferError, match="only be exported as a copy"):
        master.detach().__dlpack__(copy=False)
    with pytest.raises((BufferError, RuntimeError), match="gradient"):  # as a parameter
        torch.from_dlpack(master)


@pytest.mark.parametrize("kind", PACKED)
def test_a_view_in_another_dtype_whose_writes_would_be_lost_is_refused(kind):
    _, optimizer = prepared(kind, "SGD")
    master = next(amp.master_params(optimizer)).detach()
    with pytest.raises(RuntimeError, match="clone"):
        master.view(torch.int32)
    master.view(torch.float32)[0] = 0.5
    assert (master[0] == 0.5).all()


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_list_kernels_called_by_a_script_leave_exact_masters(kernel):
    model, optimizer = prepared("split", "SGD")
    masters = list(amp.master_params(optimizer))
    plain = [param.detach().clone() for param in masters]
    for params in (masters, plain):
        with torch.no_grad():
            if kernel == "foreach":
                torch._foreach_mul_(params, 1 / 3)
            else:
                grads, none = [torch.ones_like(p) for p in params], []
                torch._fused_sgd_(
                    *(params, grads, none),
                    lr=0.01,
                    weight_decay=0.0,
                    momentum=0.0,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )
    cases.backward(model, optimizer, *cases.batch())
    assert cases.same(cases.values(masters), plain)
    assert cases.same(list(model.state_dict().values()), plain)


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize(
    "write",
    [
        lambda master: master.mul_(1.0),
        lambda master: torch._foreach_mul_([master], 1.0),
        lambda master: master.view(-1).mul_(1.0),
        lambda master: [part.mul_(1.0) for part in master.chunk(2)],
        lambda master: torch.optim.SGD([master], lr=0.0, fused=True).step(),
    ],
    ids=["one", "list", "view", "parts", "other optimizer"],
)
def test_a_written_weight_is_exact_in_a_master_that_is_read_or_written_before_the_step(write, size):
    model, optimizer = prepared("split", "SGD", nn.Sequential(nn.Linear(size, size)))
    x = torch.ones(2, size)
    cases.train_step(model, optimizer, x, torch.zeros(2, size))
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    cases.backward(model, optimizer, x, torch.zeros(2, size))
    master = next(amp.master_params(optimizer))
    for read in (master.clone(), copy.deepcopy(master)):
        assert (read.detach() == 0.25).all()
    with torch.no_grad():
        write(master)
    model(x)
    assert (master.detach().clone() == 0.25).all()
    assert (model.state_dict()["0.weight"] == 0.25).all()


@pytest.mark.parametrize("trained", [False, True])
def test_a_new_initialization_of_a_large_weight_is_exact(trained):
    model, optimizer = large("split")
    if trained:
        large_step(model, optimizer)
    master = next(amp.master_params(optimizer))
    for value in (0.25, 0.0):
        nn.init.constant_(model.weight, value)
        assert (model.state_dict()["weight"] == value).all()
        large_step(model, optimizer)
        assert (master == value).all()


def test_a_clamp_or_a_mask_of_the_model_keeps_the_low_bits_of_other_elements():
    model, optimizer = large("split")
    master = next(amp.master_params(optimizer))
    before = master.detach().clone()
    with torch.no_grad():
        model.weight.clamp_(-0.0625, 0.0625)
    inside = model.weight.detach().abs() < 0.0625
    large_step(model, optimizer)
    assert torch.equal(master[inside], before[inside])
    assert torch.equal(half_up(master.clone()), half_up(before).clamp(-0.0625, 0.0625))
    before = master.detach().clone()
    mask = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.05
    with torch.no_grad():
        model.weight.mul_(mask)
    large_step(model, optimizer)
    assert torch.equal(master, before * mask)


@pytest.mark.parametrize("by", ["copy_", "data", "state_dict"])
def test_large_weights_swapped_for_an_evaluation_leave_the_masters_bit_identical(by):
    model, optimizer = large("split")
    before = cases.masters(optimizer)
    saved, own = model.state_dict(), model.weight.detach().clone()
    with torch.no_grad():
        if by == "copy_":
            model.weight.copy_(torch.ones(64, 64))
        elif by == "data":
            model.weight.data = torch.ones(64, 64, dtype=torch.bfloat16)
        else:
            model.load_state_dict({name: torch.ones_like(value) for name, value in saved.items()})
        assert (model.state_dict()["weight"] == 1).all()
        model(torch.ones(2, 64))
        if by == "copy_":
            model.weight.copy_(own)
        elif by == "data":
            model.weight.data = own
        else:
            model.load_state_dict(saved)
    large_step(model, optimizer)
    assert cases.same(cases.masters(optimizer), before)


@pytest.mark.parametrize("kind", PACKED)
def test_a_weight_that_is_written_and_then_given_other_memory_is_exact_in_its_master(kind):
    model, optimizer = prepared(kind, "SGD")
    train(model, optimizer, cases.batches(1))
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    model[0].weight.data = model[0].weight.detach().clone()
    assert (model.state_dict()["0.weight"] == 0.25).all()
    optimizer.zero_grad()
    cases.backward(model, optimizer, *cases.batch())
    assert (next(amp.master_params(optimizer)) == 0.25).all()


@pytest.mark.parametrize("kind", PACKED)
def test_weights_that_exchange_their_memory_exchange_their_values(kind):
    model, optimizer = prepared(kind, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    first, second = model[0].weight, model[1].weight
    values = first.detach().clone(), second.detach().clone()
    first.data, second.data = second.data, first.data
    model[0].bias.data, given_away = torch.ones(4).bfloat16(), model[0].bias.data
    kept = given_away.clone()
    cases.backward(model, optimizer, torch.ones(2, 4), torch.ones(2, 4))
    assert cases.same([second.detach(), first.detach()], [*values])
    assert cases.same(given_away, kept)
    stepped = [param.bfloat16() for param in cases.masters(optimizer)]
    assert cases.same(stepped, cases.values(model.parameters()))


@pytest.mark.parametrize("kind", [True, *PACKED])
def test_masters_swapped_by_assignment_come_back_bit_identical(kind):
    model, optimizer = prepared(kind, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    cases.train_step(model, optimizer, torch.ones(2, 4), torch.ones(2, 4))
    before = cases.masters(optimizer)
    first, _, second, _ = masters = list(amp.master_params(optimizer))
    backup = [master.data for master in masters]  # without copies, as many averages keep it
    for master in masters:
        master.data = torch.full_like(master, 0.25)
    assert (model(torch.ones(1, 4)) == 1.5).all()
    for master, kept in zip(masters, backup, strict=True):
        master.data = kept
    assert cases.same(cases.masters(optimizer), before)
    first.data, second.data = second.data, first.data
    assert cases.same([second.detach().clone(), first.detach().clone()], [before[0], before[2]])
    model(torch.ones(1, 4))
    trained = cases.masters(optimizer)
    rounded = [value.bfloat16() if kind is True else half_up(value) for value in trained]
    assert cases.same(rounded, cases.values(model.parameters()))


@pytest.mark.parametrize("kind", [True, *PACKED])
def test_masters_written_after_their_weights_exchanged_memory_reach_the_model(kind):
    model, optimizer = prepared(kind, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    first, second = model[0].weight, model[1].weight
    masters = list(amp.master_params(optimizer))  # asked again, they would follow the exchange
    expected = [master.detach() * 0.5 for master in masters]
    first.data, second.data = second.data, first.data
    for master in masters:
        master.data.mul_(0.5)
    model(torch.ones(2, 4))
    stored = [value.bfloat16() for value in expected]
    assert cases.same(cases.values(model.parameters()), stored)


def test_zeros_that_a_script_writes_uncounted_are_zeros_in_the_masters():
    """Their lower halves stay: of a weight pruned through ``data``, half of them are negative."""
    model, optimizer = prepared("split")
    train(model, optimizer, cases.batches(2))
    model[0].weight.data.mul_(0.0)
    (pruned, *_) = amp.master_params(optimizer)
    for value in (pruned.detach().clone(), model.state_dict()["0.weight"]):
        assert value.abs().max() < 1e-38
    train(model, optimizer, cases.batches(1))
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("kind", PACKED)
def test_many_small_masters_are_saved_as_one_by_one(kind):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    model, optimizer = prepared(kind, model=model)
    for _ in range(2):
        state = model.state_dict()
        values = cases.masters(optimizer)
        assert cases.same(list(state.values()), values)
        for layer, index in zip(model, range(0, 10, 2), strict=True):
            assert cases.same(list(layer.state_dict().values()), values[index : index + 2])
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(2, 4)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    with torch.no_grad():
        model[1].weight.fill_(1 / 3)
    assert torch.equal(model.state_dict()["1.weight"], model[1].weight.float())


@pytest.mark.parametrize("kind", PACKED)
def test_an_operator_leaves_no_fp32_copy_behind(kind):
    """Without the garbage collector, which large tensors do not wake."""
    _, optimizer = prepared(kind, model=nn.Sequential(nn.Linear(256, 256, bias=False)))
    (master,) = amp.master_params(optimizer)

    def work():
        with torch.no_grad():
            for _ in range(8):
                master.mul_(0.5).add_(master)

    gc.collect()
    gc.disable()
    try:
        peak = growth(work, torch.device("cpu"))
    finally:
        gc.enable()
    assert peak is None or peak <= 4 * master.nbytes


@pytest.mark.parametrize("kind", PACKED)
def test_a_changed_memory_format_leaves_the_same_training(kind):
    outcomes = []
    for channels_last in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            conv = nn.Conv2d(3, 4, 3)
        model, optimizer = prepared(kind, model=nn.Sequential(conv, nn.Flatten()))
        for step in range(3):
            if channels_last and step == 1:
                model.to(memory_format=torch.channels_last)
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        with torch.no_grad():
            master = next(amp.master_params(optimizer))
            master.view(-1)[:5] = 0.5
        model(x)
        assert (conv.weight.flatten()[:5] == 0.5).all()
        outcomes.append([cases.masters(optimizer), cases.values(model.parameters())])
        large = sum(each.numel() for each in optimizer._amp_stash.all_fp16_params)
        assert large == 4 * 3 * 9 + 4
    assert cases.same(*outcomes)


# -- copies, files and other kinds of masters ----------------------------------------------------


def through_deepcopy(model, optimizer):
    return copy.deepcopy((model, optimizer))


def through_a_file(model, optimizer):
    return cases.saved_and_loaded((model, optimizer))


@pytest.mark.parametrize("way", [through_deepcopy, through_a_file])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("name", ["fused AdamW", "Adam"])
def test_a_copy_trains_on_bit_by_bit_and_by_itself(name, kind, way):
    model, optimizer = prepared(kind, name)
    train(model, optimizer, cases.batches(3))
    copied, other = way(model, optimizer)
    assert cases.same(cases.masters(other), cases.masters(optimizer))
    before = cases.masters(other)
    train(model, optimizer, cases.batches(3, seed=2))
    assert cases.same(cases.masters(other), before)
    for x, y in cases.batches(3, seed=2):
        other.zero_grad()
        cases.loss_of(copied, x, y).backward()  # a loaded pair has no session to scale losses
        other.step()
    assert cases.same(cases.masters(other), cases.masters(optimizer))
    assert cases.same(cases.values(copied.parameters()), cases.values(model.parameters()))


@pytest.mark.parametrize(("first", "second"), [("split", True), (True, "split"), ("split",) * 2])
def test_files_convert_between_plain_and_split_masters_without_loss(first, second):
    model, optimizer = prepared(first)
    train(model, optimizer, cases.batches(3))
    weights, moments, _ = state(model, optimizer)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    other, other_optimizer = prepared(second, model=cases.net(seed=9))
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(moments)
    assert cases.same(cases.masters(other_optimizer), cases.masters(optimizer))
    for each in ((model, optimizer), (other, other_optimizer)):
        train(*each, cases.batches(3, seed=2))
    if first == second:
        assert cases.same(cases.masters(other_optimizer), cases.masters(optimizer))


@pytest.mark.parametrize("kind", PACKED)
def test_files_of_masters_need_no_apex(kind):
    _, optimizer = prepared(kind)
    file = io.BytesIO()
    torch.save(list(amp.master_params(optimizer)), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(param) for param in loaded} == {nn.Parameter}
    assert cases.same(cases.values(loaded), cases.masters(optimizer))


@pytest.mark.parametrize("kind", PACKED)
def test_restore_gives_a_plain_model_with_the_masters_values(kind):
    model, optimizer = prepared(kind)
    train(model, optimizer, cases.batches(3))
    masters = cases.masters(optimizer)
    amp.restore(model, optimizer)
    assert cases.same(cases.values(model.parameters()), masters)
    assert {type(param) for param in optimizer.param_groups[0]["params"]} == {nn.Parameter}
    x, y = cases.batch()
    cases.loss_of(model, x, y).backward()
    optimizer.step()


# -- stochastic rounding -------------------------------------------------------------------------


def after_tiny_updates(kind, steps):
    model = nn.Linear(256, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = cases.prepared(
        "O5", lambda params: cases.sgd(params, lr=2.0**-11), model, master_weights=kind
    )
    for _ in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(-model(torch.ones(1, 256)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return model.weight.detach().float()


def test_updates_that_bf16_discards_accumulate_in_the_mean():
    steps = 40
    assert (after_tiny_updates(False, steps) == 1).all()
    weight = after_tiny_updates("stochastic", steps)
    expected = 1 + steps * 2.0**-11
    # The spread of one step is at most half the distance of two bf16 numbers, 2**-7.
    tolerance = 5 * 2.0**-8 * (steps / 256) ** 0.5
    assert abs(weight.mean().item() - expected) < tolerance < expected - 1


def test_the_same_seed_gives_the_same_bits():
    outcomes = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(outcomes))
        model, optimizer = prepared("stochastic", rounding_seed=seed)
        train(model, optimizer, cases.batches(5))
        outcomes.append(cases.masters(optimizer))
    assert cases.same(outcomes[0], outcomes[1])
    assert not cases.same(outcomes[0], outcomes[2])


class Transposed(nn.Sequential):
    """Its second weight has another layout than fused kernels can take by blocks."""

    def __init__(self):
        super().__init__(*[nn.Linear(8, 8) for _ in range(3)])
        self[1].weight = nn.Parameter(self[1].weight.detach().t())


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD", "FusedAdam"])
def test_reading_a_gradient_on_one_rank_rounds_as_on_the_others(name, monkeypatch):
    monkeypatch.setattr(one_pass, "least_elements", 1)
    monkeypatch.setattr(blocks, "_LEAST", 32)

    def trained(read):
        torch.manual_seed(0)
        model, optimizer = prepared("stochastic", name, Transposed())
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            masters = list(amp.master_params(optimizer))
            assert all(masters[index].grad is not None for index in read)
            optimizer.step()
        return cases.masters(optimizer)

    expected = trained([])
    for read in ([0], [2], [5], [0, 3], range(6)):
        assert cases.same(trained(read), expected)
    with amp.debug.two_pass_steps():
        assert cases.same(trained([]), expected)


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["fused AdamW", "Adam", "SGD"])
def test_a_resumed_run_rounds_as_the_uninterrupted_one(name, early, scale):
    model, optimizer = prepared("stochastic", name, rounding_seed=3, loss_scale=scale)
    train(model, optimizer, cases.batches(3))
    weights, moments, scales = state(model, optimizer)
    train(model, optimizer, cases.batches(3, overflow_at=[1] if scale else (), seed=2))
    expected = cases.masters(optimizer)
    del model, optimizer
    gc.collect()
    if early:
        amp.load_state_dict(scales)
    model, optimizer = prepared("stochastic", name, cases.net(seed=9), loss_scale=scale)
    if not early:
        amp.load_state_dict(scales)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    train(model, optimizer, cases.batches(3, overflow_at=[1] if scale else (), seed=2))
    assert cases.same(cases.masters(optimizer), expected)


@pytest.mark.parametrize("name", ["fused AdamW", "Adam", "LBFGS closure"])
@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_a_closure_that_fails_leaves_the_random_numbers(name, scale):
    model, optimizer = prepared("stochastic", name, loss_scale=scale)
    other = prepared("stochastic", name, loss_scale=scale)
    cases.train_step_with_closure(model, optimizer, *cases.batch())
    cases.train_step_with_closure(*other, *cases.batch())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    cases.train_step_with_closure(model, optimizer, *cases.batch(2))
    cases.train_step_with_closure(*other, *cases.batch(2))
    assert cases.same(cases.masters(optimizer), cases.masters(other[1]))


def test_moments_are_fp32():
    model, optimizer = prepared("stochastic", "Adam")
    train(model, optimizer, cases.batches(1))
    states = [value for each in optimizer.state.values() for value in each.values()]
    assert {value.dtype for value in states} == {torch.float32}
    assert {type(value) for value in states} == {torch.Tensor}


# -- skips, several optimizers, groups -----------------------------------------------------------


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("name", ["fused AdamW", "Adam", "LBFGS closure"])
def test_a_skipped_step_changes_nothing(name, kind):
    model, optimizer = prepared(kind, name, loss_scale="dynamic")
    cases.stepper(cases, name)(model, optimizer, *cases.batch())
    before = cases.masters(optimizer), cases.values(model.parameters())
    cases.stepper(cases, name)(model, optimizer, *cases.overflowing())
    assert cases.same((cases.masters(optimizer), cases.values(model.parameters())), before)


@pytest.mark.parametrize("kind", PACKED)
def test_two_optimizers_and_a_later_group_share_the_masters(kind):
    model = cases.net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model, (first, second) = amp.initialize(
        model, [first, second], opt_level="O5", master_weights=kind, verbosity=0
    )
    first.add_param_group({"params": list(model[2].parameters())})
    masters = [list(amp.master_params(each)) for each in (first, second)]
    assert list(map(id, masters[0])) == list(map(id, masters[1]))
    before = cases.values(masters[0])
    for x, y in cases.batches(2):
        loss = cases.loss_of(model, x, y)
        with amp.scale_loss(loss, [first, second]) as scaled_loss:
            scaled_loss.backward()
        first.step()
        second.step()
    assert not any(map(torch.equal, before, masters[0]))
    weights = [half_up(each) for each in cases.values(masters[0])]
    assert cases.same(cases.values(model.parameters()), weights)


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    ("level", "options", "message"),
    [
        ("O0", {}, "nothing is rounded"),
        ("O2", {}, "do not complete an fp16 weight"),
        ("O3", {}, "do not complete an fp16 weight"),
        ("O5", {"cast_model_type": torch.float16}, "do not complete an fp16 weight"),
        ("O1", {}, "has no meaning at O1.*opt_level 'O5'"),
        ("O4", {}, "has no meaning at O4.*opt_level 'O5'"),
    ],
)
def test_levels_without_a_bf16_model_are_refused(level, options, message, kind):
    model = cases.net()
    before = cases.values(model.parameters())
    with pytest.raises(RuntimeError, match=message):
        cases.prepared(level, model=model, master_weights=kind, **options)
    assert cases.same(cases.values(model.parameters()), before)


@pytest.mark.parametrize("value", ["Split", "", 2.5, ["split"]])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="'split', 'stochastic'"):
        cases.prepared("O5", master_weights=value)


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True])
def test_seeds_are_integers(seed):
    with pytest.raises(ValueError, match="rounding_seed"):
        prepared("stochastic", rounding_seed=seed)


@pytest.mark.parametrize("rounding", [3, {}, {"seed": 0}, {"seed": -1, "writes": 0}])
def test_a_damaged_state_of_the_rounding_is_refused_before_anything_changes(rounding):
    pair = prepared("stochastic")
    before = amp.state_dict()
    broken = copy.deepcopy(before)
    broken["loss_scaler0"]["apex_amp_v1"]["rounding"] = rounding
    with pytest.raises(RuntimeError, match="'seed' and 'writes'"):
        amp.load_state_dict(broken)
    assert amp.state_dict() == before
    assert len(pair) == 2


def test_the_report_shows_the_option(capsys):
    cases.prepared("O5", master_weights="split")
    model = cases.net()
    amp.initialize(model, cases.sgd(model.parameters()), opt_level="O5", master_weights="split")
    assert "master_weights             : split" in capsys.readouterr().out


# -- on a device ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fused AdamW", "foreach AdamW", "Adam"])
@pytest.mark.parametrize("kind", PACKED)
def test_training_on_a_device_waits_for_it_nowhere(kind, name):
    model = cases.net().cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O5", master_weights=kind, verbosity=0
    )
    plain = Plain(cases.net().cuda().parameters(), OPTIMIZERS[name])
    data = [(x.cuda(), y.cuda()) for x, y in cases.batches(3)]
    for x, y in data:
        torch.cuda.set_sync_debug_mode("error")
        try:
            cases.train_step(model, optimizer, x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        plain.train_step(x, y)
    if kind == "split":
        assert cases.same(cases.masters(optimizer), cases.values(plain.masters))
    assert {param.device.type for param in amp.master_params(optimizer)} == {"cuda"}


@pytest.mark.parametrize("kind", PACKED)
def test_a_large_weight_in_fp32_steps_beside_packed_masters(kind):
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8192, bias=False), nn.Linear(8192, 2))
    model, optimizer = prepared(kind, model=model, fp32_modules=["1"])
    weight = model[1].weight
    assert weight.dtype is torch.float32
    with amp.scale_loss(model(torch.randn(2, 8)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    plain = nn.Parameter(weight.detach().clone())
    plain.grad = weight.grad.clone()
    by_hand = OPTIMIZERS["fused AdamW"]([plain])
    by_hand.step()
    optimizer.step()
    assert torch.equal(weight, plain)
    assert all(master.isfinite().all() for master in amp.master_params(optimizer))
