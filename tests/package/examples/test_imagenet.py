"""The ImageNet example: data, models, schedule, training, evaluation, resume, two processes."""

import re
import sys

import pytest
import torch

from tests.package.examples.conftest import EXAMPLES
from tests.support.ranks import run_script

TINY = ["-a", "resnet10", "-j", "0", "-b", "4", "--image-size", "32"]


@pytest.fixture
def example(load, monkeypatch):
    """The script, with two of the smallest model's four stages: a twentieth of its weights."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    script = load("imagenet/main_amp", "sklearn", "PIL")
    monkeypatch.setitem(sys.modules["resnet"].STAGES, "resnet10", (1, (1, 1)))
    yield script
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Red and blue images of several shapes and formats: 16 to train on, 6 to validate."""
    Image = pytest.importorskip("PIL.Image", reason="the demo extra is not installed")
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 8), ("val", 3)):
        for name, color in (("blue", (20, 40, 220)), ("red", (220, 40, 20))):
            below = root / split / name
            below.mkdir(parents=True)
            for index in range(count):
                suffix = ("png", "jpg", "bmp")[index % 3]
                image = Image.new("RGB", (40 + 3 * index, 36 + index), color)
                image.save(below / f"{index}.{suffix}")
    return root


@pytest.mark.usefixtures("example")
def test_validation_counts_no_image_twice():
    from image_data import make_loader

    data = torch.utils.data.TensorDataset(torch.arange(7))
    shares = [
        make_loader(data, 2, workers=0, shuffle=False, rank=rank, world_size=2, seed=0)
        for rank in range(2)
    ]
    seen = [torch.cat([batch for (batch,) in share]).tolist() for share in shares]
    assert seen == [[0, 2, 4, 6], [1, 3, 5]]


def test_folders_of_images_are_learned(example, folder, tmp_path, capsys):
    level = ["--opt-level", "O5", "--keep-batchnorm-fp32", "True", "--channels-last"]
    options = [*level, "--epochs", "3", "--lr", "1", "--print-freq", "2"]
    score = example.main([str(folder), *TINY, *options, "--output", str(tmp_path)])
    line = r"^epoch 2 \[2/4\]  loss \d\.\d{4}  top-1 +\d+\.\d\d%  top-5 100\.00%  \d+ images/s$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)
    assert score.top1 == 100.0
    assert (tmp_path / "checkpoint.pth.tar").exists()
    assert (tmp_path / "model_best.pth.tar").exists()


@pytest.mark.parametrize("options", [["--opt-level", "O5"], ["--opt-level", "O4", "--sync_bn"]])
def test_a_resumed_run_ends_as_the_uninterrupted_one(example, folder, tmp_path, options):
    whole, part = tmp_path / "whole", tmp_path / "part"
    argv = [str(folder), *TINY, *options, "--epochs", "2", "--deterministic"]
    expected = example.main([*argv, "--output", str(whole)])
    # Stopped after the first of two epochs: the checkpoint of the best is the one that remains.
    run_one_epoch(example, [*argv, "--output", str(part)])
    resumed = [*argv, "--output", str(part), "--resume", str(part / "checkpoint.pth.tar")]
    assert example.main(resumed) == expected
    states = [torch.load(path / "checkpoint.pth.tar") for path in (whole, part)]
    assert states[0]["epoch"] == states[1]["epoch"] == 2
    for name, value in states[0]["model"].items():
        assert value.dtype in (torch.float32, torch.int64)
        assert torch.equal(value, states[1]["model"][name]), name
    assert states[0]["amp"] == states[1]["amp"]


def run_one_epoch(example, argv):
    class StopError(Exception):
        pass

    def save_and_stop(*args, **kwargs):
        original(*args, **kwargs)
        raise StopError

    original, example.save_checkpoint = example.save_checkpoint, save_and_stop
    try:
        with pytest.raises(StopError):
            example.main(argv)
    finally:
        example.save_checkpoint = original


def test_evaluation_scores_the_checkpoint(example, folder, tmp_path, capsys):
    argv = [str(folder), *TINY, "--opt-level", "O5", "--output", str(tmp_path)]
    trained = example.main([*argv, "--epochs", "1"])
    before = (tmp_path / "checkpoint.pth.tar").read_bytes()
    resume = ["--resume", str(tmp_path / "checkpoint.pth.tar")]
    assert example.main([*argv, *resume, "--evaluate"]) == trained
    assert "epoch 1 validation" in capsys.readouterr().out
    assert (tmp_path / "checkpoint.pth.tar").read_bytes() == before


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_one_model(on_two_ranks, folder, tmp_path):
    options = ["--opt-level", "O5", "--sync_bn", "--epochs", 1, "--print-freq", 1]
    script = EXAMPLES / "imagenet/main_amp.py"
    printed = run_script(on_two_ranks, script, folder, *TINY, *options, "--output", tmp_path)
    assert printed.count("validation") == 1
    assert "epoch 0 [2/2]" in printed  # 16 images: two steps of four in each of two processes
    assert torch.load(tmp_path / "checkpoint.pth.tar")["epoch"] == 1
