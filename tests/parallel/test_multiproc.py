"""python -m apex.parallel.multiproc starts a script in several processes."""

import json
import os
import subprocess
import sys

import pytest

from apex.parallel import multiproc

SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump([{name: os.environ[name] for name in names}, sys.argv[2:]], file)
"""
FAIL = """
import os, sys, time
sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(60)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs a script's text in two processes; returns exit status and what SHOW wrote."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(text, *arguments):
        (tmp_path / "out").mkdir()
        script = tmp_path / "script.py"
        script.write_text(text)
        status = multiproc.main([str(script), str(tmp_path / "out"), *arguments])
        return status, [json.loads(p.read_text()) for p in sorted((tmp_path / "out").iterdir())]

    return run


def test_every_process_gets_its_rank_and_one_address(start):
    status, ((first, _), (second, _)) = start(SHOW)
    assert status == 0
    assert [p["RANK"] for p in (first, second)] == ["0", "1"]
    assert [p["LOCAL_RANK"] for p in (first, second)] == ["0", "1"]
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def test_arguments_reach_the_script(start):
    _, results = start(SHOW, "--lr", "0.1", "data")
    assert [arguments for _, arguments in results] == [["--lr", "0.1", "data"]] * 2


def test_old_flags_are_set_where_the_command_line_has_them(start):
    _, results = start(SHOW, "--rank", "9", "--world-size", "9")
    assert [arguments for _, arguments in results] == [
        ["--rank", str(rank), "--world-size", "2"] for rank in range(2)
    ]


def test_old_flags_are_given_to_a_script_that_names_them(start):
    _, results = start(SHOW + "FLAGS = '--rank', \"--world-size\"\n")
    assert [arguments for _, arguments in results] == [
        ["--world-size", "2", "--rank", str(rank)] for rank in range(2)
    ]


def test_a_failing_process_ends_the_others_and_gives_its_status(start):
    status, _ = start(FAIL)
    assert status == 3


def test_it_says_that_torchrun_is_todays_way(start, caplog):
    start(SHOW)
    assert "torchrun --nproc-per-node=2" in caplog.text


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_a_bad_world_size_is_refused(start, monkeypatch, capsys, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit):
        start(SHOW)
    assert "must be a positive number of processes" in capsys.readouterr().err


@pytest.mark.distributed
def test_it_runs_as_a_module(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SHOW)
    environment = {**os.environ, "WORLD_SIZE": "2"}
    subprocess.run(
        [sys.executable, "-m", "apex.parallel.multiproc", str(script), str(tmp_path)],
        check=True,
        env=environment,
        timeout=60,
    )
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}
