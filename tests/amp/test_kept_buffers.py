"""Buffers that models compute in fp32 stay so at O2, O3 and O5, and go with 16-bit activations."""

import copy
import io
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import apex.amp as amp
from tests.amp.cases import LOW, backward, sgd
from tests.amp.decoder import Decoder, Positions, Rotary, UncastRotary, ids

CASTING = ("O2", "O3", "O5")
every_casting_level = pytest.mark.parametrize("level", CASTING)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def prepared(model, level, **options):
    options = {"verbosity": 0, "loss_scale": 1.0, **options}
    return amp.initialize(model, sgd(model), opt_level=level, **options)


def losses(model, optimizer, steps=3):
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids()).flatten(0, 1).float(), ids().flatten())
        backward(loss, optimizer)
        optimizer.step()
        found.append(loss.item())
    return found


# -- what stays ------------------------------------------------------------------------------


@every_casting_level
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("position", [4097, 100_000])
def test_rotary_angles_are_those_of_fp32_within_a_rounding(level, persistent, position):
    model = nn.ModuleDict({"rotary": Rotary(persistent=persistent), "fc": nn.Linear(8, 8)})
    where = torch.tensor([[position]])
    expected = model["rotary"](torch.zeros(1), where)
    model, _ = prepared(model, level)
    found = model["rotary"](torch.zeros(1, dtype=LOW[level]), where)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype is LOW[level]
        assert torch.equal(ours, exact.to(LOW[level]))


@every_casting_level
def test_non_persistent_buffers_keep_their_values_objects_and_dtype(level):
    model = Decoder()
    kept = [model.add.table, model.mask, model.temperature, model.rotary.inv_freq]
    before = [tensor.clone() for tensor in kept]
    model, _ = prepared(model, level)
    now = [model.add.table, model.mask, model.temperature, model.rotary.inv_freq]
    assert all(a is b for a, b in zip(now, kept, strict=True))
    assert all(map(torch.equal, now, before))
    assert all(tensor.dtype is torch.float32 for tensor in now)
    assert model.qkv.weight.dtype is LOW[level]


@every_casting_level
def test_persistent_buffers_and_16_bit_ones_have_the_dtype_of_the_level(level):
    model = nn.Sequential(Positions(persistent=True), Positions(), nn.Linear(8, 8))
    model[1].half()
    model, _ = prepared(model, level)
    assert model[0].table.dtype is LOW[level]
    assert model[1].table.dtype is LOW[level]


def test_a_float64_buffer_is_kept_in_fp32():
    model = nn.Sequential(Positions().double(), nn.Linear(8, 8))
    model, _ = prepared(model, "O5")
    assert model[0].table.dtype is torch.float32
    assert model(torch.ones(1, 4, 8)).isfinite().all()


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_elsewhere_buffers_are_plain(level):
    model, optimizer = prepared(Decoder(), level)
    assert type(model.mask) is torch.Tensor
    losses(model, optimizer, 1)


# -- training --------------------------------------------------------------------------------


@every_casting_level
@pytest.mark.parametrize("rotary", [Rotary, UncastRotary])
def test_a_model_that_computes_with_them_trains(level, rotary):
    model, optimizer = prepared(Decoder(rotary), level)
    found = losses(model, optimizer)
    assert found[-1] < found[0]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_it_is_as_close_to_fp32_as_the_dtype_allows(level):
    torch.manual_seed(3)
    model = Decoder()
    exact = copy.deepcopy(model)
    model, optimizer = prepared(model, level)
    plain, plain_optimizer = prepared(exact, "O0")
    expected = losses(plain, plain_optimizer)
    eps = torch.finfo(LOW[level]).eps
    assert losses(model, optimizer) == pytest.approx(expected, rel=16 * eps)


