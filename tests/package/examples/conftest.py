"""How the tests load an example's script: by its path, with the folder's modules beside it."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def load(monkeypatch):
    """``load("dcgan/main_amp", "PIL")`` returns the script, or skips where PIL is missing."""

    def load(script, *extras):
        for module in extras:
            pytest.importorskip(module, reason="the demo extra is not installed")
        path = EXAMPLES / f"{script}.py"
        monkeypatch.syspath_prepend(str(path.parent))
        spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
