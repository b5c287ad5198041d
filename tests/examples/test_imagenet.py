"""The ImageNet example: data, models, schedule, training, evaluation, resume, two processes."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

IMAGENET = Path(__file__).parents[2] / "examples" / "imagenet"
TINY = ["-a", "resnet10", "-j", "0", "-b", "4", "--image-size", "32"]


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    for module in ("sklearn", "PIL"):
        pytest.importorskip(module, reason="the demo extra is not installed")
    monkeypatch.syspath_prepend(str(IMAGENET))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    spec = importlib.util.spec_from_file_location("imagenet_main_amp", IMAGENET / "main_amp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Red and blue images of several shapes and formats: 16 to train on, 6 to validate."""
    from PIL import Image

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


# -- data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [False, True])
def test_a_class_is_a_folder(folder, augment):
    from image_data import ImageFolder

    data = ImageFolder(folder / "train", 32, augment=augment)
    assert (data.classes, len(data)) == (["blue", "red"], 16)
    image, label = data[8]
    assert (image.dtype, image.shape, label) == (torch.uint8, (3, 32, 32), 1)
    assert image[0].min() > 200 > 60 > image[2].max()


def test_a_folder_without_images_is_refused(tmp_path):
    from image_data import ImageFolder

    with pytest.raises(FileNotFoundError, match="contains no images"):
        ImageFolder(tmp_path / "train", 32, augment=False)


@pytest.mark.parametrize("shape", [(10, 10), (300, 40), (40, 300)])
def test_random_boxes_lie_inside_the_image(shape):
    from image_data import random_box

    for _ in range(200):
        left, upper, right, lower = random_box(*shape)
        assert 0 <= left < right <= shape[0] + 1e-6
        assert 0 <= upper < lower <= shape[1] + 1e-6


def test_the_center_is_a_square_of_seven_eighths():
    from image_data import center_box

    assert center_box(512, 256) == (144.0, 16.0, 368.0, 240.0)


def test_the_digits_share_no_image():
    from image_data import load_digits

    train, test = load_digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train[0][0].shape == (3, 32, 32)
    seen = {bytes(image.flatten().tolist()) for image, _ in train}
    assert not any(bytes(image.flatten().tolist()) in seen for image, _ in test)


@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_arrive_normalized_and_in_order(channels_last):
    from image_data import DEVIATION, MEAN, Prefetcher

    images = torch.arange(5, dtype=torch.uint8).mul(50).view(5, 1, 1, 1).expand(5, 3, 2, 2)
    loader = [(images[i : i + 2], torch.arange(5)[i : i + 2]) for i in (0, 2, 4)]
    prefetcher = Prefetcher(loader, torch.device("cpu"), channels_last=channels_last)
    batches = list(prefetcher)
    assert torch.cat([labels for _, labels in batches]).tolist() == list(range(5))
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))
    arrived = torch.cat([images for images, _ in batches])
    torch.testing.assert_close(arrived, (images / 255 - mean) / deviation)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    assert batches[0][0].is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("shuffle", [False, True])
def test_processes_share_the_images(shuffle):
    from image_data import make_loader

    data = torch.utils.data.TensorDataset(torch.arange(12))
    shares = [
        torch.cat(
            [
                batch
                for (batch,) in make_loader(
                    data, 2, workers=0, shuffle=shuffle, rank=rank, world_size=3, seed=0
                )
            ]
        ).tolist()
        for rank in range(3)
    ]
    assert [len(share) for share in shares] == [4, 4, 4]
    assert sorted(index for share in shares for index in share) == list(range(12))


def test_validation_counts_no_image_twice():
    from image_data import make_loader

    data = torch.utils.data.TensorDataset(torch.arange(7))
    shares = [
        make_loader(data, 2, workers=0, shuffle=False, rank=rank, world_size=2, seed=0)
        for rank in range(2)
    ]
    seen = [torch.cat([batch for (batch,) in share]).tolist() for share in shares]
    assert seen == [[0, 2, 4, 6], [1, 3, 5]]


def test_fewer_images_than_a_batch_are_refused():
    from image_data import make_loader

    data = torch.utils.data.TensorDataset(torch.arange(7))
    with pytest.raises(ValueError, match="7 training images are too few"):
        make_loader(data, 8, workers=0, shuffle=True, rank=0, world_size=1, seed=0)


