"""What amp costs: host syncs and Python per iteration, stored bytes per parameter."""

import gc
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex import amp
from benchmarks.memory import storages
from tests.training import cases

FUSED = {
    "Adam": lambda params: torch.optim.Adam(params, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
UNFUSED = {
    "Adam": lambda params: torch.optim.Adam(params, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, foreach=True),
}


class HostReads(TorchDispatchMode):
    """Counts the operators that hand a tensor's value to the host."""

    READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in self.READS
        return func(*args, **(kwargs or {}))


def reads_of(model, optimizer, train, steps=3):
    """Host reads of some steady iterations, after two to start with."""
    data = list(cases.batches(2 + steps))
    for x, y in data[:2]:
        train(model, optimizer, x, y)
    with HostReads() as reads:
        for x, y in data[2:]:
            train(model, optimizer, x, y)
    return reads.count


def plain_step(model, optimizer, x, y):
    optimizer.zero_grad()
    cases.loss_of(model, x, y).backward()
    optimizer.step()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
@pytest.mark.parametrize("level", cases.MIXED)
def test_an_iteration_with_a_fused_optimizer_has_no_host_read(level, name, loss_scale):
    pair = cases.prepared(level, FUSED[name], loss_scale=loss_scale)
    assert reads_of(*pair, cases.train_step) == 0


@pytest.mark.parametrize("name", UNFUSED)
@pytest.mark.parametrize("level", cases.MIXED)
def test_an_iteration_with_any_other_optimizer_has_at_most_one_host_read_more(level, name):
    model = cases.net()
    own = reads_of(model, UNFUSED[name](model.parameters()), plain_step)
    pair = cases.prepared(level, UNFUSED[name], loss_scale="dynamic")
    assert reads_of(*pair, cases.train_step, steps=3) <= own + 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("level", cases.MIXED)
def test_an_iteration_with_a_fused_optimizer_never_waits_for_the_gpu(level, name):
    model, optimizer = cases.prepared(level, FUSED[name], model=cases.net().cuda())
    data = [(x.cuda(), y.cuda()) for x, y in cases.batches(5)]
    for x, y in data[:2]:
        cases.train_step(model, optimizer, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in data[2:]:
            cases.train_step(model, optimizer, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def live_bytes():
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    return sum(storages().values())


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize(
    ("level", "expected"), [("O0", 12), ("O1", 12), ("O4", 12), ("O2", 14), ("O5", 14)]
)
def test_stored_bytes_per_parameter_after_step_and_zero_grad(level, expected, clear):
    x = torch.randn(2, 100)
    before = live_bytes()
    model = torch.nn.Linear(100, 200, bias=False)
    model, optimizer = cases.prepared(level, FUSED["AdamW"], model=model)
    for _ in range(2):
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        del scaled_loss
        optimizer.step()
        {"optimizer": optimizer, "model": model}[clear].zero_grad()
    per_param = (live_bytes() - before) / model.weight.numel()
    assert expected <= per_param < expected + 0.01


class Instructions:
    """Counts the bytecode instructions that Python runs in its block."""

    def __enter__(self):
        self.count = 0
        sys.settrace(self._of_frame)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _of_frame(self, frame, event, value):
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._in_frame

    def _in_frame(self, frame, event, value):
        self.count += event == "opcode"
        return self._in_frame


def instructions_of(iteration):
    for _ in range(40):  # past the blocks that are inspected for mistakes
        iteration()
    with Instructions() as instructions:
        iteration()
    return instructions.count


def deep(layers):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)])
    return model, FUSED["AdamW"](model.parameters()), torch.randn(2, 4)


def native(layers, dtype):
    model, optimizer, x = deep(layers)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def iteration():
        with torch.autocast("cpu", dtype):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return instructions_of(iteration)


def own(layers, level):
    model, optimizer, x = deep(layers)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def iteration():
        loss = model(x).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return instructions_of(iteration)


@pytest.mark.filterwarnings("ignore:fp16 is emulated")
@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_a_layer_costs_no_more_python_than_with_autocast_and_grad_scaler(level, dtype):
    assert own(40, level) - own(20, level) <= native(40, dtype) - native(20, dtype)
