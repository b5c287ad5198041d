"""The examples of this repository, rewritten for torch, train to the same losses."""

import gc
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="the migrate extra is not installed")

from apex.tools.migrate.migration import migration_of
from apex.tools.migrate.sources import read
from apex.tools.migrate.to_torch.conversion import conversion_of
from apex.tools.migrate.verdicts import Kind

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls ``use(module)`` on an example as it is and as rewritten for a level."""

    def both(name, level, use):
        folder = tmp_path / Path(name).parent
        shutil.copytree(EXAMPLES / Path(name).parent, folder)
        monkeypatch.syspath_prepend(str(folder))
        script = tmp_path / name
        (changed,) = conversion_of(script, level=level).changed
        results = []
        for text in (changed.before, changed.after):
            script.write_text(text)
            results.append(use(loaded(script)))
            sys.modules.pop("migrated_example")
            gc.collect()  # amp's casts end with the model
        assert "apex import amp" not in text
        return results

    return both


def loaded(path):
    spec = importlib.util.spec_from_file_location("migrated_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["migrated_example"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("level", "steps"), [("O4", "60"), ("O1", "4"), ("O0", "4")])
def test_the_simple_example_has_the_same_losses(run, level, steps):
    arguments = ["--opt-level", level, "--steps", steps]
    before, after = run("simple/main_amp.py", level, lambda example: example.main(arguments))
    assert before == after
    assert before[0] > before[1]


def test_the_digits_have_the_same_losses_and_accuracy(run, monkeypatch):
    pytest.importorskip("sklearn", reason="the demo extra is not installed")
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "20", "--opt-level", "O4"])

    def figures(example):
        printed = []
        example.print = printed.append
        example.main()
        return printed

    before, after = run("digits/train.py", "O4", figures)
    assert before == after
    assert before[-1].startswith("final loss")


def test_the_language_model_has_the_same_losses_with_clipping_and_accumulation(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A cat sat.\n\nThe cat's hat-band sat on a mat;\n" * 20)
    arguments = ["--data", str(text), "--width", "16", "--epochs", "2", "--opt-level", "O4"]
    before, after = run(
        "word_language_model/main_amp.py", "O4", lambda example: example.main(arguments)
    )
    assert before == after


REFUSED = {
    "dcgan/main_amp.py": "Several models or optimizers",
    "ignite/train.py": "no amp.scale_loss in this file",
    "imagenet/main_amp.py": "training_run.py, which is imported here, uses amp, too",
    "imagenet/training_run.py": "main_amp.py, which imports this file, uses amp, too",
}


def test_the_other_examples_stay_with_the_reason():
    left = {
        each.path.relative_to(EXAMPLES).as_posix(): " ".join(r.text for r in each.refusals)
        for each in conversion_of(EXAMPLES, level="O4").left
    }
    assert left.keys() == REFUSED.keys()
    assert [name for name, reason in REFUSED.items() if reason not in left[name]] == []


def test_all_examples_work_with_this_package():
    migration = migration_of(EXAMPLES)
    verdicts = [verdict for script in migration.scripts for _, verdict in script.uses]
    assert len(verdicts) > 30
    assert not [verdict for verdict in verdicts if verdict.kind is Kind.NOT_SUPPORTED]
    assert not migration.unread


def test_reading_changes_nothing():
    script = EXAMPLES / "simple" / "main_amp.py"
    before = read(script)
    conversion_of(script, level="O4")
    assert read(script) == before
