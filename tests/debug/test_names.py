"""The public names of ``amp.debug``, and the ways to import it."""

import subprocess
import sys

import pytest

import apex
from apex import amp


@pytest.mark.parametrize("name", amp.debug.__all__)
def test_every_name_is_reachable_and_no_module_shadows_it(name):
    assert callable(getattr(amp.debug, name))
    assert name in dir(amp.debug)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"no 'nothing'; it has .*trace_overflow"):
        amp.debug.nothing  # noqa: B018


@pytest.mark.parametrize("name", amp.debug.__all__)
@pytest.mark.parametrize("module", ["apex.amp.debug", "apex.debug"])
def test_names_can_be_imported_from_either_path(module, name):
    names = {}
    exec(f"from {module} import {name}", names)
    assert names[name] is getattr(apex.debug, name)


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("module", ["apex", "apex.amp", "apex.amp.debug"])
def test_importing_amp_loads_no_module_of_debug(module):
    loaded = "[m for m in sys.modules if m.startswith(('apex.debug.', 'apex.amp.debug.'))]"
    assert run(f"import sys, {module}; print({loaded})") == "[]"


def test_a_fresh_process_can_start_from_the_alias():
    assert run("from apex.amp.debug import History; print(History.__module__)") == (
        "apex.debug.watch"
    )
