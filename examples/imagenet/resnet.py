"""ResNets (He et al., CVPR 2016) in plain torch, for machines without torchvision."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

STAGES: dict[str, tuple[int, tuple[int, ...]]] = {
    "resnet10": (1, (1, 1, 1, 1)),
    "resnet18": (1, (2, 2, 2, 2)),
    "resnet34": (1, (3, 4, 6, 3)),
    "resnet50": (4, (3, 4, 6, 3)),
    "resnet101": (4, (3, 4, 23, 3)),
    "resnet152": (4, (3, 8, 36, 3)),
}
"""Output channels per inner channel (4 for a bottleneck), and the number of blocks per stage."""


class Residual(nn.Module):
    """Computes ``relu(inside(x) + shortcut(x))``."""

    def __init__(self, inside: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.shortcut(x))


def resnet(name: str, num_classes: int) -> nn.Sequential:
    """Returns a net for images [N, 3, H, W] of at least 32 x 32 pixels."""
    expansion, stages = STAGES[name]
    layers = [conv_norm(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for stage, blocks in enumerate(stages):
        width = 64 * 2**stage
        for index in range(blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(block(channels, width, expansion, stride))
            channels = width * expansion
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers)


def block(channels: int, width: int, expansion: int, stride: int) -> Residual:
    """Returns two 3x3 convolutions or, with an ``expansion``, a 1x1, 3x3, 1x1 bottleneck."""
    if expansion == 1:
        last = conv_norm(width, width, 3)
        inside = nn.Sequential(conv_norm(channels, width, 3, stride), nn.ReLU(), last)
    else:
        last = conv_norm(width, width * expansion, 1)
        inside = nn.Sequential(
            *(conv_norm(channels, width, 1), nn.ReLU()),
            *(conv_norm(width, width, 3, stride), nn.ReLU()),
            last,
        )
    nn.init.zeros_(last[1].weight)  # each block starts as its shortcut, which helps training
    out = width * expansion
    same = stride == 1 and channels == out
    return Residual(inside, nn.Identity() if same else conv_norm(channels, out, 1, stride))


def conv_norm(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution followed by batch norm."""
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(out))
