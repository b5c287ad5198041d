"""``apex migrate``: its output, the files it writes, its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex.cli import exit_codes, main

PLAIN = """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
"""


@pytest.fixture
def apex(tmp_path, capsys, monkeypatch):
    """Runs the command in a folder with a script; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PLAIN)

    def run(*arguments):
        try:
            code = main(["migrate", *arguments])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


def test_a_script_that_works_is_exit_code_0(apex):
    code, out, err = apex("train.py")
    assert (code, err) == (exit_codes.OK, "")
    assert out.endswith("1 file: 3 uses work unchanged, 0 with a note, 0 unsupported.\n")


def test_a_use_that_is_not_supported_is_exit_code_1(apex, tmp_path):
    (tmp_path / "other.py").write_text("from apex.pyprof import nvtx\n")
    code, out, _ = apex(".")
    assert code == exit_codes.FAILED
    assert "  not supported  apex.pyprof.nvtx  (line 1)\n" in out


def test_a_syntax_error_is_exit_code_1_and_the_rest_is_there(apex, tmp_path):
    (tmp_path / "old.py").write_text("from apex import amp\nprint 'hello'\n")
    code, out, _ = apex(".")
    assert code == exit_codes.FAILED
    assert "old.py: line 2: not valid Python 3 syntax.\n" in out
    assert "3 uses work unchanged" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such.py"], "There is no file or folder no_such.py."),
        (["latin.py"], "latin.py cannot be decoded"),
        (["lab.ipynb"], "lab.ipynb is a notebook. Convert it to a script first: jupyter nb"),
        (["train.py", "--to", "torch"], "unrecognized arguments: --to torch. To move a script"),
        (["train.py", "--write"], "see the table in docs/migrating.md."),
        ([], "PATH"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(apex, tmp_path, arguments, message):
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "lab.ipynb").write_text('{"cells": [{"source": ["from apex import amp"]}]}')
    code, out, err = apex(*arguments)
    assert (code, out) == (exit_codes.BAD_INPUT, "")
    assert message in err


def test_json_goes_to_a_file_or_alone_to_standard_output(apex, tmp_path):
    code, out, _ = apex("train.py", "--json", "uses.json")
    assert code == exit_codes.OK
    assert "3 uses work" in out
    _, out, _ = apex("train.py", "--json", "-")
    assert json.loads(out) == json.loads((tmp_path / "uses.json").read_text())
    assert json.loads(out)["uses"][1]["name"] == "apex.amp.initialize"


def test_json_that_cannot_be_written_is_exit_code_3(apex):
    code, _, err = apex("train.py", "--json", "no/such/folder.json")
    assert code == exit_codes.NOT_WRITTEN
    assert "no/such/folder.json cannot be written: No such file" in err


def test_names_that_are_no_text_are_printed_escaped(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.py"
    try:
        Path(os.fsdecode(name)).write_text("from apex import amp\n")
    except OSError:
        pytest.skip("the file system takes no such name")
    command = [sys.executable, "-m", "apex", "migrate", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == exit_codes.OK
    assert b"caf\\udce9.py" in ended.stdout
