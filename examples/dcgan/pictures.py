"""Training images, and grids of generated images."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class Pictures(Dataset[tuple[Tensor]]):
    """The images under ``root``, as [3, size, size] in -1..1, cropped to the central square.

    Raises:
        FileNotFoundError: If there are no images.
    """

    def __init__(self, root: Path, size: int) -> None:
        self.files = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not self.files:
            raise FileNotFoundError(f"{root} contains no images.")
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        with Image.open(self.files[index]) as file:
            image = file.convert("RGB")
        side = min(image.size)
        left, upper = (image.width - side) // 2, (image.height - side) // 2
        box = (left, upper, left + side, upper + side)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1)
        return (pixels.float().div(127.5).sub(1),)


def digits(size: int) -> TensorDataset:
    """Returns scikit-learn's 1797 digits as [1, size, size] in -1..1."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images, dtype=torch.float32).div(8).sub(1).unsqueeze(1)
    images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    return TensorDataset(images)


def save_grid(path: Path, images: Tensor, columns: int = 8) -> None:
    """Writes ``images`` [N, 1 or 3, H, W] in -1..1 as one PNG, in rows of ``columns``."""
    images = images.detach().float().cpu().add(1).mul(127.5).round().clamp(0, 255)
    images = F.pad(images.to(torch.uint8).expand(-1, 3, -1, -1), (1, 1, 1, 1), value=255)
    images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, -len(images) % columns), value=255)
    rows = [torch.cat(list(row), dim=2) for row in images.split(columns)]
    grid = torch.cat(rows, dim=1).permute(1, 2, 0).contiguous()
    height, width, _ = grid.shape
    Image.frombytes("RGB", (width, height), bytes(grid.flatten().tolist())).save(path)
