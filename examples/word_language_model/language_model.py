"""A language model: word embeddings, a recurrent net, and scores for the next word."""

from __future__ import annotations

from torch import Tensor, nn

Hidden = Tensor | tuple[Tensor, Tensor]  # of a GRU, of an LSTM

CELLS: dict[str, type[nn.LSTM | nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}


class LanguageModel(nn.Module):
    """Predicts each word from those before it.

    Args:
        cell: ``"LSTM"`` or ``"GRU"``.
        words: Size of the vocabulary.
        width: Size of embeddings and hidden states.
        layers: Number of recurrent layers.
        dropout: Dropout probability.
        tied: Whether embedding and output layer share one matrix.
    """

    def __init__(
        self, cell: str, words: int, width: int, layers: int, dropout: float, *, tied: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.cell = CELLS[cell](width, width, layers, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(width, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.scores.weight, -0.1, 0.1)
        nn.init.zeros_(self.scores.bias)
        if tied:
            self.scores.weight = self.embedding.weight

    def forward(self, words: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        """Returns scores [T, N, vocabulary] and the hidden state after ``words`` [T, N]."""
        output, hidden = self.cell(self.dropout(self.embedding(words)), hidden)
        return self.scores(self.dropout(output)), hidden


def detached(hidden: Hidden) -> Hidden:
    """Returns ``hidden`` detached from the chunk that produced it."""
    return tuple(h.detach() for h in hidden) if isinstance(hidden, tuple) else hidden.detach()
