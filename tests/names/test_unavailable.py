"""Names of apex that are not here: the import fails with one sentence on what to use."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from apex import _unavailable


@pytest.fixture(autouse=True)
def installed():
    """``import apex`` does this."""
    _unavailable.install()


@pytest.mark.parametrize("name", _unavailable.INSTEAD)
def test_import_says_what_to_use_instead(name):
    with pytest.raises(ImportError) as raised:
        importlib.import_module(name)
    assert str(raised.value) == f"{name} is not part of this apex: use {instead(name)}."


def instead(name):
    return _unavailable.INSTEAD[name]


@pytest.mark.parametrize("name", ["apex.transformer", "apex.contrib.fmha"])
def test_error_is_the_one_that_libraries_catch(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


@pytest.mark.parametrize("name", _unavailable.INSTEAD)
def test_who_only_asks_whether_it_is_there_hears_no(name):
    assert importlib.util.find_spec(name) is None


def test_from_import_of_a_name_says_it_too():
    with pytest.raises(ImportError, match="use Megatron-LM"):
        from apex import transformer  # noqa: F401


def test_from_import_of_what_is_inside_says_it_too():
    with pytest.raises(ImportError, match="scaled_dot_product_attention"):
        from apex.contrib.multihead_attn import SelfMultiheadAttn  # noqa: F401


def test_import_of_a_module_inside_says_it_too():
    with pytest.raises(ImportError, match=r"apex\.transformer is not part of this apex"):
        importlib.import_module("apex.transformer.tensor_parallel.layers")


def test_any_other_name_fails_as_usual():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex\.contrib\.nothing'$"):
        importlib.import_module("apex.contrib.nothing")


@pytest.mark.parametrize("name", _unavailable.INSTEAD)
def test_nothing_in_the_table_exists(name):
    finders = [f for f in sys.meta_path if not isinstance(f, _unavailable.UnavailableFinder)]
    parent = name.rpartition(".")[0]
    try:
        path = importlib.import_module(parent).__path__
    except ImportError:
        return  # inside a package that is not there either
    assert not any(finder.find_spec(name, path) for finder in finders)


def test_the_finder_is_installed_once_and_last():
    before = list(sys.meta_path)
    _unavailable.install()
    assert sys.meta_path == before
    assert sum(isinstance(f, _unavailable.UnavailableFinder) for f in before) == 1


def test_import_apex_installs_it():
    code = "import apex\ntry: import apex.pyprof\nexcept ImportError as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"apex.pyprof is not part of this apex: use {instead('apex.pyprof')}.\n"
