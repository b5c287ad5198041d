"""The word language model: its corpus, its batches, clipping and accumulation."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from apex import amp

MODEL = Path(__file__).parents[2] / "examples" / "word_language_model"
TINY = ["--width", "16", "--epochs", "2"]
FAST = ["--epochs", "8", "--lr", "0.02", "--bptt", "4", "--accumulate", "1"]


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(MODEL))


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("word_main_amp", MODEL / "main_amp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A cat sat.\n\nThe cat's hat-band sat on a mat;\n" * 20)
    return path


# -- text ------------------------------------------------------------------------------------


def test_words_keep_apostrophes_and_marks_stand_alone():
    from corpus import split

    assert list(split("O no!\n\nThe cat's hat-band")) == [
        *("o", "no", "!", "<eos>"),
        *("the", "cat's", "hat-band", "<eos>"),
    ]


def test_each_word_has_the_number_of_its_first_appearance(text):
    from corpus import Corpus

    corpus = Corpus(text)
    assert corpus.vocabulary[:5] == ["a", "cat", "sat", ".", "<eos>"]
    assert corpus.train[:5].tolist() == [0, 1, 2, 3, 4]
    assert len(corpus.train) == 9 * len(corpus.validation)


def test_a_text_of_few_words_is_refused(tmp_path):
    from corpus import Corpus

    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match="contains 3 words; at least 100"):
        Corpus(path)


def test_columns_are_pieces_of_the_text():
    from corpus import columns

    assert columns(torch.arange(11), 2).t().tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_more_columns_than_words_are_refused():
    from corpus import columns

    with pytest.raises(ValueError, match="5 words are too few for 4 columns"):
        columns(torch.arange(5), 4)


@pytest.mark.parametrize("length", [1, 3, 9, 20])
def test_chunks_ask_for_every_word_but_the_first_once(length):
    from corpus import chunks

    pieces = list(chunks(torch.arange(10), length))
    assert torch.cat([words for words, _ in pieces]).tolist() == list(range(9))
    assert torch.cat([following for _, following in pieces]).tolist() == list(range(1, 10))


# -- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_a_text_file_is_learned(example, text, level):
    loss, validation = example.main([*("--data", str(text), "--opt-level", level, *TINY), *FAST])
    assert loss < math.log(11) / 2  # 11 words
    assert math.isfinite(validation)


def test_the_sonnets_are_the_default(example, capsys):
    loss, _ = example.main(["--opt-level", "O4", "--epochs", "1", "--width", "16"])
    assert "perplexity" in capsys.readouterr().out
    assert loss < math.log(600)


@pytest.mark.parametrize("options", [["--model", "GRU"], ["--nlayers", "2", "--dropout", "0.2"]])
def test_other_nets_train(example, text, options):
    losses = example.main(["--data", str(text), "--opt-level", "O5", *TINY, *options])
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_tied_scores_share_the_embedding(example, text, level):
    from language_model import LanguageModel

    model = LanguageModel("LSTM", 11, 8, 1, 0.0, tied=True)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.scores.weight is model.embedding.weight
    args = example.parse_args(["--data", str(text)])
    before = model.scores.weight.detach().clone()
    example.train(args, model, optimizer, torch.arange(11).repeat(4).view(-1, 2))
    assert not torch.equal(before, model.embedding.weight)


@pytest.mark.parametrize("level", ["O0", "O4"])
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


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
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
