"""PyTorch-Ignite's trainer with ``amp_mode="apex"``."""

import pytest
from torch.nn import functional as F
from torch.testing import assert_close

from apex import amp
from tests.clients.classes import EXACT, LEVELS, adam, labelled_rows, layers
from tests.clients.libraries import need
from tests.support.loops import every, masters, scaled_backward

engine = need("ignite.engine")

pytestmark = pytest.mark.clients


def prepared_layers(level):
    model = layers()
    options = {"opt_level": level, "loss_scale": 2.0**8, "verbosity": 0}
    return amp.initialize(model, adam(model), **options)


def trained_by_hand(level, data, accumulate):
    model, optimizer = prepared_layers(level)
    for index, (x, y) in enumerate(data):
        if index % accumulate == 0:
            optimizer.zero_grad()
        scaled_backward(F.cross_entropy(model(x), y) / accumulate, optimizer)
        if (index + 1) % accumulate == 0:
            optimizer.step()
    return masters(optimizer)


@every(accumulate=[1, 2], level=LEVELS)
def test_ignite_trains_as_the_three_lines_do(level, accumulate):
    data = [labelled_rows(seed) for seed in range(4)]
    model, optimizer = prepared_layers(level)
    options = {"device": "cpu", "amp_mode": "apex", "gradient_accumulation_steps": accumulate}
    trainer = engine.create_supervised_trainer(model, optimizer, F.cross_entropy, **options)
    trainer.run(data, max_epochs=1)
    assert_close(masters(optimizer), trained_by_hand(level, data, accumulate), **EXACT)