def test_activations_stay_in_16_bits_and_outputs_are_plain():
    seen = []
    model = nn.Sequential(Positions(), nn.Linear(8, 8), Positions())
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model, _ = prepared(model, "O5")
    out = model(torch.ones(2, 4, 8))
    assert seen[0].dtype is torch.bfloat16
    assert type(seen[0]) is type(out) is torch.Tensor
    assert out.dtype is torch.float32


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(3, 2), persistent=False)

    def forward(self, x):
        return {"y": self.fc(x), "table": self.table, "rows": [self.table[0], self.table[1:]]}


@every_casting_level
def test_buffers_that_a_model_returns_are_plain(level):
    model, _ = prepared(Returns(), level)
    out = model(torch.ones(1, 2))
    assert all(type(t) is torch.Tensor for t in (out["table"], *out["rows"]))
    assert model.table.data_ptr() == out["table"].data_ptr()


# -- what they meet --------------------------------------------------------------------------

SMALL = torch.linspace(0.1, 0.9, 4)


def of_shape(*shape):
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape)


def augmented(x, b):
    x = x.clone()
    x += b
    x *= b
    return x


def put(x, b):
    x = x.clone()
    x[1:] = b[1:]
    return x


WITH_16_BITS = {
    "augmented": augmented,
    "setitem": put,
    "add": lambda x, b: x + b,
    "radd": lambda x, b: b + x,
    "sub": lambda x, b: b - x,
    "mul": lambda x, b: x * b,
    "div": lambda x, b: x / b,
    "iadd": lambda x, b: x.clone().add_(b),
    "slice": lambda x, b: x[:2] + b[:2],
    "rows": lambda x, b: sum(x[0] * row for row in b),
    "split": lambda x, b: x[:, :2] + b.split(2, dim=1)[1],
    "chunk": lambda x, b: x[:, :2] + b.chunk(2, dim=1)[1],
    "unbind": lambda x, b: x[0] + b.unbind()[1],
    "max": lambda x, b: x[0] + b.max(dim=0).values,
    "reduced": lambda x, b: x + b.sum(0, keepdim=True),
    "transposed": lambda x, b: x + b.mT,
    "data": lambda x, b: x + b.data,
    "detached": lambda x, b: x + b.detach().requires_grad_(False),
    "moved": lambda x, b: x + b.to("cpu").contiguous(),
    "as x": lambda x, b: b.to(x),
    "type_as": lambda x, b: b.type_as(x),
    "x as it": lambda x, b: x.type_as(b),
    "new": lambda x, b: x + b.new_ones(4),
    "like": lambda x, b: x + torch.zeros_like(b),
    "selected": lambda x, b: x + b.index_select(0, torch.tensor([1, 0, 3, 2])),
    "embedding": lambda x, b: x + F.embedding(torch.tensor([1, 0, 3, 2]), b),
    "gather": lambda x, b: x + b.gather(0, torch.zeros(4, 4, dtype=torch.long)),
    "chain": lambda x, b: x + (b * 2.0 + 1.0).cos().unsqueeze(0)[0],
    "with integers": lambda x, b: x + b * torch.arange(4),
    "matmul": lambda x, b: x @ b,
    "rmatmul": lambda x, b: b @ x,
    "linear": lambda x, b: F.linear(x, b, b[0]),
    "conv": lambda x, b: F.conv1d(x[None], b[:, :, None]),
    "einsum": lambda x, b: torch.einsum("ij,kj->ik", x, b),
    "addmm": lambda x, b: torch.addmm(b, x, x),
    "bmm": lambda x, b: torch.baddbmm(b[None], x[None], x[None]),
    "cat": lambda x, b: torch.cat([x, b]),
    "stack": lambda x, b: torch.stack((x, b)),
    "where": lambda x, b: torch.where(x > 0.5, x, b),
    "where not": lambda x, b: torch.where(x > 0.5, b, x),
    "lerp": lambda x, b: torch.lerp(x, x + 1, b),
    "maximum": torch.maximum,
    "clamp": lambda x, b: x.clamp(min=b),
    "greater": lambda x, b: x > b,
    "layer_norm": lambda x, b: F.layer_norm(x, (4,), b[0], b[1]),
    "group_norm": lambda x, b: F.group_norm(x[None], 2, b[0], b[1]),
    "prelu": lambda x, b: F.prelu(x - 0.5, b[0]),
    "attention": lambda x, b: F.scaled_dot_product_attention(x[None], x[None], x[None], b[None]),
    "cross_entropy": lambda x, b: F.cross_entropy(x, torch.arange(4), weight=b[0]),
    "index_put": lambda x, b: x.index_put((torch.tensor([0]),), b[:1]),
    "scatter": lambda x, b: x.scatter(0, torch.zeros(4, 4, dtype=torch.long), b),
    "keyword": lambda x, b: torch.add(input=x, other=b),
    "operator": torch.ops.aten.add.Tensor,
    "operator in place": lambda x, b: torch.ops.aten.add_.Tensor(x.clone(), b),
    "grid_sample": lambda x, b: F.grid_sample(
        x[None, None], torch.stack([b, b], -1)[None], align_corners=False
    ),
    "with a shape": lambda x, b: x.reshape(b.shape).expand_as(b),
}


