"""Without Lightning, the module of its plugin says what to install."""

import importlib
import sys

import pytest


def test_without_lightning_the_error_names_the_package(monkeypatch):
    for name in ("lightning", "pytorch_lightning", "lightning_fabric"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("pytorch", "fabric"):
        monkeypatch.setitem(sys.modules, f"lightning.{name}", None)
    monkeypatch.delitem(sys.modules, "apex.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module("apex.integrations.lightning")
