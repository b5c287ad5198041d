"""The command ``apex``: parses arguments, calls ``apex.tools``, returns an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apex._core.project import VERSION
from apex.tools.compare.columns import legend
from apex.tools.errors import InputError, NotWrittenError

# Exit codes; docs/reference/command_line.md explains them.
OK = 0
FAILED = 1
BAD_INPUT = 2
NOT_WRITTEN = 3
NOT_FINITE = 4
INTERRUPTED = 130

_QUESTIONS = """\
  NaN?           apex trace train.py
  Which level?   apex compare my_training.py
  Old script?    apex migrate train.py
  Another apex?  apex doctor
"""


Outcome = tuple[str, dict[str, Any], int]
"""What a command prints, its results for ``--json``, and its exit code."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command and all its subcommands."""
    parser = argparse.ArgumentParser(prog="apex", description=_QUESTIONS, formatter_class=_Raw)
    parser.add_argument("--version", action="version", version=f"apex-amp {VERSION}")
    subparsers = parser.add_subparsers(title="commands")
    for add in (_add_trace, _add_compare, _add_migrate, _add_doctor):
        add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        argv: The arguments after the command's name; ``None`` for the arguments of the process.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if "run" not in args:
        parser.print_help()
        return OK
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may be ASCII
    try:
        check_file(args.json)
        text, data, code = args.run(args)
        write_json(args.json, data)
        show(args.json, text)
        return int(code)
    except InputError as error:
        print(f"{args.parser.prog}: {error}", file=sys.stderr)
        if isinstance(error, NotWrittenError):
            return NOT_WRITTEN
        return BAD_INPUT
    except OSError as error:  # without a file: a full disk, or as in `apex doctor | head -1`
        place = error.filename or "standard output"
        print(f"{args.parser.prog}: {place}: {error.strerror}.", file=sys.stderr)
        # Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_WRITTEN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


# -- apex trace ------------------------------------------------------------------------------------

_TRACE_MORE = """\
Options come before SCRIPT; whatever follows it is passed to the script. The exit code is 4 if the
trace found a fault, otherwise the script's own.

examples:
  apex trace train.py --epochs 1
  apex trace --digits train.py
  apex trace --json trace.json -m project.train --config small.yaml
  torchrun --nproc-per-node 2 -m apex trace train.py
"""


def _add_trace(subparsers: Any) -> None:
    parser = _command(subparsers, "trace", _trace, "name the first operator that makes inf or NaN")
    parser.epilog = _TRACE_MORE
    look = parser.add_mutually_exclusive_group()
    look.add_argument(
        "--digits",
        action="store_true",
        help="instead of inf and NaN, find operators that lose precision in 16 bits",
    )
    look.add_argument(
        "--updates",
        action="store_true",
        help="instead, count weights that optimizer steps leave unchanged",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="run the script to its end, and report then"
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in python -m"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script, as given to python")
    parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own arguments"
    ).required = False  # Python 3.11 calls it missing beside SCRIPT


def _trace(args: argparse.Namespace) -> Outcome:
    """Runs a training script and names the first operator that made inf or NaN.

    Works with and without amp, in forward and backward passes. The report shows the module, the
    source line, the input values, the cause and possible fixes. The script stops at the first
    fault. Overflows that make a dynamic loss scale back off do not stop it, and neither do -inf
    masks that reach no gradient. Code under torch.compile runs in eager mode.
    """
    from apex.tools.script import Script
    from apex.tools.trace import measure, rank_file, trace

    script = Script(args.script, args.arguments, args.is_module)
    script.check()
    if args.json not in (None, "-"):
        args.json = rank_file(args.json)
    if args.digits or args.updates:
        tracing = measure(script, digits=args.digits, keep_going=args.keep_going)
    else:
        notify = functools.partial(show, args.json)
        tracing = trace(script, keep_going=args.keep_going, notify=notify)
    # torchrun ends every rank with SIGTERM once one has ended with a fault. This rank ends anyway.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = tracing.ending.status
    if tracing.has_fault and not tracing.ending.interrupted:
        code = NOT_FINITE
    return f"\n{tracing.report}", tracing.data, code


# -- apex compare ----------------------------------------------------------------------------------

_COMPARE_MORE = """\
target:
  file.py            a file that defines model, optimizer, batches and loss, or a function setup()
                     that returns them
  file.py:function   a function of that file

  model      a torch.nn.Module in fp32
  optimizer  a torch.optim.Optimizer over its parameters
  batches    an iterable, restarted when it ends; a batch is any nesting of tensors
  loss       loss(model, batch) -> the 0-d loss tensor
  evaluate   optional: evaluate(model) -> a metric of the trained model, such as accuracy

  The target is built once; each level gets deep copies of its model and optimizer.

levels:
  O0 to O5, autocast-fp16, autocast-bf16, and bf16 (bf16 throughout, without fp32 masters). O0
  always runs, as the baseline. Levels whose dtype this CPU emulates are trained and not timed.
  Unless --levels names them, those that would train for more than a minute are skipped.

columns:
"""


