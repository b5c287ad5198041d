"""DCGAN: the nets, the pictures, three losses with three scales, and going on from a checkpoint."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from apex import amp

DCGAN = Path(__file__).parents[2] / "examples" / "dcgan"
TINY = ["--imageSize", "8", "--nz", "4", "--ngf", "4", "--ndf", "4", "--workers", "0"]


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    for module in ("sklearn", "PIL"):
        pytest.importorskip(module, reason="the demo extra is not installed")
    monkeypatch.syspath_prepend(str(DCGAN))


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("dcgan_main_amp", DCGAN / "main_amp.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


def batch(bad=False):
    real = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    noise = torch.randn(4, 4, 1, 1, generator=torch.Generator().manual_seed(2))
    if bad:
        real[0, 0, 0, 0] = float("inf")
    return real, noise


def params(model):
    return [param.detach().clone() for param in model.parameters()]


# -- nets and pictures -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 16, 64])
def test_the_nets_fit_the_image_size(size):
    from nets import discriminator, generator

    images = generator(noise=3, width=2, channels=3, size=size)(torch.randn(2, 3, 1, 1))
    assert images.shape == (2, 3, size, size)
    assert discriminator(width=2, channels=3, size=size)(images).shape == (2,)


@pytest.mark.parametrize("size", [0, 4, 24])
def test_a_size_that_is_no_power_of_two_is_refused(size):
    from nets import discriminator

    with pytest.raises(ValueError, match=f"--imageSize is {size}"):
        discriminator(width=2, channels=1, size=size)


def test_pictures_of_every_mode_become_rgb_squares(pictures):
    from pictures import Pictures

    data = Pictures(pictures, size=8)
    assert [data[i][0].shape for i in range(len(data))] == [(3, 8, 8)] * 5
    torch.testing.assert_close(data[0][0][:, 4, 4], torch.tensor([0, 80, 10]) / 127.5 - 1)


def test_a_folder_without_images_is_refused(tmp_path):
    from pictures import Pictures

    with pytest.raises(FileNotFoundError, match="contains no images"):
        Pictures(tmp_path, size=8)


def test_a_grid_shows_each_image_in_its_place(tmp_path):
    from pictures import save_grid
    from PIL import Image

    images = torch.linspace(-1, 1, 3).view(3, 1, 1, 1).expand(3, 1, 2, 2)
    save_grid(tmp_path / "grid.png", images, columns=2)
    with Image.open(tmp_path / "grid.png") as grid:
        assert (grid.size, grid.mode) == ((8, 8), "RGB")
        shown = [grid.getpixel(at) for at in [(1, 1), (5, 1), (1, 5), (5, 5), (3, 0)]]
    assert shown == [(value,) * 3 for value in (0, 128, 255, 255, 255)]


# -- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_step_trains_both_nets(make_gan, level):
    gan = make_gan(level, argv=["--lr", "0.01"])
    before = [params(model) for model in gan.models]
    for _ in range(2):
        losses = gan.step(*batch())
    assert len(amp.state_dict()) == 3
    assert all(torch.isfinite(loss) for loss in (losses.real, losses.fake, losses.generator))
    for model, old in zip(gan.models, before, strict=True):
        assert not any(map(torch.equal, old, params(model)))


def test_an_overflow_of_one_loss_lowers_its_own_scale_and_stops_its_own_optimizer(make_gan):
    gan = make_gan("O2")
    discriminator, _ = gan.models
    gan.step(*batch())
    scales = [scaler["loss_scale"] for scaler in amp.state_dict().values()]
    before = params(discriminator)
    gan.step(*batch(bad=True))
    after = [scaler["loss_scale"] for scaler in amp.state_dict().values()]
    assert after == [scales[0] / 2, *scales[1:]]
    assert all(map(torch.equal, before, params(discriminator)))


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
    gan.step(*batch())
    gan.save(tmp_path / "checkpoint.pt", epoch=7)
    gan.step(*batch())
    expected = [params(model) for model in gan.models]
    scales = amp.state_dict()
    del gan
    resumed = make_gan(level)
    assert resumed.load(tmp_path / "checkpoint.pt", torch.device("cpu")) == 7
    resumed.step(*batch())
    for model, values in zip(resumed.models, expected, strict=True):
        assert all(map(torch.equal, params(model), values))
    assert amp.state_dict() == scales


def test_more_images_a_batch_than_there_are_is_refused(example, pictures, tmp_path):
    with pytest.raises(ValueError, match="5 images are fewer than --batchSize 64"):
        example.main([*TINY, "--dataroot", str(pictures), "--outf", str(tmp_path)])
