"""A whole comparison: levels train as they would alone, and what fails does not stop the rest."""

import json
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from apex import amp
from apex.cli import OK, main
from apex.tools.compare import run
from apex.tools.compare.results import LEVELS, to_json
from apex.tools.compare.table import comparison_text
from apex.tools.compare.target import open_target
from apex.tools.compare.timing import Load
from apex.tools.errors import InputError
from tests.support.emulation import emulate
from tests.support.features import needs_masters
from tests.support.loops import descend
from tests.tools.cases import FAILS_IN_BF16, TARGET, by_name, compared, written

pytestmark = pytest.mark.usefixtures("ideal_machine")

ALL = ",".join(LEVELS)


@pytest.fixture(scope="module")
def every(tmp_path_factory, ideal_machine):
    """One comparison of all levels, that many tests look at."""
    return compared(written(tmp_path_factory.mktemp("every")), ALL, steps=7)


def by_hand(target, step):
    """Returns the losses of a plain loop over the target's batches."""
    with open_target(target) as build:
        experiment = build()
        return tuple(step(experiment, experiment.batches[index % 3]).item() for index in range(7))


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_level_trains_as_a_plain_amp_loop_does(every, level):
    prepared = []

    def step(experiment, batch):
        model, optimizer = experiment.model, experiment.optimizer
        if not prepared:
            prepared.append(amp.initialize(model, optimizer, opt_level=level, verbosity=0))
        loss = experiment.loss(model, batch)
        descend(loss, optimizer)
        return loss

    losses = by_hand(every.target, step)
    prepared.clear()
    assert by_name(every)[level].training.losses == losses


