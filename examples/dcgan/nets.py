"""DCGAN's generator and discriminator (Radford et al., ICLR 2016)."""

from __future__ import annotations

import math

from torch import nn


def generator(noise: int, width: int, channels: int, size: int) -> nn.Sequential:
    """Returns a net from noise [N, noise, 1, 1] to images [N, channels, size, size] in -1..1."""
    doublings = doublings_from_four(size)
    wide = width * 2 ** (doublings - 1)
    layers: list[nn.Module] = [
        *(nn.ConvTranspose2d(noise, wide, 4, bias=False), nn.BatchNorm2d(wide), nn.ReLU())
    ]
    for _ in range(doublings - 1):
        layers += [
            nn.ConvTranspose2d(wide, wide // 2, 4, stride=2, padding=1, bias=False),
            *(nn.BatchNorm2d(wide // 2), nn.ReLU()),
        ]
        wide //= 2
    layers += [nn.ConvTranspose2d(wide, channels, 4, stride=2, padding=1, bias=False), nn.Tanh()]
    return nn.Sequential(*layers).apply(initialize)


def discriminator(width: int, channels: int, size: int) -> nn.Sequential:
    """Returns a net from images to the logit of "this image is real" [N].

    It returns a logit because amp rejects ``binary_cross_entropy`` in fp16, which cannot represent
    the logarithms of probabilities near 0 and 1.
    """
    layers: list[nn.Module] = [
        *(nn.Conv2d(channels, width, 4, stride=2, padding=1, bias=False), nn.LeakyReLU(0.2))
    ]
    for _ in range(doublings_from_four(size) - 1):
        layers += [
            nn.Conv2d(width, width * 2, 4, stride=2, padding=1, bias=False),
            *(nn.BatchNorm2d(width * 2), nn.LeakyReLU(0.2)),
        ]
        width *= 2
    layers += [nn.Conv2d(width, 1, 4, bias=False), nn.Flatten(start_dim=0)]
    return nn.Sequential(*layers).apply(initialize)


def doublings_from_four(size: int) -> int:
    """Returns how many times 4 must be doubled to reach ``size``.

    Raises:
        ValueError: If ``size`` is not 8, 16, 32, ...
    """
    doublings = int(math.log2(max(size, 1))) - 2
    if doublings < 1 or 4 * 2**doublings != size:
        raise ValueError(f"--imageSize is {size}; it must be a power of two and at least 8.")
    return doublings


def initialize(layer: nn.Module) -> None:
    """Initializes the weights as in the paper."""
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(layer.weight, 0.0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1.0, 0.02)