@every_dtype
@pytest.mark.parametrize("name", WITH_16_BITS)
def test_what_meets_16_bits_is_what_the_rounded_buffer_gives(kept, dtype, name):
    x = of_shape(4, 4).to(dtype)
    buffer, fn = of_shape(4, 4).flip(0), WITH_16_BITS[name]
    found, expected = fn(x, kept(buffer)), fn(x, buffer.to(dtype))
    assert found.dtype is expected.dtype
    assert type(found) is torch.Tensor
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * eps, atol=8 * eps)


@pytest.fixture
def kept():
    """Makes a plain fp32 tensor the buffer of a model that is prepared at O5."""
    models = []

    def make(tensor):
        model = nn.Linear(1, 1)
        model.register_buffer("buffer", tensor, persistent=False)
        models.append(amp.initialize(model, opt_level="O5", verbosity=0))
        return model.buffer

    return make


WRITES = {
    "copy_": lambda b, x: b.copy_(x),
    "add_": lambda b, x: b.add_(x),
    "mul_ and add_": lambda b, x: b.mul_(0.75).add_(x, alpha=0.25),
    "lerp_": lambda b, x: b.lerp_(x.float(), 0.25),
    "setitem": lambda b, x: b.__setitem__(slice(1, None), x[1:]),
    "iadd": lambda b, x: b.__iadd__(x),
    "data": lambda b, x: b.data.add_(x),
    "out": lambda b, x: torch.add(x, x, out=b),
    "foreach": lambda b, x: torch._foreach_add_([b], [x.float()]),
}

ROW = torch.tensor([2])
ROWS = torch.zeros(4, 4, dtype=torch.long)

WRITES_OF_ONE_DTYPE = {
    "lerp_": lambda b, x: b.lerp_(x, 0.25),
    "rows": lambda b, x: b.__setitem__(ROW, x[:1]),
    "mask": lambda b, x: b.__setitem__(ROWS == 0, x.flatten()),
    "index_put_": lambda b, x: b.index_put_((ROW,), x[:1], accumulate=True),
    "index_copy_": lambda b, x: b.index_copy_(0, ROW, x[:1]),
    "index_add_": lambda b, x: b.index_add_(0, ROW, x[:1], alpha=0.5),
    "scatter_": lambda b, x: b.scatter_(0, ROWS, x),
    "scatter_add_": lambda b, x: b.scatter_add_(0, ROWS, src=x),
    "scatter_reduce_": lambda b, x: b.scatter_reduce_(0, ROWS, x, "mean"),
    "masked_scatter_": lambda b, x: b.masked_scatter_(ROWS == 0, x),
    "addmm_": lambda b, x: b.addmm_(x, x, beta=0.75, alpha=0.25),
    "view": lambda b, x: b.t()[1:].lerp_(x[1:], 0.25),
}
"""Writes that torch refuses of a tensor of another dtype."""


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_one_is_held_in_fp32(kept, name):
    x = of_shape(4, 4).bfloat16() / 3
    buffer, plain = kept(of_shape(4, 4) + 2.0**-12), of_shape(4, 4) + 2.0**-12
    WRITES[name](buffer, x)
    WRITES[name](plain, x)
    assert buffer.dtype is torch.float32
    assert torch.equal(buffer, plain)
    assert (x + buffer).dtype is torch.bfloat16


