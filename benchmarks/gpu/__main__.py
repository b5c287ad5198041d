"""Measures a machine with a GPU: tests, graphs, speed, memory, NCCL, compilers.

python -m benchmarks.gpu    (or: make gpu)

Each part runs in its own process, so a crash or a hang loses one check only. Each result is
written at once, as a line of RESULTS/DEVICE.jsonl. A call takes at most ten minutes, and the next
call continues there. Each call ends with the page of all results, RESULTS/DEVICE.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu import page
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.records import MACHINE, Records
from benchmarks.machine import machine
from tests.support.emulated_cuda import device

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS_TO_BEGIN = 120.0
"""The longest time before the first check of a process begins, and between two checks."""
MORE = 75
"""Exit code of a part's process that leaves checks to the next process."""


def run_checks(part: Part, records: Records, *, tiny: bool) -> int:
    """Runs the checks of a part that are due, in this process; returns its exit code."""
    due = []
    for check, function in part.checks(tiny, records):
        if records.is_due(part.name, check):
            due.append((check, function))
    for index, (check, function) in enumerate(due):
        gc.collect()  # sessions and memory of earlier checks end here
        torch.cuda.empty_cache()
        records.write(part=part.name, check=check, begun=True)
        try:
            records.write(part=part.name, check=check, result=function())
        except Exception as error:  # noqa: BLE001 - the other checks are still of interest
            records.write(part=part.name, check=check, error=described(error))
        is_last = index == len(due) - 1
        if part.alone and not is_last:
            return MORE
    return 0


def described(error: Exception) -> str:
    """Returns an error and where it came from, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:300]} ({place})"


def run_part(part: Part, records: Records, end: float, *, tiny: bool) -> bool:
    """Runs processes of a part until the part or the call ends; returns whether the part has."""
    today = date.today().isoformat()
    while True:
        seconds_left = part.seconds - records.seconds(part.name)
        if seconds_left <= 0:
            records.write(part=part.name, over=f"its {part.seconds:.0f} s are over, {today}")
            return True
        now = time.monotonic()
        if now >= end:
            return False
        code = run_process(part, records, min(end, now + seconds_left), tiny=tiny)
        if code == 0:
            records.write(part=part.name, over=f"all checks have ended, {today}")
            return True
        if code is None or code == MORE:
            continue
        check = records.running(part.name)
        if check is None:
            records.write(part=part.name, over=f"its process did not begin: {code}, {today}")
            return True
        records.write(part=part.name, check=check, error=code)


def run_process(part: Part, records: Records, end: float, *, tiny: bool) -> int | str | None:
    """Runs one process of a part.

    Returns:
        0 or ``MORE`` if it ended well, a text if it did not, None if it was still running at
        ``end``.
    """
    command = [sys.executable, "-m"]
    if os.environ.get(device.VARIABLE) == "1":
        command.append("tests.support.emulated_cuda")
    command += ["benchmarks.gpu", "--results", str(records.path), "--process-of", part.name]
    if tiny:
        command.append("--tiny")
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    check = records.running(part.name)
    check_start = start
    code: int | None = None
    too_long = ""
    while code is None and not too_long and time.monotonic() < end:
        time.sleep(0.1)
        code = process.poll()
        running = records.running(part.name)
        if running != check:
            check = running
            check_start = time.monotonic()
        limit = SECONDS_TO_BEGIN if check is None else part.seconds_per_check
        if time.monotonic() - check_start > limit:
            too_long = f"over its {limit:.0f} s"
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)  # the process group: it may have children
        process.wait()
    records.write(part=part.name, seconds=round(time.monotonic() - start, 1))
    if code is None:
        return too_long or None
    if code in (0, MORE):
        return code
    return f"its process ended with {code}"


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="tiny networks: a rehearsal")
    parser.add_argument("--seconds", type=float, default=570.0, help="of this call")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for both files")
    parser.add_argument(
        "--adopt",
        type=Path,
        metavar="JSONL",
        help="take over another run's parts into RESULTS and write the page; needs no GPU",
    )
    parser.add_argument("--process-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs what is left of the parts, and writes the page."""
    args = parse_args()
    if args.adopt:
        records = Records(args.results / args.adopt.name)
        records.adopt(Records(args.adopt))
        write_page(records)
        return
    if not torch.cuda.is_available():
        sys.exit(
            f"make gpu needs a GPU and a torch built for it; torch {torch.__version__} of "
            f"{sys.executable} sees none. Name another interpreter with `make gpu PYTHON=...`; "
            "without a GPU, rehearse it with "
            "`python -m tests.support.emulated_cuda benchmarks.gpu --tiny`."
        )
    if args.process_of:
        warnings.filterwarnings("ignore", message=".* is emulated on this CPU")
        sys.exit(run_checks(PARTS[args.process_of], Records(args.results), tiny=args.tiny))
    end = time.monotonic() + args.seconds
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    args.results.mkdir(parents=True, exist_ok=True)
    records = Records(args.results / f"{name}.jsonl")
    if not records.lines():
        records.write(part=MACHINE, result=machine(), check=MACHINE)
    if args.parts:
        parts = [PARTS[part] for part in args.parts]
    else:
        parts = [part for part in PARTS.values() if args.tiny or not part.only_rehearsed]
    for part in parts:
        if records.reason(part.name) is None:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            run_part(part, records, end, tiny=args.tiny)
    write_page(records)
    unfinished = [part.name for part in parts if records.reason(part.name) is None]
    if unfinished:
        sys.exit(f"Unfinished: {', '.join(unfinished)}. Run the same command again to continue.")


def write_page(records: Records) -> None:
    """Writes the results as a page, and prints it."""
    text = page.markdown(records)
    records.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(f"Written to {records.path} and .md.")


if __name__ == "__main__":
    main()
