"""PyText 0.3.3: a document classifier trained with ``FP16OptimizerApex`` and exported."""

import random

import numpy
import pytest
import torch
from torch.testing import assert_close

from apex import amp
from tests.clients import stubs
from tests.clients.libraries import need, of_its_time

STUBS = (
    "caffe2",  # its other way of exporting; torch no longer has it
    "pytext.utils.onnx",  # the same; imports names that torch.onnx no longer has
    "onnx",  # the same
    "fairseq",  # transformers, dictionaries and fairseq's fp16 optimizer, which is not apex's
    "pytorch_pretrained_bert",  # BERT
    "torchdp",  # differential privacy
    "torch.utils.tensorboard",  # its log for TensorBoard
)

with pytest.MonkeyPatch.context() as patch, stubs.standing_in(*STUBS):
    patch.setattr(numpy, "NAN", numpy.nan, raising=False)
    need("pytext")
    from pytext.config.pytext_config import LATEST_VERSION, PyTextConfig
    from pytext.data import Data
    from pytext.data.sources import TSVDataSource
    from pytext.models.doc_model import DocModel
    from pytext.models.representations.docnn import DocNNRepresentation
    from pytext.optimizer import Adam
    from pytext.optimizer.fp16_optimizer import FP16OptimizerApex
    from pytext.task.task import create_task
    from pytext.task.tasks import DocumentClassificationTask
    from pytext.trainers import TaskTrainer
    from pytext.utils import cuda, precision

pytestmark = of_its_time

WORDS = {"fruit": ["apple", "pear", "plum"], "animal": ["cat", "dog", "cow"]}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(numpy, "NAN", numpy.nan, raising=False)  # gone in numpy 2
    monkeypatch.setattr(cuda, "CUDA_ENABLED", False)
    # What set_fp16(True) does where there is a GPU; pre_export takes it back.
    monkeypatch.setattr(precision, "FP16_ENABLED", False)


def write(path, count):
    with path.open("w") as file:
        for _ in range(count):
            label = random.choice(list(WORDS))
            text = " ".join(random.choices([*WORDS[label], "a", "the"], k=5))
            print(label, text, sep="\t", file=file)
    return str(path)


@pytest.fixture
def train(tmp_path):
    """Trains and returns the task; ``options`` are the trainer's."""
    train_file, eval_file = write(tmp_path / "train", 64), write(tmp_path / "eval", 16)

    def run(level, **options):
        torch.manual_seed(0)
        random.seed(0)
        precision.FP16_ENABLED = level is not None
        data = TSVDataSource.Config(
            train_filename=train_file, eval_filename=eval_file, test_filename=eval_file,
            field_names=["label", "text"],
        )  # fmt: skip
        config = DocumentClassificationTask.Config(
            data=Data.Config(source=data),
            model=DocModel.Config(representation=DocNNRepresentation.Config(dropout=0.0)),
            trainer=TaskTrainer.Config(
                epochs=6,
                max_clip_norm=1.0,
                optimizer=Adam.Config(lr=0.002),
                fp16_args=FP16OptimizerApex.Config(opt_level=level or "O0"),
                **options,
            ),
        )
        task = create_task(config)
        whole = PyTextConfig(task=config, version=LATEST_VERSION, use_fp16=level is not None)
        task.train(whole)
        return task

    return run


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_optimizer_trains_as_fp32_does(train, level, accumulate):
    options = {"num_accumulated_batches": accumulate, "do_eval": False}
    plain, expected, reached = (
        train(each, **options).test(None).loss for each in (None, "O0", level)
    )
    assert reached < 0.5  # it begins at log(2)
    assert_close(reached, plain, rtol=0.2, atol=0)  # its fp32 runs pad sentences less
    assert_close(reached, expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_export_is_an_fp32_model_with_the_exact_weights(train, level, tmp_path):
    task = train(level)  # and loads the weights of the best evaluation
    model = task.model
    low = torch.float16 if level == "O2" else torch.float32
    assert {param.dtype for param in model.parameters()} == {low}
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    masters = [param.detach().clone() for param in amp.master_params(task.trainer.optimizer)]

    trace = task.torchscript_export(model, str(tmp_path / "model.pt"))
    assert not precision.FP16_ENABLED
    assert_close(dict(model.state_dict()), exact, rtol=0, atol=0)
    assert_close([param.detach() for param in model.parameters()], masters, rtol=0, atol=0)
    if level == "O2":
        assert any(not value.equal(value.half().float()) for value in exact.values())

    sentences = [["apple", "pear"], ["cat", "the"]]
    scores = trace(tokens=sentences)
    assert [max(row, key=row.get) for row in scores] == ["fruit", "animal"]
    assert torch.jit.load(str(tmp_path / "model.pt"))(tokens=sentences) == scores
