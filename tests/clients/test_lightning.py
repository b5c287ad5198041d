"""PyTorch Lightning 1.9.5: ``ApexMixedPrecisionPlugin`` under a ``Trainer``."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from apex import amp
from tests.clients.libraries import need, of_its_time

pl = need("pytorch_lightning")
plugins = need("pytorch_lightning.plugins")
if not pl.__version__.startswith("1."):
    pytest.skip("pytorch_lightning 2 has no plugin for apex", allow_module_level=True)

pytestmark = of_its_time

LEVELS = ("O0", "O1", "O2", "O4", "O5")


def data():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        )
        self.losses = []

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)]


class Adversaries(pl.LightningModule):
    """Two optimizers, which the module steps itself."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(2, 6), nn.Linear(6, 1)

    def training_step(self, batch, index):
        real, _ = batch
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            fake = self.generator(torch.randn(len(real), 2, dtype=self.generator.weight.dtype))
            gap = (self.critic(fake) - self.critic(real.to(fake.dtype))).float().mean()
            optimizer.zero_grad()
            self.manual_backward(F.softplus(sign * gap))
            optimizer.step()

    def configure_optimizers(self):
        parts = (self.critic, self.generator)
        return [torch.optim.Adam(part.parameters(), lr=2e-2) for part in parts]


def fit(module, level, **options):
    plugin = [plugins.ApexMixedPrecisionPlugin(level)] if level else None
    trainer = pl.Trainer(
        accelerator="cpu", plugins=plugin, max_epochs=6, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, data())
    return trainer


OPTIONS = ({}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2})


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "clip", "accumulate"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_plugin_trains_as_fp32_does(level, options):
    plain, module = Classifier(), Classifier()
    fit(plain, None, **options)
    fit(module, level, **options)
    assert sum(module.losses[-4:]) < 0.6 * sum(module.losses[:4])
    assert_close(module.losses, plain.losses, rtol=0 if level == "O0" else 0.01, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_module_steps_two_optimizers_itself(level):
    plain, module = Adversaries(), Adversaries()
    torch.manual_seed(0)
    fit(plain, None)
    torch.manual_seed(0)
    trainer = fit(module, level)
    for optimizer, part in zip(trainer.optimizers, (plain.critic, plain.generator), strict=True):
        trained = list(amp.master_params(optimizer))
        # Adam moves a parameter by 2e-2 a step at first, whatever the gradient's size.
        assert_close(trained, list(part.parameters()), rtol=0, atol=5e-3 if level != "O0" else 0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_loads_into_a_plain_module(level, tmp_path):
    module = Classifier()
    trainer = fit(module, level)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "saved.ckpt")
    trained = list(amp.master_params(trainer.optimizers[0]))
    assert_close(list(loaded.parameters()), trained, rtol=0, atol=0)
