"""A text file as word indices, split into batches for a recurrent net."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

END_OF_LINE = "<eos>"


class Corpus:
    """The words of a text, numbered in the order of their first appearance.

    Attributes:
        vocabulary: The words by index; punctuation marks and line ends count as words.
        train: The indices of the first 90 % of the text.
        validation: The indices of the rest.

    Raises:
        ValueError: If the text has fewer than 100 words.
    """

    def __init__(self, path: Path) -> None:
        words = list(split(path.read_text(encoding="utf-8")))
        if len(words) < 100:
            raise ValueError(f"{path} contains {len(words)} words; at least 100 are needed.")
        self.vocabulary = list(dict.fromkeys(words))
        numbers = {word: number for number, word in enumerate(self.vocabulary)}
        text = torch.tensor([numbers[word] for word in words])
        self.train, self.validation = text.tensor_split([len(text) * 9 // 10])


def split(text: str) -> Iterator[str]:
    """Yields the lower-case words and the punctuation of each non-empty line."""
    for line in text.lower().splitlines():
        if line.strip():
            yield from re.findall(r"\w+(?:['\u2019-]\w+)*|[^\w\s]", line)
            yield END_OF_LINE


def columns(text: Tensor, batch_size: int) -> Tensor:
    """Returns ``text`` [N] as [N // batch_size, batch_size]; each column is a contiguous piece.

    Raises:
        ValueError: If a column would have fewer than two words.
    """
    length = len(text) // batch_size
    if length < 2:
        raise ValueError(f"{len(text)} words are too few for {batch_size} columns.")
    return text[: length * batch_size].view(batch_size, length).t().contiguous()


def chunks(text: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields chunks of ``length`` rows, each with the words that follow."""
    for start in range(0, len(text) - 1, length):
        end = min(start + length, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1]
