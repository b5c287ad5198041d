"""Handwritten digits for MMEngine: scikit-learn's data, a model and a metric."""

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

TEST_IMAGES = 360


class Digits(Dataset):
    """8 x 8 grey images, the last 360 of 1797 for testing; ``limit`` keeps the first images."""

    def __init__(self, train, limit=None):
        digits = load_digits()
        part = slice(None, -TEST_IMAGES) if train else slice(-TEST_IMAGES, None)
        self.images = torch.tensor(digits.images[part], dtype=torch.float32)[:limit].unsqueeze(1)
        self.labels = torch.tensor(digits.target[part])[:limit]
        self.metainfo = {"classes": [str(digit) for digit in range(10)]}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index] / 16, "labels": self.labels[index]}


class Classifier(BaseModel):
    """Two convolutions with batch norm, without any mixed-precision code."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images, labels=None, mode="tensor"):
        logits = self.head(self.features(images))
        if mode == "loss":
            return {"loss": F.cross_entropy(logits.float(), labels)}
        return logits


class Accuracy(BaseMetric):
    """The accuracy on the test images."""

    def process(self, data_batch, data_samples):
        guesses = torch.stack([*data_samples]).argmax(1).cpu()
        self.results += (guesses == data_batch["labels"]).tolist()

    def compute_metrics(self, results):
        return {"accuracy": sum(results) / len(results)}
