"""The word language model: its corpus, its batches, clipping and accumulation."""

import math

import pytest
import torch

from apex import amp
from tests.support.loops import prepared

TINY = ["--width", "16", "--epochs", "2"]
FAST = ["--epochs", "8", "--lr", "0.02", "--bptt", "4", "--accumulate", "1"]


@pytest.fixture
def example(load):
    return load("word_language_model/main_amp")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A cat sat.\n\nThe cat's hat-band sat on a mat;\n" * 20)
    return path


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_a_text_file_is_learned(example, text, level):
    loss, validation = example.main([*("--data", str(text), "--opt-level", level, *TINY), *FAST])
    assert loss < math.log(11) / 2  # 11 words
    assert math.isfinite(validation)


@pytest.mark.parametrize("clip", ["1e9", "0.001"])
def test_two_accumulated_chunks_step_once_by_their_clipped_mean(example, clip):
    from language_model import LanguageModel

    model = LanguageModel("LSTM", 11, 8, 1, 0.0, tied=False)
    model, optimizer = prepared("O4", lambda p: torch.optim.SGD(p, lr=1.0), model)
    steps = []
    optimizer.register_step_pre_hook(
        lambda *_: steps.append([p.grad.clone() for p in amp.master_params(optimizer)])
    )
    args = example.parse_args(["--accumulate", "2", "--bptt", "4", "--clip", clip])
    text = torch.arange(18).remainder(11).view(9, 2)  # eight words to predict: two chunks
    before = [p.detach().clone() for p in model.parameters()]
    example.train(args, model, optimizer, text)
    assert len(steps) == 1
    moved = [old - new for old, new in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(moved, steps[0], rtol=0, atol=1e-6)
    norm = torch.nn.utils.get_total_norm(steps[0])
    assert norm == pytest.approx(0.001, rel=1e-3) if clip == "0.001" else norm > 0.001
