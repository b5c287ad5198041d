"""Every optimizer of eight libraries, unmodified, against a loop by hand (tests/support/reference).

Each one trains, also through an overflow, with a group that is added, and resumed.
"""

import importlib
import inspect
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from apex import amp
from tests.clients.libraries import need
from tests.support import loops
from tests.support.reference.plain_loops import Loop

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

LIBRARIES = (
    "pytorch_optimizer", "torch_optimizer", "timm.optim", "optimi", "heavyball", "schedulefree",
    "torchao.optim", "bitsandbytes.optim",
)  # fmt: skip
WIDTH = 64  # the least size of a quantized state is 4096 elements
PHASES = (  # what a library cannot do by hand is left out
    ("train", "train", "group", "train", "overflow", "resume", "train", "train"),
    ("train", "train", "overflow", "resume", "train", "train"),
    ("train", "train", "train"),
)
NOT_TRAINED = {
    "AdamMini", "AdaLOMO", "GSAM", "LOMO", "WSAM",  # take a model
    "CPUOffloadOptimizer", "DeMo", "DistributedMuon",  # need a GPU, or process groups
    "PCGrad", "SafeFP16Optimizer",  # run the backward pass
    "PSGDBase", "SOAPBase",  # base classes
    "AdEMAMix32bit", "PagedAdEMAMix32bit",  # not on a CPU
    "AdaHessian", "Adahessian", "SophiaH",  # need O4: tests/loop/test_optimizers_of_others.py
}  # fmt: skip
CLOSURES = ("AliG", "LBFGS", "SAMWrapper")
WRAPPERS = ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC")
OPTIONS = {"BSAM": {"num_data": 8}, "Ranger21": {"num_iterations": 8}}
MOMENTUM = ("LARS32bit", "LARS8bit", "PytorchLARS", "SGD32bit", "SGD8bit")


def batch_of(step, *, overflow=False):
    x, y = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step))
    if overflow:
        x[0, 0] = torch.inf
    return x, y


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def optimizer_of(kind, params):
    name, library = kind.__name__, kind.__module__.partition(".")[0]
    takes = inspect.signature(kind.__init__).parameters
    options = {"lr": 1e-3, **OPTIONS.get(name, {})} if "lr" in takes else OPTIONS.get(name, {})
    if name in MOMENTUM or (library == "bitsandbytes" and name in ("LARS", "SGD")):
        options["momentum"] = 0.9
    if library == "pytorch_optimizer" and ("Muon" in name or name == "AdaGO"):
        params = [{"params": [param], "use_muon": param.ndim == 2} for param in params]
    if name == "SpectralSphere":
        params = [param for param in params if param.ndim == 2]
    if name == "SplitOpt":
        params = [{"params": params, "optimizer": importlib.import_module(library).AdamW}]
    if name == "SAMWrapper":
        options["wrapped_optimizer"] = importlib.import_module(library).SFAdamW  # has train()
    if name in WRAPPERS:
        return kind(torch.optim.SGD(params, lr=1e-2), **options)
    if "base_optimizer" in takes:
        options = {"base_optimizer": torch.optim.SGD, "lr": 1e-2}
    return kind(params, **options)


def takes_closure(kind):
    return kind.__name__ in CLOSURES or kind.__name__.endswith("Closure")


def run_step(backward, step, zero_grad, kind):
    """Runs one iteration: ``step`` calls a method of the optimizer."""
    torch.manual_seed(7)  # some draw
    np.random.seed(7)  # Kron draws from it
    parts = [name for name in ("first_step", "second_step", "third_step") if hasattr(kind, name)]

    @torch.enable_grad()
    def closure():
        zero_grad()
        return backward()

    for part in parts or ["step"]:
        if takes_closure(kind):
            step(part, closure)
        else:
            closure()
            step(part)


class ByHand:
    def __init__(self, level, make, first):
        self.level, self.make, self.first = level, make, first
        self.begin(loops.values(net().parameters()))

    def begin(self, weights):
        self.loop = Loop(self.level, weights, self.make, trains=slice(self.first))
        self.optimizer = self.loop.optimizer
        self.zero_grad, self.params = self.loop.zero_grad, self.loop.stepped

    def backward(self, x, y):
        self.loop.round_to_model()
        loss = self.loop.backward(x, y)
        if self.loop.overflow:  # each optimizer checks its own gradients
            grads = [param.grad for param in self.trained() if param.grad is not None]
            self.loop.overflow = not all(torch.isfinite(grad).all() for grad in grads)
        return loss

    def trained(self):
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def step(self, name, *closure):
        if not self.loop.overflow:
            getattr(self.optimizer, name)(*closure)
            self.loop.round_to_model()
        self.loop.overflow = False

    def resume(self):
        before, state = self.loop, loops.saved_and_loaded(self.optimizer.state_dict())
        self.begin(loops.values(before.stepped))
        self.loop.scale, self.loop.growth_tracker = before.scale, before.growth_tracker
        yield
        self.optimizer.load_state_dict(state)

    def result(self):
        return loops.values(self.trained())


