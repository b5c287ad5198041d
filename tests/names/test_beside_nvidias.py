"""What is always ours imports nothing that NVIDIA's apex replaces where it is installed."""

import functools
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import apex
from apex import amp
from tests.support import loops

THEIRS = "optimizers normalization contrib mlp fused_dense multi_tensor_apply _autocast_utils"
THEIRS = [*(f"apex.{name}" for name in THEIRS.split()), "amp_C", "apex_C"]
OURS = ["_torch", "_core", "_engine", "_optimizer_rules", "amp", "debug"]
OURS += ["parallel", "fp16_utils", "RNN", "reparameterization"]

IMPORT_OURS = """
import importlib, sys
sys.modules.update(dict.fromkeys({theirs!r}))  # None: an ImportError for whoever asks
for name in {ours!r}:
    importlib.import_module(name)
import fused_layer_norm_cuda, fused_adam_cuda
"""


def modules(name):
    yield f"apex.{name}"
    for each in pkgutil.walk_packages([str(Path(apex.__file__).parent / name)], f"apex.{name}."):
        yield each.name


def test_ours_imports_without_what_nvidia_replaces():
    ours = [module for name in OURS for module in modules(name) if "multiproc" not in module]
    code = IMPORT_OURS.format(theirs=THEIRS, ours=ours)
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


class SGD(torch.optim.SGD):
    """As NVIDIA's FusedSGD: steps the masters that it finds in ``_amp_stash``."""

    def step(self, closure=None):
        assert not hasattr(self._amp_stash, "fp32_from_fp16_groups")
        return super().step(closure)


class Adam(torch.optim.Adam):
    """As NVIDIA's FusedAdam: its kernel takes fp32 state of a 16-bit parameter."""


SGD.__module__, Adam.__module__ = "apex.optimizers.fused_sgd", "apex.optimizers.fused_adam"


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_nvidias_sgd_steps_the_masters_in_its_groups(level):
    make = functools.partial(SGD, lr=0.5)
    model, optimizer = loops.prepared(level, make, nn.Linear(4, 1), loss_scale=8.0)
    before = loops.masters(optimizer)
    loops.descend(model(torch.ones(2, 4)).float().mean(), optimizer)
    torch.testing.assert_close(loops.masters(optimizer), [old - 0.5 for old in before])


def test_nvidias_adam_keeps_fp32_state_at_o3():
    model = nn.Linear(4, 1)
    optimizer = Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    _, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
