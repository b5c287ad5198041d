"""The command ``apex``: its flags, its help, its exit codes."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest

from apex.cli import SUBCOMMANDS, build_parser, exit_codes, main
from apex.cli.output import why_not_writable
from apex.tools.progress import progress_on
from apex.tools.text import text_table
from tests.tools.cases import TARGET, comparison_of, result_of, written
from tests.tools.test_compare import FAILS_IN_BF16

pytestmark = pytest.mark.usefixtures("every_dtype_is_fast")

FLAGS = {
    "compare": [
        *("-h", "--help", "--levels", "--steps", "--emulated", "--emulated-steps", "--rounds"),
        *("--suggest-fp32", "--seed", "--device", "--output", "--json", "--wide"),
    ],
    "doctor": ["-h", "--help", "--device", "--seconds", "--json"],
    "migrate": ["-h", "--help", "--json"],
    "trace": ["-h", "--help", "--keep-going", "--json", "-m"],
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


EXIT_CODES = {
    "": {0: "success", 1: "part of the work failed", 4: "the script that `apex trace` ran made"},
    "compare": {0: "success", 1: "a level failed"},
    "doctor": {0: "success", 1: "another package conflicts"},
    "migrate": {0: "success", 1: "a use is not supported"},
    "trace": {0: "the script succeeded", 1: "an uncaught error", 4: "inf or NaN was found"},
}
OF_ALL = {2: "the arguments, or the objects", 3: "a file could not be written", 130: "interrupted"}


@pytest.mark.parametrize("command", EXIT_CODES)
def test_the_help_fits_a_terminal_and_tells_the_command_s_own_exit_codes(command):
    parser = parsers()[command] if command else build_parser()
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= 100
    told = dict(re.findall(r"^  (\d+) +(.+)$", text.partition("exit codes:\n")[2], re.MULTILINE))
    expected = dict(sorted((EXIT_CODES[command] | OF_ALL).items()))
    assert list(map(int, told)) == list(expected)
    for meaning, start in zip(told.values(), expected.values(), strict=True):
        assert meaning.startswith(start)


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
    few = [*FEW, "--wide", "--json", "figures.json"]
    code, out, _ = apex("compare", target, "--levels", "O0,O4", *few)
    assert code == exit_codes.OK
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["O0"], ["O4"])] == [
        ["O0", "fp32"],
        ["O4", "bf16"],
    ]
    assert out.endswith("report: report.html\njson: figures.json\n")
    assert (tmp_path / "report.html").read_text().count("<tr") == 2 * (1 + 2)  # verdicts, figures
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
        (["compare", "x.py", "--steps", "abc"], "--steps: got 'abc'; it must be a whole number"),
        (["compare", "x.py", "--seed", "1.5"], "--seed: got '1.5'; it must be a whole number"),
        (["compare", "x.py", "--seed", "9" * 20], "it must fit in 64 bits"),
        (["compare", "x.py", "--device"], "--device needs a value"),
        (["compare", "x.py", "--json", "report.html"], "--output and --json name the same file"),
        (["doctor", "--json"], "--json needs a value: a file, or - for standard output"),
        (["doctor", "--seconds", "abc"], "got 'abc'; it must be a number of seconds"),
        (["doctor", "--seconds", "-1"], "got -1; it must be finite and at least 0 seconds"),
        (["doctor", "--seconds", "nan"], "got nan; it must be finite and at least 0 seconds"),
        (["no-such-command"], "invalid choice"),
        ([], "apex: name a COMMAND: compare, doctor, migrate, trace"),
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


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (["--output", "no/such/folder.html"], "no/such/folder.html cannot be written: No such"),
        (["--output", "folder"], "folder cannot be written: it is a folder"),
        (["--json", "no/figures.json"], "no/figures.json cannot be written: No such"),
    ],
)
def test_a_file_that_cannot_be_written_is_found_before_the_training(
    apex, tmp_path, outputs, reason
):
    (tmp_path / "folder").mkdir()
    target = written(tmp_path, "raise RuntimeError('executed')\n")
    code, out, err = apex("compare", target, *outputs)
    assert (code, out) == (exit_codes.NOT_WRITTEN, "")
    assert err.startswith(f"apex compare: {reason}")
    assert err.endswith("Nothing was trained.\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "target.py"]


def test_trying_a_file_neither_changes_nor_leaves_one(tmp_path):
    (tmp_path / "old").write_text("kept")
    assert why_not_writable(tmp_path / "old") is None
    assert why_not_writable(tmp_path / "new") is None
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "kept")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_a_pipe_without_a_reader_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert why_not_writable(tmp_path / "pipe") is None


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


@pytest.mark.skipif(os.name == "nt", reason="it needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_costs_no_report(closed, tmp_path):
    target = written(tmp_path)
    command = [sys.executable, "-m", "apex", "compare", target, "--levels", "O0", *FEW]
    line = f"{shlex.join(map(str, command))} {closed}"
    ended = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == exit_codes.OK
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "report.html").exists()


def test_an_interrupt_is_exit_code_130(apex, tmp_path):
    target = written(
        tmp_path, TARGET.replace("    return nn", "    raise KeyboardInterrupt\n    return nn")
    )
    code, _, err = apex("compare", target, *FEW)
    assert code == exit_codes.INTERRUPTED
    assert err.endswith("interrupted\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_tqdm_a_terminal_gets_plain_lines_and_a_notice(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = Terminal()
    progress = progress_on(stream)(total=2)
    progress.set_description("train O0")
    assert stream.getvalue() == (
        "tqdm is not installed: plain progress (pip install 'apex-amp[demo]')\n[0/2] train O0\n"
    )


def test_without_a_terminal_each_stage_is_one_line(apex, tmp_path):
    code, _, err = apex("compare", written(tmp_path), "--levels", "O0,O4", *FEW)
    assert code == exit_codes.OK
    stages = ["train O0", "train O4", "probe O0", "probe O4", "time all, interleaved"]
    assert [line.partition("] ")[2] for line in err.splitlines()] == stages
    assert "\r" not in err


# -- width -----------------------------------------------------------------------------------

NARROW = ["level", "ms", "/", "step", "speed", "memory", "final", "loss", "verdict"]


@pytest.mark.parametrize(("columns", "wide", "narrow"), [(80, 0, 1), (99, 0, 1), (80, 1, 0)])
def test_a_narrow_terminal_gets_the_columns_that_matter(
    apex, tmp_path, monkeypatch, columns, wide, narrow
):
    monkeypatch.setenv("COLUMNS", str(columns))
    arguments = ["--levels", "O0,O4", *FEW, *["--wide"] * wide]
    _, out, _ = apex("compare", written(tmp_path), *arguments)
    (heading,) = [line for line in out.splitlines() if line.startswith("level ")]
    assert (heading.split() == NARROW) == bool(narrow)
    assert ("--wide shows all columns." in out) == bool(narrow)
    if narrow:
        prose = [line for line in out.splitlines() if str(tmp_path) not in line]
        assert max(map(len, prose)) <= columns


def test_a_table_that_does_not_fit_a_wide_terminal_is_cut_too():
    found = comparison_of(result_of(), result_of("O4"))
    assert max(map(len, text_table(found).splitlines())) > 120
    assert max(map(len, text_table(found, width=120).splitlines())) <= 100
    assert text_table(found, width=200) == text_table(found)
