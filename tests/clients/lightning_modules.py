"""Small modules and trainers for the tests of Lightning, for any of its packages."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.clients.classes import adam, layers


def classifier(pl, **options):
    class Classifier(pl.LightningModule):
        """Calls its forward, or with ``by_itself`` a child, and records losses."""

        def __init__(self, by_itself=False, optimizer=torch.optim.Adam, lr=2e-2, poison=()):
            super().__init__()
            self.layers, self.losses, self.sharded = layers(), [], False
            self.by_itself, self.optimizer, self.lr, self.poison = by_itself, optimizer, lr, poison

        def configure_model(self):
            if self.sharded:  # Lightning calls it for each run
                self.sharded = False
                for layer in (*self.layers, self.layers):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, index):
            x, y = batch
            assert x.dtype is torch.float32
            output = self.layers(x) if self.by_itself else self(x)
            loss = F.cross_entropy(output, y)
            self.losses.append(loss.item())
            return loss * (float("inf") if self.global_step in self.poison else 1.0)

        def validation_step(self, batch, index):
            x, y = batch
            assert self.layers(x).dtype is self(x).dtype
            self.log("loss", F.cross_entropy(self(x), y))

        test_step = validation_step

        def predict_step(self, batch, index):
            return self(batch[0]), self.layers[0].weight.dtype

        def configure_optimizers(self):
            optimizer = self.optimizer(self.parameters(), lr=self.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]

    return Classifier(**options)


def adversaries(pl):
    class Adversaries(pl.LightningModule):
        """Two optimizers, which the module steps itself, and two losses."""

        automatic_optimization, two_scales, own_dtype = False, False, False

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.generator, self.critic = nn.Linear(2, 6), nn.Linear(6, 1)

        def training_step(self, batch, index):
            inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(index)), batch[0]
            dtype = self.generator.weight.dtype if self.own_dtype else torch.float32
            noise, real = (each.to(dtype) for each in inputs)
            for number, (optimizer, sign) in enumerate(
                zip(self.optimizers(), (1, -1), strict=True)
            ):
                gap = self.critic(self.generator(noise)) - self.critic(real)
                optimizer.zero_grad()
                scale = {"loss_id": number} if self.two_scales else {}
                self.manual_backward(F.softplus(sign * gap.float()).mean(), **scale)
                optimizer.step()

        def configure_optimizers(self):
            return [adam(self.critic), adam(self.generator)]

    return Adversaries()


def trainer(pl, plugin=None, max_epochs=2, **options):
    return pl.Trainer(
        accelerator="cpu", plugins=plugin, max_epochs=max_epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        **options,
    )  # fmt: skip
