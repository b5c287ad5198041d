"""Trains the digits at every optimization level, prints a table and writes ``report.html``.

python examples/digits/compare.py
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from levels import LOW_DTYPES, Run, is_emulated, time_levels, train_level
from report import write_report
from table import text_table
from tqdm import tqdm
from train import count, load_data


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=count, default=6)
    parser.add_argument("--rounds", type=count, default=30, help="timed steps of each level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--emulated-steps",
        type=count,
        default=10,
        help="training steps of a level whose dtype this machine emulates",
    )
    parser.add_argument("--levels", nargs="+", default=list(LOW_DTYPES), choices=list(LOW_DTYPES))
    parser.add_argument("--output", type=Path, default=Path("report.html"))
    return parser.parse_args()


def compare(args: argparse.Namespace, device: str) -> tuple[list[Run], Mapping[str, float]]:
    """Returns each level's training, and its milliseconds per step."""
    data = load_data(device)
    emulated = {level: is_emulated(LOW_DTYPES[level], device) for level in args.levels}
    epochs = args.epochs * math.ceil(len(data[0][1]) / 64)
    steps = {lv: min(args.emulated_steps, epochs) if emulated[lv] else epochs for lv in emulated}
    rounds = {lv: min(2, args.rounds) if emulated[lv] else args.rounds for lv in emulated}

    total = sum(steps.values()) + sum(rounds.values())
    with tqdm(total=total, unit="step", dynamic_ncols=True, smoothing=0.05) as bar:
        runs = []
        for level in args.levels:
            bar.set_description(f"train {level}" + (" (emulated)" if emulated[level] else ""))
            runs.append(
                train_level(
                    level,
                    data,
                    steps=steps[level],
                    seed=args.seed,
                    emulated=emulated[level],
                    on_step=bar.update,
                )
            )
        bar.set_description("time all levels in turns")
        times = time_levels(rounds, data[0], seed=args.seed, on_step=bar.update)
    return runs, times


def machine(device: str) -> str:
    """Names the device and torch."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


def main() -> None:
    """Compares the levels, prints the table, writes the report."""
    args = parse_args()
    torch.backends.cudnn.deterministic = True
    warnings.filterwarnings("ignore", message="fp16 is emulated")  # the table says so itself
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs, times = compare(args, device)
    print()
    print(text_table(runs, times))
    print()
    write_report(args.output, runs, times, machine=machine(device))
    print(f"Curves and table: {args.output}")


if __name__ == "__main__":
    main()
