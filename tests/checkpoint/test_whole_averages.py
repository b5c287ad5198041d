"""YOLOv5 and YOLOv3 of 2020: the average of a prepared model, saved whole.

``detect.py`` loads it in a fresh process, with or without apex, as the plain fp32 model.
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
from tests.support.training import same

SOURCE = Path(__file__).parent / "detector.py"

PLAIN = ("O0", "O1", "O4")
every_level = pytest.mark.parametrize("level", PLAIN)


@pytest.fixture
def detector(tmp_path, monkeypatch):
    """The module as a script imports it, from the folder where the files go."""
    shutil.copy(SOURCE, tmp_path)
    spec = importlib.util.spec_from_file_location("detector", tmp_path / SOURCE.name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "detector", module)
    spec.loader.exec_module(module)
    return module


class Averaged:
    """The average of what a model held after each step, by hand."""

    def __init__(self, ema):
        self.values = copy.deepcopy(ema.ema.state_dict())
        self.ema = ema

    def update(self, model):
        decay = self.ema.decay(self.ema.updates)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.values[name] = self.values[name] * decay + (1.0 - decay) * value


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.rand(2, 3, 8, 8, generator=generator),
            torch.rand(2, 2, 8, 8, 6, generator=generator),
        )


def trained(detector, level, *, wrap=None, evaluates=False):
    """``train.py`` at a level: the model, its optimizer, their average, and the same by hand."""
    torch.manual_seed(0)
    model = detector.Model()
    optimizer = detector.grouped_optimizer(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    model.hyp, model.gr, model.names = {"box": 0.05}, 1.0, ["person"]
    model.class_weights = torch.ones(1)
    model = model if wrap is None else wrap(model)
    ema = detector.ModelEMA(model)
    by_hand = Averaged(ema)
    for _epoch in range(2):
        model.train()
        for images, targets in batches(3):
            loss = F.mse_loss(model(images).float(), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
            by_hand.update(model)
        scheduler.step()
        ema.update_attr(model)
        ema.ema.eval()
        if evaluates:  # test.py
            with torch.no_grad():
                assert ema.ema(next(batches(1))[0])[0].isfinite().all()
    return model, optimizer, ema, by_hand.values


def save(path, ema, optimizer=None, **entries):
    state = None if optimizer is None else optimizer.state_dict()
    torch.save({"epoch": 1, "model": ema.ema, "optimizer": state, **entries}, path)


def expected(detector, values, dtype=torch.float32):
    """What the average detects, by a model that has never seen apex."""
    plain = detector.Model()
    plain.load_state_dict(values)
    # Nothing but parameters and buffers is rounded by ``half``.
    plain = plain.to(dtype).float().fuse().eval()
    with amp.disable_casts():
        return plain(next(batches(1))[0])


DETECT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # those cannot be imported
import detector, torch
model = detector.attempt_load("best.pt")
assert type(model) is detector.Model, type(model)
assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
set_in_training = {"hyp", "gr", "names", "class_weights"}
assert set(vars(model)) == {*vars(detector.Model()), *set_in_training}, sorted(vars(model))
assert not torch.is_autocast_enabled("cpu")
assert sys.modules.get("apex") is None
torch.save(model(torch.load("images.pt")), "found.pt")
"""


def detected(folder, *, without=()):
    """What ``detect.py`` finds with the file, in a fresh process that may lack apex."""
    torch.save(next(batches(1))[0], folder / "images.pt")
    subprocess.run([sys.executable, "-c", DETECT, *without], cwd=folder, check=True)
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("without", [["apex", "amp_C", "apex_C"], []], ids=["without", "with"])
@every_level
def test_the_average_detects_in_a_fresh_process_as_a_plain_fp32_model(
    detector, tmp_path, level, without
):
    _, optimizer, ema, values = trained(detector, level)
    save(tmp_path / "best.pt", ema, optimizer)
    found = detected(tmp_path, without=without)
    assert all(value.dtype is torch.float32 for value in found)
    assert same(found, expected(detector, values))


@pytest.mark.parametrize("level", ["O1"])
def test_stripped_and_halved_it_is_what_its_fp16_values_give(detector, tmp_path, level):
    _, optimizer, ema, values = trained(detector, level)
    save(tmp_path / "best.pt", ema, optimizer)
    detector.strip_optimizer(tmp_path / "best.pt")
    model = torch.load(tmp_path / "best.pt", weights_only=False)["model"]
    assert {param.dtype for param in model.parameters()} == {torch.float16}
    assert same(detected(tmp_path, without=["apex"]), expected(detector, values, torch.float16))


@pytest.mark.parametrize("level", ["O1"])
def test_later_versions_save_a_half_copy_and_the_average_goes_on(detector, tmp_path, level):
    model, optimizer, ema, values = trained(detector, level)
    half = copy.deepcopy(ema.ema).half()
    torch.save({"model": half, "ema": half, "updates": ema.updates}, tmp_path / "best.pt")
    assert same(detected(tmp_path, without=["apex"]), expected(detector, values, torch.float16))
    assert same(dict(ema.ema.state_dict()), dict(values))
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    del optimizer


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_average_made_from_an_fp32_copy_follows_the_masters(detector, level):
    torch.manual_seed(0)
    model = detector.Model()
    ema = detector.ModelEMA(model)
    by_hand = Averaged(ema)
    before = copy.deepcopy(dict(ema.ema.state_dict()))
    optimizer = detector.grouped_optimizer(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for images, targets in batches(2):
        with amp.scale_loss(F.mse_loss(model(images).float(), targets), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        ema.update(model)
        by_hand.update(model)
    assert same(dict(ema.ema.state_dict()), dict(by_hand.values))
    assert not same(dict(ema.ema.state_dict()), before)
