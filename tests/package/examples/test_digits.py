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
    monkeypatch.setattr(sys, "argv", ["train.py", "--opt-level", "O4", "--steps", "2"])
    load("digits/train").main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"final loss \d\.\d{4}, test accuracy \d+\.\d\d%", last)


@pytest.mark.usefixtures("ideal_machine")
def test_the_digits_are_a_target_that_learns_and_is_evaluated():
    from tests.tools.cases import by_name, compared

    found = by_name(compared(str(DIGITS / "experiment.py"), "O0,O4", steps=12, rounds=1))
    for result in found.values():
        assert not result.errors
        assert result.training.losses[-1] < result.training.losses[0] / 2
        assert 0.5 < result.training.evaluation <= 1
