"""``apex.integrations``: what it says without a library, and the scales of one optimizer."""

import importlib
import sys

import pytest

from apex.integrations import scales
from apex.parallel import LARC
from tests.support import loops

LIGHTNING = "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"
MISSING = [
    ("lightning", [f"{package}.plugins.precision" for package in LIGHTNING]),
    ("transformers", ("transformers",)),
    ("mmengine", ("mmengine.model", "mmengine.optim", "mmengine.registry")),
]


@pytest.mark.parametrize(("name", "missing"), MISSING)
def test_the_error_names_the_package(monkeypatch, name, missing):
    for each in missing:
        monkeypatch.setitem(sys.modules, each, None)
        monkeypatch.setitem(sys.modules, each.partition(".")[0], None)
    monkeypatch.delitem(sys.modules, f"apex.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"pip install .*{name}"):
        importlib.import_module(f"apex.integrations.{name}")


def test_another_number_of_scales_warns_and_loads_what_fits():
    _, larc = loops.prepared("O5", lambda p: LARC(loops.sgd(p)), loss_scale="dynamic", num_losses=2)
    assert scales.is_prepared(larc)
    with pytest.warns(UserWarning, match="got 1 loss scalers, but amp has 2"):
        scales.load_state_dict(larc, {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    loaded = [each["loss_scale"] for each in scales.state_dict(larc).values()]
    assert loaded == [2.0, 2.0**16]
    assert not scales.is_prepared(LARC(loops.sgd(loops.net().parameters())))
