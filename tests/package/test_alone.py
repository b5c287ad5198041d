"""Where nobody else has an ``apex``: every way to start Python finds ours."""

import ast
import sys

import pytest

from tests.package.environments import Environment, outcome

WHERE = "from importlib.util import find_spec as f; print([f(n).origin for n in ('apex', 'amp_C')])"


@pytest.mark.parametrize("flags", [[], ["-I"], ["-E"], ["-s"]])
def test_python_finds_apex(alone, flags):
    site = alone.site / "apex_amp" / "_site"
    expected = [str(site / "apex/__init__.py"), str(site / "amp_C/__init__.py")]
    assert alone.value(WHERE, *flags) == expected


def test_without_site_one_line_installs_the_finder(alone):
    code = f"import sys; sys.path.append({str(alone.site)!r}); import apex_amp; {WHERE}"
    assert all("_site" in path for path in alone.value(code, "-S"))


def test_a_target_folder_works_by_pythonpath(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    target = tmp_path / "target"
    environment.unpack(wheel, target)
    found = environment.value(WHERE, PYTHONPATH=f"{target}:{target / 'apex_amp' / '_site'}")
    assert all(path.startswith(str(target)) for path in found)


def test_the_switch_hides_the_package(alone):
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('apex', 'amp_C')])"
    assert alone.value(code, APEX_AMP="off") == [None, None]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_processes_find_it(alone, method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing as m\n"
        "def child(queue):\n"
        "    import importlib.util\n"
        "    queue.put(importlib.util.find_spec('apex').origin)\n"
        "if __name__ == '__main__':\n"
        f"    context = m.get_context({method!r})\n"
        "    queue = context.Queue()\n"
        "    context.Process(target=child, args=(queue,)).start()\n"
        "    print([queue.get(timeout=60)])\n"
    )
    assert "_site" in alone.run(str(script))


def test_start_up_imports_the_finder_alone(alone):
    loaded = "import sys; print(sorted(sys.modules))"
    with_it, without = alone.value(loaded), alone.value(loaded, "-S")
    rest = set(with_it) - set(without)
    assert {name for name in rest if "apex" in name or "importlib." in name} == {"_apex_amp"}


def test_the_command_starts(alone):
    assert outcome([str(alone.python.parent / "apex"), "--version"]).startswith("apex-amp ")


FACTS = """
import sys, torch, importlib, runpy, threading, warnings
warnings.simplefilter("error")
before = set(sys.modules)
names = ["apex", "apex.amp", "amp_C", "apex.optimizers"]
threads = [threading.Thread(target=importlib.import_module, args=(n,), daemon=True) for n in names]
for thread in threads: thread.start()
for thread in threads: thread.join(120)
import apex
found = {"ended": [name in sys.modules for name in names], "new": sorted(set(sys.modules) - before)}
found["public"] = [name for name in apex.__all__ if getattr(apex, name) is not None]
for name in ("apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"): importlib.import_module(name)
from importlib.metadata import version
found["versions"] = {version("apex"), version("apex-amp"), apex.__version__}
print(found)
sys.argv = ["apex", "--version"]
runpy.run_module("apex", run_name="__main__")
"""


@pytest.fixture(scope="module")
def facts(alone):
    """What one process prints, and nothing else, that imports apex in several threads."""
    line, version = alone.run("-c", FACTS).splitlines()
    return {**ast.literal_eval(line), "command": version}


def test_first_imports_from_several_threads_end(facts):
    assert facts["ended"] == [True] * 4


def test_import_after_torch_loads_only_apex_and_what_is_fast_of_the_standard_library(facts):
    new = {name for name in facts["new"] if not name.startswith("apex")}
    standard = {"amp_C", *sys.stdlib_module_names}
    assert [name for name in new if name.partition(".")[0] not in standard] == []
    slow = {"importlib.abc", "importlib.resources", "importlib.metadata", "inspect", "ast"}
    assert not slow & new


def test_public_names_are_these_and_each_is_reached_as_an_attribute(facts):
    assert facts["public"] == [
        "RNN", "__version__", "amp", "contrib", "debug", "fp16_utils", "fused_dense", "mlp",
        "multi_tensor_apply", "normalization", "optimizers", "parallel", "reparameterization",
    ]  # fmt: skip


def test_libraries_find_the_distribution_apex_at_our_version(facts):
    assert len(facts["versions"]) == 1
    assert facts["command"] == f"apex-amp {next(iter(facts['versions']))}"
