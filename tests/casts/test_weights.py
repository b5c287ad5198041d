"""A cast weight is shared by what awaits one backward pass, and never older than the weight."""

import contextlib
import copy
import functools
import os
import subprocess
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from apex import amp
from tests.support import ranks
from tests.support.features import TORCH_VERSION
from tests.support.loops import Body, at_levels, every, grads, in_a_thread, prepared, same

LOW = {"O1": torch.float16, "O4": torch.bfloat16}
level = at_levels(*LOW)
X = torch.linspace(-1, 1, 8).reshape(2, 4)
shares_casts = pytest.mark.skipif(
    TORCH_VERSION < (2, 11), reason="this torch casts a weight at each use"
)


class Layers(nn.Module):
    """Each way to use a weight: a layer, a product, a convolution, a cell."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.empty(4, 4))
        self.conv = nn.Conv1d(4, 4, 1)
        self.cell = nn.GRUCell(4, 4)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)

    def forward(self, x):
        y = torch.tanh(self.first(x)) @ self.factor
        return self.cell(self.conv(y[..., None])[..., 0], x).float()


class ByHand(Layers):
    """The same, where every use casts its weight."""

    low = torch.bfloat16

    def forward(self, x):
        first, conv, cell = self.first, self.conv, self.cell
        low = lambda tensor: tensor.to(self.low)  # noqa: E731
        y = torch.tanh(F.linear(low(x), low(first.weight), low(first.bias))) @ low(self.factor)
        y = F.conv1d(y[..., None], low(conv.weight), low(conv.bias))[..., 0]
        for hook in conv._forward_hooks.values():
            hook(conv, (), y)
        weights = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
        return torch.gru_cell(y, low(x), *map(low, weights)).float()


def outcome(scenario, level, way):
    """What a scenario computes by hand, or with casts of ``initialize``, ``init``, a session."""
    model = ByHand() if way == "by hand" else Layers()
    model.low = LOW[level]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    if way == "initialize":
        return scenario(*prepared(level, lambda _: optimizer, model, loss_scale=1.0))
    if way == "beside a session":
        held = prepared(level)
    if way == "init":
        held = amp.init(loss_scale=1.0, patch_type=LOW[level])
    results = scenario(model, optimizer)
    if way == "beside a session":
        amp.restore(*held)
    if way == "init":
        held._deactivate()
    return results


def compare(scenario, level, ways=("initialize", "beside a session", "init")):
    wanted = outcome(scenario, level, "by hand")
    assert all(torch.isfinite(tensor).all() for tensor in wanted)
    for way in ways:
        # amp.init registers kernels of ours where torch's would cast alike, for the whole process.
        if way != "init" or "TORCH_KERNELS" not in os.environ:
            assert same(outcome(scenario, level, way), wanted), way


def test_torch_s_own_kernels_share_as_ours():
    """In a process without ours of linear layers and convolutions."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "O4 and not keeps", __file__]
    subprocess.run(command, env={**os.environ, "TORCH_KERNELS": ""}, check=True)


# -- writes between two uses whose backward pass comes later ---------------------------------------


@torch.no_grad()
def counted(model, optimizer):
    for param in model.parameters():
        param.mul_(0.5)


def pointed_elsewhere(model, optimizer):
    for param in model.parameters():
        param.data = param.data * 0.5


@torch.no_grad()
def set_to(model, optimizer):
    for param in model.parameters():
        param.set_(param * 0.5)


def stepped(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def stepped_by_others(model, optimizer):
    stepped(model, torch.optim.SGD(model.parameters(), lr=0.125))


def loaded(model, optimizer):
    state = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def replaced(model, optimizer):
    for name, param in [*model.named_parameters()]:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(param.detach() * 0.5))


def in_a_block(model, optimizer):
    with torch.inference_mode():
        for param in model.parameters():
            param.mul_(0.5)


def moved(model, optimizer):
    model.double().float()
    counted(model, optimizer)


WRITES = [counted, pointed_elsewhere, set_to, stepped, stepped_by_others]
WRITES += [loaded, replaced, in_a_block, moved]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_two_forwards_is_seen(write, level):
    def scenario(model, optimizer):
        first = model(X)
        write(model, optimizer)
        second = model(X)
        write(model, optimizer)
        third = model(X)
        optimizer.zero_grad()
        (first.sum() + second.sum() + third.sum()).backward()
        return [first, second, third, *(p.grad for p in model.parameters() if p.grad is not None)]

    compare(scenario, level)


