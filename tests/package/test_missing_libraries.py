"""Without its library, a module of ``apex.integrations`` says what to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (
            "lightning",
            ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"),
        ),
        ("transformers", ("transformers",)),
        ("mmengine", ("mmengine.model", "mmengine.optim", "mmengine.registry")),
    ],
)
def test_the_error_names_the_package(monkeypatch, name, missing):
    for each in missing:
        monkeypatch.setitem(sys.modules, each, None)
        monkeypatch.setitem(sys.modules, each.partition(".")[0], None)
    monkeypatch.delitem(sys.modules, f"apex.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"pip install .*{name}"):
        importlib.import_module(f"apex.integrations.{name}")