@every_dtype
@pytest.mark.parametrize("name", WRITES_OF_ONE_DTYPE)
def test_averages_and_caches_in_one_take_16_bit_activations(kept, dtype, name):
    x = of_shape(4, 4).to(dtype) / 3
    buffer, plain = kept(of_shape(4, 4) + 2.0**-12), of_shape(4, 4) + 2.0**-12
    WRITES_OF_ONE_DTYPE[name](buffer, x)
    WRITES_OF_ONE_DTYPE[name](plain, x.float())
    assert torch.equal(buffer, plain)
    assert (x + buffer).dtype is dtype


def test_another_storage_is_taken_as_it_is(kept):
    buffer, x = kept(of_shape(4)), of_shape(4).bfloat16()
    buffer.data = x
    assert buffer.dtype is torch.bfloat16
    assert buffer.data_ptr() == x.data_ptr()


def test_a_list_of_buffers_is_saved_and_put_back_to_the_last_bit(kept):
    buffers = [kept(of_shape(4) + 2.0**-12), of_shape(4).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    saved = [torch.empty_like(buffer) for buffer in buffers]
    torch._foreach_copy_(saved, buffers)
    torch._foreach_zero_(buffers)
    torch._foreach_copy_(buffers, saved)
    assert all(map(torch.equal, buffers, before))
    halves = torch._foreach_mul(buffers, 0.5)
    assert all(half.dtype is each.dtype for half, each in zip(halves, before, strict=True))
    assert torch.equal(halves[0], before[0] * 0.5)


def test_a_number_is_formatted(kept):
    assert f"{kept(torch.tensor(0.25)):.1f} {kept(torch.ones(1))}" == "0.2 tensor([1.])"


def test_running_statistics_go_on_in_them(kept):
    x = of_shape(6, 4).bfloat16()
    mean, var = kept(torch.zeros(4)), kept(torch.ones(4))
    F.batch_norm(x, mean, var, x[0], x[1], training=True)
    expected = [torch.zeros(4).bfloat16(), torch.ones(4).bfloat16()]
    F.batch_norm(x, *expected, x[0], x[1], training=True)
    assert torch.equal(mean, expected[0].float())
    assert torch.equal(var, expected[1].float())


def test_alone_and_with_fp32_constants_they_compute_in_fp32_and_yield_on(kept):
    buffer = kept(of_shape(4))
    product = torch.outer(torch.arange(4.0), buffer)
    assert product.dtype is torch.float32
    assert torch.equal(product, torch.outer(torch.arange(4.0), of_shape(4)))
    assert (product.cos() + torch.ones(4, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_with_fp32_activations_and_weights_they_give_plain_fp32(kept):
    weight = torch.ones(4, requires_grad=True)
    result = weight * kept(of_shape(4))
    assert type(result) is torch.Tensor
    assert (result * torch.ones(4, dtype=torch.bfloat16)).dtype is torch.float32


@pytest.mark.parametrize(
    "cast",
    [
        lambda b: b.float(),
        lambda b: b.to(torch.float32),
        lambda b: b.to("cpu", dtype=torch.float32),
        lambda b: b.type(torch.float32),
    ],
)
def test_what_is_cast_to_fp32_in_so_many_words_stays_so(kept, cast):
    result = cast(kept(of_shape(4)))
    assert type(result) is torch.Tensor
    assert (result * torch.ones(4, dtype=torch.bfloat16)).dtype is torch.float32


@every_dtype
def test_a_number_does_not_lose_bits_and_goes_where_dtypes_have_to_be_equal(kept, dtype):
    x, number = of_shape(4).to(dtype), kept(torch.tensor(1 / 3))
    assert torch.equal(x * number, (x.float() * (1 / 3)).to(dtype))
    assert x.index_put((torch.tensor([0]),), number)[0] == torch.tensor(1 / 3).to(dtype)
    assert F.prelu(-x, number).dtype is dtype
    assert torch.stack([x[0], number]).dtype is dtype


def test_integers_booleans_and_numbers_come_out_as_ever(kept):
    buffer = kept(of_shape(4))
    assert type(buffer > 0.5) is type(buffer.argmax()) is type(buffer.bfloat16()) is torch.Tensor
    assert buffer.tolist() == buffer.numpy().tolist() == of_shape(4).tolist()
    assert buffer.shape == (4,)
    assert type(buffer.shape) is torch.Size
    assert repr(buffer) == repr(of_shape(4))


class Foreign(torch.Tensor):
    """A tensor subclass of another library, as fastai's."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Foreign, type("Default", (torch.Tensor,), {})])
def test_another_library_s_subclass_goes_on_deciding(kept, kind):
    buffer, x = kept(of_shape(4)), of_shape(4).bfloat16().as_subclass(kind)
    for result in (x + buffer, buffer + x, torch.stack([buffer, x])):
        assert type(result) is kind
        assert result.dtype is torch.bfloat16
    buffer.add_(of_shape(4).as_subclass(kind))
    assert torch.equal(buffer, 2 * of_shape(4))


def test_gradients_flow_past_them():
    model, _ = prepared(nn.Sequential(Positions(), nn.Linear(8, 8)), "O5")
    x = torch.ones(1, 4, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


# -- what scripts do with models -------------------------------------------------------------


def outputs(model):
    with torch.no_grad():
        return model(ids())


def is_kept(model):
    """Whether the model's buffers go with 16-bit activations."""
    x = torch.ones(16, 16, dtype=model.qkv.weight.dtype)
    return (x + model.mask).dtype is x.dtype and model.mask.dtype is torch.float32


@every_casting_level
def test_copies_and_files_compute_as_the_model(level):
    model, _ = prepared(Decoder(), level)
    expected = outputs(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert is_kept(other)
        assert torch.equal(outputs(other), expected)
    other = copy.deepcopy(model)
    assert other.mask.data_ptr() != model.mask.data_ptr()
    layer = copy.deepcopy(model.add)
    assert (layer(torch.ones(1, 2, 8, dtype=LOW[level]))).dtype is LOW[level]


def test_what_is_saved_of_them_are_plain_tensors():
    model = nn.ModuleDict({"rotary": Rotary(persistent=True), "fc": nn.Linear(8, 8)})
    model["rotary"].register_buffer("other", torch.ones(3), persistent=False)
    model, _ = prepared(model, "O5")
    saved = {**model.state_dict(), **model["rotary"].state_dict()}
    assert all(type(tensor) is torch.Tensor for tensor in saved.values())
    file = io.BytesIO()
    torch.save([saved, model["rotary"].other], file)
    file.seek(0)
    loaded, other = torch.load(file, weights_only=True)
    assert torch.equal(loaded["rotary.inv_freq"], Rotary().inv_freq)
    assert type(other) is torch.Tensor
    model.load_state_dict({**model.state_dict(), "rotary.inv_freq": torch.arange(4.0)})
    assert model["rotary"].inv_freq.tolist() == [0.0, 1.0, 2.0, 3.0]


@every_casting_level
def test_restore_makes_them_plain(level):
    model = Decoder()
    before = model.mask.clone()
    model, optimizer = prepared(model, level)
    amp.restore(model, optimizer)
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())
    assert torch.equal(model.mask, before)
    outputs(model)


@every_casting_level
def test_the_model_moves_to_another_dtype_and_back(level):
    model, optimizer = prepared(Decoder(), level)
    expected = outputs(model)
    outputs(model.to("cpu"))
    assert is_kept(model)
    model.float()
    outputs(model)
    model.to(LOW[level])
    assert is_kept(model)
    assert torch.equal(outputs(model), expected)
    other = torch.float16 if LOW[level] is torch.bfloat16 else torch.bfloat16
    model.to(other)
    assert is_kept(model)
    losses(model, optimizer, 1)


@every_casting_level
def test_a_part_that_moves_by_itself_keeps_them(level):
    model, _ = prepared(Decoder(), level)
    model.add.to("cpu")
    model.add._apply(lambda tensor: tensor.clone())  # as a move to another device does
    assert outputs(model).isfinite().all()


@pytest.mark.gpu
@every_casting_level
def test_on_a_device_they_compute_as_on_the_cpu(level):
    torch.manual_seed(0)
    cpu, _ = prepared(Decoder(), level)
    moved = copy.deepcopy(cpu).cuda()
    torch.manual_seed(0)
    there, optimizer = prepared(Decoder().cuda(), level)
    expected = outputs(cpu)
    file = io.BytesIO()
    torch.save(there, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for model in (moved, there, copy.deepcopy(there), loaded):
        assert model.mask.is_cuda
        assert (torch.ones(16, 16, device="cuda", dtype=LOW[level]) + model.mask).is_cuda
        with torch.no_grad():
            found = model(ids().cuda())
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found.cpu(), expected, rtol=0.05, atol=0.05)
    loss = F.cross_entropy(there(ids().cuda()).flatten(0, 1).float(), ids().cuda().flatten())
    backward(loss, optimizer)
    optimizer.step()
    assert is_kept(there.cpu())
    assert is_kept(moved.cpu())
    assert torch.equal(outputs(moved), expected)


@pytest.mark.gpu
def test_a_number_on_the_cpu_and_a_copy_in_the_background_go_with_a_device(kept):
    x = of_shape(4).cuda().bfloat16()
    number, row = kept(torch.tensor(0.75)), kept(of_shape(4))
    assert torch.equal(x * number, x * 0.75)
    assert (x * number).dtype is torch.bfloat16
    sent = row.to("cuda", non_blocking=True)
    assert torch.equal(x + sent, x + of_shape(4).cuda().bfloat16())
    sent[torch.tensor([1], device="cuda")] = x[:1]
    assert sent.dtype is torch.float32
    assert sent.cpu()[1] == x.cpu()[0].float()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_leaves_a_buffer_that_another_library_has_replaced(copied):
    model, _ = prepared(Decoder(), "O5")
    model.mask = model.mask.float().as_subclass(Replaced)
    assert type(copied(model).mask) is Replaced


class Replaced(torch.Tensor):
    """A tensor of another library that owns its class, as DTensor does."""

    def __reduce_ex__(self, protocol):
        return torch.ones_like(self.as_subclass(torch.Tensor)).as_subclass, (Replaced,)

    def __deepcopy__(self, memo):
        return self.clone()


def test_replicas_of_data_parallel_compute_as_the_model():
    model, _ = prepared(Decoder(), "O5")
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module.named_children():
            replica._modules[name] = replicas[child]
        for name, param in module.named_parameters(recurse=False):
            setattr(replica, name, param.detach())
        for name, buffer in module.named_buffers(recurse=False):
            # What comes back from a broadcast are plain tensors.
            replica._buffers[name] = torch.frombuffer(
                bytearray(buffer.numpy().tobytes()), dtype=buffer.dtype
            ).reshape(buffer.shape)
    assert type(replicas[model].mask) is torch.Tensor
    assert torch.equal(outputs(replicas[model]), outputs(model))


def plain_copy(tensor):
    return torch.tensor(tensor.tolist(), dtype=tensor.dtype)


@pytest.mark.parametrize("copied", [lambda t: t, torch.clone, plain_copy])
def test_functional_calls_compute_as_the_model(copied):
    model, _ = prepared(Decoder(), "O5")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: copied(tensor.detach()) for name, tensor in state.items()}
    found = torch.func.functional_call(model, state, (ids(),))
    assert torch.equal(found, model(ids()))
    assert copied is not plain_copy or type(state["mask"]) is torch.Tensor


def test_an_ensemble_computes_as_its_models():
    models = [prepared(Decoder(), "O5")[0] for _ in range(2)]
    params, buffers = torch.func.stack_module_state(models)

    def call(params, buffers):
        return torch.func.functional_call(models[0], (params, buffers), (ids(),))

    found = torch.vmap(call)(params, buffers)
    expected = torch.stack([model(ids()) for model in models])
    torch.testing.assert_close(found, expected, rtol=2.0**-5, atol=2.0**-5)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(Positions(), nn.Linear(8, 8), nn.ReLU(), Positions())
        self.last = nn.Linear(8, 8)
        self.saves = True

    def forward(self, x):
        if self.saves:
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        else:
            x = self.block(x)
        return self.last(x)


@pytest.mark.parametrize("scaled", [True, False])
def test_recomputed_blocks_yield_again(scaled):
    model, optimizer = prepared(Checkpointed(), "O5")
    gradients = []
    for model.saves in (True, False):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4, 8)).sum()
        if scaled:
            backward(loss, optimizer)
        else:
            loss.backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_an_explained_model_keeps_its_buffers():
    model, _ = prepared(Decoder(), "O5")
    before = outputs(model)
    text = str(amp.debug.explain(model, ids()))
    assert "rotary" in text
    assert is_kept(model)
    assert torch.equal(outputs(model), before)


