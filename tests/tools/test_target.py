"""What ``apex compare`` accepts as a target, and what it says of what it does not."""

import sys

import pytest
import torch

from apex.tools.compare.target import open_target
from apex.tools.errors import InputError
from tests.tools.cases import TARGET, written

BODY = TARGET.replace("\n", "\n    ")
SETUP = f"def setup():{BODY}\n    return model, optimizer, batches, loss\n"


def trains(experiment):
    loss = experiment.loss(experiment.model, next(iter(experiment.batches)))
    loss.backward()
    experiment.optimizer.step()
    return loss.dim() == 0


FILE = "folder = __file__\n"
DATACLASS = "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    width: int = 16\n"
BESIDE = "plain = loss\nloss = 1\ndef other():\n    return model, optimizer, batches, plain\n"
TARGETS = {
    "names": (TARGET, ""),
    "setup": (SETUP, ""),
    "function": (SETUP.replace("setup", "other"), ":other"),
    "dict": (SETUP.replace("return model, optimizer, batches, loss", "return locals()"), ""),
    "dataclass": ("from __future__ import annotations\n" + FILE + TARGET + DATACLASS, ""),
    "function beside names": (TARGET + BESIDE, ":other"),
    "star": ("from helper_of_target import *\n", ""),
    "activations": (TARGET + "model.features = [model(batches[0][0])]\n", ""),
}


@pytest.mark.parametrize(("text", "function"), TARGETS.values(), ids=TARGETS)
def test_each_level_gets_objects_of_its_own(tmp_path, text, function):
    written(tmp_path, TARGET, "helper_of_target.py")
    with open_target(written(tmp_path, text) + function) as build:
        first, second, third = build(), build(), build()
    sys.modules.pop("helper_of_target", None)
    assert len({id(experiment.model) for experiment in (first, second, third)}) == 3
    assert first.optimizer.param_groups[0]["params"][0] is first.model[0].weight
    assert trains(first)
    for one, other in zip(second.model.parameters(), third.model.parameters(), strict=True):
        assert torch.equal(one, other)


LOCKED = "import threading\nmodel.lock = threading.Lock()\n"
SCRIPT = "raise RuntimeError('executed')\nfor batch in []:\n    loss = batch\n    loss.backward()\n"
PREPARES = """from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level='O5', verbosity=0)
"""
FAILS = """
def setup():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise OSError('no data') from error
"""
MAIN = "if __name__ == '__main__':\n    def setup(): pass\n1 / 0\n"
NO_TARGETS = {
    "raises": (FAILS, r"raised ZeroDivisionError: division by zero \(.*:4\)\n  no data"),
    "import": ("import no_such\nfrom x import *\n", "Executing .* failed: ModuleNotFoundError"),
    "exits": (TARGET + "raise SystemExit(3)\n", "Executing .* failed: SystemExit: 3"),
    "two": ("def setup():\n    return 1, 2\n", "returned tuple; it must return model, optimizer"),
    "none": ("def setup():\n    pass\n", "returned NoneType; it must return model, optimizer"),
    "part": ("def setup():\n    return {'model': 1}\n", "returned dict; it must return model"),
    "module": ("import torch\nsetup = torch.nn.ReLU()\n", r"setup\(\) raised TypeError"),
    "model": (TARGET + "model = 3\n", "model is int; it must be Module"),
    "batches": (TARGET + "batches = 4\n", "batches is int; it must be Iterable"),
    "relative": ("from .model import *\n", "belongs to no package: import its neighbours without"),
    "locked": (TARGET + LOCKED, r"cannot be deep-copied, as each level needs: TypeError"),
    "prepares": (TARGET + PREPARES, r"calls amp\.initialize\. .*per level: return the plain model"),
}

NOT_RUN = {
    "script": (SCRIPT, "lacks model, optimizer, batches. apex compare takes no training script"),
    "names": (SCRIPT + "model = optimizer = batches = 1\n", "calls backward itself.*file was not"),
    "functions": ("def main():\n    raise OSError\n    loss.backward()\n", "lacks model, optim"),
    "missing": ("1 / 0\nmodel = 1\n", "lacks optimizer, batches, loss. apex compare takes"),
    "main": (MAIN, "lacks model, optimizer, batches, loss"),
    "syntax": ("model = (\n", r"is not valid Python 3: .*line 1"),
}


@pytest.mark.filterwarnings("ignore:can't resolve package:ImportWarning")
@pytest.mark.parametrize(("text", "message"), NO_TARGETS.values(), ids=NO_TARGETS)
def test_a_target_that_gives_no_experiment_is_refused(tmp_path, text, message):
    with pytest.raises(InputError, match=message), open_target(written(tmp_path, text)) as build:
        build()


@pytest.mark.parametrize(("text", "message"), NOT_RUN.values(), ids=NOT_RUN)
def test_a_file_that_is_no_target_is_not_run(tmp_path, text, message):
    test_a_target_that_gives_no_experiment_is_refused(tmp_path, text, message)


def test_all_random_numbers_are_those_of_the_seed(tmp_path):
    draws = "[torch.rand(1).item(), random.random(), numpy.random.rand()]"
    target = written(tmp_path, f"{TARGET}import random, numpy\nbatches = {draws}\n")
    drawn = []
    for seed in (-1, -1, 0):
        with open_target(target, seed=seed) as build:
            drawn.append(build().batches)
    assert drawn[0] == drawn[1]
    assert not {*drawn[0]} & {*drawn[2]}


def test_a_file_imports_its_neighbours_and_leaves_no_trace(tmp_path):
    (tmp_path / "neighbour_of_target.py").write_text("WIDTH = 16\n")
    text = "from neighbour_of_target import WIDTH\n" + TARGET.replace("16", "WIDTH")
    path = list(sys.path)
    with open_target(written(tmp_path, text)) as build:
        assert trains(build())
    assert sys.path == path
    assert "apex_compare_target" not in sys.modules
    sys.modules.pop("neighbour_of_target")
