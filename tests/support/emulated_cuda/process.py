"""A second pytest that has the emulated device, and runs tests for the one that has none.

The device changes its process for good and must be there before torch, so the first process sends
it the names of tests and gets their reports back. This file is the second process's plugin, too.
"""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.emulated_cuda import build, device

ROOT = Path(__file__).parents[3]
PIPE = "APEX_EMULATED_CUDA_PIPE"
SECONDS = 300


class Process:
    """Runs tests of some files on the emulated device.

    Raises:
        Unavailable: If this machine cannot have the device.
    """

    def __init__(self, files, rootdir=ROOT):
        build.library()
        self.pipe, theirs = multiprocessing.Pipe()
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        command = [sys.executable, "-m", "pytest", "-p", __name__, "-p", "no:cacheprovider"]
        self.process = subprocess.Popen(
            [*command, f"--rootdir={rootdir}", *map(str, files)],
            cwd=ROOT,
            env={**os.environ, device.VARIABLE: "1", PIPE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    def reports(self, name, following):
        """Yields the reports of one test, as plain data.

        Args:
            name: The test's node id.
            following: That of the test to come, whose fixtures stay; None if there is none.

        Raises:
            EOFError: If the process has died, or hangs; with what it has written.
        """
        try:
            self.pipe.send((name, following))
            while self.pipe.poll(SECONDS):
                report = self.pipe.recv()
                if report is None:
                    return
                yield report
        except (EOFError, OSError):
            pass
        written = self.stop()
        raise EOFError(f"The emulated device's process has died:\n{written[-8000:]}")

    def stop(self):
        """Ends the process, which ends by itself at the end of the pipe; returns its output."""
        self.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        if self.output.closed:
            return ""
        with self.output:
            self.output.seek(0)
            return self.output.read()


def pytest_configure(config):
    if PIPE in os.environ:
        config.pluginmanager.register(Served(config, Connection(int(os.environ.pop(PIPE)))))


class Served:
    """The second process: runs what it is asked to, in place of pytest's own loop."""

    def __init__(self, config, pipe):
        self.config, self.pipe = config, pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        with contextlib.suppress(EOFError):
            while True:
                name, following = self.pipe.recv()
                self.config.hook.pytest_runtest_protocol(
                    item=items[name], nextitem=items.get(following)
                )
                self.pipe.send(None)
        return True

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(data)
