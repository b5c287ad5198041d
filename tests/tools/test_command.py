"""The command ``apex``: its flags, its help, its exit codes."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import pytest

from apex._core.project import VERSION
from apex.cli import BAD_INPUT, FAILED, INTERRUPTED, NOT_WRITTEN, OK, build_parser, main
from apex.tools.compare.timing import Load
from tests.tools.cases import FAILS_IN_BF16, TARGET, written

pytestmark = pytest.mark.usefixtures("ideal_machine")

FLAGS = {
    "trace": ["-h", "--help", "--json", "--digits", "--updates", "--keep-going", "-m"],
    "compare": [
        *("-h", "--help", "--json", "--levels", "--steps", "--rounds", "--seed", "--device"),
        "--output",
    ],
    "migrate": ["-h", "--help", "--json"],
    "doctor": ["-h", "--help", "--json", "--device"],
}

FEW = ["--steps", "2", "--rounds", "1"]


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


def test_the_flags_are_these():
    (commands,) = [a.choices for a in build_parser()._actions if getattr(a, "choices", None)]
    found = {}
    for command, parser in commands.items():
        found[command] = [flag for action in parser._actions for flag in action.option_strings]
        assert parser.description
    assert found == FLAGS
    assert re.search("bytes / param +weights, masters", commands["compare"].format_help())


def test_the_help_leads_from_a_question_to_a_command():
    text = build_parser().format_help()
    assert re.findall(r"\? +apex (\w+)", text) == list(FLAGS)
    assert len(text.splitlines()) < 25


def test_the_bare_command_prints_the_help(apex):
    assert apex() == (OK, build_parser().format_help(), "")


def test_the_version_is_the_distribution_s(apex):
    assert apex("--version") == (OK, f"apex-amp {VERSION}\n", "")


def test_a_terminal_without_unicode_gets_escapes(apex, tmp_path, monkeypatch):
    (tmp_path / "\xe9.py").write_text("import apex\n")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["migrate", "\xe9.py"]) == OK
    assert terminal.buffer.getvalue().startswith(b"\\xe9.py\n  works          apex  (line 1)\n")


# -- exit codes ------------------------------------------------------------------------------


def test_a_comparison_prints_a_row_per_level_and_writes_the_files(apex, tmp_path):
    target = written(tmp_path)
    few = [*FEW, "--json", "figures.json"]
    code, out, err = apex("compare", target, "--levels", "O0,O4", *few)
    assert code == OK
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row[:1] in (["O0"], ["O4"])] == ["O0", "O4"] * 2
    assert out.endswith("report: report.html\n")
    assert "</html>" in (tmp_path / "report.html").read_text()
    assert len(json.loads((tmp_path / "figures.json").read_text())["levels"]) == 2
    stages = ["train O0", "train O4", "time all, interleaved: round 1 of 1"]
    assert err.splitlines() == [f"[{stage}]" for stage in stages]


def test_a_busy_machine_is_said_before_the_work_and_training_is_judged(apex, tmp_path, monkeypatch):
    monkeypatch.setattr(Load, "busy", True)
    few = ["--levels", "O4", "--steps", "20", "--rounds", "9"]
    code, out, err = apex("compare", written(tmp_path), *few)
    assert code == OK
    first, *stages = err.splitlines()
    assert first.startswith("[this machine is busy (")
    assert stages == ["[train O0]", "[train O4]"]
    assert "O4: unclear, trains as well as fp32; not timed." in out


def test_a_level_that_fails_is_exit_code_1_and_json_is_alone_on_standard_output(apex, tmp_path):
    target = written(tmp_path, FAILS_IN_BF16)
    code, out, err = apex("compare", target, "--levels", "O4,O5", *FEW, "--json", "-")
    assert code == FAILED
    assert "O4: no, training failed: RuntimeError: no kernel for bf16" in err
    assert (tmp_path / "report.html").exists()
    assert json.loads(out)["target"] == target


def test_a_reader_that_is_gone_costs_no_report_and_is_exit_code_3(apex, tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(os, "dup2", lambda *_: None)
        assert main(["compare", written(tmp_path), "--levels", "O0", *FEW]) == NOT_WRITTEN
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            closed.close()
    assert (tmp_path / "report.html").exists()


def test_a_full_disk_is_named_and_is_exit_code_3(tmp_path, capsys):
    command = ["migrate", written(tmp_path)]
    run = [sys.executable, "-m", "apex", *command]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            run, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered
        )
    _, error = process.communicate()
    assert process.returncode == NOT_WRITTEN
    assert error == "apex migrate: standard output: No space left on device.\n"
    assert main([*command, "--json", "/dev/full"]) == NOT_WRITTEN
    reason = "/dev/full could not be written: No space left on device."
    assert capsys.readouterr().err == f"apex migrate: {reason}\n"


BAD_USAGE = [
    (["compare"], "TARGET"),
    (["compare", "x.py", "--steps", "0"], "got 0; it must be at least 1"),
    (["compare", "x.py", "--steps", "abc"], "--steps: invalid count value: 'abc'"),
    (["compare", "x.py", "--levels", "O9"], "no level 'O9'; choose from O0, O1"),
    (["compare", "x.py", "--device", "xpu:99"], "there is no device 'xpu:99'"),
    (["compare", "no_such.py"], "no_such.py cannot be read: No such file"),
    (["compare", "."], "apex compare: . cannot be read: Is a directory."),
    (["compare", "x.py", "--levels", "o4"], "separated by commas. Did you mean O4?"),
    (["compare", "x.py", "--levles", "O4"], "usage: apex compare [-h] [--json FILE]"),
    (["trace"], "the following arguments are required: SCRIPT"),
    (["trace", "lab.ipynb"], "lab.ipynb is a notebook. Convert it to a script first: jup"),
    (["trace", "--keepgoing", "x.py"], "apex trace: error: unrecognized arguments: --keepg"),
    (["trace", "--keep", "nothing.py", "--json"], "apex trace: there is no file nothing.py."),
    (["compare", "lab.ipynb"], "lab.ipynb is a notebook. Convert it to a script first: jup"),
    (["compare", "old.py"], "line 1). This is Python 2. Convert it first: 2to3 -w FILE"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(apex, tmp_path, arguments, message):
    (tmp_path / "lab.ipynb").write_text("{}")
    (tmp_path / "old.py").write_text("print 'epoch'\n")
    code, out, err = apex(*arguments)
    assert (code, out) == (BAD_INPUT, "")
    assert message in err


@pytest.mark.parametrize(
    ("option", "file"),
    [("--output", "no/such/folder.html"), ("--output", "folder"), ("--json", "no/figures.json")],
)
def test_a_file_that_cannot_be_written_is_found_before_the_training(apex, tmp_path, option, file):
    (tmp_path / "folder").mkdir()
    target = written(tmp_path, f"{TARGET}raise RuntimeError('executed')\n")
    code, out, err = apex("compare", target, option, file)
    assert (code, out) == (NOT_WRITTEN, "")
    assert err.startswith(f"apex compare: {file} cannot be written: it is a folder or read-only")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "target.py"]


FAILING = [
    ("from .model import width\n", "trace it as a module, `apex trace -m package.module`."),
    ("print 'epoch'\n", "This is Python 2. Convert it first: 2to3 -w FILE"),
    ("x.cuda(async=True)\n", "async is a keyword since Python 3.7. Write .cuda("),
    ("from apex import amp\namp.initialise()\n", "Did you mean initialize?"),
    ("from apex.optimizers import FusedAdm\n", "Did you mean FusedAdam?"),
    ("from apex import amp\namp.initialize(1, optlevel='O1')\n", "Did you mean opt_level?"),
    ("1 / 0\nfrom apex import amp\namp.initialise()\n", "train.py:1)\nTraced 0 operators"),
    ("exec('1 / 0')\n", "ZeroDivisionError: division by zero"),
]


@pytest.mark.filterwarnings("ignore:can't resolve package:ImportWarning")
@pytest.mark.parametrize(("text", "message"), FAILING)
def test_a_script_that_fails_before_it_trains_is_told_how_to_run(apex, tmp_path, text, message):
    folder = tmp_path / "package" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(text)
    code, out, _ = apex("trace", "package/inner/train.py")
    assert code == 1
    assert message in out


def test_an_interrupt_is_exit_code_130(apex, tmp_path):
    stops = "\n\ndef loss(model, batch):\n    raise KeyboardInterrupt\n"
    code, _, err = apex("compare", written(tmp_path, TARGET + stops), *FEW)
    assert (code, err.splitlines()[-1]) == (INTERRUPTED, "interrupted")
