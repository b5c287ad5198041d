"""The digits as a target of ``apex compare``, which trains them at every level.

apex compare examples/digits/experiment.py
"""

import torch
import torch.nn.functional as F
from train import accuracy, batches, build_model, load_data


def setup():
    """Returns the model, its optimizer, the batches, the loss, and a final measurement."""
    train, _ = load_data("cpu")
    model = build_model(width=16)  # so that a CPU that emulates 16 bits trains it in seconds
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    # More batches than any run needs: they are generated one by one.
    return model, optimizer, batches(train, steps=100_000, batch_size=128, seed=0), loss, evaluate


def loss(model, batch):
    """Returns the cross entropy of one batch."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def evaluate(model):
    """Returns the accuracy on the test digits, between 0 and 1."""
    _, test = load_data("cpu")
    device = next(model.parameters()).device
    return accuracy(model, tuple(part.to(device) for part in test))
