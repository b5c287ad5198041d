"""``apex compare``: trains a target at every level and compares the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from apex.cli import exit_codes
from apex.cli.arguments import count, seed
from apex.cli.output import NotWrittenError, columns_of, json_text, why_not_writable, write

if TYPE_CHECKING:
    from apex.tools.compare import Options
    from apex.tools.results import Comparison

HELP = "train at every level, compare, and recommend one"

DESCRIPTION = """\
Trains TARGET at every level of amp and with torch.autocast, from the same weights on the same
batches, and compares time per step (steps are interleaved), memory, loss curves, distance from
fp32, the first module whose output differs from fp32 by more than its dtype's eps, loss scale and
skipped steps, updates lost to rounding, and gradients that underflow. Prints a table and a
recommendation, and writes a self-contained HTML report."""

EPILOG = """\
target:
  path/to/file.py            a file that defines model, optimizer, batches and loss, or a function
                             setup() that returns them
  path/to/file.py:function   a function of that file
  package.module:function    a function of an importable module

  model      a torch.nn.Module in fp32
  optimizer  a torch.optim.Optimizer over its parameters
  batches    an iterable, restarted when it ends; a batch is any nesting of tensors
  loss       loss(model, batch) -> the 0-d loss tensor
  evaluate   optional: evaluate(model) -> a metric of the trained model, such as accuracy

  A function returns them in this order, or as a dict with these names. Each level gets its own
  objects: the file is executed, or the function called, once per level; objects that are the same
  each time are deep-copied.

levels:
  O0 to O5, autocast-fp16, autocast-bf16, and bf16 (bf16 throughout, without fp32 masters, to show
  their effect). O0 always runs, as the baseline. A level whose dtype this machine emulates (fp16 on
  most CPUs) is skipped; with --emulated, it trains for a few steps and is marked with *.

examples:
  apex compare examples/digits/experiment.py
  apex compare my_project.training:setup --levels O0,O4,O5 --steps 300 --json levels.json

"""

EXIT_CODES = {exit_codes.FAILED: "a level failed; the output names it and reports the others"}

EMULATED_STEPS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("target", metavar="TARGET", help="what to train; see below")
    parser.add_argument(
        "--levels", metavar="NAMES", help="comma-separated, such as O0,O4,O5 (default: all)"
    )
    parser.add_argument(
        "--steps", type=count, default=100, metavar="N", help="training steps (default: 100)"
    )
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="also train levels whose dtype this machine emulates, which is slow",
    )
    parser.add_argument(
        "--emulated-steps",
        type=count,
        metavar="N",
        help=f"their training steps (default: {EMULATED_STEPS}); implies --emulated",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=20,
        metavar="N",
        help="timed steps of each level, interleaved (default: 20)",
    )
    parser.add_argument(
        "--suggest-fp32",
        action="store_true",
        help="search for the fewest modules to keep in fp32 at O2 and O5, and train with them too",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="such as cpu or cuda:1 (default: the accelerator if there is one)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the report (default: report.html)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the results as JSON; - writes them to standard output and the table to "
        "standard error",
    )
    parser.add_argument(
        "--wide",
        action="store_true",
        help="print all columns; a terminal that they do not fit shows the six most important ones",
    )


def run(args: argparse.Namespace) -> int:
    """Compares, prints the table, writes the files; returns the exit code."""
    from apex.tools.compare import compare
    from apex.tools.errors import InputError
    from apex.tools.progress import progress_on

    files = {"report": args.output}
    if args.json not in (None, "-"):
        files["json"] = Path(args.json)
    options = _options(args)
    if len({path.resolve() for path in files.values()}) < len(files):
        raise InputError(f"--output and --json name the same file, {args.json}")
    for path in files.values():
        if why := why_not_writable(path):
            raise NotWrittenError(f"{path} cannot be written: {why}. Nothing was trained.")
    comparison = compare(args.target, options, progress_on(sys.stderr))
    if not _show(comparison, files, args):
        return exit_codes.NOT_WRITTEN
    return exit_codes.FAILED if comparison.failed else exit_codes.OK


def _options(args: argparse.Namespace) -> Options:
    from apex.tools.compare import Options
    from apex.tools.devices import parse_device
    from apex.tools.variants import VARIANTS, parse_variants

    return Options(
        variants=parse_variants(args.levels if args.levels is not None else ",".join(VARIANTS)),
        steps=args.steps,
        emulated_steps=args.emulated_steps or (EMULATED_STEPS if args.emulated else None),
        rounds=args.rounds,
        seed=args.seed,
        device=parse_device(args.device),
        suggest_fp32=args.suggest_fp32,
    )


def _show(comparison: Comparison, files: dict[str, Path], args: argparse.Namespace) -> bool:
    """Writes the files and prints the table; returns whether all files could be written."""
    from apex.tools.report import report
    from apex.tools.results import to_json
    from apex.tools.text import comparison_text

    stream = sys.stderr if args.json == "-" else sys.stdout
    data = json_text(to_json(comparison))
    contents = {"report": report(comparison), "json": data}
    # Written before printing, because printing to a closed pipe raises.
    errors = {kind: write(path, contents[kind]) for kind, path in files.items()}
    text = comparison_text(comparison, width=columns_of(stream), wide=args.wide)
    print("\n" + text, file=stream)
    if args.json == "-":
        sys.stdout.write(data)
    for kind, path in files.items():
        if errors[kind] is None:
            print(f"{kind}: {path}", file=stream)
        else:
            print(f"apex compare: {path} could not be written: {errors[kind]}", file=sys.stderr)
    return not any(errors.values())
