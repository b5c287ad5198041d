"""The word language model: its corpus, its batches, clipping and accumulation."""

import math

import pytest
import torch

from apex import amp

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


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.usefixtures("example")
def test_chunks_ask_for_every_word_but_the_first_once(length):
    from corpus import chunks

    pieces = list(chunks(torch.arange(10), length))
    assert torch.cat([words for words, _ in pieces]).tolist() == list(range(9))
    assert torch.cat([following for _, following in pieces]).tolist() == list(range(1, 10))


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_a_text_file_is_learned(example, text, level):
    loss, validation = example.main([*("--data", str(text), "--opt-level", level, *TINY), *FAST])
    assert loss < math.log(11) / 2  # 11 words
    assert math.isfinite(validation)


@pytest.mark.parametrize("level", ["O4"])
def test_two_accumulated_chunks_step_once_by_their_mean(example, monkeypatch, level):
    from language_model import LanguageModel

    model = LanguageModel("LSTM", 11, 8, 1, 0.0, tied=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    steps = []
    optimizer.register_step_pre_hook(
        lambda *_: steps.append([p.grad.clone() for p in amp.master_params(optimizer)])
    )
    args = example.parse_args(["--accumulate", "2", "--bptt", "4", "--clip", "1e9"])
    text = torch.arange(18).remainder(11).view(9, 2)  # eight words to predict: two chunks
    twin = [p.detach().clone() for p in model.parameters()]
    example.train(args, model, optimizer, text)
    assert len(steps) == 1
    moved = [before - after for before, after in zip(twin, model.parameters(), strict=True)]
    torch.testing.assert_close(moved, steps[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_the_gradients_of_a_step_are_clipped(example, level):
    from language_model import LanguageModel

    model = LanguageModel("LSTM", 11, 8, 1, 0.0, tied=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    norms = []
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in amp.master_params(optimizer)])
        )
    )
    args = example.parse_args(["--clip", "0.001", "--bptt", "4"])
    example.train(args, model, optimizer, torch.arange(18).remainder(11).view(9, 2))
    assert norms == pytest.approx([0.001], rel=1e-3)
