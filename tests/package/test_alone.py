"""Where nobody else has an ``apex``: every way to start Python finds ours, and nothing is left."""

import pytest

from tests.package.environments import Environment

WHERE = "import apex, amp_C; print([apex.amp.__file__, amp_C.__file__])"
VERSION = "from importlib.metadata import version; print([version('apex'), version('apex-amp')])"


@pytest.mark.parametrize("flags", [[], ["-I"], ["-E"], ["-s"]])
def test_python_finds_apex(alone, flags):
    site = alone.site / "apex_amp" / "_site"
    assert alone.value(WHERE, *flags) == [
        str(site / "apex/amp/__init__.py"),
        str(site / "amp_C/__init__.py"),
    ]


def test_every_top_level_module_is_served(alone):
    names = ["apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"]
    code = f"import importlib; print([importlib.import_module(n).__name__ for n in {names}])"
    assert alone.value(code) == names


def test_without_site_one_line_installs_the_finder(alone):
    code = f"import sys; sys.path.append({str(alone.site)!r}); import apex_amp; {WHERE}"
    torch = (alone.site / "zz_torch.pth").read_text()
    (amp, _) = alone.value(code, "-S", PYTHONPATH=torch)
    assert "_site" in amp


def test_a_target_folder_works_by_pythonpath(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    target = tmp_path / "target"
    environment.pip("install", "--no-deps", "--target", str(target), str(wheel))
    path = f"{target}:{target / 'apex_amp' / '_site'}"
    (amp, kernels) = environment.value(WHERE, PYTHONPATH=path)
    assert amp.startswith(str(target))
    assert kernels.startswith(str(target))


def test_the_switch_hides_the_package(alone):
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('apex', 'amp_C')])"
    assert alone.value(code, APEX_AMP="off") == [None, None]


def test_libraries_find_the_distribution_apex(alone):
    ours, amp = alone.value(VERSION)
    assert ours == amp


def test_pip_does_not_list_it(alone):
    assert "apex " not in alone.pip("list")


@pytest.mark.parametrize("line", [["-m", "apex"], ["-I", "-m", "apex"]])
def test_python_m_apex_is_the_command(alone, line):
    assert alone.run(*line, "--version").startswith("apex-amp ")


def test_the_command_starts(alone):
    from tests.package.environments import outcome

    assert outcome([str(alone.python.parent / "apex"), "--version"]).startswith("apex-amp ")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_processes_find_it(alone, method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing as m\n"
        "def child(queue):\n"
        "    import apex.amp\n"
        "    queue.put(apex.amp.__file__)\n"
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


def test_import_after_torch_needs_nothing_slow_of_the_standard_library(alone):
    code = (
        "import sys, torch; before = set(sys.modules); import apex.amp; "
        "print(sorted(set(sys.modules) - before))"
    )
    slow = {"importlib.abc", "importlib.resources", "importlib.metadata", "inspect", "ast"}
    assert not slow & set(alone.value(code))


def test_first_imports_from_several_threads_end(alone):
    code = (
        "import importlib, threading\n"
        "names = ['apex', 'apex.amp', 'amp_C', 'apex.optimizers']\n"
        "found = []\n"
        "def load(name): found.append(importlib.import_module(name).__name__)\n"
        "threads = [threading.Thread(target=load, args=(n,), daemon=True) for n in names]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join(120)\n"
        "print(sorted(found))"
    )
    for _ in range(2):
        assert alone.value(code) == ["amp_C", "apex", "apex.amp", "apex.optimizers"]


def test_uninstalling_leaves_nothing(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    before = environment.files()
    environment.pip("install", "--no-deps", str(wheel))
    environment.run("-c", "import apex")
    environment.pip("uninstall", "-y", "apex-amp")
    assert environment.files() == before
    assert [path.name for path in environment.site.iterdir() if "apex" in path.name] == []


def test_type_checkers_find_marked_packages(alone):
    site = alone.site / (alone.site / "apex_amp.pth").read_text().splitlines()[0]
    assert (site / "apex" / "py.typed").is_file()
