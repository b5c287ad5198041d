"""Training through the public API equals the loop written by hand, bit for bit."""

import pytest

from tests.support import loops
from tests.support.reference.plain_loops import Loop

# torch's fused SGD keeps random numbers in an fp16 momentum on CPU, with or without amp (2.13).
PAIRS = [(level, name) for level in loops.LEVELS for name in loops.OPTIMIZERS]
PAIRS.remove(("O3", "fused SGD"))


OPTIONS = {
    "plain": {},
    "overflows": {"loss_scale": "dynamic", "growth_interval": 2},
    "static": {"loss_scale": 128.0},
    "overflow first": {},
    "static overflow": {"loss_scale": 128.0},
}
OVERFLOW_AT = {"overflows": {2, 3, 6}, "overflow first": {0}, "static overflow": {2}}
RUNS = [(*pair, run) for run in ("plain", "overflows") for pair in PAIRS]
RUNS += [(level, "Adam", "static") for level in loops.LEVELS]
RUNS += [(level, "Adam", "static overflow") for level in loops.LEVELS]
RUNS += [(level, name, "overflow first") for level in loops.DYNAMIC for name in loops.OPTIMIZERS]
# A dynamic scale refuses closures.
CLOSURES = [name for name in loops.OPTIMIZERS if name.endswith("closure")]
RUNS = [
    (level, name, run)
    for level, name, run in RUNS
    if name not in CLOSURES or (run == "plain" and level not in loops.DYNAMIC)
]
RUNS += [(level, name, "static") for level in loops.DYNAMIC for name in CLOSURES]


@pytest.mark.parametrize(("level", "name", "run"), RUNS)
def test_training_at_a_level_equals_the_plain_loop(level, name, run):
    options, make = OPTIONS[run], loops.OPTIMIZERS[name]
    model, optimizer = loops.prepared(level, make, **options)
    scale, interval = options.get("loss_scale"), options.get("growth_interval", 2000)
    loop = Loop(level, loops.net().parameters(), make, scale=scale, interval=interval)
    train, train_by_hand = loops.stepper(loops, name), loops.stepper(loop, name)
    for x, y in loops.batches(9 if run == "overflows" else 6, OVERFLOW_AT.get(run, ())):
        loss, loss_by_hand = train(model, optimizer, x, y), train_by_hand(x, y)
        assert loops.same(loss, loss_by_hand)
        assert loops.loss_scale() == loop.scale
        assert loops.same(list(model.parameters()), loop.model)
        assert loops.same(loops.masters(optimizer), loop.stepped)
    assert len(set(loop.scales)) > 2 or run != "overflows"
    assert run != "static overflow" or not all(param.isfinite().all() for param in loop.model)
    assert loops.same(optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"])
