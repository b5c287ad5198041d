"""timm 0.4.12: what its train.py does with apex, and its own optimizers."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from apex import amp
from tests.clients.libraries import need, of_its_time

timm = need("timm")
if not timm.__version__.startswith("0.4."):
    pytest.skip("timm is of today", allow_module_level=True)

from timm.models.helpers import load_checkpoint, resume_checkpoint  # noqa: E402 - after the check
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from timm.utils import ApexScaler, CheckpointSaver, ModelEmaV2  # noqa: E402

pytestmark = of_its_time

RATES = {
    **dict.fromkeys(("adabelief", "adafactor", "adamp", "adamw", "fusedadam", "fusedlamb"), 0.01),
    **dict.fromkeys(("lookahead_adam", "lookahead_fusedlamb", "nadam", "rmsproptf"), 0.01),
    **dict.fromkeys(("fusednovograd", "fusedsgd", "momentum", "sgdp"), 0.02),
    "novograd": 0.005,
    "radam": 0.05,
    "rmsprop": 0.005,
}


@pytest.fixture
def prepare_vit(monkeypatch):
    """Builds a tiny ViT and one of timm's optimizers, prepared as train.py does."""

    def build(name, level, **options):
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=2, num_classes=2
        )
        with monkeypatch.context() as patch:
            # It refuses apex's optimizers where there is no GPU.
            patch.setattr(torch.cuda, "is_available", lambda: True)
            optimizer = create_optimizer_v2(model, name, RATES[name], weight_decay=1e-3)
        return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)

    return build


def step(model, optimizer, scaler, index=0):
    """What train.py's train_one_epoch does with a batch; returns the loss."""
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(index))
    loss = F.cross_entropy(model(images).float(), torch.arange(4) % 2)
    optimizer.zero_grad()
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    return loss.item()


@pytest.mark.parametrize("name", RATES)
def test_an_optimizer_of_timm_trains_as_in_fp32(prepare_vit, name, level):
    def losses(level):
        model, optimizer = prepare_vit(name, level, loss_scale=2.0**7)
        return [step(model, optimizer, ApexScaler()) for _ in range(8)]

    expected = losses("O0")
    reached = losses(level)
    assert min(reached) < reached[0]
    assert_close(reached, expected, rtol=0.05, atol=0.01)


def test_a_run_of_train_py_resumes(prepare_vit, tmp_path):
    """At O1, which train.py asks for."""

    def start(resume=None):
        model, optimizer = prepare_vit("adamw", "O1")
        scaler = ApexScaler()
        epoch = resume_checkpoint(model, resume, optimizer, scaler) if resume else 0
        ema = ModelEmaV2(model, decay=0.5)
        if resume:
            load_checkpoint(ema.module, resume, use_ema=True)
        scheduler = CosineLRScheduler(optimizer, t_initial=4)
        scheduler.step(epoch)
        return (model, optimizer, scaler, ema, scheduler), epoch

    def epochs(run, which, name):
        model, optimizer, scaler, ema, scheduler = run
        (tmp_path / name).mkdir()
        folder = str(tmp_path / name)
        saver = CheckpointSaver(model, optimizer, None, ema, scaler, checkpoint_dir=folder)
        for epoch in which:
            for index in range(4):
                step(model, optimizer, scaler, index)
                ema.update(model)
            scheduler.step(epoch + 1)
            saver.save_checkpoint(epoch, metric=epoch)
        return str(tmp_path / name / "last.pth.tar")

    run, _ = start()
    whole = epochs(run, range(4), "whole")
    amp.restore(*run[:2])
    run, _ = start()
    first = epochs(run, range(2), "first")
    amp.restore(*run[:2])
    run, epoch = start(first)
    assert epoch == 2
    second = epochs(run, range(epoch, 4), "second")

    expected, resumed = torch.load(whole), torch.load(second)
    assert resumed["arch"] == "visiontransformer"
    for part in ("state_dict", "state_dict_ema", "optimizer", "amp"):
        assert_close(resumed[part], expected[part], rtol=0, atol=0)
