"""What the doctor finds, and what it makes of it."""

import json
import time

import pytest
import torch

from apex.cli import OK, main
from apex.tools import doctor
from apex.tools.compare.timing import Load
from tests.support.emulation import emulate

CPU = torch.device("cpu")


def speeds_of(fp16, bf16):
    """Speeds of a device where these are so many times as fast as fp32; 0 where it cannot."""
    return {"float16": {"matmul": fp16, "conv": fp16}, "bfloat16": {"matmul": bf16, "conv": bf16}}


ADVICE = [
    (8.0, 8.0, "O4"),  # nothing to scale: bf16 where both are fast
    (8.0, 6.0, "O4"),
    (8.0, 1.0, "O1"),  # GPUs before Ampere
    (8.0, 0, "O1"),
    (0.02, 4.0, "O4"),  # CPUs that emulate fp16
    (1.0, 1.1, "O0"),
    (0.6, 0.1, "O0"),
    (0, 0, "O0"),
]


@pytest.mark.parametrize(("fp16", "bf16", "level"), ADVICE)
def test_the_advised_level_is_the_simplest_that_is_fast(fp16, bf16, level):
    found, text = doctor.advise(speeds_of(fp16, bf16), "gpu", Load(0.5, 2))
    assert found == level
    assert text.startswith(f"Start with {level}: ")


def test_a_busy_machine_gets_no_level():
    found, text = doctor.advise(speeds_of(8.0, 8.0), "gpu", Load(17.0, 2))
    assert found is None
    assert text.startswith("No level suggested: this machine is busy (load 17 on 2 cores).")
    found, text = doctor.advise(speeds_of(8.0, None), "gpu", Load(0.5, 2))
    assert found is None
    assert text.startswith("No level suggested: other programs disturbed the measurement.")


@pytest.mark.parametrize("busy", [False, True])
def test_a_cpu_that_emulates_both_dtypes_is_told_so_however_busy_it_is(monkeypatch, busy):
    monkeypatch.setattr(Load, "busy", busy)
    monkeypatch.setattr(doctor, "operator_seconds", lambda dtype, device: {"matmul": QUIET})
    emulate(monkeypatch, "fp16", "bf16")
    health = doctor.examine(CPU)
    assert health.opt_level == "O0"
    said = "Start with O0: this CPU emulates fp16 and bf16, tens of times slower"
    assert health.advice.startswith(said)
    assert health.speeds["cpu"] == {"float16": {}, "bfloat16": {}}  # whatever times show
    assert str(health).count("against fp32: emulated, tens of times slower") == 2
    emulate(monkeypatch, "fp16")
    assert doctor.examine(CPU).opt_level == (None if busy else "O4")


def test_a_gpu_beside_a_cpu_that_emulates_gets_a_level_of_its_own(monkeypatch):
    monkeypatch.setattr(Load, "busy", False)
    monkeypatch.setattr(doctor, "operator_seconds", lambda dtype, device: {"matmul": QUIET})
    monkeypatch.setattr(doctor, "describe", str)
    emulate(monkeypatch, "fp16", "bf16")
    health = doctor.examine(torch.device("cuda"))
    assert health.opt_level == "O4"
    assert list(health.speeds) == ["cuda", "cpu"]


QUIET = [(1.0, 0.5)] * 8


SPEEDS = [
    (QUIET, 2.0, "matmul 2x"),
    ([(1.0 + at, 0.5 + 3 * at) for at in range(8)], 2.0, "not measured: busy"),
    ([(1.0 + at, 0.5 + 3 * at) for at in reversed(range(8))], 2.0, "not measured: busy"),
    ([(9.0, 30.0)] * 30 + QUIET, 2.0, "matmul 2x"),  # a load that comes and goes
    ([(1.0, 80.0)] * 8, 0.0125, "matmul 0.0125x"),
    ([], 0.0, "matmul no"),
]


@pytest.mark.parametrize(("times", "speed", "shown"), SPEEDS)
def test_a_speed_is_what_hardware_can_do_or_not_measured(monkeypatch, times, speed, shown):
    emulate(monkeypatch)
    monkeypatch.setattr(doctor, "operator_seconds", lambda dtype, device: {"matmul": times})
    health = doctor.examine(CPU)
    assert shown in str(health)
    assert "not measured" in shown or doctor.speed_of(times) == speed
    assert ("not measured" in shown) == (health.speeds["cpu"]["float16"]["matmul"] is None)


def test_it_takes_a_few_seconds_and_measures_every_dtype(monkeypatch):
    emulate(monkeypatch)
    start = time.thread_time()  # another program's load is not the doctor's
    found = doctor.examine(CPU)
    assert time.thread_time() - start < 6
    assert list(found.speeds["cpu"]) == ["float16", "bfloat16"]
    for by_work in found.speeds["cpu"].values():
        assert list(by_work) == ["matmul", "conv"]
        assert all(speed is None or speed > 0 for speed in by_work.values())
    assert set(found.versions) == {"apex-amp", "torch", "Python", "system"}
    for part in (doctor.whose(doctor.origins()), "matmul", found.advice[:20]):
        assert part in str(found)


def test_what_another_apex_provides_is_named():
    kernel = {"amp_C": "/site-packages/amp_C.so"}
    ours, theirs = doctor.whose({**doctor.origins(), **kernel}).splitlines()
    assert ours.startswith("apex is provided by apex-amp, from ")
    assert theirs == "amp_C is from /site-packages/amp_C.so"
    package = {"apex": "/site-packages/apex/__init__.py"}
    assert doctor.whose({**doctor.origins(), **kernel, **package}).splitlines() == [
        "apex is provided by another package; apex-amp adds what it lacks, as amp",
        "apex is from /site-packages/apex/__init__.py",
        "amp_C is from /site-packages/amp_C.so",
    ]


def test_the_json_is_alone_on_standard_output(capsys):
    assert main(["doctor", "--json", "-"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["origins"] == doctor.origins()
    assert data["opt_level"] in (None, "O0", "O1", "O4")
