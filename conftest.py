"""Rules for every test and doctest: one thread, one seed, no casts left on, its device."""

import collections
import contextlib
import functools
import gc
import random
import re
import time
import traceback

import hypothesis
import pytest

from tests.support.emulated_cuda import device

if device.INSTALLED:
    device.install()  # before torch is imported

import torch

import apex
from apex._core.project import VERSION
from tests.support.devices import Forwarding, Place
from tests.support.features import NO_MASTERS, has_masters

torch.set_num_threads(1)
hypothesis.settings.register_profile("apex", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("apex")

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")


def pytest_report_header():
    return f"apex {VERSION} from {apex.__file__}, torch {torch.__version__}"


def pytest_configure(config):
    config.pluginmanager.register(Forwarding(config))
    if not hasattr(config, "workerinput"):
        write_shared_caches()


def write_shared_caches():
    """Writes what libraries cache at their first import, before several workers import them.

    yapf, which mmengine imports, writes its grammar in place: another process that imports it
    meanwhile reads an empty file, and fails.
    """
    with contextlib.suppress(ImportError):
        import yapf  # noqa: F401


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``: files share imports and fixtures, some also a pool of processes."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Pools(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return pool_of(config.rootpath, super()._split_scope(nodeid))

    return Pools(config, log)


@functools.cache
def pool_of(root, file):
    """Returns the pool of processes that a file's tests use, or the file, which has none.

    The first pool has two ranks, the second the emulated device, which g++ compiles for it.
    """
    text = (root / file).read_text("utf-8")
    if "on_two_ranks" in text:
        return "ranks"
    return "emulated" if re.search(r"mark\.(gpu|emulated)|emulated_cuda", text) else file


def pytest_collection_modifyitems(items):
    for item in items:
        skipped = Place(item).skipped
        if skipped is not None:
            item.add_marker(pytest.mark.skip(reason=skipped))


def pytest_collection_finish():
    """Hides torch's objects and the tests from collections, which then take no time."""
    import torch._dynamo  # noqa: F401 - the first optimizer would import its 100,000 objects

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Hides what earlier files have imported, too: each test may collect several times."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Says how many tests executed, and where, before pytest's closing line, which CI reads."""
    yield
    stats = terminalreporter.stats
    ended = [r for kind in ("passed", "failed", "xfailed", "xpassed") for r in stats.get(kind, [])]
    places = {report.nodeid: dict(report.user_properties).get("place") for report in ended}
    executed = collections.Counter(place or "the CPU" for place in places.values())
    reasons = collections.Counter(reason_of(report) for report in stats.get("skipped", []))
    skipped = sum(reasons.values())
    line = f"executed {len(places)} of {len(places) + skipped} tests"
    if places:
        line += ": " + ", ".join(f"{count} on {place}" for place, count in executed.most_common())
    if skipped:
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        line += f"; {skipped} skipped: {told}"
    terminalreporter.write_line(line)


def reason_of(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ").splitlines()[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips what needs fp32 masters where torch is too old for them."""
    try:
        return (yield)
    except Exception as error:
        if has_masters or "fp32 masters (O2, O5" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # pytest keeps it, and so the test's models
        pytest.skip(NO_MASTERS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties.append(("place", Place(item).name))
    item.failed = getattr(item, "failed", False) or report.failed
    return report


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every test, whatever ran before it."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)  # and with none, torch keeps the traceback of every such call


@pytest.fixture(autouse=True)
def nothing_left_on(request):
    """Fails a test that leaves casts on in this thread: the next tests would run under them.

    amp's casts end with the models of their session, so the test's own fixtures are let go first.
    """
    yield
    if not casts_on():
        return
    request.node.funcargs = {}
    left = casts_left()
    for device_type in left:
        torch.set_autocast_enabled(device_type, False)
    if left and not request.node.failed:  # the traceback of a failed test keeps its models alive
        pytest.fail(f"the test left casts on for {', '.join(left)}", pytrace=False)


def casts_left():
    """Returns the device types whose casts are still on once nothing holds the test's models.

    autograd's device thread lets go of a backward pass, and of the modes around it, only after
    backward has returned: a moment later, as it waits for the interpreter's lock.
    """
    deadline = time.monotonic() + 2.0
    while True:
        gc.collect()
        with apex.amp.disable_casts():  # applies the end of a session in another thread
            pass
        left = casts_on()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.001)


def casts_on():
    return [device_type for device_type in DEVICE_TYPES if torch.is_autocast_enabled(device_type)]
