"""The house: who may write an attribute, and what nobody needs in order to train."""

import ast
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from apex.amp import frontend
from apex.tools.compare import results

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "apex"

TORCHS = {"grad", "data", "args", "found_inf"}
"""Attributes of torch's and Python's objects that ours have, too."""

REASONS = {
    "amp/sessions.py properties.loss_scale": "apex's options, which are set as attributes",
    "amp/frontend.py _amp_state.verbosity": "apex's state of the latest call, which scripts set",
    "amp/frontend.py _amp_state.min_loss_scale": "apex's state of the latest call",
    "amp/frontend.py _amp_state.max_loss_scale": "apex's state of the latest call",
}


def stored(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def is_of_itself(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_each_attribute_is_written_in_the_file_of_its_owner():
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
    owners = defaultdict(set)
    for path, tree in trees.items():
        if path.relative_to(SOURCES).parts[0] in ("_engine", "amp"):
            for node in filter(is_of_itself, stored(tree)):
                owners[node.attr].add(path)
    foreign = set()
    for path, tree in trees.items():
        for node in stored(tree):
            if is_of_itself(node) or node.attr in TORCHS or node.attr not in owners:
                continue
            # Classes of debug and tools have attributes of the same names.
            if path not in owners[node.attr] and path.parts[-2] not in ("debug", "tools"):
                foreign.add(f"{path.relative_to(SOURCES)} {ast.unparse(node)}")
    assert foreign == set(REASONS)


def test_without_the_watchers_amp_trains_the_same_numbers(tmp_path):
    shutil.copytree(SOURCES, tmp_path / "apex")
    shutil.rmtree(tmp_path / "apex" / "_engine" / "watch")
    maker = tmp_path / "apex" / "amp" / "sessions.py"
    text = maker.read_text()
    assert text.count("Watch") == 2  # its import and its use are all that there is
    text = text.replace("_engine.watch import Watch", "_engine.observer import Observer as Watch")
    maker.write_text(text)
    names = "Adam and plain and not fused"
    code = (
        "import sys, pytest, apex.amp\n"
        f"assert apex.amp.__file__.startswith({str(tmp_path)!r})\n"
        f"sys.exit(pytest.main(['-q', '-k', {names!r}, 'tests/parity/test_levels.py']))"
    )
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "APEX_AMP": "off"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


def test_each_level_has_a_name_for_scripts_and_a_row_in_compare():
    for name, level in frontend.opt_levels.items():
        assert isinstance(level, getattr(frontend, name))
        assert name in frontend.__all__
        assert name in results.LEVELS
