"""The character model: it learns, resumes exactly, and reports a fault."""

import math

import pytest
import torch

TEXT = "the cat sat on the mat and the rat sat on the cat\n" * 40
TINY = ["--width", "32", "--layers", "1", "--context", "16", "--batch", "4", "--sample", "8"]


@pytest.fixture
def example(load):
    return load("char_model/main")


@pytest.fixture
def run(example, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*arguments):
        files = ["--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "char.pt")]
        return example.main([*files, *TINY, *map(str, arguments)])

    return run


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_text_is_learned(run, level, capsys):
    losses, held_out = run("--opt-level", level, "--steps", 50, "--lr", "1e-2")
    letters = len(set(TEXT))
    assert losses[0] == pytest.approx(math.log(letters), rel=0.1)
    assert held_out < losses[0] / 1.5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step   50: loss ")
    assert lines[1] == f"held out: loss {held_out:.3f}"
    assert len("\n".join(lines[2:])) == 1 + 8  # the line break that it continues


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_resumed_run_is_bit_identical(run, level, tmp_path):
    whole, score = run("--opt-level", level, "--steps", 6)
    expected = torch.load(tmp_path / "char.pt")
    first, _ = run("--opt-level", level, "--steps", 3)
    rest, resumed = run("--opt-level", level, "--steps", 6, "--resume", tmp_path / "char.pt")
    assert [*first, *rest] == whole
    assert resumed == score
    found = torch.load(tmp_path / "char.pt")
    assert found["amp"] == expected["amp"]
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value)
