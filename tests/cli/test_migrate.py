"""``apex migrate``: what it prints, what it writes, its exit codes."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("libcst", reason="the migrate extra is not installed")

from apex.cli import exit_codes, main
from tests.tools.migrate_cases import PLAIN, to_torch


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


# -- the report --------------------------------------------------------------------------------


def test_a_script_that_works_is_exit_code_0(apex):
    code, out, err = apex("train.py")
    assert (code, err) == (exit_codes.OK, "")
    assert out.endswith("1 file: 3 uses work unchanged, 0 work with a note, 0 are not supported.\n")


def test_a_use_that_is_not_supported_is_exit_code_1(apex, tmp_path):
    (tmp_path / "other.py").write_text("from apex.pyprof import nvtx\n")
    code, out, _ = apex(".")
    assert code == exit_codes.FAILED
    assert "  not supported  apex.pyprof.nvtx  (line 1)\n" in out


def test_a_syntax_error_is_exit_code_1_and_the_rest_is_there(apex, tmp_path):
    (tmp_path / "old.py").write_text("from apex import amp\nprint 'hello'\n")
    code, out, _ = apex(".")
    assert code == exit_codes.FAILED
    assert "old.py: line 2: not the syntax of Python 3.\n" in out
    assert "3 uses work unchanged" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such.py"], "There is no file or folder no_such.py."),
        (["latin.py"], "latin.py cannot be decoded"),
        (["train.py", "--write"], "--write and --level go with --to torch."),
        (["train.py", "--level", "O4"], "--write and --level go with --to torch."),
        (["train.py", "--to", "jax"], "invalid choice: 'jax'"),
        (["train.py", "--to", "torch", "--level", "O2"], "invalid choice: 'O2'"),
        ([], "PATH"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(apex, tmp_path, arguments, said):
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    code, out, err = apex(*arguments)
    assert (code, out) == (exit_codes.BAD_INPUT, "")
    assert said in err


def test_without_libcst_it_says_what_to_install(apex, monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    code, out, err = apex("train.py")
    assert (code, out) == (exit_codes.MISSING_PACKAGE, "")
    assert "pip install 'apex-amp[migrate]'" in err


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
    assert "no/such/folder.json not written: No such file" in err


# -- to torch ----------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_diff_is_alone_on_standard_output_and_patch_takes_it(apex, tmp_path):
    code, out, err = apex("train.py", "--to", "torch")
    assert code == exit_codes.OK
    assert err.startswith("train.py: rewritten\n")
    assert (tmp_path / "train.py").read_text() == PLAIN
    command = ["git", "apply", "-p1", "-"]
    subprocess.run(command, input=out, check=True, text=True, cwd=tmp_path)
    assert (tmp_path / "train.py").read_text() == to_torch(PLAIN)[0]


def test_write_changes_the_files_in_place(apex, tmp_path):
    code, out, _ = apex(".", "--to", "torch", "--write")
    assert (code, out) == (exit_codes.OK, "")
    assert (tmp_path / "train.py").read_text() == to_torch(PLAIN)[0]
    code, out, err = apex(".", "--to", "torch")
    assert (code, out, err) == (exit_codes.OK, "", "No script uses apex.amp.\n")


def test_line_ends_and_a_missing_last_one_are_kept(apex, tmp_path):
    dos = PLAIN.replace("\n", "\r\n").rstrip().encode()
    (tmp_path / "train.py").write_bytes(dos)
    apex("train.py", "--to", "torch", "--write")
    expected = to_torch(PLAIN)[0].replace("\n", "\r\n").rstrip().encode()
    assert (tmp_path / "train.py").read_bytes() == expected


def test_a_script_that_stays_is_exit_code_1_and_the_others_are_changed(apex, tmp_path):
    (tmp_path / "masters.py").write_text(PLAIN.replace("O1", "O2"))
    code, out, err = apex(".", "--to", "torch")
    assert code == exit_codes.FAILED
    assert "+++ b/train.py\n" in out
    assert "masters.py" not in out
    assert 'masters.py: left as it is\n  line 12: opt_level="O2": fp32 masters' in err
    assert err.endswith("\n\n1 rewritten, 1 left as they are.\n")


def test_files_that_share_a_session_stay_both(apex, tmp_path):
    (tmp_path / "train.py").write_text("import saving\n" + PLAIN)
    (tmp_path / "saving.py").write_text(
        "from apex import amp\n\ndef state():\n    return amp.state_dict()\n"
    )
    code, out, err = apex(".", "--to", "torch")
    assert (code, out) == (exit_codes.FAILED, "")
    assert "line 1: saving.py, which is imported here, uses amp, too" in err
    assert "line 1: train.py, which imports this file, uses amp, too" in err
    assert apex("train.py", "--to", "torch")[0] == exit_codes.FAILED


def test_the_level_is_taken_where_the_script_computes_it(apex, tmp_path):
    (tmp_path / "train.py").write_text(PLAIN.replace('"O1"', "args.level"))
    assert apex("train.py", "--to", "torch")[0] == exit_codes.FAILED
    code, out, _ = apex("train.py", "--to", "torch", "--level", "O4")
    assert code == exit_codes.OK
    assert "torch.bfloat16" in out


def test_json_of_the_change_has_diff_notes_and_reasons(apex, tmp_path):
    (tmp_path / "masters.py").write_text(PLAIN.replace("O1", "O2"))
    _, out, _ = apex(".", "--to", "torch", "--json", "-")
    data = json.loads(out)
    assert data["changed"][0]["diff"].startswith("--- a/train.py\n")
    assert data["left"][0]["reasons"][0]["line"] == 12
    assert data["not_read"] == []


@pytest.mark.skipif(sys.platform == "win32", reason="the mode of a file means nothing there")
def test_a_file_that_cannot_be_written_is_exit_code_3(apex, tmp_path, monkeypatch):
    from apex.tools.migrate import sources

    def fail(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "write", fail)  # the tests may run as root, who may write all
    code, _, err = apex("train.py", "--to", "torch", "--write")
    assert code == exit_codes.NOT_WRITTEN
    assert "train.py not written: Permission denied" in err
