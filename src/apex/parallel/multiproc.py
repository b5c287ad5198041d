"""Runs a script in several processes on this machine: ``python -m apex.parallel.multiproc``.

This module supports old command lines; use ``torchrun --nproc-per-node=N script.py`` in new ones.
Every process receives ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``, and the old flags ``--rank`` and ``--world-size`` if the script uses them.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

_POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script in every process and returns the first non-zero exit status.

    If one process fails, the others are terminated.
    """
    parser = argparse.ArgumentParser(
        prog="python -m apex.parallel.multiproc",
        description="Run a script in one process per GPU, or in WORLD_SIZE processes.",
        epilog="Prefer torchrun: torchrun --nproc-per-node=N script.py ...",
    )
    parser.add_argument("script", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    world_size = _world_size(parser)
    logging.getLogger("apex").warning(
        "apex.parallel.multiproc starts %d processes. Prefer torchrun: "
        "torchrun --nproc-per-node=%d %s ...", world_size, world_size, options.script
    )  # fmt: skip
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
        **os.environ,
        "WORLD_SIZE": str(world_size),
    }
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in map(str, range(world_size)):
            script_arguments = _script_arguments(options, rank, environ["WORLD_SIZE"])
            command = [sys.executable, options.script, *script_arguments]
            rank_environ = {**environ, "RANK": rank, "LOCAL_RANK": rank}
            process = subprocess.Popen(command, env=rank_environ)
            processes.append(process)
            stack.enter_context(process)  # waits for the process at the end
            stack.callback(process.terminate)  # runs before the wait; ignores an ended process
        return _first_failure(processes)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for a process that fails, and returns its exit status; 0 if all succeed."""
    while True:
        statuses = [process.poll() for process in processes]
        for status in statuses:
            if status:
                return status
        if None not in statuses:
            return 0
        time.sleep(_POLL_SECONDS)


def _world_size(parser: argparse.ArgumentParser) -> int:
    """Returns ``WORLD_SIZE`` from the environment, or the number of accelerators, at least 1."""
    size = os.environ.get("WORLD_SIZE")
    if size is None:
        return max(1, torch.accelerator.device_count())
    if not size.isdecimal() or int(size) < 1:
        parser.error(f"WORLD_SIZE is {size!r}; it must be a positive number of processes.")
    return int(size)


def _script_arguments(options: argparse.Namespace, rank: str, world_size: str) -> list[str]:
    """Returns the script's arguments, with the old flags if the script uses them."""
    result = list(options.arguments)
    path = Path(options.script)
    text = ""
    if path.is_file():
        text = path.read_text(errors="replace")
    for flag, value in (("--world-size", world_size), ("--rank", rank)):
        if flag in result[:-1]:  # given on the command line, followed by a value
            position = result.index(flag)
            result[position + 1] = value
        elif f'"{flag}"' in text or f"'{flag}'" in text:
            result += [flag, value]
    return result


if __name__ == "__main__":
    sys.exit(main())
