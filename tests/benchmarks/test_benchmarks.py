"""The benchmarks: their counters count right, their verdicts follow the printed figures."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import instructions, memory, syncs
from benchmarks.counting import counted_syncs
from benchmarks.loops import Task, fused_adamw, native, plain, with_amp
from benchmarks.measurement import Goal, Measurement, sampled, table, verdict
from benchmarks.race import Times, race

ROOT = Path(__file__).parents[2]


def small_task(optimizer=fused_adamw):
    return Task(small_model, small_batch, optimizer)


def small_model():
    return nn.Linear(64, 64)


def small_batch():
    return torch.randn(4, 64), torch.randint(0, 64, (4,))


# -- host syncs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.sum()),
        lambda t: float(t.sum()),
        lambda t: t.equal(t),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.unique(),
        lambda t: t.sum().tolist(),
    ],
)
def test_each_read_by_the_host_counts_once(read):
    tensor = torch.ones(3)
    with counted_syncs() as counts:
        read(tensor)
    assert sum(counts.values()) == 1


def test_device_work_counts_nothing():
    tensor = torch.ones(3, requires_grad=True)
    with counted_syncs() as counts:
        (tensor * 2).sum().backward()
        torch.where(tensor.isfinite().all(), tensor, 0)
    assert not counts


def test_a_read_inside_backward_counts():
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(lambda grad: grad * grad.sum().item())
    with counted_syncs() as counts:
        tensor.sum().backward()
    assert counts == {"aten::_local_scalar_dense": 1}


def test_nothing_counts_after_the_block():
    with counted_syncs() as counts:
        pass
    torch.ones(1).item()
    assert not counts


def test_grad_scaler_syncs_once_with_an_optimizer_that_is_not_fused():
    task = small_task(torch.optim.RMSprop)
    assert syncs.syncs_per_iteration(native(task, torch.float16)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.cpu])
def test_a_copy_to_the_host_counts(read):
    tensor = torch.ones(3, device="cuda")
    with counted_syncs() as counts:
        read(tensor)
    assert sum(counts.values()) == 1


@pytest.mark.gpu
def test_a_copy_to_the_host_that_nobody_waits_for_counts_nothing():
    tensor = torch.ones(3, device="cuda")
    with counted_syncs() as counts:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
    assert not counts


@pytest.mark.parametrize("optimizer", syncs.FUSED.values(), ids=syncs.FUSED.keys())
@pytest.mark.parametrize("level", syncs.LEVELS)
def test_amp_never_syncs_with_a_fused_optimizer(level, optimizer):
    assert syncs.syncs_per_iteration(with_amp(small_task(optimizer), level), refuse=True) == 0


@pytest.mark.parametrize("optimizer", syncs.OTHER.values(), ids=syncs.OTHER.keys())
@pytest.mark.parametrize("level", syncs.LEVELS)
def test_amp_syncs_at_most_once_with_any_other(level, optimizer):
    task = small_task(optimizer)
    own = syncs.syncs_per_iteration(plain(task))
    assert syncs.syncs_per_iteration(with_amp(task, level)) - own <= 1


# -- memory ----------------------------------------------------------------------------------


def test_a_storage_counts_once_whatever_looks_at_it():
    before = memory.storages()
    tensor = torch.zeros(100)
    views = [tensor.view(10, 10), tensor[5:]]
    after = memory.storages()
    assert len(views) == 2
    assert sum(size for key, size in after.items() if key not in before) == 400


def test_a_gradient_counts():
    before = memory.storages()
    leaf = torch.zeros(100, requires_grad=True)
    leaf.sum().backward()
    after = memory.storages()
    assert sum(size for key, size in after.items() if key not in before) == 800


@pytest.mark.parametrize("level", memory.BYTES)
@pytest.mark.parametrize("count", [memory.live_bytes, memory.allocated_bytes])
def test_amp_stores_what_the_level_needs_and_no_more(level, count):
    params = sum(param.numel() for param in small_model().parameters())
    # The batch and some scalars add 0.3 bytes; a hidden copy of anything would add 2 or more.
    assert count(small_task(), level) / params == pytest.approx(memory.BYTES[level], abs=1.0)


# -- timing ----------------------------------------------------------------------------------


def test_ratios_are_taken_round_by_round():
    times = Times({"a": [2.0, 3.0], "b": [1.0, 6.0]})
    assert times.ratios("a", "b") == [2.0, 0.5]


def test_a_race_gives_everyone_a_sample_per_round_and_heat():
    racers = {"first": partial(partial, int), "second": partial(partial, str)}
    times = race(racers, rounds=3, calls=2, heats=2)
    assert {name: len(samples) for name, samples in times.samples.items()} == {
        "first": 6,
        "second": 6,
    }
    assert all(sample > 0 for samples in times.samples.values() for sample in samples)


def test_a_racer_that_cannot_be_built_ends_the_race():
    with pytest.raises(EOFError):
        race({"broken": partial(int, "no number")}, rounds=1, calls=1)


# -- verdicts --------------------------------------------------------------------------------


def test_instructions_are_those_of_the_iterations_between_two_runs(monkeypatch, capsys):
    def counted(level, peer, iterations):
        return 10**9 + iterations * (3_000_000 if peer == "amp" else 2_000_000)

    monkeypatch.setattr(instructions.shutil, "which", lambda name: name)
    monkeypatch.setattr(instructions, "count", counted)
    instructions.main()
    assert capsys.readouterr().out.splitlines() == [
        f"{level}: 3.00 M, native 2.00 M, 1.5000x" for level in ("O1", "O4")
    ]


@pytest.mark.parametrize("peer", ["amp", "native"])
def test_the_iterations_that_valgrind_counts_run(peer):
    command = [sys.executable, "-m", "benchmarks.instructions", "O4", peer, "1"]
    subprocess.run(command, check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("relation", "value", "passed"),
    [
        ("<=", 1.004, True),
        ("<=", 1.006, False),
        ("<", 0.994, True),
        ("<", 0.996, False),
        (">=", 0.996, True),
        (">=", 0.994, False),
        ("==", 1.001, True),
        ("==", 1.01, False),
    ],
)
def test_a_goal_is_judged_by_the_printed_digits(relation, value, passed):
    figure = Measurement("speed", "case", value, "x", Goal(relation, 1.0), digits=2)
    assert figure.passed is passed


def test_the_table_shows_a_missed_goal():
    good = Measurement("speed", "good", 0.5, "x", Goal("<=", 1.0))
    bad = Measurement("speed", "bad", 1.5, "x", Goal("<=", 1.0))
    lines = table([good, bad]).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["pass", "FAIL"]
    assert verdict([good, bad]) == "1 of 2 goals met; missed: speed: bad."


def test_a_figure_without_a_goal_is_not_judged():
    figure = Measurement("speed", "case", 1.0, "ms")
    assert figure.passed is None
    assert verdict([figure]) == "0 of 0 goals met."


def test_samples_give_their_median_and_quartiles():
    figure = sampled("speed", "case", [1.0, 2.0, 3.0, 4.0, 100.0], "ms")
    assert (figure.low, figure.value, figure.high) == (1.5, 3.0, 52.0)


def test_figures_are_strict_json():
    figure = Measurement("speed", "case", 1.0, "x", Goal("<", 2.0))
    data = json.loads(json.dumps(figure.as_json(), allow_nan=False))
    assert (data["low"], data["goal"], data["passed"]) == (None, "< 2", True)


@pytest.mark.slow
def test_the_command_writes_the_figures_it_prints(tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "import"]
    process = subprocess.run(
        [*command, "--json", str(path)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    figures = json.loads(path.read_text())["figures"]
    assert [figure["case"] for figure in figures] == ["import apex.amp", "other packages"]
    assert all(figure["case"] in process.stdout for figure in figures)
