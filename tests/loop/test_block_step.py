"""Large models without loss scale step block by block: same bits, and no fp32 gradients."""

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from apex import amp
from apex._engine.optimizer import block_step
from apex.optimizers import FusedAdam, FusedSGD
from benchmarks.loops import with_amp
from benchmarks.memory import peak_bytes
from tests.support import loops

KINDS = {
    "AdamW": loops.fused_adamw_of,
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.1, momentum=0.9),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_step, "least_elements", 1)
    monkeypatch.setattr(block_step, "_LEAST", 16)
    block_step._cuts.cache_clear()
    yield
    block_step._cuts.cache_clear()


@pytest.fixture
def counted(monkeypatch):
    """Counts the tensors that fused operators took by blocks."""
    taken = []
    run = block_step._run_blocks

    def counting(func, pairs, lists, kwargs):
        taken.append(len(pairs))
        return run(func, pairs, lists, kwargs)

    monkeypatch.setattr(block_step, "_run_blocks", counting)
    return taken


def leave(model):
    """Changes no gradient."""


def replace(model):
    """Puts gradients in place that blocks cannot take."""
    weight, bias, other, _ = model.parameters()
    weight.grad = weight.grad.T.contiguous().T
    bias.grad = None
    other.grad = other.grad.clone().requires_grad_()


def stepped(
    name, monkeypatch, *, blocks, net=loops.net, edit=leave, clip=False, passes=1, shape=(3, 4)
):
    monkeypatch.setattr(block_step, "least_elements", 1 if blocks else 1e9)
    model, optimizer = loops.prepared("O5", KINDS[name], model=net())
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(passes):
            x, y = torch.randn(shape, generator=generator), torch.randn(3, 2, generator=generator)
            loops.backward(model, optimizer, x, y)
        edit(model)
        if clip:
            amp.clip_grad_norm_(optimizer, 0.05)
        optimizer.step()
        assert _get_current_dispatch_mode() is None
        assert loops.agree(model, optimizer)
        assert not optimizer._optimizer_step_pre_hooks
    return loops.masters(optimizer), optimizer.state_dict()["state"]


@loops.every(name=KINDS, clip=[False, True])
def test_blocks_give_the_bits_of_a_step_over_fp32_gradients(name, clip, counted, monkeypatch):
    by_blocks = stepped(name, monkeypatch, blocks=True, clip=clip)
    assert counted == [4, 4, 4]
    assert loops.same(by_blocks, stepped(name, monkeypatch, blocks=False, clip=clip))


@loops.every(name=KINDS)
def test_a_step_takes_gradients_of_any_layout_and_with_a_graph(name, counted, monkeypatch):
    by_blocks = stepped(name, monkeypatch, blocks=True, edit=replace)
    assert counted == [1, 1, 1]
    assert loops.same(by_blocks, stepped(name, monkeypatch, blocks=False, edit=replace))


def channels_last_net():
    return loops.conv_net().to(memory_format=torch.channels_last)


@loops.every(passes=[1, 2], cuts=[True, False])
def test_channels_last_and_batch_norm_go_along(passes, cuts, counted, monkeypatch):
    monkeypatch.setattr(block_step, "_LEAST", 16 if cuts else 2**19)
    options = {"net": channels_last_net, "passes": passes, "shape": (3, 3, 4, 4)}
    by_blocks = stepped("AdamW", monkeypatch, blocks=True, **options)
    assert bool(counted) == (passes == 1)  # a sum is in fp32
    assert loops.same(by_blocks, stepped("AdamW", monkeypatch, blocks=False, **options))


def flat_net():
    net = loops.net()
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, net.parameters())
    return net


def test_weights_that_lie_in_one_flat_tensor_go_along(counted, monkeypatch):
    monkeypatch.setattr(block_step, "_LEAST", 8)  # cuts also a weight that is not the first
    by_blocks = stepped("AdamW", monkeypatch, blocks=True, net=flat_net)
    assert counted == [4, 4, 4]
    assert loops.same(by_blocks, stepped("AdamW", monkeypatch, blocks=False, net=flat_net))


def test_a_pre_hook_that_reads_a_gradient_gets_it_in_fp32(counted):
    model, optimizer = loops.prepared("O5", loops.fused_adamw_of)
    master = next(iter(amp.master_params(optimizer)))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(master.grad.clone()))
    loops.train_step(model, optimizer, *loops.batch())
    assert seen[0].dtype is torch.float32
    assert seen[0].any()
    assert counted == [3]


@pytest.mark.parametrize("least", [1, 1e9])
def test_torch_refuses_a_pass_through_weights_that_were_stepped_since(least, monkeypatch):
    monkeypatch.setattr(block_step, "least_elements", least)
    model, optimizer = loops.prepared("O5", loops.fused_adamw_of)
    x, y = loops.batch()
    earlier = loops.loss_of(model, x, y)
    loops.train_step(model, optimizer, x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()


@pytest.mark.parametrize("least", [1, 1e9])
def test_a_step_of_torchs_grad_scaler_leaves_unscaled_gradients(least, monkeypatch):
    monkeypatch.setattr(block_step, "least_elements", least)
    model, optimizer = loops.prepared("O5", loops.fused_adamw_of)
    x, y = loops.batch()
    loops.loss_of(model, x, y).backward()
    before = [param.grad.float() for param in model.parameters()]
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loops.loss_of(model, x, y)).backward()
    scaler.step(optimizer)
    assert loops.same(before, loops.grads(model.parameters()))


@pytest.mark.parametrize(("max_norm", "most"), [(None, 16.3), (0.1, 16.4)])
def test_the_peak_of_an_iteration(max_norm, most, monkeypatch):
    monkeypatch.undo()
    task = loops.large_task()
    params = sum(param.numel() for param in task.model().parameters())
    peak = peak_bytes(with_amp(task, "O5", max_norm=max_norm), 14 * params) / params
    assert peak <= most + 1.5  # buffers of a block are large beside three layers


def test_an_optimizer_that_clips_by_itself_gets_fp32_gradients(monkeypatch):
    monkeypatch.setitem(KINDS, "clips", lambda p: FusedAdam(p, lr=1e-2, max_grad_norm=0.05))
    by_blocks = stepped("clips", monkeypatch, blocks=True)
    assert loops.same(by_blocks, stepped("clips", monkeypatch, blocks=False))


def test_no_hook_sees_a_stand_in():
    model, optimizer = loops.prepared("O5", loops.fused_adamw_of)
    seen = []
    masters = list(amp.master_params(optimizer))
    optimizer.register_step_post_hook(lambda *_: seen.extend(p.grad for p in masters))
    loops.train_step(model, optimizer, *loops.batch())
    assert loops.same(seen, [param.grad.float() for param in model.parameters()])
    assert not loops.same(seen, loops.masters(optimizer))


class Clips(torch.optim.AdamW):
    """Reads gradients in its own step."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_value_([p for g in self.param_groups for p in g["params"]], 1e-3)
        return super().step(closure)


def test_an_optimizer_with_a_step_of_its_own_gets_fp32_gradients(counted):
    loops.trained("O5", lambda p: Clips(p, lr=1e-2, fused=True), steps=1)
    assert not counted
