"""What a prepared model is given or told later: heads, buffers, devices, dtypes, compilation."""

import types
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from apex import amp
from tests.model.cases import CASTS_DOWN, EPS, close, dtype_of, prepare, train_plain
from tests.support import loops

level = loops.at_levels(*CASTS_DOWN)


def new_head(seed=7):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(8, 2)


def replace_head(model, optimizer):
    """Fine-tuning as scripts do it: another last layer, stepped by a group of its own."""
    model[2] = new_head()
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})


def test_a_module_that_takes_over_weights_loads_them_to_the_last_bit(level):
    model, _ = prepare(level)
    own = nn.Linear(8, 2)
    own.weight, own.bias = model[2].weight, model[2].bias
    model[2] = own
    exact = {name: value / 3.0 for name, value in loops.net().state_dict().items()}
    model.load_state_dict(exact)
    assert loops.same(dict(model.state_dict()), exact)


def prepare_in_two_calls(level):
    model, optimizer = loops.plain_pair()
    options = {"opt_level": level, "verbosity": 0, "loss_scale": 64.0}
    amp.initialize(model, **options)
    amp.initialize([], optimizer, **options)
    return model, optimizer


@loops.every(level=loops.LEVELS_SHORT, calls=[1, 2])
def test_a_head_put_on_later_trains_with_its_group_from_its_exact_values(level, calls):
    plain, reference = loops.plain_pair()
    train_plain(plain, reference, 1)
    replace_head(plain, reference)
    train_plain(plain, reference, seed=2)
    model, optimizer = prepare(level) if calls == 1 else prepare_in_two_calls(level)
    loops.train(model, optimizer, 1)
    replace_head(model, optimizer)
    assert model[2].weight.dtype is dtype_of(level)
    exact = list(new_head().parameters())
    assert loops.same(list(optimizer.param_groups[1]["params"]), exact)
    assert loops.same([model.state_dict()[f"2.{k}"] for k in ("weight", "bias")], exact)
    loops.train(model, optimizer, seed=2)
    assert close(amp.master_params(optimizer), amp.master_params(reference), eps=4 * EPS[level])
    amp.restore(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert optimizer.param_groups[1]["params"][0] is model[2].weight


@loops.every(level=loops.LEVELS_SHORT)
def test_an_optimizer_made_for_a_new_head_casts_the_head_and_trains_it(level):
    plain, reference = loops.plain_pair()
    train_plain(plain, reference, 1)
    plain[2] = new_head()
    reference = loops.sgd(plain.parameters())
    train_plain(plain, reference, seed=2)
    model, optimizer = prepare(level)
    loops.train(model, optimizer, 1)
    model[2] = new_head()
    optimizer = loops.sgd(model.parameters())
    amp.initialize([], optimizer, opt_level=level, verbosity=0)
    loops.train(model, optimizer, seed=2)
    assert model[2].weight.dtype is dtype_of(level)
    assert close(amp.master_params(optimizer), amp.master_params(reference), eps=4 * EPS[level])


def narrow(model, optimizer):
    """As scripts prune channels and resize embeddings: the parameters stay."""
    optimizer.zero_grad()
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data[:4].clone()
        model[0].bias.data = model[0].bias.data[:4].clone()
        model[2].weight.data = model[2].weight.data[:, :4].clone()


def narrow_stepped(_, optimizer):
    """As optimizers do for a projected step (GaLore), over what they step."""
    optimizer.zero_grad()
    weight, bias, after, _ = optimizer.param_groups[0]["params"]
    weight.data = weight.data[:4].clone()
    bias.data = bias.data[:4].clone()
    after.data = after.data[:, :4].clone()


@loops.every(level=loops.LEVELS_SHORT, change=["narrow", "narrow, read", "narrow_stepped"])
def test_weights_that_get_data_of_another_shape_train_on(level, change):
    plain, reference = loops.plain_pair()
    train_plain(plain, reference, 1)
    narrow(plain, reference)
    train_plain(plain, reference, seed=2)
    model, optimizer = prepare(level)
    loops.train(model, optimizer, 1)
    (narrow_stepped if change == "narrow_stepped" else narrow)(model, optimizer)
    if change == "narrow, read":
        shapes = [param.shape for param in amp.master_params(optimizer)]
        assert shapes == [param.shape for param in plain.parameters()]
    loops.train(model, optimizer, seed=2)
    assert close(amp.master_params(optimizer), amp.master_params(reference), eps=4 * EPS[level])


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_gradient_of_the_old_shape_does_not_keep_a_model_from_becoming_plain(level):
    model, optimizer = loops.trained(level, loss_scale=1.0)
    narrow(model, MagicMock())  # without ``zero_grad``
    amp.restore(model, optimizer)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert model[0].weight.shape == (4, 4)
    assert model[0].weight.grad is None
    assert model[2].bias.grad is not None


def test_late_parts_get_the_dtypes_that_the_level_gives_their_like(level):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    model, optimizer = prepare(level, model, fp32_modules=[nn.LayerNorm])
    model.append(nn.BatchNorm1d(2))
    model.append(nn.LayerNorm(2))
    model.register_buffer("late", torch.ones(2))
    model[1].weight = nn.Parameter(torch.randn(2, 4))
    late = [model[1].weight, *model[2].parameters(), *model[3].parameters()]
    optimizer.add_param_group({"params": late})
    assert model[2].weight.dtype is model[2].running_mean.dtype is torch.float32
    assert model[1].weight.dtype is model.late.dtype is dtype_of(level)
    seen = []
    model[3].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    loops.train(model, optimizer, 1)
    assert model[3].weight.dtype is torch.float32
    assert seen == [dtype_of(level)]


class Shifted(nn.Sequential):
    def forward(self, x):
        return super().forward(x + self.shift if hasattr(self, "shift") else x)


CHANGES = {
    "0.weight": lambda model: setattr(model, "0", nn.Linear(4, 2)),
    "shift": lambda model: model.register_buffer("shift", torch.ones(4)),
    "0.bias": lambda model: setattr(model[0].bias, "data", torch.ones(2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_late_or_assigned_and_uncast_is_named_with_the_remedy(level, name):
    model = amp.initialize(Shifted(nn.Linear(4, 2)), opt_level=level, verbosity=0)
    CHANGES[name](model)
    words = rf"{name} \(float32\)(.|\n)*add_param_group(.|\n)*value\.to\(param\.dtype"
    with pytest.raises(RuntimeError, match=words):
        model(loops.batch()[0])
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(dtype_of(level))
    assert model(loops.batch()[0]).dtype is torch.float32


class Time(nn.Module):
    """A diffusion model's embedding of its step, which is an integer."""

    def forward(self, step):
        angles = step[:, None] * torch.tensor([1.0, 0.1])
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(4, 4)

    def forward(self, x):
        state = torch.zeros(1, 4)
        x = x.to(self.cell.weight_hh_l0.dtype)
        return self.cell(x, (state, state) if type(self.cell) is nn.LSTM else state)[0]


class Scattered(nn.Linear):
    def forward(self, x):
        rows = super().forward(x.to(self.weight.dtype))
        return torch.zeros(3, 4).scatter_add(0, torch.zeros(3, 4, dtype=torch.int64), rows)


@pytest.mark.parametrize("kind", [nn.Linear, Scattered, nn.LSTM, nn.GRU, nn.RNN])
def test_a_tensor_that_the_forward_makes_is_named_with_the_remedies(level, kind):
    def made():
        return nn.Sequential(Time(), kind(4, 4) if issubclass(kind, nn.Linear) else Recurrent(kind))

    model, _ = prepare(level, made())
    with pytest.raises(RuntimeError, match=r"created inside forward(.|\n)*fp32_modules"):
        model(torch.arange(3))
    model, _ = prepare(level, made(), fp32_modules=["1"])
    assert model(torch.arange(3)).dtype is torch.float32


WITHOUT_KERNELS = {
    "fft": torch.fft.fft,
    "det": torch.linalg.det,
    "rank": torch.linalg.matrix_rank,
    "vander": torch.linalg.vander,
    "quantile": lambda x: torch.quantile(x, 0.5),
    "stft": lambda x: torch.stft(x, 4, window=torch.ones(4, dtype=x.dtype), return_complex=True),
}


@pytest.mark.parametrize("of", WITHOUT_KERNELS.values(), ids=WITHOUT_KERNELS)
def test_an_operator_without_a_16_bit_kernel_is_told_with_the_remedy(level, of):
    """Such operators of torch say so each in its own way."""
    body = loops.Body(lambda self, x: of(self.linear(x)), linear=nn.Linear(4, 4))
    model, _ = prepare(level, body)
    with pytest.raises(RuntimeError, match=r"operator without a 16-bit kernel(.|\n)*fp32_modules"):
        model(torch.ones(4, 4))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_operator_of_a_library_that_casts_give_16_bits_is_told_with_the_remedy(level):
    # A kernel that is in no autocast's list, as those of extensions are not.
    library = types.SimpleNamespace(run=lambda x: torch.ops.aten._linalg_det(x)[0])
    body = loops.Body(lambda self, x: library.run(self.linear(x)), linear=nn.Linear(4, 4))
    model, _ = prepare(level, body)
    with pytest.raises(RuntimeError, match=r"x.float\(\)(.|\n)*register_float_function"):
        model(torch.ones(4, 4))
    amp.restore(model)
    amp.register_float_function(library, "run")
    model, _ = prepare(level, body)
    assert model(torch.ones(4, 4)).dtype is torch.float32


def test_an_input_that_no_level_casts_gets_torch_s_own_error(level):
    model, _ = prepare(level)
    integers = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
    for dtype in (*integers, torch.bool, torch.complex64):
        with pytest.raises(RuntimeError, match=r"but got \w+ and B?\w+$"):
            model(loops.batch()[0].to(dtype))


def test_an_error_about_shapes_keeps_torch_s_own_text(level):
    model, _ = prepare(level)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(\w+ and \w+\)$"):
        model(torch.ones(3, 5))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_mask_that_fp16_cannot_hold_is_named_with_the_one_that_it_can(level):
    class Masked(nn.Linear):
        least = -1e9

        def forward(self, x):
            scores = super().forward(x)
            return scores.masked_fill(scores > 0, self.least or torch.finfo(scores.dtype).min)

    model = amp.initialize(Masked(4, 2), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=r"overflow(.|\n)*finfo(.|\n)*_float_function") as raised:
        model(loops.batch()[0])
    assert "Levels O1" not in str(raised.value)
    Masked.least = None
    assert model(loops.batch()[0]).isfinite().all()


FLOATS = [
    lambda model: model.float(),
    lambda model: model.type(torch.float32),
    lambda model: model.to("cpu", torch.float32),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("to_fp32", FLOATS)
def test_float_makes_a_model_plain_with_exact_values_and_training_goes_on(level, to_fp32, caplog):
    model, optimizer = prepare(level)
    loops.train(model, optimizer)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    assert to_fp32(model) is model
    assert type(model) is nn.Sequential
    assert "after amp.initialize makes the model plain" in caplog.text
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert loops.same(list(model.state_dict().values()), list(exact.values()))
    plain = loops.net()
    plain.load_state_dict(exact)
    x = loops.batch()[0]
    assert torch.equal(torch.jit.trace(model, x)(x), plain(x))
    loops.train(model, optimizer)
    assert not loops.same(list(model.parameters()), list(exact.values()))
    assert loops.same(list(model.parameters()), list(amp.master_params(optimizer)))
    amp.restore(model, optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    train_plain(model, optimizer)


def test_float_between_backward_and_step_changes_no_step(level):
    (model, optimizer), expected = prepare(level), prepare(level)
    for pair in ((model, optimizer), expected):
        loops.backward(*pair, *loops.batch())
    model.float()
    optimizer.step()
    expected[1].step()
    assert loops.same(loops.masters(optimizer), loops.masters(expected[1]))


def test_an_error_names_parameters_that_were_cast_later():
    """At O1 and O4 operators cast them, as soon as one has met float64 beside fp32."""
    model, _ = prepare("O0")
    model[2].to(torch.float64)
    with pytest.raises(RuntimeError, match=r"float64\).*cast, added or assigned later"):
        model(loops.batch()[0])
    model.float()
    model(loops.batch()[0])


@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_a_materialized_model_trains_as_one_that_never_was_lazy(level):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(2))
    model(loops.batch()[0])
    eager = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2))
    eager.load_state_dict(model.state_dict())
    pairs = [prepare(level, each) for each in (model, eager)]
    for pair in pairs:
        loops.train(*pair)
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in pairs))


@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_a_group_of_lazy_parameters_is_refused_until_they_are_materialized(level):
    model, optimizer = prepare(level)
    model.append(nn.LazyLinear(2, dtype=next(model.parameters()).dtype))
    group = {"params": list(model[3].parameters())}
    with pytest.raises(ValueError, match="uninitialized parameter"):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1
    model(loops.batch()[0])
    optimizer.add_param_group(group)
    before = loops.masters(optimizer)[-2:]
    loops.train(model, optimizer)
    assert not loops.same(before, loops.masters(optimizer)[-2:])