class Prepared:
    def __init__(self, level, make, first):
        self.level, self.make, self.first = level, make, first
        self.begin()

    def begin(self):
        self.model = net()
        self.params, self.zero_grad = [*self.model.parameters()], self.model.zero_grad
        self.optimizer = self.make(self.params[: self.first])
        amp.initialize(self.model, self.optimizer, opt_level=self.level, verbosity=0)

    def backward(self, x, y):
        return loops.backward(self.model, self.optimizer, x, y)

    def step(self, name, *closure):
        getattr(self.optimizer, name)(*closure)

    def resume(self):
        of_model, of_optimizer, of_amp = loops.saved_and_loaded(
            (self.model.state_dict(), self.optimizer.state_dict(), amp.state_dict())
        )
        amp.restore(self.model, self.optimizer)
        self.begin()
        yield
        self.model.load_state_dict(of_model)
        self.optimizer.load_state_dict(of_optimizer)
        amp.load_state_dict(of_amp)

    def result(self):
        values = loops.masters(self.optimizer)
        amp.restore(self.model, self.optimizer)
        return values


def run(way, level, kind, phases):
    """Returns the weights after the phases."""
    first = 2 if "group" in phases else None
    way = way(level, partial(optimizer_of, kind), first)

    def add_group():
        if "group" in done:
            way.optimizer.add_param_group({"params": way.params[first:]})
        if hasattr(way.optimizer, "train"):
            way.optimizer.train()

    done = []
    add_group()
    for number, phase in enumerate(phases):
        done.append(phase)
        if phase == "group":
            add_group()
        elif phase == "resume":
            for _ in way.resume():
                add_group()
        elif phase == "train" or (level == "O2" and not hasattr(kind, "first_step")):
            backward = partial(way.backward, *batch_of(number, overflow=phase == "overflow"))
            run_step(backward, way.step, way.zero_grad, kind)
    return way.result()


def possible(level, kind):
    """Returns what the optimizer can do by hand, with the weights after it."""
    failures = []
    for phases in PHASES:
        try:
            return phases, run(ByHand, level, kind, phases)
        except Exception as error:  # noqa: BLE001, PERF203 - the library's own
            failures.append(repr(error))
    return None, failures


@pytest.fixture(autouse=True)
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


@loops.every(level=["O2", "O4", "O5"], library=LIBRARIES)
def test_it_trains_as_by_hand(library, level):
    wrong = {}
    for name, kind in inspect.getmembers(need(library), inspect.isclass):
        if not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
            continue
        # Closures are refused, and BSAM never calls step(), which an overflow skips.
        is_unfit = level == "O2" and (takes_closure(kind) or name == "BSAM")
        if is_unfit or name in NOT_TRAINED:
            continue
        phases, expected = possible(level, kind)
        found = phases and run(Prepared, level, kind, phases)
        if not (found and loops.same(found, expected)):
            wrong[name] = phases or expected
    assert not wrong


@loops.every(level=["O2", "O4", "O5"], by=["module", "id"])
def test_bitsandbytes_finds_options_of_a_parameter(by, level):
    """Which it looks up by module and attribute, or by id: after ``restore``, too."""
    optim, modules = need("bitsandbytes.optim"), need("bitsandbytes.nn")
    table = optim.GlobalOptimManager.get_instance()
    table.initialize()
    kind = modules.Embedding if by == "module" else nn.Embedding
    model = nn.Sequential(kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if by == "id":
        table.override_config(model[0].weight, "optim_bits", 32)
    _, optimizer = loops.prepared(level, lambda p: optim.Adam8bit(p, lr=1e-3), model)
    for _ in ("prepared", "restored"):
        optimizer.state.clear()
        optimizer.initialized = False
        table.index2config.clear()
        params = optimizer.param_groups[0]["params"]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        dtypes = [optimizer.state[param]["state1"].dtype for param in params[:2]]
        assert dtypes == [torch.float32, torch.uint8]
        amp.restore(model, optimizer)
    table.initialize()
