"""Trains a DCGAN with amp: two models, two optimizers, and three losses with separate scales.

python examples/dcgan/main_amp.py --opt_level O4 --niter 10
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from nets import discriminator, generator
from pictures import Pictures, digits, save_grid
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from apex import amp

REAL, FAKE, GENERATOR = 0, 1, 2  # loss_id of the three losses


@dataclass(frozen=True)
class Losses:
    """The losses of one step, 0-d, on the device."""

    real: Tensor
    fake: Tensor
    generator: Tensor

    def __str__(self) -> str:
        parts = {"real": self.real, "fake": self.fake, "generator": self.generator}
        return "  ".join(f"{name} {value.item():.4f}" for name, value in parts.items())


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line, with the traditional names of DCGAN scripts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dataroot", type=Path, help="folder of images; default: scikit-learn's digits")
    add("--workers", type=int, default=2)
    add("--batchSize", type=int, default=64)
    add("--imageSize", type=int, default=32, help="side length in pixels: 8, 16, 32, ...")
    add("--nz", type=int, default=100, help="length of the noise vector")
    add("--ngf", type=int, default=64, help="smallest width of the generator")
    add("--ndf", type=int, default=64, help="smallest width of the discriminator")
    add("--niter", type=int, default=25, help="epochs")
    add("--lr", type=float, default=2e-4)
    add("--beta1", type=float, default=0.5)
    add("--outf", type=Path, default=Path("dcgan_out"), help="folder for grids and checkpoint")
    add("--resume", type=Path, help="checkpoint to resume from")
    add("--manualSeed", type=int, default=0)
    add("--opt_level", "--opt-level", default="O1", metavar="O0..O5")
    return parser.parse_args(argv)


class Gan:
    """The two models and optimizers, prepared by one ``amp.initialize``."""

    def __init__(self, args: argparse.Namespace, channels: int, device: torch.device) -> None:
        net_d = discriminator(args.ndf, channels, args.imageSize).to(device)
        net_g = generator(args.nz, args.ngf, channels, args.imageSize).to(device)
        adam = {"lr": args.lr, "betas": (args.beta1, 0.999), "fused": True}
        self.models, self.optimizers = amp.initialize(
            [net_d, net_g],
            [Adam(net_d.parameters(), **adam), Adam(net_g.parameters(), **adam)],
            opt_level=args.opt_level,
            num_losses=3,
        )

    def step(self, real: Tensor, noise: Tensor) -> Losses:
        """Trains both nets once, on ``real`` images and ``noise`` [N, nz, 1, 1]."""
        net_d, net_g = self.models
        optimizer_d, optimizer_g = self.optimizers

        optimizer_d.zero_grad()
        loss_real = judged(net_d(real), is_real=True)
        with amp.scale_loss(loss_real, optimizer_d, loss_id=REAL) as scaled_loss:
            scaled_loss.backward()
        fake = net_g(noise)
        loss_fake = judged(net_d(fake.detach()), is_real=False)
        with amp.scale_loss(loss_fake, optimizer_d, loss_id=FAKE) as scaled_loss:
            scaled_loss.backward()  # adds to the gradients of loss_real, which are unscaled
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = judged(net_d(fake), is_real=True)  # the generator aims to pass as real
        with amp.scale_loss(loss_g, optimizer_g, loss_id=GENERATOR) as scaled_loss:
            scaled_loss.backward()
        optimizer_g.step()
        return Losses(loss_real.detach(), loss_fake.detach(), loss_g.detach())

    @torch.no_grad()
    def draw(self, noise: Tensor) -> Tensor:
        """Returns the generator's images."""
        return self.models[1](noise)

    def save(self, path: Path, epoch: int) -> None:
        """Saves the state from which a later run resumes."""
        parts = {"models": self.models, "optimizers": self.optimizers}
        state = {name: [part.state_dict() for part in both] for name, both in parts.items()}
        torch.save({**state, "amp": amp.state_dict(), "epoch": epoch}, path)

    def load(self, path: Path, device: torch.device) -> int:
        """Loads what ``save`` wrote; returns the number of completed epochs."""
        state = torch.load(path, map_location=device, weights_only=True)
        for name, both in (("models", self.models), ("optimizers", self.optimizers)):
            for part, saved in zip(both, state[name], strict=True):
                part.load_state_dict(saved)
        amp.load_state_dict(state["amp"])
        return state["epoch"]


def judged(logits: Tensor, *, is_real: bool) -> Tensor:
    """Returns the loss of ``logits`` [N] against the correct answer, in fp32."""
    logits = logits.float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def main(argv: Sequence[str] | None = None) -> list[nn.Module]:
    """Trains, writes a grid of generated images after each epoch, and returns both models."""
    args = parse_args(argv)
    torch.manual_seed(args.manualSeed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Pictures(args.dataroot, args.imageSize) if args.dataroot else digits(args.imageSize)
    loader = DataLoader(
        data, args.batchSize, shuffle=True, num_workers=args.workers, drop_last=True
    )
    if not len(loader):
        raise ValueError(f"{len(data)} images are fewer than --batchSize {args.batchSize}.")
    gan = Gan(args, channels=data[0][0].shape[0], device=device)
    first = gan.load(args.resume, device) if args.resume else 0

    args.outf.mkdir(parents=True, exist_ok=True)
    save_grid(args.outf / "real_samples.png", next(iter(loader))[0][:64])
    fixed_noise = torch.randn(64, args.nz, 1, 1, device=device)  # the same noise in every grid
    for epoch in range(first, args.niter):
        for (real,) in loader:
            noise = torch.randn(len(real), args.nz, 1, 1, device=device)
            losses = gan.step(real.to(device, non_blocking=True), noise)
        scales = [state["loss_scale"] for state in amp.state_dict().values()]
        print(f"epoch {epoch}  {losses}  loss scales {scales}", flush=True)
        save_grid(args.outf / f"fake_samples_epoch_{epoch:03d}.png", gan.draw(fixed_noise))
        gan.save(args.outf / "checkpoint.pt", epoch + 1)
    return gan.models


if __name__ == "__main__":
    main()
