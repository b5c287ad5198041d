"""Trains on handwritten digits with PyTorch-Ignite and ``amp_mode="apex"``."""

import argparse
from pathlib import Path

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from apex import amp

TEST_IMAGES = 360


def loaders(batch_size, limit=None):
    """Returns loaders of 1437 training and 360 test images; ``limit`` takes fewer of both."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:-TEST_IMAGES][:limit], labels[:-TEST_IMAGES][:limit])
    test = TensorDataset(images[-TEST_IMAGES:][:limit], labels[-TEST_IMAGES:][:limit])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, TEST_IMAGES)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def loss_of(logits, labels):
    return F.cross_entropy(logits.float(), labels)


def main():
    options = parse()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_loader, test_loader = loaders(options.batch_size, options.limit)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)

    trainer = create_supervised_trainer(
        model, optimizer, loss_of, device=device, amp_mode="apex",
        gradient_accumulation_steps=options.accumulate,
    )  # fmt: skip
    # The evaluator needs no amp_mode: the prepared model casts in evaluation too.
    metrics = {"accuracy": Accuracy(), "loss": Loss(loss_of)}
    evaluator = create_supervised_evaluator(model, metrics, device=device)
    # The module amp provides its loss scales through state_dict and load_state_dict.
    parts = {"model": model, "optimizer": optimizer, "amp": amp, "trainer": trainer}
    if options.resume is not None:
        Checkpoint.load_objects(parts, torch.load(options.resume, weights_only=True))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.run(test_loader)
        found = evaluator.state.metrics
        print(
            f"epoch {trainer.state.epoch}: test loss {found['loss']:.4f}, "
            f"accuracy {found['accuracy']:.1%}"
        )

    saver = DiskSaver(str(options.work_dir), require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(parts, saver, n_saved=2))
    trainer.run(train_loader, max_epochs=options.epochs)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opt-level", default="O4", choices=["O0", "O1", "O2", "O3", "O4", "O5"])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--limit", type=int, help="number of images for training and for testing")
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/ignite"))
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
