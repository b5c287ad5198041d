"""What a machine with a GPU can tell: tests, graphs, speed, memory, NCCL, compilers.

python -m benchmarks.gpu    (or: make gpu)

Parts run in processes of their own, so that one that crashes or hangs loses its own check only.
Each result is a line of RESULTS/DEVICE.jsonl at once. A call takes at most ten minutes, and the
next one goes on where it ended: forty minutes in all. The last one writes RESULTS/DEVICE.md.
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
from pathlib import Path

import torch

from benchmarks.gpu import page
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.records import Records
from benchmarks.machine import machine
from tests.support.emulated_cuda import device

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS_TO_BEGIN = 120.0
"""Of a process, and between checks."""
MORE = 75
"""The exit code of a part's process that leaves checks to the next one."""


def run_checks(part: Part, records: Records, *, tiny: bool) -> int:
    """Runs the checks of a part that are due, in this process; returns its exit code."""
    due = [each for each in part.checks(tiny) if records.is_due(part.name, each[0])]
    for check, function in due:
        gc.collect()  # sessions and memory of earlier checks end here
        torch.cuda.empty_cache()
        records.write(part=part.name, check=check, begun=True)
        try:
            records.write(part=part.name, check=check, result=function())
        except Exception as error:  # noqa: BLE001 - the other checks are still of interest
            records.write(part=part.name, check=check, error=described(error))
        if part.alone and check != due[-1][0]:
            return MORE
    return 0


def described(error: Exception) -> str:
    """Returns an error and where it came from, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]} ({Path(frame.filename).name}:{frame.lineno})"


def run_part(part: Part, records: Records, end: float, *, tiny: bool) -> bool:
    """Runs processes of a part until it is over, or the call; returns whether the part is."""
    while True:
        seconds = part.seconds - records.seconds(part.name)
        if seconds <= 0:
            records.write(part=part.name, over=f"its {part.seconds:.0f} s are over")
            return True
        if time.monotonic() >= end:
            return False
        code = run_process(part, records, min(end, time.monotonic() + seconds), tiny=tiny)
        if code == 0:
            records.write(part=part.name, over="all checks have ended")
            return True
        check = records.running(part.name)
        if check is not None and code not in (None, MORE):
            records.write(part=part.name, check=check, error=code)
        elif code not in (None, MORE):
            records.write(part=part.name, over=f"its process did not begin: {code}")
            return True


def run_process(part: Part, records: Records, end: float, *, tiny: bool) -> int | str | None:
    """Runs one process of a part; returns how it ended, None for the end of the time."""
    emulated = os.environ.get(device.VARIABLE) == "1"
    module = ["tests.support.emulated_cuda", "benchmarks.gpu"]
    command = [sys.executable, "-m", *(module if emulated else module[1:])]
    command += ["--results", str(records.path), "--process-of", part.name]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, *(["--tiny"] if tiny else [])], cwd=ROOT, start_new_session=True
    )
    check, begun = records.running(part.name), start
    code: int | str | None = None
    while code is None and time.monotonic() < end:
        time.sleep(0.1)
        code = process.poll()
        if code is not None:
            break
        if records.running(part.name) != check:
            check, begun = records.running(part.name), time.monotonic()
        limit = SECONDS_TO_BEGIN if check is None else part.seconds_per_check
        if time.monotonic() - begun > limit:
            code = f"over its {limit:.0f} s"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.wait()
    records.write(part=part.name, seconds=round(time.monotonic() - start, 1))
    if isinstance(code, int) and code not in (0, MORE):
        return f"its process ended with {code}"
    return code


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
    parser.add_argument("--process-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs what is left of the parts, and writes the page when none is."""
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            f"make gpu needs a GPU and a torch built for it; torch {torch.__version__} of "
            f"{sys.executable} sees none. Name another interpreter with `make gpu PYTHON=...`; "
            "without a GPU, rehearse it with "
            "`python -m tests.support.emulated_cuda benchmarks.gpu --tiny`."
        )
    if args.process_of:
        warnings.filterwarnings("ignore", message="fp16 is emulated")
        sys.exit(run_checks(PARTS[args.process_of], Records(args.results), tiny=args.tiny))
    end = time.monotonic() + args.seconds
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    args.results.mkdir(parents=True, exist_ok=True)
    records = Records(args.results / f"{name}.jsonl")
    if not records.lines():
        records.write(part="machine", result=machine(), check="machine")
    wanted = [part for part in PARTS.values() if args.tiny or not part.only_rehearsed]
    if args.parts:
        wanted = [PARTS[part] for part in args.parts]
    for part in wanted:
        if not records.is_over(part.name):
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            run_part(part, records, end, tiny=args.tiny)
    left = [part.name for part in wanted if not records.is_over(part.name)]
    if left:
        sys.exit(f"Left: {', '.join(left)}. The same command goes on there.")
    text = page.markdown(records, wanted)
    records.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(f"Written to {records.path} and .md.")


if __name__ == "__main__":
    main()
