"""Trains a small GPT on characters at O5: clipping, exact resume, and a report on a bad step.

python examples/char_model/main.py                     # Python's own documentation, one minute
python examples/char_model/main.py --resume char.pt --steps 600
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

from apex import amp


class Block(nn.Module):
    """Causal attention and a two-layer network, each behind a norm and beside a skip."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    """A GPT that returns the loss if it gets targets, and logits otherwise."""

    def __init__(self, characters, context, width=128, heads=4, layers=4):
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:  # GPT-2: the sum over the layers keeps its variance
            for layer in (block.out, block.mlp[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets=None):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.tokens(ids) + self.positions(places))
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(text, step, args, device):
    """Returns the batch of a step, always the same one: a resumed run sees the same batches."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator)
    pieces = text[starts + torch.arange(args.context + 1)].to(device, non_blocking=True)
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def sample(model, characters, length, device):
    """Returns text that the model continues from a line break, reproducibly."""
    ids = torch.tensor([[characters.index("\n")]], device=device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        chances = model(ids[:, -model.context :])[0, -1].float().softmax(dim=0).cpu()
        following = chances.multinomial(1, generator=generator).to(device)
        ids = torch.cat([ids, following[None]], dim=1)
    return "".join(characters[index] for index in ids[0].tolist())


def main(argv=None):
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = args.data.read_text(encoding="utf-8") if args.data else "\n".join(topics.values())
    characters = sorted({"\n", *source})
    number = {character: index for index, character in enumerate(characters)}
    text = torch.tensor([number[character] for character in source])
    held_out = text[int(0.9 * len(text)) :]
    text = text[: int(0.9 * len(text))]

    torch.manual_seed(0)
    model = CharModel(len(characters), args.context, args.width, layers=args.layers).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1.0) * 0.998**step
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "amp": amp}
    first = 0
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        first = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    losses = []
    for step in range(first, args.steps):
        loss = model(*batch(text, step, args, device))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:4}: loss {torch.stack(losses[-50:]).mean():.3f}")

    with torch.no_grad():
        score = torch.stack([model(*batch(held_out, step, args, device)) for step in range(8)])
    print(f"held out: loss {score.mean():.3f}")
    print(sample(model, characters, args.sample, device))
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "step": args.steps}, args.output)
    return [loss.item() for loss in losses], score.mean().item()


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O5", choices=["O0", "O1", "O2", "O4", "O5"])
    parser.add_argument("--data", type=Path, help="a text file; default: Python's documentation")
    parser.add_argument("--steps", type=int, default=300, help="steps of the whole run")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--output", type=Path, default=Path("char.pt"), help="the checkpoint")
    parser.add_argument("--resume", type=Path, help="a checkpoint to continue from")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
