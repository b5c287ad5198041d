"""Lists operators, counts the reads of device values, and forbids waits for a device."""

import sys
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import loops


class Operators(TorchDispatchMode):
    """Lists the operators inside, as a trace sees them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class HostReads(Operators):
    """Counts the operators that hand a tensor's value to the host."""

    READS = ("aten._local_scalar_dense.", "aten.is_nonzero.", "aten.item.", "aten.equal.")

    @property
    def count(self):
        return sum(name.startswith(self.READS) for name in self.names)


def reads_of(model, optimizer, train, steps=3):
    """Host reads of some steady iterations, after two to start with."""
    data = list(loops.batches(2 + steps))
    for x, y in data[:2]:
        train(model, optimizer, x, y)
    with HostReads() as reads:
        for x, y in data[2:]:
            train(model, optimizer, x, y)
    return reads.count


def calls_inside(function, *args):
    """The number of functions, of Python and of C, that a call runs."""
    calls = []
    sys.setprofile(lambda frame, event, _: event in ("call", "c_call") and calls.append(event))
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return len(calls)


@contextmanager
def waits_are_errors():
    """Makes what lets the host wait for a CUDA device an error, inside."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
