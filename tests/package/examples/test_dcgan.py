"""DCGAN: the nets, the pictures, three losses with three scales, and going on from a checkpoint."""

import pytest
import torch

from apex import amp
from tests.support.loops import values

TINY = ["--imageSize", "8", "--nz", "4", "--ngf", "4", "--ndf", "4", "--workers", "0"]


@pytest.fixture
def example(load):
    return load("dcgan/main_amp", "sklearn", "PIL")


@pytest.fixture
def pictures(tmp_path):
    """Five pictures of other shapes and modes, in a folder and one below it."""
    from PIL import Image

    folder = tmp_path / "pictures"
    (folder / "below").mkdir(parents=True)
    for index, mode in enumerate(["RGB", "L", "RGBA", "RGB", "P"]):
        image = Image.new("RGB", (12 + index, 9), (40 * index, 80, 10)).convert(mode)
        image.save(folder / ("below" if index % 2 else "") / f"{index}.png")
    return folder


@pytest.fixture
def make_gan(example):
    def make(level, **options):
        args = example.parse_args([*TINY, "--opt_level", level, *options.pop("argv", [])])
        torch.manual_seed(0)
        return example.Gan(args, channels=1, device=torch.device("cpu"))

    return make


def pictures_and_noise():
    real = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    noise = torch.randn(4, 4, 1, 1, generator=torch.Generator().manual_seed(2))
    return real, noise


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_step_trains_both_nets(make_gan, level):
    gan = make_gan(level, argv=["--lr", "0.01"])
    before = [values(model.parameters()) for model in gan.models]
    for _ in range(2):
        losses = gan.step(*pictures_and_noise())
    assert len(amp.state_dict()) == 3
    assert all(torch.isfinite(loss) for loss in (losses.real, losses.fake, losses.generator))
    for model, old in zip(gan.models, before, strict=True):
        assert not any(map(torch.equal, old, values(model.parameters())))


@pytest.mark.parametrize("source", ["digits", "folder"])
def test_every_epoch_leaves_a_grid(example, pictures, tmp_path, source):
    data = {"digits": ["--batchSize", "256"], "folder": ["--dataroot", str(pictures)]}[source]
    size = [] if source == "digits" else ["--batchSize", "2"]
    example.main([*TINY, *data, *size, "--outf", str(tmp_path), "--niter", "2", "--opt_level=O4"])
    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        "checkpoint.pt",
        "fake_samples_epoch_000.png",
        "fake_samples_epoch_001.png",
        "real_samples.png",
    ]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_resumed_run_goes_on_exactly(make_gan, tmp_path, level):
    gan = make_gan(level)
    gan.step(*pictures_and_noise())
    gan.save(tmp_path / "checkpoint.pt", epoch=7)
    gan.step(*pictures_and_noise())
    expected = [values(model.parameters()) for model in gan.models]
    scales = amp.state_dict()
    del gan
    resumed = make_gan(level)
    assert resumed.load(tmp_path / "checkpoint.pt", torch.device("cpu")) == 7
    resumed.step(*pictures_and_noise())
    for model, weights in zip(resumed.models, expected, strict=True):
        assert all(map(torch.equal, values(model.parameters()), weights))
    assert amp.state_dict() == scales
