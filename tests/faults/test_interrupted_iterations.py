"""Ctrl-C at any line of an iteration leaves casts, counters and weights in order."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import apex
from apex import amp
from tests.training import cases

SOURCES = str(Path(apex.__file__).parent)
# Before torch 2.8 a function that dynamo leaves alone has a wrapper, whose last line runs when an
# `__enter__` below it has returned and nothing can leave the block yet.
WRAPPER = (str(Path(SOURCES, "_torch", "dynamo.py")), "called")


class Lines:
    """Counts the lines of apex that run, and raises at one of them."""

    def __init__(self, interrupt_at=None):
        self.interrupt_at, self.places = interrupt_at, []

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, *exc_info):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(SOURCES) or (code.co_filename, code.co_name) == WRAPPER:
            return None
        if event == "line":
            self.places.append((code.co_filename, frame.f_lineno))
            if len(self.places) - 1 == self.interrupt_at:
                raise KeyboardInterrupt
        return self.trace


def made(level):
    torch.manual_seed(0)
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["fused AdamW"])
    cases.train_step(model, optimizer, *cases.batch())
    return model, optimizer


def places(level):
    """The positions at which each line is passed for the first time in an iteration."""
    model, optimizer = made(level)
    lines = Lines()
    with lines:
        cases.train_step(model, optimizer, *cases.batch(2))
    seen = Counter()
    for position, place in enumerate(lines.places):
        seen[place] += 1
        if seen[place] == 1:
            yield position


def casts():
    switches = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return switches, depth, torch.is_autocast_cache_enabled(), torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_interrupt_at_any_line_of_an_iteration_leaves_things_in_order(level):
    # In a thread of its own: tracing raises where Ctrl-C cannot, between the last line of a `with`
    # and its `__exit__`, which leaves contexts that torch writes in C entered in the thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt_at_every_line, level).result()


def interrupt_at_every_line(level):
    model, optimizer = made(level)
    before = casts()
    low = next(model.parameters()).dtype
    for position in list(places(level)):
        lines = Lines(position)
        try:
            with lines:
                cases.train_step(model, optimizer, *cases.batch(2))
        except KeyboardInterrupt:
            pass
        where = lines.places[min(position, len(lines.places) - 1)]
        assert casts() == before, where
        for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(param.detach(), master.detach().to(low)), where
        optimizer.zero_grad()
        model.zero_grad()
        cases.train_step(model, optimizer, *cases.batch(3))
        for master in amp.master_params(optimizer):
            assert master.isfinite().all(), where
        assert casts() == before, where
    first = cases.masters(optimizer)
    for seed in range(4, 8):  # at the first scale some overflow
        cases.train_step(model, optimizer, *cases.batch(seed))
    assert not cases.same(cases.masters(optimizer), first)
