"""The command ``apex``: parses arguments, calls ``apex.tools``, returns an exit code."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from apex._core.project import VERSION
from apex.cli import exit_codes
from apex.cli.arguments import Parser
from apex.cli.output import NotWrittenError

SUBCOMMANDS = ("compare", "doctor", "migrate", "trace")
"""Modules of this package, in help order: each has texts, ``add_arguments`` and ``run``.

``EXIT_CODES`` are the codes that mean something else than in :mod:`.exit_codes`.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command and all its subcommands."""
    parser = Parser(
        prog="apex",
        description="Mixed-precision tools of apex-amp.",
        epilog=exit_codes.epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"apex-amp {VERSION}, torch {metadata.version('torch')}"
    parser.set_defaults(run=None, hint="")  # appended to the error on an unknown argument
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in SUBCOMMANDS:
        command = importlib.import_module(f"apex.cli.{name}")
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=command.EPILOG + exit_codes.epilog(exit_codes.of_command(command.EXIT_CODES)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(command=name, run=command.run)
        command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code, see ``apex.cli.exit_codes``.

    Args:
        argv: The arguments after the command's name; ``None`` for those of the process.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{args.hint}")
    if args.run is None:
        parser.print_help(sys.stderr)
        print(f"\napex: name a COMMAND: {', '.join(SUBCOMMANDS)}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    from apex.tools.errors import InputError  # not for --help, which loads no tool

    _prepare_streams()
    try:
        try:
            code = int(args.run(args))
        except (InputError, NotWrittenError) as error:
            print(f"apex {args.command}: {error}", file=sys.stderr)
            bad_input = isinstance(error, InputError)
            code = exit_codes.BAD_INPUT if bad_input else exit_codes.NOT_WRITTEN
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `apex compare x.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return exit_codes.NOT_WRITTEN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _prepare_streams() -> None:
    """Makes standard output and error take any text, and none where the shell has closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # as in `apex compare x.py 2>&-`
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):  # file names may not be text, a terminal ASCII
            stream.reconfigure(errors="backslashreplace")