class Product(nn.Linear):
    def forward(self, x):
        return self.weight @ x.T


@pytest.mark.parametrize("layer_class", [nn.Linear, Product])
def test_a_step_of_a_kernel_that_counts_no_writes_is_seen(layer_class, level):
    def fused(params):
        return torch.optim.SGD(params, lr=1.0, fused=True)

    layer, optimizer = prepared(level, fused, model=layer_class(2, 128, bias=False))
    _awaits_its_backward = layer(torch.ones(1, 2, requires_grad=True))
    layer.weight.grad = torch.zeros(128, 2)
    layer.weight.grad[-1] = 64.0
    optimizer.step()
    found = layer(torch.ones(1, 2)).view(-1)
    torch.testing.assert_close(found.float(), layer.weight.sum(1), rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("layer_class", [nn.Linear, Product])
def test_a_write_to_the_end_of_a_large_weight_is_seen(layer_class, level):
    layer, _ = prepared(level, model=layer_class(2, 128, bias=False))
    _awaits_its_backward = layer(torch.ones(1, 2, requires_grad=True))
    with torch.no_grad():
        layer.weight[-1] = 8.0
    assert layer(torch.ones(1, 2)).view(-1)[-1] == 16.0


@pytest.mark.parametrize("passes", ["plain", "grad", "retained"])
def test_an_uncounted_write_after_the_backward_pass_is_seen(passes, level):
    """As in a step that the script writes itself, while it still holds the loss."""

    def scenario(model, optimizer):
        losses = []
        params = [*model.parameters()]
        for _ in range(3):
            losses.append(model(X).square().sum())
            if passes == "grad":
                found = torch.autograd.grad(losses[-1], params)
            else:
                losses[-1].backward(retain_graph=passes == "retained")
                found = [param.grad for param in params]
            for param, grad in zip(params, found, strict=True):
                param.data.sub_(grad, alpha=0.125)
                param.grad = None
        return losses

    compare(scenario, level)


def test_a_retained_graph_keeps_no_cast_for_the_next_pass(level):
    """A script writes the end of a large weight, which only a backward pass in between tells."""
    weight = nn.Parameter(torch.ones(128, 2))
    handle = amp.init(loss_scale=1.0, patch_type=LOW[level])
    losses = []
    for _ in range(3):
        x = torch.ones(1, 2, requires_grad=True)  # so that the graph saves the cast
        losses.append(F.linear(x, weight).float().sum())
        losses[-1].backward(retain_graph=True)
        weight.data[-1] += 64.0
    handle._deactivate()
    assert [loss.item() for loss in losses] == [256.0, 384.0, 512.0]


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_averages_are_swapped_in_for_an_evaluation_and_back(mode, held, level):
    def swap(model, values):
        for param, value in zip(model.parameters(), values, strict=True):
            param.data.copy_(value)

    def scenario(model, optimizer):
        outputs, kept = [], []
        for _ in range(2):
            loss = model(X).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own = [param.data.clone() for param in model.parameters()]
            swap(model, [value * 0.5 for value in own])
            with mode():
                evaluated = [model(X), model(-X)]
            outputs += [loss.detach(), *(output.detach().clone() for output in evaluated)]
            if held:
                kept += evaluated
            del evaluated
            swap(model, own)
        return outputs

    compare(scenario, level)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_finite_differences_are_exact(mode, level):
    def scenario(model, optimizer):
        values = []
        for step in (0.25, -0.5, 0.25):
            model.first.weight.data[1, 1] += step
            values.append(model(X).sum().detach())
            counted(model, optimizer)
            with mode():
                value = model(X).sum()
            values.append(value.detach().clone())
        return values

    compare(scenario, level)


def both_passes_of_sam(model, optimizer):
    first = model(X).square().sum()
    first.backward()
    away = grads(model.parameters())
    for param, grad in zip(model.parameters(), away, strict=True):
        param.data.add_(grad, alpha=0.125)
    optimizer.zero_grad()
    second = model(X).square().sum()
    second.backward()
    for param, grad in zip(model.parameters(), away, strict=True):
        param.data.sub_(grad, alpha=0.125)
    optimizer.step()
    return [first, second, *grads(model.parameters()), model(X)]


def functional_calls(model, optimizer):
    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    params = dict(model.named_parameters())
    leaves = {name: (p * 0.5).detach().requires_grad_() for name, p in params.items()}
    results = [model(X), loss(leaves, X), model(X)]
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.mul_(0.5)
    results += [loss(leaves, X), model(X)]
    plain = {name: p.detach() for name, p in params.items()}
    results += torch.func.grad(loss)(plain, X).values()
    return [*results, model(X)]


def recompute(model, optimizer, *, reentrant):
    x = X.clone().requires_grad_()
    before = model(X)
    output = checkpoint(model, x, use_reentrant=reentrant)
    for param in model.parameters():
        param.data.mul_(0.5)
    output.square().sum().backward()
    return [before, output, *grads(model.parameters()), model(X)]


def write_into_a_view_of_a_cast(model, optimizer):
    factor = model.factor.to(model.low) if isinstance(model, ByHand) else model.factor
    view = torch.einsum("ij->ji", factor)
    held = model(X)
    view.mul_(2)
    return [held, view.float(), model(X)]


def write_in_the_forward(model, optimizer):
    def halve(module, args, output):
        with torch.no_grad():
            model.first.weight.mul_(0.5)

    model.conv.register_forward_hook(halve)
    return [model(X), model(X), model(X)]


def training_after_inference_mode(model, optimizer):
    with torch.inference_mode():
        before = model(X).clone()
    loss = model(X).square().sum()
    loss.backward()
    return [before, loss, *grads(model.parameters())]


def gradients_that_inference_mode_enables(model, optimizer):
    held = model(X)
    with torch.inference_mode(), torch.enable_grad():
        evaluated = model(X).clone()
    loss = held.square().sum() + model(X).square().sum()
    loss.backward()
    return [evaluated, loss, *grads(model.parameters())]


def trace(model, optimizer):
    held = model(X)
    traced = make_fx(model)(X)
    counted(model, optimizer)
    return [held, traced(X)]


SCENARIOS = [both_passes_of_sam, functional_calls]
SCENARIOS += [functools.partial(recompute, reentrant=each) for each in (True, False)]
SCENARIOS += [write_into_a_view_of_a_cast, write_in_the_forward, training_after_inference_mode]
SCENARIOS += [gradients_that_inference_mode_enables, trace]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_pass_uses_the_weights_of_its_time(scenario, level):
    compare(scenario, level)


def test_another_thread_sees_what_this_one_wrote(level):
    def scenario(model, optimizer):
        first = model(X)
        counted(model, optimizer)
        second = in_a_thread(lambda: model(X))
        counted(model, optimizer)
        third = model(X)
        return [first, second, third]

    compare(scenario, level, ["initialize"])  # the others cast in their own thread


def assert_a_write_is_seen(written, model, output):
    """Checks a model after a write to a part of it, while its earlier output is alive."""
    counted(written, None)
    expected = copy.deepcopy(model)(X)
    assert same(model(X), expected)
    assert not same(output, expected)


def test_a_write_is_seen_after_another_thread_ended_casts_within_a_forward(level):
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    amp.initialize([model, other], opt_level=level, verbosity=0)
    between = model[0].register_forward_hook(
        lambda *_: in_a_thread(lambda: other(X).sum().backward())
    )
    kept = model(X)
    between.remove()
    assert_a_write_is_seen(model, model, kept)


def around(inner, layer):
    """A model with a layer that calls another model, which is no part of it, in between."""
    return Body(lambda self, x: (self.layer(x), inner(x), self.layer(x)), layer=layer)


def all_same(outputs, layer, dtypes):
    """Whether each output is the layer's, by hand, in its dtype."""
    with amp.disable_casts():
        tensors = X, layer.weight, layer.bias
        wanted = [F.linear(*(tensor.to(dtype) for tensor in tensors)) for dtype in dtypes]
    return same([*outputs], wanted)


@every(mode=[torch.enable_grad, torch.no_grad], level=LOW)
def test_two_sessions_cast_a_shared_weight_to_their_own_dtypes(level, mode):
    """Also where the forward pass of one is inside the other's, or in a block of the script."""
    layer = nn.Linear(4, 4)
    other = "O4" if level == "O1" else "O1"
    low, other_low = LOW[level], LOW[other]
    inner, _ = prepared(other, model=nn.Sequential(layer), loss_scale=1.0)
    with torch.autocast("cpu", low, cache_enabled=True):
        assert all_same([layer(X), inner(X), layer(X)], layer, [low, other_low, low])
    outer, _ = prepared(level, model=around(inner, layer), loss_scale=1.0)
    held = []
    for _ in range(2):
        with mode():
            held.append([*outer(X), inner(X)])
        assert all_same(held[-1], layer, [low, other_low, low, other_low])
        layer.weight.data.mul_(0.5)


def test_a_model_that_only_the_forward_of_another_calls_is_cast_again(level):
    layer = nn.Linear(4, 4)
    inner, _ = prepared(level, model=nn.Sequential(layer), loss_scale=1.0)
    outer, _ = prepared(level, model=around(inner, nn.Linear(4, 4)), loss_scale=1.0)
    held = outer(X)
    layer.weight.data.mul_(0.5)
    assert all_same([outer(X)[1]], layer, [LOW[level]])
    del held


def test_a_weight_that_a_part_without_weights_gets_later_is_cast_again(level):
    part, layer = nn.Module(), nn.Linear(4, 4)
    body = Body(lambda self, x: F.linear(x, self.part.weight, self.part.bias), part=part)
    model, _ = prepared(level, model=nn.Sequential(body, nn.Linear(4, 4)))
    with contextlib.suppress(AttributeError):
        model(X)
    part.weight, part.bias = layer.weight, layer.bias
    held = model(X)
    assert_a_write_is_seen(layer, model, held)


def test_a_weight_of_a_part_that_a_script_adds_is_cast_again(level):
    model, _ = prepared(level, model=nn.Sequential(nn.Linear(4, 4)))
    model(X)
    layer = nn.Linear(4, 4)
    model.append(layer)
    held = model(X)
    assert_a_write_is_seen(layer, model, held)


def test_weights_may_be_freed_between_passes(level):
    """As by FullyShardedDataParallel, whose parameters are views of a flat tensor."""
    layer = nn.Linear(4, 4, bias=False)
    flat = torch.linspace(-1.0, 1.0, 20)
    layer.weight = nn.Parameter(flat[4:].view(4, 4))
    full, storage = flat.clone(), flat.untyped_storage()
    size = storage.nbytes()

    def gather(*_):
        storage.resize_(size)
        flat.copy_(full)

    def free(*_):
        storage.resize_(0)

    wanted = F.linear(*(tensor.to(LOW[level]) for tensor in (X, layer.weight.clone())))
    model, _ = prepared(level, model=nn.Sequential(layer))
    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(free)
    free()
    assert same([model(X), model(X)], [wanted, wanted])


class Subclass(nn.Parameter):
    pass


def with_subclass(model):
    model.extra = Subclass(torch.ones(2))


def with_sparse(model):
    model.extra = nn.Parameter(torch.eye(2).to_sparse())


def as_views(model):
    """As for a bucket of gradients, or ``vector_to_parameters``."""
    params = [*model.parameters()]
    vector = torch.cat([param.detach().flatten() for param in params])
    nn.utils.vector_to_parameters(vector, params)


@every(level=LOW, change=[with_subclass, with_sparse, as_views])
def test_a_write_is_seen_whatever_the_weights_are(change, level):
    def scenario(model, optimizer):
        change(model)
        first = model(X)
        counted(model, optimizer)
        second = model(X)
        for param in (model.first.bias, model.conv.weight, model.factor):
            param.data.mul_(0.5)
        return [first, second, model(X)]

    compare(scenario, level)


def test_a_pass_without_gradients_around_one_with_gradients_keeps_no_cast(level):
    layer, inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def guided(self, x):
        with torch.enable_grad():
            return self.layer(x), inner(x)

    outer = Body(guided, layer=layer)
    amp.initialize([outer, inner], opt_level=level, verbosity=0)
    with torch.no_grad():
        held = outer(X)
    counted(outer, None)
    assert all_same(outer(X)[:1], layer, [LOW[level]])
    del held


def test_a_restored_model_computes_in_fp32():
    plain = Layers()
    model, optimizer = prepared("O4", model=copy.deepcopy(plain))
    output = model(X)  # which still awaits its backward pass
    amp.restore(model, optimizer)
    assert torch.equal(model(X), plain(X))
    del output


# -- what is kept ----------------------------------------------------------------------------------


@contextlib.contextmanager
def saved_bytes(kept):
    """Yields a list; in the end it has the bytes of 16-bit storages of at least 32 elements."""
    storages = {}

    def pack(tensor):
        if tensor.dtype in LOW.values() and tensor.untyped_storage().nbytes() >= 2 * 32:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    sizes.append(sum(storages.values()))


class Product(nn.Linear):
    def forward(self, x):
        return x @ self.weight


def sums():
    parts = {"rows": nn.Embedding(8, 8), "linear": nn.Linear(8, 8)}
    return Body(lambda self, x: self.linear(self.rows(torch.tensor([3])) + x), **parts)


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


@torch.no_grad()
def without(model, x):
    return model(x)


STEPS = {
    "linear": (lambda: nn.Linear(8, 8), lambda m, x: torch.tanh(m(x))),
    "product": (lambda: Product(8, 8), lambda m, x: torch.tanh(m(x))),
    "conv": (lambda: nn.Conv1d(8, 8, 1), lambda m, x: torch.tanh(m(x[..., None])[..., 0])),
    "gru": (lambda: nn.GRUCell(8, 8), lambda m, x: m(x, x)),
    "lstm": (lambda: nn.LSTMCell(8, 8), lambda m, x: m(x)[0]),
    "rnn": (lambda: nn.RNNCell(8, 8), lambda m, x: m(x, x)),
    "embedding": (sums, lambda m, x: torch.tanh(m(x))),
    "tied": (tied, lambda m, x: torch.tanh(m(x))),
    "parametrized": (lambda: weight_norm(nn.Linear(8, 8)), lambda m, x: torch.tanh(m(x))),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0]),
    "cross attention": (lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x + 1, x + 2)[0]),
    "products of attention": (
        lambda: nn.Linear(8, 8),
        lambda m, x: F.scaled_dot_product_attention(m(x), m(-x), x),
    ),
    "evaluations between": (lambda: nn.Linear(8, 8), lambda m, x: torch.tanh(m(x) + without(m, x))),
}


