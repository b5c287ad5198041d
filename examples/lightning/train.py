"""Trains on handwritten digits with Lightning's Trainer and ``ApexPrecision``."""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from apex.integrations.lightning import ApexPrecision

TEST_IMAGES = 360


class Digits(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.net(images).float(), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        logits = self.net(images).float()
        self.log("test_loss", F.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(dim=1) == labels).float().mean())

    def on_validation_epoch_end(self):
        found = self.trainer.callback_metrics
        self.print(
            f"epoch {self.current_epoch + 1}: test loss {found['test_loss']:.4f}, "
            f"accuracy {found['accuracy']:.1%}"
        )

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)]


def loaders(batch_size, limit=None):
    """Returns loaders of 1437 training and 360 test images; ``limit`` takes fewer of both."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:-TEST_IMAGES][:limit], labels[:-TEST_IMAGES][:limit])
    test = TensorDataset(images[-TEST_IMAGES:][:limit], labels[-TEST_IMAGES:][:limit])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, TEST_IMAGES)


def main():
    options = parse()
    pl.seed_everything(0)
    checkpoints = pl.callbacks.ModelCheckpoint(
        options.work_dir, "epoch_{epoch}", auto_insert_metric_name=False, save_top_k=-1
    )
    trainer = pl.Trainer(
        plugins=ApexPrecision(options.opt_level),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=options.accumulate,
        devices=options.devices,
        callbacks=[checkpoints],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        logger=False,
    )
    train, test = loaders(options.batch_size, options.limit)
    # The checkpoint holds fp32 weights and the loss scales.
    trainer.fit(Digits(options.lr), train, test, ckpt_path=options.resume)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opt-level", default="O5", choices=["O0", "O1", "O2", "O4", "O5"])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--devices", type=int, default=1, help="processes, one for each device")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--limit", type=int, help="number of images for training and for testing")
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/lightning"))
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
