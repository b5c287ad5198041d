"""``apex doctor``: examines this machine and this installation."""

from __future__ import annotations

import argparse
import math

from apex.cli import exit_codes
from apex.cli.output import check_json, write_json

HELP = "measure this machine, find conflicting packages, suggest a level"

DESCRIPTION = """\
Reports versions and devices, the measured speed of fp32, fp16 and bf16 (this takes a few seconds),
conflicting apex installations, whether fused optimizers step without a host sync, what huge memory
pages gain on a CPU (some seconds more), and which level to start with and why."""

EPILOG = ""

EXIT_CODES = {
    exit_codes.FAILED: "another package conflicts, or a fused optimizer waits for the device"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="such as cpu or cuda:1 (default: the accelerator if there is one)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.2,
        metavar="S",
        help="time per operator and dtype (default: 0.2)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the report as JSON; - writes it to standard output instead of the text",
    )


def run(args: argparse.Namespace) -> int:
    """Examines, prints the report, writes the JSON; returns the exit code."""
    from apex.tools.devices import parse_device
    from apex.tools.doctor.examination import examine

    device = parse_device(args.device)
    check_json(args.json)
    health = examine(device, budget=args.seconds)
    if args.json != "-":
        print(health)
    write_json(args.json, health.to_dict())
    return exit_codes.OK if health.well else exit_codes.FAILED


def _seconds(text: str) -> float:
    """Parses a finite time of at least 0 seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; it must be a number of seconds") from None
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; it must be finite and at least 0 seconds")
    return value