# -- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("resnet18", 11.69), ("resnet50", 25.56)])
def test_our_resnets_have_the_papers_parameters(name, millions):
    from resnet import resnet

    model = resnet(name, 1000)
    count = sum(param.numel() for param in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("name", ["resnet10", "resnet50"])
def test_our_resnets_score_each_class(name):
    from resnet import resnet

    assert resnet(name, 7)(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.fixture
def torchvision(monkeypatch, tmp_path):
    """Puts a package of that name, with this source, before any that is installed."""

    def put(source):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            monkeypatch.delitem(sys.modules, name)
        package = tmp_path / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text(source)
        (package / "models.py").write_text(
            "import torch\n"
            "def list_models(module): return ['vit']\n"
            "def get_model(name, weights, num_classes): return torch.nn.Linear(2, num_classes)\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    # Not by monkeypatch: its undo would bring the stand-in back.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


@pytest.mark.parametrize("error", ["RuntimeError('operator nms does not exist')", "ImportError()"])
def test_a_torchvision_that_does_not_import_is_passed_over(torchvision, error):
    from architectures import build_model
    from resnet import Residual

    torchvision(f"raise {error}")
    modules = list(build_model("resnet10", 3).modules())
    assert any(isinstance(module, Residual) for module in modules)
    with pytest.raises(ValueError, match="--arch vit is not one of resnet10"):
        build_model("vit", 3)
    with pytest.raises(ValueError, match="--pretrained needs torchvision"):
        build_model("resnet10", 1000, pretrained=True)


def test_torchvisions_models_come_first(torchvision):
    from architectures import build_model

    torchvision("")
    assert isinstance(build_model("vit", 3), torch.nn.Linear)
    with pytest.raises(ValueError, match="1000 classes; this data has 3"):
        build_model("vit", 3, pretrained=True)


# -- scores and schedule ---------------------------------------------------------------------


def test_a_score_is_the_average_over_images():
    from tally import Tally

    tally = Tally(torch.device("cpu"))
    logits = torch.arange(8.0).repeat(4, 1)
    tally.add(torch.tensor(1.0), logits, torch.tensor([7, 7, 3, 0]))
    tally.add(torch.tensor(4.0), logits[:2], torch.tensor([6, 2]))
    score = tally.read()
    assert (score.loss, score.top1, score.top5) == pytest.approx((2.0, 200 / 6, 400 / 6))


def test_fewer_than_five_classes_have_a_top_five():
    from tally import Tally

    tally = Tally(torch.device("cpu"))
    tally.add(torch.tensor(1.0), torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    assert (tally.read().top1, tally.read().top5) == (0.0, 100.0)


@pytest.mark.parametrize(
    ("epoch", "expected"), [(0, 0), (2.5, 0.5), (5, 1), (29, 1), (30, 0.1), (60, 0.01), (80, 1e-3)]
)
def test_of_90_epochs_the_rate_changes_at_5_30_60_and_80(example, epoch, expected):
    assert example.learning_rate(epoch / 90) == pytest.approx(expected)


# -- training --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [["--opt-level", "O0"], ["--opt-level", "O5", "--keep-batchnorm-fp32", "True"]],
    ids=" ".join,
)
def test_folders_of_images_are_learned(example, folder, tmp_path, capsys, options):
    options = [*options, "--channels-last", "--epochs", "3", "--lr", "1", "--print-freq", "2"]
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


def test_without_a_path_the_digits_are_profiled(example, tmp_path, capsys):
    score = example.main([*TINY, "--prof", "2", "--opt-level", "O4", "--output", str(tmp_path)])
    output = capsys.readouterr().out
    assert "aten::" in output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("conv" in event["name"] for event in events)
    assert score.loss > 0


def test_workers_see_the_same_crops_for_the_same_seed(tmp_path):
    from image_data import ImageFolder, make_loader
    from PIL import Image

    (tmp_path / "class").mkdir()
    for index in range(4):
        Image.linear_gradient("L").save(tmp_path / "class" / f"{index}.png")
    data = ImageFolder(tmp_path, 8, augment=True)
    loader = make_loader(data, 4, workers=1, shuffle=False, rank=0, world_size=1, seed=0)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(next(iter(loader))[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_other_classes_for_validation_are_refused(example, folder, tmp_path):
    (tmp_path / "train").symlink_to(folder / "train")
    (tmp_path / "val" / "green").mkdir(parents=True)
    (tmp_path / "val" / "green" / "0.png").write_bytes(b"")
    with pytest.raises(ValueError, match="contain different classes"):
        example.main([str(tmp_path), *TINY])


@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_the_launchers_option_is_taken_in_both_spellings(example, spelling):
    assert example.parse_args([f"{spelling}=3"]).local_rank == 3


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_one_model(folder, tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *(str(IMAGENET / "main_amp.py"), str(folder), *TINY, "--opt-level", "O5", "--sync_bn"),
        *("--epochs", "1", "--print-freq", "1", "--output", str(tmp_path)),
    ]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path, timeout=120
    )
    assert done.stdout.count("validation") == 1
    assert "epoch 0 [2/2]" in done.stdout  # 16 images: two steps of four in each of two processes
    assert torch.load(tmp_path / "checkpoint.pth.tar")["epoch"] == 1
