"""ResNet-50, BERT and GPT-2, written out: what people measure mixed precision with.

He et al., "Deep Residual Learning for Image Recognition", 2016, with the stride in the 3x3
convolution; Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019, with a
classifier of the first token; Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019. Without dropout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResNet(nn.Module):
    """A residual network of bottlenecks; by default ResNet-50."""

    def __init__(
        self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
    ) -> None:
        """Makes a stage of bottlenecks for each depth; each doubles the width."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            stride = 1 if stage == 0 else 2
            for _ in range(depth):
                blocks.append(_Bottleneck(channels, inner, stride))
                channels = 4 * inner
                stride = 1
        self.stages = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``[N, classes]`` of ``images`` ``[N, 3, H, W]``."""
        features: Tensor = self.stages(self.stem(images))
        logits: Tensor = self.classifier(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return logits


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Bert(nn.Module):
    """An encoder of tokens with a classifier; by default BERT-base."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 30522,
        positions: int = 512,
        classes: int = 2,
    ) -> None:
        """Makes ``layers`` layers of ``width`` features."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.order: Tensor
        self.register_buffer("order", torch.arange(positions), persistent=False)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits ``[N, classes]`` of ``tokens`` ``[N, length]``."""
        positions = self.order[: tokens.shape[1]]
        x = self.norm(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        return logits


class Gpt(nn.Module):
    """A decoder of tokens that predicts the next ones; by default GPT-2 medium."""

    def __init__(
        self,
        layers: int = 24,
        width: int = 1024,
        heads: int = 16,
        vocabulary: int = 50257,
        positions: int = 1024,
    ) -> None:
        """Makes ``layers`` layers of ``width`` features; the first and last weights are one."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.order: Tensor
        self.register_buffer("order", torch.arange(positions), persistent=False)
        self.layers = nn.ModuleList(_CausalLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.classifier = nn.Linear(width, vocabulary, bias=False)
        self.classifier.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits ``[N * length, vocabulary]`` of ``tokens`` ``[N, length]``."""
        positions = self.order[: tokens.shape[1]]
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(self.norm(x).flatten(0, 1))
        return logits


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        split = self.inputs(x).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        joined: Tensor = self.output(mixed.transpose(1, 2).reshape(count, length, width))
        return joined


class _Layer(nn.Module):
    """A layer that normalizes each sum: BERT's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, causal=False)
        self.norm = nn.LayerNorm(width)
        self.feed_forward = _feed_forward(width)
        self.last_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x))
        return self.last_norm(x + self.feed_forward(x))


class _CausalLayer(nn.Module):
    """A layer that normalizes each input: GPT-2's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal=True)
        self.last_norm = nn.LayerNorm(width)
        self.feed_forward = _feed_forward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(self.last_norm(x))


def _feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
