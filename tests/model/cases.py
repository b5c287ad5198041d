"""What the tests of wrappers share: tolerances, a static scale, and training without amp."""

import torch

from tests.support import loops

CASTS_DOWN = ("O2", "O5")
EPS = {
    level: 0.0 if rules.compute is torch.float32 else torch.finfo(rules.compute).eps
    for level, rules in loops.LEVELS.items()
}

# So that no step of fp16 overflows: small steps are compared, and a skipped one would be none.
SCALE = {"O1": 128.0, "O2": 128.0}


def dtype_of(level):
    return loops.LEVELS[level].stored


def prepare(level, model=None, make_optimizer=loops.sgd, **options):
    options.setdefault("loss_scale", SCALE.get(level))
    return loops.prepared(level, make_optimizer, model, **options)


def train_plain(model, optimizer, count=3, seed=1):
    """Trains without amp; for a thread in which no level casts operators."""
    assert not torch.is_autocast_enabled("cpu")
    for x, y in loops.batches(count, seed=seed):
        loops.plain_step(model, optimizer, x, y)


def close(first, second, *, eps):
    """Whether two lists hold equal tensors, within ``eps`` of their largest value (at least 1).

    Sums in another order may differ in fp32's last bits.
    """
    return all(
        (a.float() - b.float()).abs().max() <= (eps + 1e-6) * b.float().abs().max().clamp(min=1.0)
        for a, b in zip(first, second, strict=True)
    )
