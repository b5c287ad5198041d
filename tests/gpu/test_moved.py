"""A model that moves after `initialize`: masters and the optimizer's state move along."""

import pytest
import torch

from apex import amp
from apex._core import tree
from tests.support import fused, loops
from tests.support.emulated_cuda import device

pytestmark = [pytest.mark.gpu, pytest.mark.emulated]

MAKERS = {
    "fused AdamW": loops.fused_adamw_of,
    "foreach Adam": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=2),
    **{name: fused.MAKERS[name] for name in ("FusedAdam", "FusedNovoGrad", "FusedLAMB")},
}


def train_and_move(level, name, moved_before):
    """Masters and state after four steps on a GPU, the model moved there before one of them."""
    loss_scale = 1.0 if name == "LBFGS" else None
    model, optimizer = loops.prepared(level, MAKERS[name], loss_scale=loss_scale)
    step = loops.train_step_with_closure if name == "LBFGS" else loops.train_step
    place = "cpu"
    for index, (x, y) in enumerate(loops.batches(4)):
        if index == moved_before:
            place = "cuda"
            model[0].cuda()  # part by part, as scripts of model parallelism do
            model[2].cuda()
        batch = x.to(place), y.to(place)
        device.waits()
        step(model, optimizer, *batch)
    return optimizer, device.waits()


@loops.every(name=MAKERS, level=loops.WITH_MASTERS)
def test_masters_and_state_move_along(level, name):
    optimizer, _ = train_and_move(level, name, moved_before=4)
    expected = loops.masters(optimizer)
    for moved_before in (0, 2):
        optimizer, waits = train_and_move(level, name, moved_before)
        on_device = [*amp.master_params(optimizer), *tree.tensors(list(optimizer.state.values()))]
        assert {each.device.type for each in on_device if each.dim()} == {"cuda"}
        masters = [master.cpu() for master in loops.masters(optimizer)]
        torch.testing.assert_close(masters, expected, rtol=1e-3, atol=1e-4)
        if "used" in name and level == "O5":
            assert waits == []


def train_with_offloads(level, offloads, *, in_background=False):
    """Outputs and masters of steps on a GPU; with masters in the CPU's memory in between."""
    model = loops.net().cuda()
    model, optimizer = loops.prepared(level, model=model)
    outputs = []
    for x, y in loops.batches(3):
        loops.train_step(model, optimizer, x.cuda(), y.cuda())
        for place in ("cpu", "cuda") if offloads else ():
            for param in optimizer.param_groups[0]["params"]:
                param.data = param.data.to(place, non_blocking=in_background)
            torch.cuda.synchronize()
            with torch.no_grad():
                outputs.append(model(x.cuda()).cpu())  # generates text, as RLHF does
    return outputs, loops.masters(optimizer)


@loops.every(in_background=[False, True], level=loops.WITH_MASTERS)
def test_masters_may_be_offloaded_while_the_model_is_evaluated(level, in_background):
    outputs, masters = train_with_offloads(level, True, in_background=in_background)
    assert loops.same(outputs[::2], outputs[1::2])
    assert loops.same(masters, train_with_offloads(level, False)[1])


def step_elsewhere(level, moves):
    """Masters after steps before which a part of the model leaves its GPU."""
    model, optimizer = loops.prepared(level, model=loops.net().cuda(), loss_scale=1.0)
    for x, y in loops.batches(3):
        loops.train_step(model, optimizer, x.cuda(), y.cuda())
        loops.backward(model, optimizer, x.cuda(), y.cuda())
        if moves:
            model[0].cpu()
            list(amp.master_params(optimizer))  # which follow, as for a clip
        optimizer.step()
        model.cuda()
    return [master.cpu() for master in loops.masters(optimizer)]


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_a_part_may_move_between_a_pass_and_its_step(level):
    found, expected = step_elsewhere(level, True), step_elsewhere(level, False)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
