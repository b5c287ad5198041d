"""``apex trace``: runs a script and names the first operator that made inf or NaN."""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from apex.cli import exit_codes
from apex.cli.output import NotWrittenError, check_json, write_json

if TYPE_CHECKING:
    from apex.debug.place import Finding as Fault

HELP = "run a training script, name the first operator that makes inf or NaN"

DESCRIPTION = """\
Runs a training script unchanged, with or without amp, and names the first operator, forward or
backward, that made inf or NaN: its module, its line of code, the values that went in, the cause and
a remedy. The script stops there. Overflows by which a dynamic loss scale finds its value are
counted and do not stop it, nor do masks of -inf that reach no gradient."""

EPILOG = """\
options of apex trace come before SCRIPT; whatever follows it is passed to the script.

cost:
  Each operator is followed by a check and a host sync, and the report states the measured ratio:
  1.4 to 1.8 for layers of 256 to 1024 features on a CPU, 7 for layers of 16 to 32. Parts under
  torch.compile run uncompiled. Replayed CUDA graphs and processes that the script starts are not
  looked into.

several processes:
  torchrun --nproc-per-node 2 -m apex trace train.py
  Each rank reports for itself, and writes the JSON file as trace.rank0.json, trace.rank1.json, ...

examples:
  apex trace train.py --epochs 1
  apex trace --json trace.json -m project.train --config small.yaml

"""

EXIT_CODES = {
    exit_codes.OK: "the script succeeded, without inf or NaN",
    exit_codes.FAILED: "an uncaught error ended the script; any other sys.exit status is passed on",
    exit_codes.NOT_FINITE: "inf or NaN was found",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.usage = "apex trace [-h] [--keep-going] [--json FILE] [-m] SCRIPT [ARGUMENT ...]"
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="let the script run to its end, and report then",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the report as JSON; - writes it to standard output and the text to "
        "standard error",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in python -m"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script, as given to python")
    parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own arguments"
    ).required = False  # Python 3.11 calls it missing beside SCRIPT


def run(args: argparse.Namespace) -> int:
    """Runs the script, prints the report, writes the JSON; returns the exit code."""
    from apex.tools.script import Script
    from apex.tools.trace import trace, tracing_text

    script = Script(args.script, args.arguments, args.is_module)
    json = _json_file(args.json)
    check_json(json)
    script.check()
    # The script may replace these.
    out, err = sys.stdout, sys.stderr
    stream = err if json == "-" else out
    notify = functools.partial(_notify, stream) if args.keep_going else None
    tracing = trace(script, notify=notify)
    if tracing is None:
        return exit_codes.OK
    for replaced in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed by the script
            replaced.flush()
    sys.stdout, sys.stderr = out, err
    if out.closed:  # by the script
        sys.stdout = stream = err
    with _until_written():
        _show(stream, f"\n{tracing_text(tracing)}")
        if json == "-" and out.closed:
            raise NotWrittenError("the JSON could not be written: the script closed its output")
        write_json(json, tracing.to_dict())
    if tracing.ending.interrupted:
        return exit_codes.INTERRUPTED
    return tracing.ending.status if tracing.seen.first is None else exit_codes.NOT_FINITE


@contextlib.contextmanager
def _until_written() -> Iterator[None]:
    """Ignores SIGTERM, which ``torchrun`` sends to every rank once one has ended with a fault."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _notify(stream: TextIO, fault: Fault) -> None:
    from apex.tools.trace import notice_text

    _show(stream, notice_text(fault))


def _show(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")  # at once, as ranks share a terminal
    stream.flush()


def _json_file(given: str | None) -> str | None:
    """Returns the file's absolute path, as the script may change the folder; one for each rank."""
    from apex.tools.trace import rank

    if given in (None, "-"):
        return given
    path = Path(str(given)).absolute()
    own = rank()
    return str(path if own is None else path.with_suffix(f".rank{own}{path.suffix}"))
