"""Trains a word-level language model with amp: clipping and gradient accumulation.

python examples/word_language_model/main_amp.py --opt-level O4
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Corpus, chunks, columns
from language_model import CELLS, LanguageModel, detached
from torch import Tensor, nn
from torch.optim import Optimizer

from apex import amp

SONNETS = Path(__file__).with_name("sonnets.txt")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=SONNETS, help="text file; default: seven sonnets")
    add("--model", default="LSTM", choices=list(CELLS))
    add("--width", type=int, default=128, help="size of embeddings and hidden states")
    add("--nlayers", type=int, default=1)
    add("--dropout", type=float, default=0.0)
    add("--tied", action="store_true", help="share the matrix of embedding and output layer")
    add("--lr", type=float, default=2e-3)
    add("--clip", type=float, default=0.5, help="largest norm of the gradients")
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=8, help="columns of text, read in parallel")
    add("--bptt", type=int, default=16, help="words through which gradients propagate")
    add("--accumulate", type=int, default=2, help="chunks of text per step")
    add("--seed", type=int, default=0)
    add("--opt-level", default="O1", metavar="O0..O5")
    add("--loss-scale", help="a number or 'dynamic'; default: the level's")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Trains, and returns the last training and validation losses."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = Corpus(args.data)
    words = len(corpus.vocabulary)
    train_text = columns(corpus.train, args.batch_size).to(device)
    validation_text = columns(corpus.validation, 1).to(device)

    model = LanguageModel(
        args.model, words, args.width, args.nlayers, args.dropout, tied=args.tied
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale
    )
    train_loss = validation_loss = math.nan
    for epoch in range(args.epochs):
        train_loss = train(args, model, optimizer, train_text)
        validation_loss = evaluate(model, validation_text, args.bptt)
        both = {"train": train_loss, "validation": validation_loss}
        parts = (
            f"{name} {loss:.3f} (perplexity {math.exp(loss):.0f})" for name, loss in both.items()
        )
        print(f"epoch {epoch}  " + "  ".join(parts), flush=True)
    return train_loss, validation_loss


def train(args: argparse.Namespace, model: nn.Module, optimizer: Optimizer, text: Tensor) -> float:
    """Trains on the text once and returns the mean loss.

    Each step accumulates the unscaled gradients of ``--accumulate`` chunks.
    """
    model.train()
    hidden, losses = None, []
    pieces = list(chunks(text, args.bptt))
    for index, (words, following) in enumerate(pieces, start=1):
        scores, hidden = model(words, None if hidden is None else detached(hidden))
        loss = F.cross_entropy(scores.float().flatten(0, 1), following.flatten())
        with amp.scale_loss(loss / args.accumulate, optimizer) as scaled_loss:
            scaled_loss.backward()
        losses.append(loss.detach())
        if index % args.accumulate == 0 or index == len(pieces):
            # The gradients are unscaled here and, with masters, fp32. After an overflow, they and
            # their norm are inf or NaN, and step() does nothing.
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, length: int) -> float:
    """Returns the mean loss over ``text`` [T, 1]."""
    model.eval()
    hidden, total = None, 0.0
    for words, following in chunks(text, length):
        scores, hidden = model(words, hidden)
        loss = F.cross_entropy(scores.float().flatten(0, 1), following.flatten())
        total += loss.item() * len(following)
    return total / (len(text) - 1)


if __name__ == "__main__":
    main()