def kept_in_a_loop(step, model):
    x = torch.ones(1, 8, requires_grad=True)
    kept = []
    with saved_bytes(kept) as sizes:
        for _ in range(5):
            x = step(model, x).float()
    return sizes[0]


@pytest.mark.parametrize("name", STEPS)
def test_a_loop_keeps_what_autocast_keeps(name, level):
    make, step = STEPS[name]
    with torch.autocast("cpu", LOW[level], cache_enabled=True):
        wanted = kept_in_a_loop(step, make())
    model, optimizer = prepared(level, model=make(), loss_scale=1.0)
    assert kept_in_a_loop(step, model) == wanted > 0
    amp.restore(model, optimizer)
    handle = amp.init(loss_scale=1.0, patch_type=LOW[level])
    assert kept_in_a_loop(step, model) == wanted
    handle._deactivate()


@shares_casts
@pytest.mark.parametrize("is_part", [False, True])
def test_models_share_the_casts_of_their_common_weight(level, is_part):
    layer = nn.Linear(8, 8)
    models = [nn.Sequential(layer), layer if is_part else nn.Sequential(layer)]
    step = lambda models, x: torch.tanh(models[1](models[0](x).float()))  # noqa: E731
    with torch.autocast("cpu", LOW[level]):
        wanted = kept_in_a_loop(step, models)
    amp.initialize(models, opt_level=level, verbosity=0)
    assert kept_in_a_loop(step, models) == wanted > 0


