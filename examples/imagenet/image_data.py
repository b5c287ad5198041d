"""Images from folders or scikit-learn's digits, loaded by workers and normalized on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

Batch = tuple[Tensor, Tensor]  # images [N, 3, H, W], labels [N]

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's red, green, blue, in 0..1
DEVIATION = (0.229, 0.224, 0.225)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images ``root/<class>/**``, as uint8 [3, size, size].

    Args:
        root: One folder per class.
        size: Side length in pixels.
        augment: Whether to crop and flip randomly, for training, instead of a center crop.

    Raises:
        FileNotFoundError: If there are no images.
    """

    def __init__(self, root: Path, size: int, *, augment: bool) -> None:
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        self.classes = [folder.name for folder in folders]
        self.files = [
            (path, label)
            for label, folder in enumerate(folders)
            for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise FileNotFoundError(f"{root} contains no images; put them in {root}/<class>/.")
        self.size = size
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = random_box(*image.size) if self.augment else center_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1)
        flip = self.augment and bool(torch.rand(()) < 0.5)
        return pixels.flip(2) if flip else pixels.contiguous(), label


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns left, upper, right, lower of a box of 8% to 100% of the area and ratio 3:4 to 4:3."""
    area, shape, x, y = torch.rand(4).tolist()
    ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
    pixels = width * height * (0.08 + 0.92 * area)
    w, h = min(width, math.sqrt(pixels * ratio)), min(height, math.sqrt(pixels / ratio))
    left, upper = x * (width - w), y * (height - h)
    return left, upper, left + w, upper + h


def center_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns the central square, 7/8 of the shorter side: 224 of 256 pixels."""
    side = min(width, height) * 7 / 8
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns 1797 digits of scikit-learn as 32 x 32 pixel images, 360 of them for validation."""
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32).mul(255 / 16).unsqueeze(1)
    images = F.interpolate(images, scale_factor=4, mode="bilinear", align_corners=False)
    images = images.round().to(torch.uint8).repeat(1, 3, 1, 1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    workers: int,
    shuffle: bool,
    rank: int,
    world_size: int,
    seed: int,
) -> DataLoader:
    """Returns a loader of this process's share: shuffled full batches, or all images in order.

    Raises:
        ValueError: If a shuffled share is smaller than one batch.
    """
    if shuffle:
        sampler = DistributedSampler(dataset, world_size, rank, seed=seed, drop_last=True)
        if len(sampler) < batch_size:
            raise ValueError(
                f"{len(dataset)} training images are too few for {world_size} process(es) with "
                f"--batch-size {batch_size}. Choose a smaller batch."
            )
    else:
        sampler = range(rank, len(dataset), world_size)  # each image in one process only
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        drop_last=shuffle,
        persistent_workers=False,  # new workers use the epoch's seed
    )


class Prefetcher:
    """Yields a loader's batches, moved to the device and normalized there.

    On CUDA, the next batch is copied as bytes and normalized while the model uses the current one.
    """

    def __init__(self, loader: DataLoader, device: torch.device, *, channels_last: bool) -> None:
        self.loader = loader
        self.device = device
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.mean, self.deviation = (
            torch.tensor(values, device=device).mul(255).view(1, 3, 1, 1)
            for values in (MEAN, DEVIATION)
        )
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        sent = None
        for batch in self.loader:
            ready, sent = sent, self._send(batch)
            if ready is not None:
                yield self._receive(*ready)
        if sent is not None:
            yield self._receive(*sent)

    def _send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self.stream is None:
            return self._on_device(batch), None
        with torch.cuda.stream(self.stream):
            return self._on_device(batch), self.stream.record_event()

    def _on_device(self, batch: Batch) -> Batch:
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        images = images.to(torch.float32, memory_format=self.format)
        return images.sub_(self.mean).div_(self.deviation), labels

    def _receive(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in batch:
                tensor.record_stream(current)  # keeps the memory until its last use here
        return batch
