"""Small modules and data for the tests of ``apex.integrations.lightning``, for either package."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def data(batch_size=8):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=batch_size)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def classifier(pl, **options):
    class Classifier(pl.LightningModule):
        """Calls its forward, or with ``by_itself`` a child, and records losses and gradients."""

        def __init__(self, by_itself=False, optimizer=torch.optim.Adam, lr=2e-2, poison=()):
            super().__init__()
            self.layers = layers()
            self.losses, self.norms = [], []
            self.by_itself, self.optimizer, self.lr, self.poison = by_itself, optimizer, lr, poison

            self.sharded = False

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

        def on_before_optimizer_step(self, optimizer):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())

        def configure_optimizers(self):
            optimizer = self.optimizer(self.parameters(), lr=self.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]

    return Classifier(**options)


def adversaries(pl):
    class Adversaries(pl.LightningModule):
        """Two optimizers, which the module steps itself, and two losses."""

        automatic_optimization = False

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.generator, self.critic = nn.Linear(2, 6), nn.Linear(6, 1)

        def training_step(self, batch, index):
            noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(index))
            for number, (optimizer, sign) in enumerate(
                zip(self.optimizers(), (1, -1), strict=True)
            ):
                gap = self.critic(self.generator(noise)) - self.critic(batch[0])
                optimizer.zero_grad()
                scale = {"loss_id": number} if self.two_scales else {}
                self.manual_backward(F.softplus(sign * gap).mean(), **scale)
                optimizer.step()

        def configure_optimizers(self):
            parts = (self.critic, self.generator)
            return [torch.optim.Adam(part.parameters(), lr=2e-2) for part in parts]

    made = Adversaries()
    made.two_scales = False
    return made


def trainer(pl, plugin=None, max_epochs=2, **options):
    return pl.Trainer(
        accelerator="cpu", plugins=plugin, max_epochs=max_epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        **options,
    )  # fmt: skip
