"""The digits example: its data, its training script, and the target of ``apex compare``."""

import re
import sys

import pytest
import torch

from tests.package.examples.conftest import EXAMPLES

DIGITS = EXAMPLES / "digits"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    """The example's files import one another by name, as they do when Python runs them."""
    pytest.importorskip("sklearn", reason="the demo extra is not installed")
    monkeypatch.syspath_prepend(str(DIGITS))


def test_the_split_shares_no_digit():
    from sklearn.datasets import load_digits
    from train import load_data

    (train, train_labels), (test, test_labels) = load_data("cpu")
    assert (len(train), len(test)) == (len(train_labels), len(test_labels)) == (1437, 360)
    both = torch.cat([train, test]).mul(16).flatten(1).long()
    every = torch.tensor(load_digits().data).long()
    assert sorted(both.tolist()) == sorted(every.tolist())


def test_one_level_runs_from_the_command_line(load, monkeypatch, capsys):
    options = ["--opt-level", "O4", "--steps", "2", "--batch-size", "4"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    script = load("digits/train")
    few = [(images[:8], labels[:8]) for images, labels in script.load_data("cpu")]
    monkeypatch.setattr(script, "load_data", lambda device: few)
    script.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"final loss \d\.\d{4}, test accuracy \d+\.\d\d%", last)


@pytest.mark.usefixtures("ideal_machine")
def test_the_digits_are_a_target_that_learns_and_is_evaluated(monkeypatch):
    import train

    def small_batches(data, **options):
        return batches(data, **{**options, "batch_size": 16})

    batches = train.batches
    monkeypatch.setattr(train, "batches", small_batches)

    from tests.tools.cases import by_name, compared

    found = by_name(compared(str(DIGITS / "experiment.py"), "O0,O4", steps=12, rounds=1))
    for result in found.values():
        assert not result.errors
        assert result.training.losses[-1] < result.training.losses[0] / 2
        assert 0.3 < result.training.evaluation <= 1  # of ten classes
