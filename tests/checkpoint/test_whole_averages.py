"""YOLOv5 and YOLOv3 of 2020: the average of a prepared model, saved whole.

``detect.py`` loads it in a fresh process, without apex, as the plain fp32 model.
"""

import copy
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from tests.support.loops import same, scaled_backward

SOURCE = Path(__file__).parent / "detector.py"


@pytest.fixture
def detector(tmp_path, monkeypatch):
    """The module as a script imports it, from the folder where the files go."""
    shutil.copy(SOURCE, tmp_path)
    spec = importlib.util.spec_from_file_location("detector", tmp_path / SOURCE.name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "detector", module)
    spec.loader.exec_module(module)
    return module


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.rand(2, 3, 8, 8, generator=generator),
            torch.rand(2, 2, 8, 8, 6, generator=generator),
        )


def trained(detector):
    """``train.py`` at O1: the model, its optimizer, their average, and the same by hand."""
    torch.manual_seed(0)
    model = detector.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    model.hyp, model.gr, model.names = {"box": 0.05}, 1.0, ["person"]
    ema = detector.ModelEMA(model)
    values = copy.deepcopy(ema.ema.state_dict())
    for images, targets in batches(3):
        loss = F.mse_loss(model(images).float(), targets)
        scaled_backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        decay = ema.decay(ema.updates)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                values[name] = values[name] * decay + (1.0 - decay) * value
    scheduler.step()
    ema.update_attr(model)
    ema.ema.eval()
    return model, optimizer, ema, values


def expected(detector, values, dtype):
    """What the average detects, by a model that has never seen apex."""
    plain = detector.Model()
    plain.load_state_dict(values)
    # Nothing but parameters and buffers is rounded by ``half``.
    plain = plain.to(dtype).float().fuse().eval()
    with amp.disable_casts():
        return plain(next(batches(1))[0])


DETECT = """
import sys
sys.modules.update(apex=None, amp_C=None, apex_C=None)  # those cannot be imported
import detector, torch
found = []
for name in ("best", "stripped", "half"):
    model = detector.attempt_load(f"{name}.pt")
    assert type(model) is detector.Model, type(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    extra = set(vars(model)) - set(vars(detector.Model()))
    assert extra == {"hyp", "gr", "names"}, extra
    found.append(model(torch.load("images.pt")))
torch.save(found, "found.pt")
"""


@pytest.mark.slow
def test_averages_saved_whole_detect_in_a_fresh_process_as_plain_fp32_models(detector, tmp_path):
    model, optimizer, ema, values = trained(detector)
    state = optimizer.state_dict()
    for name in ("best", "stripped"):
        torch.save({"model": ema.ema, "optimizer": state}, tmp_path / f"{name}.pt")
    detector.strip_optimizer(tmp_path / "stripped.pt")
    half = copy.deepcopy(ema.ema).half()  # as later versions save
    torch.save({"model": half, "ema": half, "updates": ema.updates}, tmp_path / "half.pt")
    torch.save(next(batches(1))[0], tmp_path / "images.pt")

    subprocess.run([sys.executable, "-c", DETECT], cwd=tmp_path, check=True)
    found = torch.load(tmp_path / "found.pt")
    dtypes = (torch.float32, torch.float16, torch.float16)
    assert same(found, [expected(detector, values, dtype) for dtype in dtypes])
    assert same(dict(ema.ema.state_dict()), dict(values))
    assert {param.dtype for param in model.parameters()} == {torch.float32}
