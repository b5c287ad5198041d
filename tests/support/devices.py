"""Where a test runs: on the CPU, on a GPU, or on the emulated CUDA device.

The markers are explained in tests/support/emulated_cuda/README.md.
"""

import functools

import pytest
import torch

from tests.support.emulated_cuda import build, device
from tests.support.emulated_cuda.process import Process

REAL = torch.cuda.is_available() and not device.INSTALLED


class Place:
    """Where one test runs.

    Attributes:
        name: For the closing line.
        skipped: Why it cannot run on this machine; None if it can.
        forwarded: Whether it runs in the process that has the emulated device.
    """

    def __init__(self, item):
        gpu, emulated = item.get_closest_marker("gpu"), item.get_closest_marker("emulated")
        self.name, self.skipped, self.forwarded = "the CPU", None, False
        if gpu is None and emulated is None:
            return
        options = {} if gpu is None else gpu.kwargs
        if options.keys() - {"kernels", "devices"} or (gpu is not None and gpu.args):
            raise pytest.UsageError(f"{item.nodeid}: gpu takes kernels='why' or devices=2")
        self.name = torch.cuda.get_device_name() if REAL else "emulated CUDA"
        here = REAL or device.INSTALLED or item.get_closest_marker("skip") is not None
        if not REAL and "kernels" in options:
            self.skipped = f"needs CUDA's own kernels: {options['kernels']}"
        elif REAL and torch.cuda.device_count() < options.get("devices", 1):
            self.skipped = f"needs {options['devices']} GPUs"
        elif REAL and emulated is not None:
            self.skipped = "asks the emulated device, and this machine has a GPU"
        self.forwarded = not here and self.skipped is None


class Forwarding:
    """Runs forwarded tests as this process runs its own: the same hooks, the same reports."""

    def __init__(self, config):
        self.config = config
        self.process = None
        self.unavailable = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not Place(item).forwarded:
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in [*self.reports(item, nextitem), *teardown(item, nextitem)]:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def reports(self, item, nextitem):
        following = nextitem.nodeid if nextitem and Place(nextitem).forwarded else None
        try:
            if self.unavailable is None and self.process is None:
                places = ((other.path, Place(other)) for other in item.session.items)
                self.process = Process(sorted({path for path, place in places if place.forwarded}))
            if self.unavailable is None:
                for data in self.process.reports(item.nodeid, following):
                    yield self.config.hook.pytest_report_from_serializable(
                        config=self.config, data=data
                    )
                return
        except build.Unavailable as reason:
            self.unavailable = f"Skipped: no emulated CUDA: {reason}"
        except EOFError as error:
            self.process = None
            yield report_of(item, "failed", str(error))
            return
        path, line, _ = item.location
        yield report_of(item, "skipped", (path, (line or 0) + 1, self.unavailable))

    def pytest_sessionfinish(self):
        if self.process is not None:
            self.process.stop()


def teardown(item, nextitem):
    """Ends fixtures of this process that the next test does not share; yields a failure."""
    end = functools.partial(item.session._setupstate.teardown_exact, nextitem)
    call = pytest.CallInfo.from_call(end, when="teardown")
    if call.excinfo is not None:
        yield item.ihook.pytest_runtest_makereport(item=item, call=call)


def report_of(item, outcome, reason):
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, reason, "call")
