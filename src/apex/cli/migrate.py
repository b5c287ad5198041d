"""``apex migrate``: reports which uses of apex in a script work."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from apex.cli import exit_codes
from apex.cli.output import json_is_writable, write_json

DESCRIPTION = """\
Reads Python files and reports, for every use of apex, whether it works with this package:
unchanged, with a note, or not at all, and then what to use instead. Nothing is executed."""

EXAMPLES = """\
examples:
  apex migrate train.py
  apex migrate src/ --json uses.json

"""

HINT = (
    ". To move a script to torch.autocast and GradScaler by hand, "
    "see the table in docs/migrating.md."
)


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "migrate",
        help="report which uses of apex in a script work here",
        description=DESCRIPTION,
        epilog=EXAMPLES + exit_codes.epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    parser.set_defaults(run=run, hint=HINT)


def run(args: argparse.Namespace) -> int:
    """Reads the files, prints the report, writes the JSON; returns the exit code."""
    from apex.tools.migrate.migration import migration_of
    from apex.tools.migrate.report import migration_text, to_json
    from apex.tools.migrate.sources import UnreadableError

    if not json_is_writable("migrate", args.json):
        return exit_codes.NOT_WRITTEN
    try:
        migration = migration_of(args.path)
    except UnreadableError as error:
        print(f"apex migrate: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    if args.json != "-":
        print(migration_text(migration))
    if not write_json("migrate", args.json, to_json(migration)):
        return exit_codes.NOT_WRITTEN
    return exit_codes.FAILED if migration.failed else exit_codes.OK
