"""Beside NVIDIA's apex: its parts stay its own, ours are added, and no file of either changes."""

import textwrap

import pytest

from tests.package.environments import NVIDIA, Environment, nvidia_wheel

OURS = ["amp", "parallel", "fp16_utils", "RNN", "reparameterization", "debug"]
THEIRS = ["optimizers", "normalization", "contrib", "mlp", "fused_dense", "multi_tensor_apply"]
EXPECTED = {**dict.fromkeys(OURS, "ours"), **dict.fromkeys([*THEIRS, "apex", "amp_C"], "theirs")}

FOUND = f"""
import os
from importlib.machinery import PathFinder
from importlib.util import find_spec
from _apex_amp import SITE
apex = find_spec("apex")
parts = apex.submodule_search_locations
specs = {{name: PathFinder.find_spec("apex." + name, parts) for name in {OURS + THEIRS}}}
specs |= {{"apex": apex, "amp_C": find_spec("amp_C")}}
print({{n: "ours" if s.origin.startswith(SITE + os.sep) else "theirs" for n, s in specs.items()}})
"""
"""Asks without importing torch."""

WHERE = """
from importlib.machinery import PathFinder
from importlib.util import find_spec
apex = find_spec("apex")
amp = PathFinder.find_spec("apex.amp", apex.submodule_search_locations)
print([apex.origin, find_spec("amp_C").origin, amp])
"""

IMPORTED = f"""
import importlib, os, apex
import _apex_amp
for name in {OURS + THEIRS}:
    assert getattr(apex, name) is importlib.import_module("apex." + name)
from apex import amp
import apex.contrib.clip_grad, amp_C
assert amp is apex.amp and callable(apex.amp.initialize)
import runpy, sys
sys.argv = ["apex", "--version"]
try: runpy.run_module("apex", run_name="__main__")
except SystemExit: pass
print([apex.WHOSE, amp_C.WHOSE, apex.contrib.clip_grad.WHOSE, hasattr(apex, "nothing")])
"""

FINDER = f"""
import sys
from importlib.util import spec_from_file_location
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "apex":
            folder = {str(NVIDIA / "apex")!r}
            return spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder])
        if name == "amp_C":
            return spec_from_file_location(name, {str(NVIDIA / "amp_C.py")!r})
def install(): sys.meta_path.append(Finder)
"""


def wheel_first(environment, wheel, folder):
    environment.unpack(nvidia_wheel(folder))
    environment.unpack(wheel)
    return {}


def editable_by_path(environment, wheel, folder):
    environment.unpack(wheel)
    (environment.site / "__editable__.apex-0.1.pth").write_text(str(NVIDIA))
    return {}


def editable_by_finder(environment, wheel, folder):
    environment.unpack(wheel)
    (environment.site / "__editable___apex_finder.py").write_text(FINDER)
    line = "import __editable___apex_finder; __editable___apex_finder.install()"
    (environment.site / "__editable__.apex-0.1.pth").write_text(line)
    return {}


def theirs_on_pythonpath(environment, wheel, folder):
    environment.unpack(wheel)
    return {"PYTHONPATH": str(NVIDIA)}


SETUPS = [wheel_first, editable_by_path, editable_by_finder, theirs_on_pythonpath]


@pytest.mark.parametrize("setup", SETUPS)
def test_each_part_is_whose_it_should_be(wheel, tmp_path, setup):
    environment = Environment(tmp_path / "env")
    environ = setup(environment, wheel, tmp_path)
    assert environment.value(FOUND, **environ) == EXPECTED
    if setup is editable_by_finder:
        command, found = environment.run("-c", IMPORTED, **environ).splitlines()
        assert command.startswith("apex-amp ")
        assert found == "['theirs', 'theirs', 'theirs', False]"


def test_ours_in_the_user_site_finds_theirs_in_the_system(wheel, tmp_path):
    system = Environment(tmp_path / "env")
    config = tmp_path / "env" / "pyvenv.cfg"
    config.write_text(config.read_text().replace("= false", "= true"))  # reads the user site
    system.unpack(nvidia_wheel(tmp_path))
    base = {"PYTHONUSERBASE": str(tmp_path / "user")}
    user = system.value("import site; print([site.getusersitepackages()])", **base)[0]
    system.unpack(wheel, user)
    assert system.value(FOUND, **base) == EXPECTED


def test_installing_and_uninstalling_either_changes_no_byte_of_the_other(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    theirs = nvidia_wheel(tmp_path)
    empty = environment.files()
    environment.unpack(theirs)
    nvidia = environment.files()
    environment.pip("install", "--no-deps", str(wheel))
    both = environment.files()
    assert {name: both[name] for name in nvidia} == nvidia
    environment.pip("uninstall", "-y", "apex")
    ours = environment.files()
    assert ours == {name: both[name] for name in both if name not in nvidia or name in empty}
    environment.unpack(theirs)
    environment.pip("uninstall", "-y", "apex-amp")
    assert environment.files() == nvidia
    assert [path for path in environment.site.iterdir() if "apex_amp" in path.name] == []


@pytest.fixture(scope="module")
def beside(wheel, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("beside"))
    wheel_first(environment, wheel, tmp_path_factory.mktemp("wheel"))
    return environment


def test_their_version_is_the_one_of_the_distribution_apex(beside):
    code = "from importlib.metadata import version; print([version('apex')])"
    assert beside.value(code) == ["0.1"]


def test_the_switch_leaves_theirs_alone(beside):
    found = beside.value(WHERE, APEX_AMP="off")
    assert found == [str(beside.site / "apex/__init__.py"), str(beside.site / "amp_C.py"), None]


def test_an_apex_that_has_amp_is_left_alone(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    environment.unpack(wheel)
    environment.unpack(nvidia_wheel(tmp_path, amp=True))
    code = """
    import apex, apex.amp
    found = [apex.amp.WHOSE, len(apex.__path__)]
    for name in ("apex.parallel", "amp_C"):
        try: __import__(name)
        except ModuleNotFoundError as error: found.append(error.name)
    print(found)
    """
    expected = ["theirs", 1, "apex.parallel", "amp_C"]
    assert environment.value(textwrap.dedent(code)) == expected
    (environment.site / "apex/amp/__init__.py").write_text("from torch._six import inf")
    code = "import _apex_amp; print([_apex_amp.main()])"
    assert environment.value(code) == [1]


def test_an_apex_that_is_a_single_file_is_left_alone(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    environment.unpack(wheel)
    (environment.site / "apex.py").write_text("WHOSE = 'a file'\n")
    assert environment.value("import apex; print([apex.WHOSE])") == ["a file"]


def test_an_empty_folder_apex_counts_as_none(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    environment.unpack(wheel)
    (environment.site / "apex" / "contrib").mkdir(parents=True)
    assert environment.value(FOUND)["apex"] == "ours"
