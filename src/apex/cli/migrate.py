"""``apex migrate``: what scripts use of apex, and the way to ``torch.amp``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.cli import exit_codes
from apex.cli.json_output import write_json

if TYPE_CHECKING:
    from apex.tools.migrate.to_torch.conversion import Conversion

DESCRIPTION = """\
Reads Python files and tells of every use of apex in them whether it works with this package:
unchanged, with a note, or not, and what to do then. Nothing is executed.

With --to torch it prints a diff that turns amp.initialize and amp.scale_loss into torch.autocast
and torch.amp.GradScaler where that is equivalent (levels O0, O1 and O4), and says of the other
scripts why it is not; their code stays as it is."""

EXAMPLES = """\
examples:
  apex migrate train.py
  apex migrate src/ --json uses.json
  apex migrate train.py --to torch > change.diff
  apex migrate train.py --to torch --level O4 --write

"""

LEVELS = ("O0", "O1", "O4")


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "migrate",
        help="say what works of a script's uses of apex, or turn them into torch.amp",
        description=DESCRIPTION,
        epilog=EXAMPLES + exit_codes.epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="a file, or a folder: all *.py below it but hidden folders, site-packages and build",
    )
    parser.add_argument(
        "--to", choices=["torch"], help="print the diff to this interface, and what stays and why"
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        help="the level to rewrite for where a script does not name it in the call itself; "
        "loss_scale, keep_batchnorm_fp32 and master_weights that it computes are then taken to be "
        "the level's own",
    )
    parser.add_argument(
        "--write", action="store_true", help="change the files in place of printing the diff"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write what was found; - for standard output, without text"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads, prints, writes; returns the exit code."""
    if args.to is None and (args.write or args.level):
        return _refused("--write and --level go with --to torch.")
    if importlib.util.find_spec("libcst") is None:
        print(
            "apex migrate: libcst, which reads the scripts, is not installed: "
            "pip install 'apex-amp[migrate]'",
            file=sys.stderr,
        )
        return exit_codes.MISSING_PACKAGE
    from apex.tools.migrate.sources import UnreadableError

    try:
        return _report(args) if args.to is None else _to_torch(args)
    except UnreadableError as error:
        return _refused(str(error))


def _refused(reason: str) -> int:
    print(f"apex migrate: {reason}", file=sys.stderr)
    return exit_codes.BAD_INPUT


def _report(args: argparse.Namespace) -> int:
    from apex.tools.migrate.migration import migration_of
    from apex.tools.migrate.report import migration_text, to_json

    migration = migration_of(args.path)
    if args.json != "-":
        print(migration_text(migration))
    return _finished(args.json, to_json(migration), failed=migration.failed)


def _to_torch(args: argparse.Namespace) -> int:
    from apex.tools.migrate.to_torch.conversion import conversion_of
    from apex.tools.migrate.to_torch.report import conversion_text, to_json

    conversion = conversion_of(args.path, level=args.level)
    if not args.write and args.json != "-":
        sys.stdout.write(conversion.diff)
    print(conversion_text(conversion), file=sys.stderr)
    written = not args.write or _write(conversion)
    code = _finished(args.json, to_json(conversion), failed=conversion.failed)
    return code if written else exit_codes.NOT_WRITTEN


def _write(conversion: Conversion) -> bool:
    """Changes the files; returns whether all could be written."""
    written = [_write_script(script.path, script.after) for script in conversion.changed]
    return all(written)


def _write_script(path: Path, text: str) -> bool:
    from apex.tools.migrate.sources import write

    try:
        write(path, text)
    except OSError as error:
        print(f"apex migrate: {path} not written: {error.strerror}", file=sys.stderr)
        return False
    return True


def _finished(file: str | None, data: dict[str, Any], *, failed: bool) -> int:
    """Writes the JSON where it is wanted and returns the exit code."""
    if not write_json("migrate", file, data):
        return exit_codes.NOT_WRITTEN
    return exit_codes.FAILED if failed else exit_codes.OK