@pytest.mark.parametrize("function", ["linear", "convolution"])
def test_functions_of_a_script_share_casts_in_a_block_of_autocast(function, level):
    def step(model, x):
        if function == "linear":
            return torch.tanh(F.linear(x, model.weight, model.bias))
        return torch.tanh(F.conv1d(x[..., None], model.weight[..., None], model.bias)[..., 0])

    layer, _ = prepared(level, model=nn.Linear(8, 8))
    block = functools.partial(torch.autocast, "cpu", LOW[level], cache_enabled=True)
    with block():
        kept = kept_in_a_loop(step, layer)
    with amp.disable_casts(), block():
        assert kept_in_a_loop(step, layer) == kept > 0


def casts_of(weight, output):
    """The number of a weight's casts in the graph of an output."""
    casts = 0
    nodes = [output.grad_fn]
    for node in nodes:  # which grows meanwhile
        for following, _ in node.next_functions:
            if getattr(following, "variable", None) is weight:
                casts += 1
            elif following is not None and following not in nodes:
                nodes.append(following)
    return casts


@shares_casts
def test_a_cell_casts_weights_once_that_no_graph_saves(level):
    """Neither the inputs nor the first states need gradients."""
    model, _ = prepared(level, model=nn.LSTMCell(4, 4), loss_scale=1.0)
    output = sum(model(x)[0] for x in X.split(1)).sum()
    assert [casts_of(weight, output) for weight in model.parameters()] == [1] * 4