@every_casting_level
def test_what_is_added_later_yields_too(level):
    model, optimizer = prepared(Decoder(), level)
    model.add = nn.Sequential(Positions(), nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match=r"add\.0\.table \(float32\)"):
        outputs(model)
    optimizer.add_param_group({"params": model.add.parameters()})
    losses(model, optimizer, 1)


def test_in_modules_that_stay_in_fp32_they_are_plain():
    model = nn.Sequential(nn.Linear(8, 8), Positions(), nn.Linear(8, 8))
    model, _ = prepared(model, "O5", fp32_modules=["1"])
    assert type(model[1].table) is torch.Tensor
    assert model(torch.ones(1, 4, 8)).isfinite().all()


def test_a_failed_initialize_leaves_them_plain():
    model = Decoder()
    optimizer = sgd(model)
    optimizer.state = None  # fails when the optimizer is bound
    with pytest.raises(TypeError):
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())
    assert all(not vars(buffer) for buffer in model.buffers())


class ReadsDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.fc(x.to(self.scale.dtype) * 2)


def test_code_that_takes_its_dtype_from_one_is_told_what_to_do():
    model, _ = prepared(ReadsDtype(), "O5")
    with pytest.raises(
        RuntimeError, match=r"keeps these buffers.*scale(.|\n)*result\.to\(x\.dtype\)"
    ):
        model(torch.ones(1, 4))