def test_torch_s_own_autocast_trains_as_a_plain_loop_does(every):
    def step(experiment, batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = experiment.loss(experiment.model, batch)
        experiment.optimizer.zero_grad()
        loss.backward()
        experiment.optimizer.step()
        return loss

    losses = by_hand(every.target, step)
    assert by_name(every)["autocast-bf16"].training.losses == losses
    assert {*by_name(every)["autocast-bf16"].training.loss_scales} == {1.0}


def test_levels_are_prepared_without_warnings_about_them(tmp_path, monkeypatch):
    emulate(monkeypatch, "bf16", "fp16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compared(written(tmp_path), "O1,bf16", steps=1)
    assert caught == []


def test_steps_that_overflow_are_counted(tmp_path):
    text = TARGET.replace(".float(), labels)", ".float(), labels) * 10")
    found = by_name(compared(written(tmp_path, text), "O1", steps=9))
    assert found["O1"].training.skipped > 0
    assert len(found["O1"].training.loss_scales) == 10  # before, and after each step
    assert found["O0"].training.skipped == 0


@needs_masters
def test_casts_of_a_level_do_not_reach_the_others(tmp_path):
    """While they take turns, all levels are active."""
    file = tmp_path / "dtypes"
    writes = (
        "    product = torch.ones(1, 1) @ torch.ones(1, 1)\n"
        f"    with open({str(file)!r}, 'a') as dtypes:\n"
        "        dtypes.write(f'{product.dtype} ')\n"
        "    return nn"
    )
    compared(written(tmp_path, TARGET.replace("    return nn", writes)), "O4,O5", steps=2)
    counts = Counter(file.read_text().split())
    assert counts["torch.float32"] == 2 * counts["torch.bfloat16"] > 0  # at O0 and O5, and at O4


def test_no_casts_of_a_level_reach_a_backward_pass_or_a_step(tmp_path, capsys):
    product = "torch.ones(1, 1) @ torch.ones(1, 1)"
    text = TARGET.replace("return nn", "loss = nn") + "    loss.register_hook(lambda gradient: "
    text += f"print({product}))\n    return loss\n" + COUNTED.replace('"step"', product)
    compared(written(tmp_path, text), "O4,autocast-bf16", steps=2)
    assert {*capsys.readouterr().out.splitlines()} == {"tensor([[1.]])"}


@needs_masters
def test_the_json_holds_every_level_trained_and_timed_and_no_nan(every):
    assert not every.failed
    data = json.loads(json.dumps(to_json(every), allow_nan=False))
    assert [level["level"] for level in data["levels"]] == list(LEVELS)
    assert all(level["training"] and level["times"] for level in data["levels"])
    assert data["recommendation"]["level"] is None  # seven steps and two rounds
    assert data["levels"][0]["training"]["stored"]["model"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)


def test_another_seed_gives_other_curves_and_a_script_is_executed_once(every, tmp_path):
    counter = tmp_path / "count"
    text = f"with open({str(counter)!r}, 'a') as file:\n    file.write('x')\n"
    other = by_name(compared(written(tmp_path, text + TARGET), "O0,O4,O5", steps=7, seed=1))
    assert counter.read_text() == "x"
    assert other["O4"].training.losses != by_name(every)["O4"].training.losses


@needs_masters
def test_bf16_without_masters_freezes_updates_that_masters_keep(tmp_path):
    evaluate = "evaluate = lambda model: torch.rand(()) + 2 * torch.is_grad_enabled()\n"
    text = TARGET.replace("lr=1e-2", "lr=1e-4") + evaluate
    found = by_name(compared(written(tmp_path, text), "O0,O5,bf16"))
    assert found["bf16"].training.frozen > 0.3
    assert max(found["O5"].training.frozen, found["O0"].training.frozen) < 0.01
    # Each level draws the same random numbers, and evaluates without gradients.
    assert len({each.training.evaluation for each in found.values()}) == 1
    assert found["O0"].training.evaluation < 1


COUNTED = """
class Counted(torch.optim.SGD):
    def step(self, closure=None):
        print("step")
        return super().step(closure)


optimizer = Counted(model.parameters(), lr=0.1)
"""


def test_a_timed_step_is_one_of_the_optimizer_too(tmp_path, capsys):
    counts = []
    for rounds in (1, 3):
        compared(written(tmp_path, TARGET + COUNTED), rounds=rounds)
        counts.append(capsys.readouterr().out.count("step"))
    assert counts[0] < counts[1]


@needs_masters
@pytest.mark.parametrize(("levels", "expected"), [("O0 O4", 12), ("O2 O5", 14), ("bf16", 6)])
def test_bytes_per_param_are_those_of_the_level(every, levels, expected):
    # Adam keeps two values a weight, and a step count of 4 bytes for each of the 4 tensors.
    steps = 16 / (8 * 16 + 16 + 16 * 4 + 4)
    for found in map(by_name(every).get, levels.split()):
        assert found.training.stored.per_param == pytest.approx(expected + steps)
        assert found.memory == found.training.stored.bytes + found.training.saved_bytes
    # O0 saves inputs, labels, the results of Tanh and of log_softmax, and a total weight.
    assert by_name(every)["O0"].training.saved_bytes == 6 * (4 * (8 + 16 + 4) + 8) + 4


@needs_masters
def test_an_emulated_level_is_trained_and_judged_and_not_timed(tmp_path, monkeypatch):
    emulate(monkeypatch, "bf16", "fp16")
    levels = "O0,O1,O4,O5,autocast-bf16"
    comparison = compared(written(tmp_path), levels, steps=20, rounds=1)
    assert not comparison.failed
    *others, last = levels.split(",")[1:]
    found = comparison.recommendation
    assert found.level == "O0"
    assert found.text.startswith("Stay in fp32: none of the other levels")
    assert found.quality == f"Training is as good as in fp32 at {', '.join([*others, last])}."
    for verdict in found.verdicts[1:]:
        dtype = "fp16" if verdict.level == "O1" else "bf16"
        assert verdict.word == "usable"
        assert verdict.why == f"trains as well as fp32; {dtype} is emulated on this CPU"
        assert by_name(comparison)[verdict.level].times == ()
    assert comparison_text(comparison).count(" emulated  ") == 4  # instead of a time


def test_the_load_that_ends_the_timing_is_the_comparison_s(tmp_path, monkeypatch):
    loads = iter([Load(0.0, 1), Load(0.0, 1), Load(9.0, 1)])
    monkeypatch.setattr(run, "current_load", lambda: next(loads, Load(0.0, 1)))
    monkeypatch.setattr(Load, "busy", property(lambda load: load.average > 1.0))
    found = compared(written(tmp_path), "O4")
    assert (len(by_name(found)["O4"].times), found.load.average) == (1, 9.0)


def test_levels_that_the_cpu_computes_are_timed_beside_emulated_ones(tmp_path, monkeypatch):
    emulate(monkeypatch, "fp16")
    evaluate = (
        "evaluate = lambda model: torch.finfo((torch.ones(1, 1) @ torch.ones(1, 1)).dtype).bits\n"
    )
    found = by_name(
        compared(written(tmp_path, TARGET + evaluate), "O4,autocast-bf16,O1", steps=2, rounds=1)
    )
    assert [len(found[name].times) for name in ("O0", "O1", "O4")] == [1, 0, 1]
    assert [found[name].training.evaluation for name in ("O0", "autocast-bf16")] == [32, 16]


@needs_masters
def test_a_long_training_at_an_emulated_level_is_skipped_unless_it_is_named(tmp_path, monkeypatch):
    emulate(monkeypatch, "bf16")
    comparison = compared(written(tmp_path), "O0,O4", steps=2, patience=0.0)
    assert not comparison.failed
    verdict = comparison.recommendation.verdicts[1]
    assert verdict.word == "skipped"
    said = r"bf16 is emulated on this CPU: --levels O4 trains it, in about \d+ s"
    assert re.fullmatch(said, verdict.why)
    assert by_name(comparison)["O4"].training is None
    assert comparison.speed(by_name(comparison)["O4"]) is None
    monkeypatch.setattr(run, "PATIENCE", 0.0)
    arguments = ["compare", comparison.target, "--output", str(tmp_path / "report.html")]
    for more, trained in (([], False), (["--levels", "O4"], True)):
        figures = tmp_path / "figures.json"
        assert main([*arguments, "--steps", "2", "--json", str(figures), *more]) == OK
        levels = json.loads(figures.read_text())["levels"]
        (level,) = [level for level in levels if level["level"] == "O4"]
        assert bool(level["training"]) == trained


@needs_masters
def test_the_target_of_the_how_to_trains(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "howto" / "compare.md").read_text()
    target = re.search(r"```python\n(import torch\n.*?)```", text, re.DOTALL)[1]
    assert not compared(written(tmp_path, target), "O0,O5", steps=2, rounds=1).failed


NARROW = """
class Narrow(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].dtype is torch.float64:
            raise RuntimeError("no kernel")
        return super().step(closure)

optimizer = Narrow(model.parameters(), lr=1e-2)
"""


def test_an_optimizer_without_wider_kernels_trains_uncounted(tmp_path):
    frozen = "model[0].requires_grad_(False)\n"
    found = compared(written(tmp_path, TARGET + frozen + NARROW))
    assert not found.failed
    assert not found.notes  # some weights moved
    assert by_name(found)["O0"].training.frozen is None


# -- bad input -------------------------------------------------------------------------------

UNMOVED = "def loss(model, batch):\n    return sum(p.sum() for p in model.parameters()) * 0\n"


TIRES = """
plain = loss
calls = []

def loss(model, batch):
    calls.append(batch)
    if len(calls) > 10:
        raise MemoryError("no more")
    return plain(model, batch)
"""
NOTES = [
    (TIRES, "Timing failed: MemoryError: no more ("),
    ("batches = iter(batches)\n", "The batches ran out after 3 of 5 steps, as those of a"),
    (UNMOVED, "Training in fp32 changed no parameter"),
]


@pytest.mark.parametrize(("change", "note"), NOTES)
def test_what_makes_the_comparison_say_less_is_noted(tmp_path, change, note):
    found = compared(written(tmp_path, TARGET + change), steps=5)
    assert found.steps == (3 if "ran out" in note else 5)
    assert [each.startswith(note) for each in found.notes] == [True]
    assert not found.failed


def test_what_fails_is_noted_and_the_others_finish(tmp_path):
    text = FAILS_IN_BF16 + "\n\ndef evaluate(model):\n    return {'accuracy': 0.75}\n"
    found = by_name(compared(written(tmp_path, text), "O0,O4,O5"))
    (error,) = found["O4"].errors
    assert error.startswith("training failed: RuntimeError: no kernel for bf16 (")
    assert re.search(r"\.py:\d+\)$", error)  # the line of the target's own code
    (error,) = found["O5"].errors
    assert error.startswith("evaluating failed: TypeError: float() argument must be a string or a")
    assert found["O5"].times


@pytest.mark.parametrize(
    ("batches", "message"),
    [("[]", "The target gives no batches"), ("(1 / 0 for _ in [1])", "ZeroDivisionError: div")],
)
def test_batches_that_give_nothing_are_refused(tmp_path, batches, message):
    with pytest.raises(InputError, match=message):
        compared(written(tmp_path, TARGET + f"batches = {batches}\n"))


FAILING = [
    ("labels.oops", r"AttributeError: 'Tensor' object has no attribute 'oops' \(.*\.py:\d+\)"),
    ("return model(inputs)", r"returned a tensor of shape \[6, 4\]; it must return one number"),
    (
        "return model(inputs).sum().detach()",
        r"of shape \[\]; it must return one number that depends on",
    ),
]


@pytest.mark.parametrize(("line", "message"), FAILING)
def test_a_target_that_fails_in_fp32_stops_at_once(tmp_path, line, message):
    target = written(tmp_path, TARGET.replace("    return nn", f"    {line}\n    return nn"))
    stages = []
    with pytest.raises(InputError, match=rf"^Training in fp32 \(O0\) failed: .*{message}"):
        compared(target, ALL, stages=stages)
    assert stages == ["train O0"]
