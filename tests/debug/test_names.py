"""The public names of ``amp.debug``, and the ways to import it."""

import importlib
import subprocess
import sys

import pytest

from apex import amp


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"no 'nothing'; it has .*trace_overflow"):
        amp.debug.nothing  # noqa: B018


@pytest.mark.parametrize("name", amp.debug.__all__)
def test_every_name_can_be_imported_from_either_path_and_no_module_shadows_it(name):
    found = [getattr(importlib.import_module(m), name) for m in ("apex.amp.debug", "apex.debug")]
    assert found[0] is found[1]
    assert callable(found[0])
    assert name in dir(amp.debug)


def test_importing_amp_loads_no_module_of_debug_and_the_alias_is_there():
    loaded = "[m for m in sys.modules if m.startswith(('apex.debug.', 'apex.amp.debug.'))]"
    code = f"import sys, apex.amp; print({loaded}); from apex.amp.debug import History"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
