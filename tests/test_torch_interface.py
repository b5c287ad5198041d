"""Private names in ``src`` and in the tests are listed with reasons; helpers exist once."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import apex
from tests import mutants

SOURCES = Path(apex.__file__).parents[1]
# torch documents them: "Foreach Functions" of docs/torch.html, "Extending PyTorch".
DOCUMENTED = ("torch._foreach_", "torch.ops.aten._foreach_", "torch.utils._python_dispatch.Torch")
ELSEWHERE = {
    "torch.nn.modules.batchnorm._BatchNorm": "the common class of batch norms since torch 0.2",
    "torch.nn.modules._functions.SyncBatchNorm": "torch's own function, without its module",
}


def trees():
    tops = "apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"
    for file in (f for top in tops for f in sorted((SOURCES / top).rglob("*.py"))):
        yield file.relative_to(SOURCES).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def is_private(name):
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def names(tree):
    """Yields each name under ``torch`` that a file imports or reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            yield ast.unparse(node)


def test_private_names_of_torch_outside_of_its_package_are_listed_with_a_reason():
    found = defaultdict(set)
    for path, tree in trees():
        if not path.startswith(("apex/_torch/", "apex/debug/")):  # a tool looks into torch
            for name in filter(is_private, names(tree)):
                found[name].add(path)
    assert {name for name in found if not name.startswith(DOCUMENTED)} == set(ELSEWHERE), found


def test_the_copies_module_alone_starts_copies_that_nobody_waits_for_and_records_events():
    """Elsewhere such a copy would be read too early, see Note [Copies]."""
    others = [(path, tree) for path, tree in trees() if path != "apex/_torch/copies.py"]
    nodes = [(path, node) for path, tree in others for node in ast.walk(tree)]
    calls = [f"{path}: {ast.unparse(n)}" for path, n in nodes if isinstance(n, ast.Call)]
    assert not [call for call in calls if "non_blocking=" in call or ": torch.Event(" in call]


def test_private_modules_that_tests_import_are_those_of_their_readme():
    folder, found = Path(__file__).parent, set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("apex"):
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    found = {name.removeprefix("apex.") for name in found if name.startswith("apex._")}
    listed = re.findall(r"`(_[a-z_.]+)`", (folder / "README.md").read_text(encoding="utf-8"))
    used = {module for module in listed if any(name.startswith(module) for name in found)}
    assert used == {*listed}
    assert [name for name in sorted(found) if not name.startswith(tuple(listed))] == []


def test_every_planted_fault_has_its_line_in_the_sources_and_its_test_in_the_readme():
    assert [*mutants.tests()] == [mutant.fault for mutant in mutants.MUTANTS]
    for mutant in mutants.MUTANTS:
        source = (SOURCES / "apex" / mutant.file).read_text(encoding="utf-8")
        assert source.count(mutant.right) == 1, mutant.fault


def test_the_commonest_helpers_are_defined_once_in_support():
    places = defaultdict(list)
    for file in Path(__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if getattr(node, "name", None) in ("train", "trained", "batch", "prepared", "Net"):
                places[node.name].append(file.name)
    assert set(map(tuple, places.values())) == {("loops.py",)}, places