def test_other_errors_stay_as_they_are():
    model, _ = prepared(nn.Sequential(Positions(), nn.Linear(8, 8)), "O5")
    with pytest.raises(RuntimeError, match="must match the size") as error:
        model(torch.ones(1, 4, 7))
    assert "keeps these buffers" not in str(error.value)


# -- what is lost is named -------------------------------------------------------------------


class Grid(nn.Module):
    def __init__(self, values, *, persistent=True):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("grid", values, persistent=persistent)

    def forward(self, x):
        return self.fc(x) + self.grid[:4]


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "apex"]


@every_casting_level
def test_buffers_that_lose_distinct_values_are_named_once_with_the_line(caplog, level):
    model = nn.Sequential(
        Grid(torch.arange(4000.0)), nn.Sequential(Grid(torch.linspace(0, 1, 9999)))
    )
    model, optimizer = prepared(model, level)
    outs = [model(torch.ones(1, 4)) for _ in range(2)]
    assert outs[0].isfinite().all()
    (line,) = lines(caplog)
    assert f"in Sequential, rounding to {str(LOW[level])[6:]} makes distinct values equal" in line
    assert "the buffers 0.grid, 1.0.grid. " in line
    assert "fp32_modules=['0', '1.0']" in line
    del optimizer


@every_casting_level
def test_the_line_keeps_them(caplog, level):
    model = nn.Sequential(Grid(torch.arange(4000.0)))
    model, _ = prepared(model, level, fp32_modules=["0"])
    assert torch.equal(model[0].grid, torch.arange(4000.0))
    assert not lines(caplog)


