"""``apex migrate``: reports which uses of apex in a script work."""

from __future__ import annotations

import argparse
from pathlib import Path

from apex.cli import exit_codes
from apex.cli.output import check_json, write_json

HELP = "report which uses of apex in a script work here"

DESCRIPTION = """\
Reads Python files and reports, for every use of apex, whether it works with this package:
unchanged, with a note, or not at all, and then what to use instead. Nothing is executed."""

EPILOG = """\
examples:
  apex migrate train.py
  apex migrate src/ --json uses.json

"""

EXIT_CODES = {exit_codes.FAILED: "a use is not supported, or a file could not be read or parsed"}

HINT = (
    ". To move a script to torch.autocast and GradScaler by hand, "
    "see the table in docs/migrating.md."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="a file, or a folder: all *.py under it except in hidden folders, virtual "
        "environments, site-packages and build",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the report as JSON; - writes it to standard output instead of the text",
    )
    parser.set_defaults(hint=HINT)


def run(args: argparse.Namespace) -> int:
    """Reads the files, prints the report, writes the JSON; returns the exit code."""
    from apex.tools.migrate.migration import migration_of
    from apex.tools.migrate.report import migration_text, to_json

    check_json(args.json)
    migration = migration_of(args.path)
    if args.json != "-":
        print(migration_text(migration))
    write_json(args.json, to_json(migration))
    return exit_codes.FAILED if migration.failed else exit_codes.OK
