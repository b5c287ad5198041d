"""PyTorch Lightning 1.9.5: ``ApexMixedPrecisionPlugin`` under a ``Trainer``."""

import pytest
import torch
from torch.testing import assert_close

from tests.clients.classes import EXACT, LEVELS, data
from tests.clients.libraries import need, of_its_time
from tests.clients.lightning_modules import adversaries, classifier, trainer
from tests.support.loops import at_levels, masters

pl = need("pytorch_lightning")
plugins = need("pytorch_lightning.plugins")
if not pl.__version__.startswith("1."):
    pytest.skip("pytorch_lightning 2 has no plugin for apex", allow_module_level=True)

pytestmark = of_its_time
level = at_levels(*LEVELS)


def fit(module, level, **options):
    plugin = [plugins.ApexMixedPrecisionPlugin(level)] if level else None
    made = trainer(pl, plugin, max_epochs=6, **options)
    made.fit(module, data())
    return made


OPTIONS = ({}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2})


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "clip", "accumulate"])
def test_the_plugin_trains_as_fp32_does(level, options):
    plain, module = classifier(pl), classifier(pl)
    fit(plain, None, **options)
    fit(module, level, **options)
    assert sum(module.losses[-4:]) < 0.7 * sum(module.losses[:4])
    assert_close(module.losses, plain.losses, rtol=0 if level == "O0" else 0.01, atol=0)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_module_steps_two_optimizers_itself(level):
    plain, module = adversaries(pl), adversaries(pl)
    fit(plain, None)
    module.own_dtype = True  # Lightning 1 calls training_step without the model's casts
    made = fit(module, level)
    for optimizer, part in zip(made.optimizers, (plain.critic, plain.generator), strict=True):
        # Adam moves a parameter by 2e-2 a step at first, whatever the gradient's size.
        assert_close(masters(optimizer), [*map(torch.detach, part.parameters())], rtol=0, atol=5e-3)


def test_a_checkpoint_loads_into_a_plain_module(level, tmp_path):
    made = fit(module := classifier(pl), level)
    made.save_checkpoint(tmp_path / "saved.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "saved.ckpt")
    assert_close([*map(torch.detach, loaded.parameters())], masters(made.optimizers[0]), **EXACT)