@every_casting_level
@pytest.mark.parametrize(
    "values",
    [torch.arange(256.0), torch.tensor([0.485, 0.456, 0.406]), torch.ones(99) / 3, torch.zeros(0)],
)
def test_buffers_that_lose_none_are_not_named(caplog, level, values):
    prepared(nn.Sequential(Grid(values)), level)
    prepared(nn.Sequential(nn.Linear(64, 64), Rotary(), Positions()), level)
    assert not lines(caplog)


def test_a_kept_buffer_is_named_where_it_is_first_rounded(caplog):
    model, _ = prepared(nn.Sequential(Grid(torch.arange(4000.0), persistent=False)), "O5")
    assert not lines(caplog)
    model[0].grid.float() * 2
    torch.outer(model[0].grid, torch.ones(3)).cos() * torch.ones(3, dtype=torch.bfloat16)
    assert not lines(caplog)
    for _ in range(2):
        model(torch.ones(1, 4))
    (line,) = lines(caplog)
    assert "to bfloat16 where it meets 16 bits makes distinct values equal" in line
    assert "the buffer 0.grid. " in line
    assert "fp32_modules=['0']" in line


def test_a_buffer_of_the_model_itself_is_named_with_what_to_do(caplog):
    prepared(Grid(torch.arange(4000.0)), "O5")
    (line,) = lines(caplog)
    assert "Put grid into a module of its own" in line
    assert "fp32_modules=[" not in line


