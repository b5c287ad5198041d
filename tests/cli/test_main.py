"""The command ``apex``: its flags, its help, its exit codes."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from apex.cli import SUBCOMMANDS, build_parser, exit_codes, main
from tests.tools.cases import TARGET, written
from tests.tools.test_compare import FAILS_IN_BF16

FLAGS = {
    "compare": [
        *("-h", "--help", "--levels", "--steps", "--emulated", "--emulated-steps", "--rounds"),
        *("--seed", "--device", "--output", "--json"),
    ],
    "doctor": ["-h", "--help", "--device", "--seconds", "--json"],
    "migrate": ["-h", "--help", "--json"],
}

FEW = ["--steps", "2", "--rounds", "1"]


def parsers():
    (commands,) = [a for a in build_parser()._actions if a.dest == "==SUPPRESS=="] or [
        a for a in build_parser()._actions if getattr(a, "choices", None)
    ]
    return commands.choices


@pytest.fixture
def apex(tmp_path, capsys, monkeypatch):
    """Runs the command in an empty folder; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


# -- arguments and help ----------------------------------------------------------------------


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_are_these(command):
    actions = parsers()[command]._actions
    assert [flag for action in actions for flag in action.option_strings] == FLAGS[command]


def test_the_version_is_that_of_the_package_and_of_torch(apex):
    code, out, _ = apex("--version")
    assert code == 0
    assert out == f"apex-amp {version('apex-amp')}, torch {version('torch')}\n"


def test_every_subcommand_is_in_the_help():
    text = build_parser().format_help()
    assert all(re.search(rf"^ +{command} ", text, re.MULTILINE) for command in SUBCOMMANDS)


@pytest.mark.parametrize("command", ["", *FLAGS])
def test_the_help_fits_a_terminal_and_tells_the_exit_codes(command):
    parser = parsers()[command] if command else build_parser()
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= 100
    for code, meaning in exit_codes.MEANINGS.items():
        assert re.search(rf"^  {code} +{re.escape(meaning)}$", text, re.MULTILINE)


def test_the_help_of_compare_names_what_a_target_gives():
    text = parsers()["compare"].format_help()
    for name in ("model", "optimizer", "batches", "loss", "evaluate", "setup()", "autocast-bf16"):
        assert name in text


def test_the_module_runs_as_the_command_and_its_help_loads_no_tool():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['apex', 'compare', '--help']\n"
        "try:\n"
        "    runpy.run_module('apex', run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    print('apex.tools' in sys.modules)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert output.startswith("usage: apex compare")
    assert output.endswith("False\n")


# -- exit codes ------------------------------------------------------------------------------


def test_a_comparison_prints_a_row_per_level_and_writes_the_files(apex, tmp_path):
    target = written(tmp_path)
    code, out, _ = apex("compare", target, "--levels", "O0,O4", *FEW, "--json", "figures.json")
    assert code == exit_codes.OK
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["O0"], ["O4"])] == [
        ["O0", "fp32"],
        ["O4", "bf16"],
    ]
    assert out.endswith("report: report.html\njson: figures.json\n")
    assert (tmp_path / "report.html").read_text().count("<tr") == 3
    assert len(json.loads((tmp_path / "figures.json").read_text())["levels"]) == 2


def test_json_on_standard_output_is_alone_there(apex, tmp_path):
    target = written(tmp_path)
    code, out, err = apex("compare", target, "--levels", "O0", *FEW, "--json", "-")
    assert code == exit_codes.OK
    assert json.loads(out)["target"] == target
    assert "ms / step" in err


def test_a_level_that_fails_is_exit_code_1_and_the_rest_is_there(apex, tmp_path):
    code, out, _ = apex("compare", written(tmp_path, FAILS_IN_BF16), "--levels", "O4,O5", *FEW)
    assert code == exit_codes.FAILED
    assert "O4: training failed: RuntimeError: no kernel for bf16" in out
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare"], "TARGET"),
        (["compare", "x.py", "--steps", "0"], "got 0; it must be at least 1"),
        (["compare", "x.py", "--levels", "O9"], "no level 'O9'; choose from O0, O1"),
        (["compare", "x.py", "--device", "abacus"], "there is no device 'abacus'"),
        (["compare", "x.py", "--device", "xpu:99"], "there is no device 'xpu:99'"),
        (["compare", "no_such.py"], "There is no file no_such.py."),
        (["doctor", "--seconds", "-1"], "got -1; it must be finite and at least 0 seconds"),
        (["doctor", "--seconds", "nan"], "got nan; it must be finite and at least 0 seconds"),
        (["no-such-command"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(apex, arguments, message):
    code, out, err = apex(*arguments)
    assert (code, out) == (exit_codes.BAD_INPUT, "")
    assert message in err


def test_a_factory_that_raises_is_exit_code_2_and_quoted(apex, tmp_path):
    target = written(tmp_path, "def setup():\n    raise OSError('no data here')\n")
    code, _, err = apex("compare", target)
    assert code == exit_codes.BAD_INPUT
    assert err.splitlines()[-1].endswith(f"setup() raised OSError: no data here ({target}:2)")


def test_a_report_that_cannot_be_written_is_exit_code_3_and_the_json_still_is(apex, tmp_path):
    arguments = ["--levels", "O0", *FEW, "--output", "no/such/folder.html", "--json", "a.json"]
    code, _, err = apex("compare", written(tmp_path), *arguments)
    assert code == exit_codes.NOT_WRITTEN
    assert "no/such/folder.html could not be written: No such file" in err
    assert (tmp_path / "a.json").exists()


def test_a_reader_that_is_gone_costs_no_report_and_is_exit_code_3(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "apex", "compare", written(tmp_path), "--levels", "O0", *FEW]
    ended = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False
    )
    os.close(write)
    assert ended.returncode == exit_codes.NOT_WRITTEN
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr
    assert (tmp_path / "report.html").exists()


def test_an_interrupt_is_exit_code_130(apex, tmp_path):
    target = written(
        tmp_path, TARGET.replace("    return nn", "    raise KeyboardInterrupt\n    return nn")
    )
    code, _, err = apex("compare", target, *FEW)
    assert code == exit_codes.INTERRUPTED
    assert err.endswith("interrupted\n")


def test_without_tqdm_and_matplotlib_plain_lines_do(apex, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = apex("compare", written(tmp_path), "--levels", "O0", *FEW)
    assert code == exit_codes.OK
    assert "tqdm is not installed: plain progress (pip install 'apex-amp[demo]')" in err
    assert re.search(r"^\[\d+/\d+\] train O0$", err, re.MULTILINE)
