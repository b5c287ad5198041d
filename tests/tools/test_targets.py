"""What ``apex compare`` accepts as a target, and what it says of what it does not."""

import re
import sys

import pytest
import torch

from apex.tools.errors import TargetError
from apex.tools.targets import open_target
from tests.tools.cases import TARGET, written

BODY = TARGET.replace("\n", "\n    ")
SETUP = f"def setup():{BODY}\n    return model, optimizer, batches, loss\n"


def trains(experiment):
    loss = experiment.loss(experiment.model, next(iter(experiment.batches)))
    loss.backward()
    experiment.optimizer.step()
    return loss.dim() == 0


@pytest.mark.parametrize(
    ("text", "function"),
    [
        (TARGET, ""),
        (SETUP, ""),
        (SETUP.replace("setup", "other"), ":other"),
        (SETUP.replace("return model, optimizer, batches, loss", "return locals()"), ""),
    ],
    ids=["names", "setup", "function", "dict"],
)
def test_a_file_gives_fresh_objects_each_time(tmp_path, text, function):
    with open_target(written(tmp_path, text) + function) as build:
        first, second, third = build(), build(), build()
    assert len({id(experiment.model) for experiment in (first, second, third)}) == 3
    assert trains(first)
    for one, other in zip(second.model.parameters(), third.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_target_that_parses_arguments_gets_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["apex", "compare", "target.py", "--steps", "3"])
    parses = "import argparse, sys\nargparse.ArgumentParser().parse_args()\nmodel.argv = sys.argv\n"
    target = written(tmp_path, TARGET + parses)
    with open_target(target) as build:
        assert build().model.argv == [target]
    assert sys.argv[0] == "apex"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that can be imported; its name is good for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text):
        (tmp_path / "target_module.py").write_text(text)
        monkeypatch.delitem(sys.modules, "target_module", raising=False)
        return "target_module"

    yield make
    sys.modules.pop("target_module", None)


def test_a_function_of_a_module_is_called_anew(module):
    with open_target(module(SETUP) + ":setup") as build:
        assert build().model is not build().model


def test_what_comes_back_the_same_is_copied_with_its_optimizer(module):
    with open_target(module(TARGET)) as build:
        first, second = build(), build()
    assert first.model is not second.model
    assert trains(first)
    assert first.optimizer.param_groups[0]["params"][0] is first.model[0].weight
    assert not torch.equal(first.model[0].weight, second.model[0].weight)


def test_a_model_that_cannot_be_copied_is_no_fault_where_each_is_made_anew(tmp_path):
    locked = "\nimport threading\nmodel.lock = threading.Lock()\n"
    with open_target(written(tmp_path, TARGET + locked)) as build:
        assert trains(build())


def test_a_model_that_must_be_copied_and_cannot_is_refused_with_the_remedy(module):
    locked = "\nimport threading\nmodel.lock = threading.Lock()\n"
    with (
        pytest.raises(TargetError, match=r"cannot be deep-copied: TypeError.*builds a new one"),
        open_target(module(TARGET + locked)),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def setup():\n    raise OSError('no data')\n", r"setup\(\) raised OSError: no data"),
        ("import no_such_module\n", "Executing .* failed: ModuleNotFoundError"),
        ("raise SystemExit(7)\n", "Executing .* failed: SystemExit: 7"),
        ("model = 1\n", r"no function setup\(\).*no optimizer, batches, loss"),
        ("def setup():\n    return 1, 2\n", "returned tuple; it must return model, optimizer"),
        ("import torch\nsetup = torch.nn.ReLU()\n", r"setup\(\) raised TypeError"),
        (TARGET + "model = 3\n", "model is int, not a torch.nn.Module"),
        (TARGET + "loss = 3\nbatches = 4\n", "batches is int.*; loss is int"),
        (TARGET + "model.to('meta')\n", r"the model's parameter '0.weight' has no values yet"),
        (TARGET + "model = torch.nn.LazyLinear(2)\n", r"the model's parameter 'weight' has no v"),
    ],
    ids=[
        "raises",
        "import",
        "exit",
        "nothing",
        "two",
        "module",
        "model",
        "several",
        "meta",
        "lazy",
    ],
)
def test_a_target_that_gives_no_experiment_is_refused(tmp_path, text, message):
    with pytest.raises(TargetError, match=message), open_target(written(tmp_path, text)):
        pass


@pytest.mark.parametrize("imported", ["import apex.amp as amp", "from apex import amp"])
def test_a_target_that_prepares_its_model_is_refused_with_the_line(tmp_path, imported):
    call = "model, optimizer = amp.initialize(model, optimizer, opt_level='O5', verbosity=0)\n"
    target = written(tmp_path, f"{imported}\n{TARGET}{call}")
    line = TARGET.count("\n") + 2
    message = (
        rf"calls amp\.initialize \({re.escape(target)}:{line}\).*once per level: return the pl"
    )
    with pytest.raises(TargetError, match=message), open_target(target):
        pass


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no/such/file.py", "There is no file"),
        ("./", r"\./ is neither a \.py file nor the name of a module"),
        (".package:setup", r"\.package is neither a \.py file nor the name"),
        ("no_such_package:setup", "Importing no_such_package failed.*A file name needs its suffix"),
        ("math:setup", r"no function setup\(\)\."),
    ],
)
def test_a_target_that_is_not_there_is_refused(target, message):
    with pytest.raises(TargetError, match=message), open_target(target):
        pass


def test_a_file_imports_its_neighbours_and_leaves_no_trace(tmp_path):
    (tmp_path / "neighbour_of_target.py").write_text("WIDTH = 16\n")
    text = "from neighbour_of_target import WIDTH\n" + TARGET.replace("16", "WIDTH")
    path = list(sys.path)
    with open_target(written(tmp_path, text)) as build:
        assert trains(build())
    assert sys.path == path
    assert "apex_compare_target" not in sys.modules
    sys.modules.pop("neighbour_of_target")