def test_many_modules_are_written_as_patterns(caplog):
    model = nn.Sequential(*[nn.Sequential(Grid(torch.arange(999.0))) for _ in range(9)])
    model, _ = prepared(model, "O5")
    (line,) = lines(caplog)
    assert "fp32_modules=['*.*']" in line
    again = nn.Sequential(*[nn.Sequential(Grid(torch.arange(999.0))) for _ in range(9)])
    caplog.clear()
    prepared(again, "O5", fp32_modules=["*.*"])
    assert not lines(caplog)


def test_buffers_that_are_added_later_are_named_too(caplog):
    model, optimizer = prepared(nn.Sequential(nn.Linear(4, 4)), "O5")
    model.append(Grid(torch.arange(4000.0)))
    optimizer.add_param_group({"params": model[1].parameters()})
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model[2].parameters()})
    (line,) = lines(caplog)
    assert "the buffer 1.grid. " in line
    assert "fp32_modules=['1']" in line


def test_a_failed_initialize_names_nothing(caplog):
    model = Grid(torch.arange(4000.0))
    optimizer = sgd(model)
    optimizer.state = None
    with pytest.raises(TypeError):
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert not lines(caplog)


@pytest.fixture(autouse=True)
def warnings_are_captured(caplog):
    caplog.set_level(logging.WARNING, logger="apex")