def test_a_block_of_autocast_after_the_session_keeps_no_weight_alive(level):
    model, optimizer = prepared(level)
    model(X.double())  # from now on, our kernels cast in all layers
    amp.restore(model, optimizer)
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", LOW[level]):
        layer(X)
    weight = weakref.ref(layer.weight)
    del layer
    assert weight() is None


def test_a_registered_function_casts_a_weight_once_and_sees_a_write(level):
    functions = types.ModuleType("functions")
    functions.product = lambda x, weight: x @ weight
    amp.register_half_function(functions, "product")
    model, optimizer = prepared(level, model=nn.Linear(8, 8))
    step = lambda model, x: torch.tanh(functions.product(x, model.weight))  # noqa: E731
    assert kept_in_a_loop(step, model) == 2 * 64
    x = torch.ones(1, 8)
    held = functions.product(x, model.weight)
    counted(model, optimizer)
    wanted = x.to(held.dtype) @ model.weight.to(LOW[level])
    assert torch.equal(functions.product(x, model.weight), wanted)


def bytes_kept(kind):
    """What a loop of the script keeps with a weight of its own, or of a list of modules."""
    weight = nn.Parameter(torch.eye(8))
    model, held = nn.Linear(4, 4), nn.ModuleList()
    held.weight = weight
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    models = [model, held] if kind == "list" else [model]
    step = lambda _, x: torch.tanh(F.linear(x, weight))  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        wanted = kept_in_a_loop(step, model)
    amp.initialize(models, optimizer, opt_level="O4", verbosity=0)
    return kept_in_a_loop(step, model), wanted