def _add_compare(subparsers: Any) -> None:
    parser = _command(subparsers, "compare", _compare, "train at every level and recommend one")
    parser.epilog = _COMPARE_MORE + legend()
    add = parser.add_argument
    add("target", metavar="TARGET", help="what to train; see below")
    add("--levels", metavar="NAMES", help="comma-separated, such as O0,O4,O5 (default: all)")
    add("--steps", type=count, default=100, metavar="N", help="training steps (default: 100)")
    add("--rounds", type=count, default=20, metavar="N", help="timed steps a level (default: 20)")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    _add_device(parser)
    add("--output", default="report.html", metavar="FILE", help="default: report.html")


def _compare(args: argparse.Namespace) -> Outcome:
    """Trains TARGET at every level of amp and with torch.autocast.

    All start from the same weights and see the same batches. Compares time per step (steps are
    interleaved), memory, losses and the distance from fp32. Prints two tables and a recommendation,
    and writes a self-contained HTML report.
    """
    from apex.tools.compare.report import report
    from apex.tools.compare.results import parse_levels, to_json
    from apex.tools.compare.run import PATIENCE, Options, compare
    from apex.tools.compare.table import comparison_text
    from apex.tools.devices import parse_device

    options = Options(
        levels=parse_levels(args.levels),
        steps=args.steps,
        rounds=args.rounds,
        seed=args.seed,
        device=parse_device(args.device),
        patience=PATIENCE if args.levels is None else math.inf,
    )
    check_file(args.output)
    comparison = compare(args.target, options, lambda stage: print(f"[{stage}]", file=sys.stderr))
    write(args.output, report(comparison))
    text = f"\n{comparison_text(comparison)}\nreport: {args.output}"
    return text, to_json(comparison), FAILED if comparison.failed else OK


# -- apex migrate ----------------------------------------------------------------------------------


def _add_migrate(subparsers: Any) -> None:
    parser = _command(subparsers, "migrate", _migrate, "report which uses of apex in a script work")
    parser.epilog = (
        "To move a script to torch.autocast and GradScaler by hand, see\n"
        "https://github.com/apex-amp/apex-amp/blob/main/docs/howto/torch_amp.md"
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="a file, or a folder to search for *.py files (hidden, build and virtual environment "
        "folders are skipped)",
    )


def _migrate(args: argparse.Namespace) -> Outcome:
    """Reads Python files and reports whether each use of apex works with this package.

    A use works unchanged, works with a note, or is not supported. In the last case, the report
    names a replacement. Nothing is executed.
    """
    from apex.tools.migrate.report import migration_of

    migration = migration_of(args.path)
    data = {**dataclasses.asdict(migration), "counts": migration.counts}
    return str(migration), data, FAILED if migration.failed else OK


# -- apex doctor -----------------------------------------------------------------------------------


def _add_doctor(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "doctor",
        _doctor,
        "show which package provides apex, and which dtypes are fast on this machine",
    )
    _add_device(parser)


def _doctor(args: argparse.Namespace) -> Outcome:
    """Shows which package provides apex, and which dtypes are fast on this machine.

    Recommends a level to start with. Takes a few seconds.
    """
    from apex.tools.devices import parse_device
    from apex.tools.doctor import examine

    health = examine(parse_device(args.device))
    return str(health), dataclasses.asdict(health), OK


# -- arguments -------------------------------------------------------------------------------------

_Raw = argparse.RawDescriptionHelpFormatter


def _command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], Outcome], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, formatter_class=_Raw)
    parser.description = inspect.getdoc(run)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the results as JSON; - writes them to standard output",
    )
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="such as cpu or cuda:1 (default: the accelerator if there is one)",
    )


def count(text: str) -> int:
    """Parses an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; it must be at least 1")
    return value


# -- output ----------------------------------------------------------------------------------------


def show(file: str | None, text: str) -> None:
    """Prints a report; to standard error if ``file``, the target of ``--json``, is ``"-"``."""
    stream = sys.stderr if file == "-" else sys.stdout
    # In one piece, because ranks share a terminal.
    print(f"{text}\n", end="", file=stream, flush=True)


def check_file(file: str | None) -> None:
    """Raises if the target of ``--output`` or ``--json`` cannot be written; changes nothing."""
    if file is None or file == "-":
        return
    path = Path(file)
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise NotWrittenError(
            f"{path} cannot be written: it is a folder or read-only, or there is no folder for it."
        )


def write(file: str, text: str) -> None:
    """Writes a file, or raises."""
    try:
        Path(file).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise NotWrittenError(f"{file} could not be written: {error.strerror}.") from error


def write_json(file: str | None, data: dict[str, Any]) -> None:
    """Writes data to a file; for ``"-"``, to standard output; for ``None``, nowhere. May raise."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    if file == "-":
        print(text, end="", flush=True)
    elif file is not None:
        write(file, text)
