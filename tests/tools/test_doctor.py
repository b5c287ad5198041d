"""What the doctor finds, and what it makes of it."""

import json
import sys

import pytest
import torch

from apex import amp
from apex.cli import exit_codes, main
from apex.tools.doctor import examination, installed, speeds, syncs
from apex.tools.doctor.advice import advise
from apex.tools.doctor.examination import examine
from apex.tools.doctor.speeds import DTYPES, WORK, Speed, measure
from apex.tools.load import Load

CPU = torch.device("cpu")


def speeds_of(fp16, bf16):
    """Speeds on a device where these are so many times as fast as fp32; None where it cannot."""
    times = {"float32": 1.0, "float16": fp16, "bfloat16": bf16}
    return [
        Speed("gpu", work, dtype, None if ratio is None else 1 / ratio, 1_000)
        for work in WORK
        for dtype, ratio in times.items()
    ]


@pytest.mark.parametrize(
    ("fp16", "bf16", "level"),
    [
        (8.0, 8.0, "O4"),  # nothing to scale: bf16 where both are fast
        (8.0, 1.0, "O1"),  # GPUs before Ampere
        (8.0, None, "O1"),
        (0.02, 4.0, "O4"),  # CPUs that emulate fp16
        (1.0, 1.1, "O0"),
        (None, None, "O0"),
    ],
)
def test_the_advised_level_is_the_simplest_that_is_fast(fp16, bf16, level):
    assert advise(speeds_of(fp16, bf16), "gpu").opt_level == level


def rounds_of(fp16, bf16):
    """Speeds whose rounds are so many times as fast as fp32's."""
    by_dtype = {"float32": (1.0,) * len(bf16), "float16": fp16, "bfloat16": bf16}
    return [
        Speed("gpu", work, dtype, 1 / max(ratios), 1_000, "", tuple(1 / r for r in ratios))
        for work in WORK
        for dtype, ratios in by_dtype.items()
    ]


QUIET = (3.9, 4.0, 4.1, 4.0, 3.8, 4.0, 4.0, 4.1, 3.9, 4.0)
BUSY = (0.5, 4.0, 0.6, 2.0, 0.9, 1.0, 3.0, 0.7, 1.1, 0.6)


def test_speeds_that_spread_decide_nothing_and_the_reason_tells_by_how_much():
    found = advise(rounds_of((0.05,) * 10, BUSY), "gpu", Load(17.0, 2))
    assert found.opt_level is None
    assert found.reason == (
        "this machine is busy (load 17 on 2 cores). Relative to fp32 on gpu, bf16 measured 0.6 to "
        "4 times as fast and fp16 0.05 to 0.05 times as fast. Run again when it is idle, or with a "
        "larger --seconds."
    )


def test_speeds_that_spread_without_crossing_a_threshold_decide():
    assert advise(rounds_of((0.05,) * 10, QUIET), "gpu").opt_level == "O4"
    wide = tuple(2 * ratio for ratio in QUIET[:5]) + QUIET[5:]
    assert advise(rounds_of((0.05,) * 10, wide), "gpu").opt_level == "O4"


def test_one_disturbed_round_decides_nothing_else():
    disturbed = (0.1, *QUIET[1:])
    assert advise(rounds_of((0.05,) * 10, disturbed), "gpu").opt_level == "O4"


def test_dtypes_take_turns_and_the_best_of_the_rounds_counts(monkeypatch):
    turns = []

    def timed(run, _):
        turns.append(run().dtype)
        return float(len(turns))

    monkeypatch.setattr(speeds, "seconds", timed)
    found = measure(CPU, budget=0.0)
    calls = len(DTYPES) * (speeds.ROUNDS + 1)
    assert turns == list(DTYPES) * (2 * calls // len(DTYPES))
    for speed in found:
        assert len(speed.rounds) == speeds.ROUNDS
        assert speed.seconds == min(speed.rounds)


def test_the_advice_to_stay_in_fp32_says_why():
    reason = advise(speeds_of(1.0, 1.1), "gpu").reason
    assert reason.startswith("stay in fp32")
    assert "1.1 times" in reason


def test_every_operator_is_measured_in_every_dtype():
    found = measure(CPU, budget=0.0)
    assert [(s.work, s.dtype) for s in found] == [
        (work, str(dtype).removeprefix("torch.")) for work in WORK for dtype in DTYPES
    ]
    assert all(speed.seconds > 0 and speed.per_second > 0 for speed in found)


def test_fused_steps_read_nothing_on_the_host():
    assert syncs.host_reads(CPU) == dict.fromkeys(syncs.OPTIMIZERS, 0)


def test_a_step_that_reads_on_the_host_is_counted(monkeypatch):
    monkeypatch.setitem(syncs.OPTIMIZERS, "RMSprop", torch.optim.RMSprop)
    assert syncs.host_reads(CPU)["RMSprop"] >= 1


def test_nothing_is_left_behind():
    before = amp._amp_state.verbosity, len(amp._amp_state.sessions())
    syncs.host_reads(CPU)
    assert (amp._amp_state.verbosity, len(amp._amp_state.sessions())) == before
    assert not torch.is_autocast_enabled("cpu")


def test_this_installation_has_no_conflict():
    assert installed.conflicts() == []


def test_a_hidden_package_is_a_conflict(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (conflict,) = installed.conflicts()
    assert str(tmp_path / "apex") in conflict


def test_a_distribution_apex_with_modules_is_a_conflict(tmp_path, monkeypatch):
    info = tmp_path / "apex-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9\n")
    (info / "RECORD").write_text("apex/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (conflict,) = installed.conflicts()
    assert "`apex` 0.9" in conflict
    assert "pip uninstall apex" in conflict


def test_the_metadata_only_distribution_is_none(tmp_path, monkeypatch):
    info = tmp_path / "apex-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("apex-0.1.0.dist-info/METADATA,,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert installed.conflicts() == []


@pytest.fixture(scope="module")
def health():
    return examine(CPU, budget=0.0)


def test_the_text_is_one_screen(health):
    lines = str(health).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    start = (
        f"Start with {health.advice.opt_level}: " if health.advice.opt_level else "No level sugg"
    )
    assert start in str(health)


def test_a_conflict_is_told_and_sets_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(examination.installed, "conflicts", lambda: ["something is in the way"])
    assert main(["doctor", "--seconds", "0"]) == exit_codes.FAILED
    assert "Conflict: something is in the way." in capsys.readouterr().out


def test_json_holds_what_was_found(tmp_path, capsys):
    file = tmp_path / "health.json"
    assert main(["doctor", "--seconds", "0", "--json", str(file)]) == exit_codes.OK
    written = json.loads(file.read_text("utf-8"))
    assert written["well"] is True
    assert {speed["dtype"] for speed in written["speeds"]} == {"float32", "float16", "bfloat16"}
    assert "on cpu" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--seconds", "0", "--json", "-"]) == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["versions"]["torch"] == torch.__version__


def test_a_device_that_is_not_here_is_refused(capsys):
    assert main(["doctor", "--device", "nonsense"]) == exit_codes.BAD_INPUT
    assert "nonsense" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told(tmp_path, capsys):
    assert main(["doctor", "--seconds", "0", "--json", str(tmp_path)]) == exit_codes.NOT_WRITTEN
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_setting_that_turns_instructions_off_is_named(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert name not in examine(torch.device("cpu"), budget=0.0).devices["cpu"]
    monkeypatch.setenv(name, "AVX2")
    assert examine(torch.device("cpu"), budget=0.0).devices["cpu"].endswith(f"{name}=AVX2")