@pytest.mark.parametrize("kind", ["own", "list"])
def test_a_weight_that_no_model_s_forward_uses_is_cast_once(kind):
    """In a process of its own, as our kernels stay."""
    kept, wanted = ranks.in_new_process(bytes_kept, kind)
    assert kept == wanted > 0


@pytest.mark.gpu
def test_a_replay_casts_the_weights_of_its_time(level):
    model, optimizer = prepared(level, model=nn.Linear(4, 4).cuda())
    x = X.cuda()
    held = model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(x)
    for _ in range(2):
        counted(model, optimizer)
        graph.replay()
        with amp.disable_casts():
            wanted = F.linear(*(t.to(LOW[level]) for t in (x, model.weight, model.bias)))
        assert same([output.float(), model(x).float()], [wanted.float()] * 2)
    del held


def growth(work):
    """The bytes that are allocated by ``work`` and not freed."""
    with torch.autograd.profiler.profile(profile_memory=True) as record:
        work()
    events = record.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@every(ways=["initialize", "init"], end=["backward", "step", "no grad", "restore"])
def test_what_ends_casts_frees_them(end, ways):
    """Each weight has 2 KiB, and its cast 1 KiB."""
    model = nn.Sequential(nn.Linear(32, 16), nn.GRUCell(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    ended = model, optimizer
    if ways == "initialize":
        ended = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    else:
        handle = amp.init(loss_scale=1.0, patch_type=torch.bfloat16)
    x = torch.ones(1, 32)
    held = []

    def work():
        if end == "no grad":
            with torch.no_grad():
                held.append(model(x).sum())
            return
        loss = model(x).sum()
        if end == "backward":
            held.append(loss)
            loss.backward()
            return
        del loss
        if end == "step":
            optimizer.step()
        elif ways == "initialize":
            amp.restore(*ended)
        else:
            handle._deactivate()

    model(x).sum().backward()
    assert growth(work) < 1024
    if ways == "init":
        handle._deactivate()
