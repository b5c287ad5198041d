"""Names of apex that are not here: the import fails with one sentence on what to use."""

import importlib
import importlib.util
import sys

import pytest

from apex import _unavailable


@pytest.fixture(autouse=True)
def installed():
    """``import apex`` does this."""
    _unavailable.install()


def test_import_and_find_spec_say_what_to_use_instead():
    for name in _unavailable.INSTEAD:
        for find in (importlib.import_module, importlib.util.find_spec):
            with pytest.raises(ModuleNotFoundError) as raised:
                find(name)
            instead = _unavailable.INSTEAD[name]
            assert str(raised.value) == f"{name} is not part of this apex: use {instead}."


def test_from_import_of_what_is_inside_says_it_too():
    with pytest.raises(ImportError, match="scaled_dot_product_attention"):
        from apex.contrib.multihead_attn import SelfMultiheadAttn  # noqa: F401


def test_import_of_a_module_inside_says_it_too():
    with pytest.raises(ImportError, match=r"apex\.transformer is not part of this apex"):
        importlib.import_module("apex.transformer.tensor_parallel.layers")


def test_any_other_name_fails_as_usual():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex\.contrib\.nothing'$"):
        importlib.import_module("apex.contrib.nothing")


def test_the_finder_is_installed_once_and_last():
    before = list(sys.meta_path)
    _unavailable.install()
    assert sys.meta_path == before
    assert sum(isinstance(f, _unavailable.UnavailableFinder) for f in before) == 1
