"""What importing does: apex alone brings no MMEngine, and without MMEngine the reason is said."""

import importlib
import subprocess
import sys

import pytest


def test_import_apex_does_not_import_mmengine():
    code = "import sys, apex; sys.exit('mmengine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_mmengine_the_import_says_what_to_install(monkeypatch):
    for name in ("mmengine", "mmengine.model", "mmengine.optim", "mmengine.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "apex.integrations.mmengine", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'apex-amp\[mmengine\]'"):
        importlib.import_module("apex.integrations.mmengine")
