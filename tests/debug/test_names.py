"""The public names of ``amp.debug``."""

import subprocess
import sys

import pytest

from apex import amp


@pytest.mark.parametrize("name", amp.debug.__all__)
def test_every_name_is_reached_and_no_module_hides_it(name):
    assert callable(getattr(amp.debug, name))
    assert name in dir(amp.debug)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"no 'nothing'; it has .*trace_overflow"):
        amp.debug.nothing  # noqa: B018


def test_importing_amp_loads_no_part_of_it():
    code = "import sys, apex.amp; print([m for m in sys.modules if m.startswith('apex.debug.')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
