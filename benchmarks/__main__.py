"""Runs the benchmarks, prints their table and writes it as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

from benchmarks import (
    casts,
    collectives,
    import_time,
    launches,
    machinery,
    memory,
    models,
    repeated,
    syncs,
    tensors,
)
from benchmarks.loops import device
from benchmarks.machine import machine
from benchmarks.measurement import table, verdict

BENCHMARKS = {
    benchmark.NAME: benchmark
    for benchmark in (
        syncs,
        launches,
        collectives,
        memory,
        import_time,
        casts,
        repeated,
        machinery,
        tensors,
        models,
    )
}
RESULTS = Path(__file__).parent / "results"


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=list(BENCHMARKS),
        help="run only this benchmark; repeatable",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run fewer rounds, with a wider spread"
    )
    parser.add_argument(
        "--json", type=Path, help="output file; default: benchmarks/results/DEVICE.json"
    )
    return parser.parse_args()


def main() -> None:
    """Runs the benchmarks, prints the table and writes the JSON file."""
    args = parse_args()
    warnings.filterwarnings("ignore", message=".* is emulated on this CPU")

    about = machine()
    start = time.perf_counter()
    measurements = []
    for name in args.only or BENCHMARKS:
        print(f"{name} ...", end=" ", flush=True, file=sys.stderr)
        measurements += BENCHMARKS[name].run(quick=args.quick)
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)

    print(table(measurements))
    print()
    print(verdict(measurements))
    path = args.json or RESULTS / f"{device()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"machine": about, "quick": args.quick, "figures": [m.as_json() for m in measurements]}
    path.write_text(json.dumps(data, indent=2) + "\n")
    print(f"{', '.join(f'{key} {value}' for key, value in about.items())}")
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
