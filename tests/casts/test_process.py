"""The process is not ours: what amp touches globally is as it was once a session has ended."""

import subprocess
import sys

SNAPSHOT = """
import gc, inspect, os, random, signal, sys, threading, types, warnings
import torch, torch._dynamo, torch._functorch.config, torch._inductor.config
import torch.compiler.config
import torch.nn.functional as F
from torch import nn

KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd", "Python",
        "CompositeExplicitAutograd", "Functionalize", "BackendSelect", "ADInplaceOrView", "Meta")
MODULES = [torch, F, torch.Tensor, torch.autograd, torch.autograd.graph, torch.linalg, torch.amp,
           torch.nn.Module, torch.optim.Optimizer, torch.optim.SGD, torch.utils.data.DataLoader,
           torch.nn.parallel.DistributedDataParallel, torch.jit, torch.compiler]
SETTINGS = [torch._dynamo.config, torch._functorch.config, torch._inductor.config,
            torch.compiler.config]


def functions(holder):
    return {name: id(value) for name, value in vars(holder).items() if callable(value)}


def values(config):
    return {name: repr(value) for name, value in config.get_config_copy().items()}


def snapshot():
    from torch.nn.modules import module
    from torch.optim import optimizer
    hooks = [each for owner in (module, optimizer) for name, each in sorted(vars(owner).items())
             if name.startswith("_global")]
    return {
        "functions": {holder.__name__: functions(holder) for holder in MODULES},
        "kernels": {key: sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key))
                    for key in KEYS},
        "hooks": repr([dict(each) if hasattr(each, "items") else each for each in hooks]),
        "settings": {config.__name__: values(config) for config in SETTINGS},
        "gc": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_freeze_count()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
                     for d in ("cpu", "cuda", "xpu", "mps")] + [torch.is_autocast_cache_enabled()],
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
                  torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "warnings": repr(warnings.filters),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "python": (sys.gettrace(), sys.getprofile(), sys.excepthook, sys.displayhook,
                   sys.getrecursionlimit(), threading.excepthook),
    }


def changes(was, now, path=""):
    if isinstance(was, dict) and isinstance(now, dict):
        return [line for name in sorted({*was, *now}, key=str)
                for line in changes(was.get(name), now.get(name), f"{path}.{name}")]
    return [] if was == now else [f"{path}: {str(was)[:200]} is now {str(now)[:200]}"]


def train(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        loss = model(torch.ones(2, 4)).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    return model, optimizer


def check(was, why):
    found = changes(was, snapshot())
    if found:
        sys.exit(f"{why}: " + "\\n".join(found))
"""

RUN = """
from torch._dynamo.utils import counters

@torch.compile(backend="eager")
def unrelated(x):
    return x.sin() + 1

def frames():
    unrelated(torch.ones(2))
    return counters["frames"]["ok"]

warnings.simplefilter("ignore")
torch.manual_seed(0)
random.seed(0)
torch.optim.SGD([nn.Parameter(torch.ones(1))]).zero_grad()
compiled, before = frames(), snapshot()
from apex import amp
import apex.optimizers, apex.normalization, apex.parallel
check(before, "import")
for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
    for end in ("restored", "deleted"):
        model, optimizer = train(level)
        if end == "restored":
            amp.restore(model, optimizer)
        del model, optimizer
        gc.collect()
        check(before, f"{level} {end}")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype is torch.bfloat16
            assert torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16
        assert frames() == compiled, f"compiled again: {level} {end}"
"""


def test_importing_amp_and_sessions_that_have_ended_change_nothing():
    command = [sys.executable, "-c", SNAPSHOT + RUN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


TWICE = """
import sys
import torch
from apex import amp
amp.initialize(torch.nn.Linear(1, 1), opt_level="O4", verbosity=0)
for name in [*sys.modules]:
    if name.startswith("apex"):
        del sys.modules[name]
from apex import amp
amp.initialize(torch.nn.Linear(1, 1), opt_level="O5", verbosity=0)
amp.initialize(torch.nn.Linear(1, 1), opt_level="O4", verbosity=0)
"""


def test_a_second_import_is_refused_where_the_casts_of_the_first_would_run():
    command = [sys.executable, "-W", "ignore", "-c", TWICE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "A process can import apex once only" in done.stderr
    assert "line 11" in done.stderr
