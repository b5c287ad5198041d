"""Private names of torch are used in ``apex._torch``; each elsewhere is listed with a reason."""

import ast
import runpy
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import apex
from apex import amp
from apex._torch import autograd, foreach
from tests.training import cases

SOURCES = Path(apex.__file__).parents[1]
KINDS = (nn.Module, torch.optim.Optimizer, torch.Tensor, torch.optim.Adam, torch.library.Library)
THEIRS = {
    name for kind in KINDS for name in dir(kind) if name[0] == "_" and not name.startswith("__")
}


def files():
    tops = "apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"
    return [f for top in tops for f in sorted((SOURCES / top).rglob("*.py"))]


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def dotted(node):
    """Returns ``a.b.c`` of an attribute chain that begins with a name, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def own_names(trees):
    """Returns every private name that the sources define themselves."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)  # slots, and attributes set by name
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torch"):
                found.update(alias.name for alias in node.names)
    return {name for name in found if is_private(name)}


def used(tree, own):
    """Yields the private names of torch in one file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if any(map(is_private, whole.split("."))):
                    yield whole
        elif isinstance(node, ast.Attribute):
            whole = dotted(node)
            if whole and whole.startswith("torch."):
                if is_private(node.attr):
                    yield whole
            elif is_private(node.attr) and (node.attr in THEIRS or node.attr not in own):
                yield f".{node.attr}"
        elif isinstance(node, ast.FunctionDef) and node.name in THEIRS:
            yield f".{node.name}"


def scan():
    trees = {f: ast.parse(f.read_text(encoding="utf-8")) for f in files()}
    own = own_names(trees.values())
    found = defaultdict(set)
    for file, tree in trees.items():
        path = file.relative_to(SOURCES).as_posix()
        if not path.startswith(("apex/_torch/", "apex/debug/")):  # a tool looks into torch
            for name in used(tree, own):
                found[name].add(path)
    return found


# torch documents them ("Foreach Functions" of docs/torch.html, torch.nn.modules.batchnorm's base
# class in the docs of SyncBatchNorm, TorchDispatchMode in "Extending PyTorch").
DOCUMENTED = ("torch._foreach_", "torch.ops.aten._foreach_", "torch.utils._python_dispatch.Torch")

ELSEWHERE = {
    "torch.nn.modules.batchnorm._BatchNorm": "the common class of batch norms since torch 0.2",
    "torch._weight_norm": "torch.nn.utils.weight_norm calls it; old checkpoints depend on it",
    "._apply": "the method under Module.to and .cuda: overridden as subclasses in torch do",
    "._forward_pre_hooks": "where a module keeps its hooks: none of ours is attached twice",
    "torch.nn.modules._functions.SyncBatchNorm": "torch's own function, without its module",
    "._patch_step_function": "gives an unpickled optimizer's class the step hooks",
    "._version": "autograd's count of in-place writes, in the docs of torch.autograd",
    "._getframe": "of Python's sys",
}


def test_private_names_of_torch_outside_of_its_package_are_listed_with_a_reason():
    found = {name for name in scan() if not name.startswith(DOCUMENTED)}
    assert found == set(ELSEWHERE), {name: sorted(where) for name, where in scan().items()}


# -- the plain forms are forced --------------------------------------------------------------

PLAIN = {
    (foreach, "_check_and_unscale_kernel_"): foreach.plain_check_and_unscale_,
    (foreach, "update_scale_"): foreach.plain_update_scale_,
    (foreach, "group"): foreach.plain_group,
    (autograd, "backward_id"): autograd.plain_backward_id,
}


def test_each_name_that_may_be_missing_has_a_plain_form(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype")
        without = runpy.run_path(foreach.__file__)
    assert without["group"] is without["plain_group"]
    chosen = [name for (module, name), plain in PLAIN.items() if getattr(module, name) is plain]
    assert chosen == [], "this torch lacks what the plain forms stand in for"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 3.0])
def test_plain_unscaling_is_bit_equal_to_torch_s(dtype, bad, scale):
    grads = [torch.randn(3, 2).to(dtype), torch.randn(5).to(dtype)]
    if bad is not None:
        grads[1][2] = bad
    copies = [grad.clone() for grad in grads]
    flags = [torch.zeros(()), torch.zeros(())]
    inverse = torch.tensor(1.0 / scale)
    foreach.check_and_unscale_(grads, flags[0], inverse)
    foreach.plain_check_and_unscale_(copies, flags[1], inverse)
    assert cases.same(copies, grads)
    assert flags[0] == flags[1] == (bad is not None)


@pytest.mark.parametrize("overflow", [0.0, 1.0])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.1, 0.3)])
@pytest.mark.parametrize("start", [(2.0**16, 0), (8.0, 2), (torch.finfo(torch.float32).max, 2)])
def test_plain_scale_update_is_torch_s(overflow, start, factors):
    results = []
    for update in (foreach.update_scale_, foreach.plain_update_scale_):
        scale, steps = torch.tensor(start[0]), torch.tensor(start[1], dtype=torch.int32)
        update(scale, steps, torch.tensor(overflow), *factors, 3)
        results.append((scale, steps))
    assert cases.same(*results)


def test_plain_groups_are_torch_s():
    tensors = [torch.randn(2, 3), torch.randn(4).half(), torch.randn(1), torch.randn(()).half()]
    pairs = [tensors, [tensor + 1 for tensor in tensors]]
    groups = [make(pairs) for make in (foreach.group, foreach.plain_group)]
    parts = [{key: value[0] for key, value in group.items()} for group in groups]
    assert parts[0].keys() == parts[1].keys()
    assert all(cases.same(parts[0][key], parts[1][key]) for key in parts[0])


@pytest.mark.parametrize("level", cases.LEVELS)
def test_training_is_the_same_with_every_plain_form(level, monkeypatch):
    def result():
        made = cases.prepared(level, cases.OPTIMIZERS["SGD"])
        losses = [cases.train_step(*made, x, y) for x, y in cases.batches(4, overflow_at={1})]
        return losses, cases.masters(made[1]), dict(amp.state_dict())

    expected = result()
    for (module, name), plain in PLAIN.items():
        monkeypatch.setattr(module, name, plain)
    assert cases.same(result(), expected)


# -- copies between devices ------------------------------------------------------------------


COPIES = "apex/_torch/copies.py"


def others_than_copies():
    return [f for f in files() if f.relative_to(SOURCES).as_posix() != COPIES]


def starts_copy(node):
    if not isinstance(node, ast.Call):
        return False
    named = any(keyword.arg == "non_blocking" for keyword in node.keywords)
    is_copy = isinstance(node.func, ast.Attribute) and node.func.attr == "copy_"
    return named or (is_copy and len(node.args) > 1)


def test_only_the_copies_module_starts_a_copy_that_nobody_waits_for():
    """A scan of the sources, see Note [Copies]: elsewhere such a copy would be read too early."""
    found = [
        f"{file.relative_to(SOURCES)}:{node.lineno}"
        for file in others_than_copies()
        for node in filter(starts_copy, ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    ]
    assert found == [], "use apex._torch.copies: moved, or HostCopy"


def test_the_copies_module_alone_records_events():
    """``Event.record()`` takes the stream of the thread's current device, not of the event's."""
    found = [f for f in others_than_copies() if "torch.Event(" in f.read_text(encoding="utf-8")]
    assert found == [], "use apex._torch.copies.record"
