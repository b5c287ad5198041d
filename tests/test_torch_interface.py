"""Private names of torch that the sources use: each is known, in one place, and has a reason."""

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
        place = next((folder for folder in (DEBUG, TOOLS) if path.startswith(folder)), path)
        for name in used(tree, own):
            found[name].add(place)
    return found


# torch documents them ("Foreach Functions" of docs/torch.html, torch.nn.modules.batchnorm's base
# class in the docs of SyncBatchNorm, TorchDispatchMode in "Extending PyTorch").
DOCUMENTED = ("torch._foreach_", "torch.ops.aten._foreach_", "torch.utils._python_dispatch.Torch")

AUTOGRAD = "apex/_torch/autograd.py"
FOREACH = "apex/_torch/foreach.py"
GRAD_SCALERS = "apex/_torch/grad_scaler.py"
TRACING = "apex/_torch/dynamo.py"
OVERRIDES = "apex/_torch/overrides.py"
FUNCTION_MODES_PLACE = "apex/_torch/function_modes.py"
DISPATCHER = "apex/_torch/dispatcher.py"
DISPATCH_MODES = "apex/_torch/dispatch_modes.py"
MODULES = "apex/_torch/modules.py"
DEBUG = "apex/debug/"
TOOLS = "apex/tools/"
GRAD_SCALER = "GradScaler's own interface to optimizers: called by it, or read from it"
NO_PLAIN_FORM = "op casts stand on it: without it there are none to fall back to"
FUSED = "only where has_fused finds its kernel; the foreach form is the plain one"
FUNCTION_MODES = "a mode's own block cannot be ended twice, which an interrupt asks for"
TOOL = "a tool for diagnosis, outside of training"

HOOKS = "where a module keeps its hooks: asked so that none of ours is attached twice"

KNOWN = {
    "torch._C": (
        f"{FUNCTION_MODES_PLACE} {AUTOGRAD} {TRACING} {DISPATCHER} {OVERRIDES} "
        f"{DISPATCH_MODES} {DEBUG}",
        "the module itself; DisableTorchFunctionSubclass is in torch's notes on extending it",
    ),
    "torch._C._dispatch_has_kernel": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._dispatch_has_kernel_for_dispatch_key": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._dispatch_keyset_full_after": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._dispatch_tls_set_dispatch_key_excluded": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._get_dispatch_mode": (
        DISPATCH_MODES,
        "traces let operators on fake tensors pass, with which DTensor computes shapes",
    ),
    "torch._C._TorchDispatchModeKey": (DISPATCH_MODES, "the argument of _get_dispatch_mode"),
    "torch._C._len_torch_function_stack": (FUNCTION_MODES_PLACE, FUNCTION_MODES),
    "torch._C._pop_torch_function_stack": (FUNCTION_MODES_PLACE, FUNCTION_MODES),
    "torch._C._push_on_torch_function_stack": (FUNCTION_MODES_PLACE, FUNCTION_MODES),
    "torch._C._autograd": (DEBUG, TOOL),
    "torch._dynamo.config": (TRACING, "before torch 2.8 it lists the classes that are traced"),
    "torch._functorch.config": (TRACING, "turns a look off that refuses subclasses, from 2.13 on"),
    "torch._guards": (TRACING, "asked only where dynamo is loaded"),
    "torch._fused_adagrad_": (FOREACH, FUSED),
    "torch._fused_adam_": (FOREACH, FUSED),
    "torch._neg_view": (DEBUG, TOOL),
    "torch._fused_adamw_": (FOREACH, FUSED),
    "torch._fused_sgd_": (FOREACH, FUSED),
    "torch._weight_norm": (
        "apex/reparameterization/weight_norm.py",
        "torch.nn.utils.weight_norm itself calls it; old checkpoints depend on its formula",
    ),
    "torch.nn.modules.batchnorm._BatchNorm": (
        "apex/_engine/model/plan.py apex/_engine/model/writes.py apex/fp16_utils/fp16util.py "
        "apex/parallel/convert_syncbn.py apex/parallel/optimized_sync_batchnorm.py "
        f"{DEBUG}",
        "the common class of batch norms, in torch since 0.2; scripts test for it by this name",
    ),
    "torch.utils._python_dispatch._get_current_dispatch_mode": (
        DISPATCH_MODES,
        "a mode is popped only if it is the innermost one, so that an interrupt leaves none",
    ),
    "torch._ops": (DEBUG, TOOL),
    "._FrameAction": (TRACING, "of dynamo's eval_frame; before torch 2.8 skip_code of it"),
    "._FrameExecStrategy": (TRACING, "of dynamo's eval_frame; before torch 2.8 skip_code of it"),
    "._apply": (
        "apex/_engine/model/module_class.py",
        "the method under Module.to and .cuda: overridden as subclasses in torch do",
    ),
    "._backward_hooks": ("apex/_engine/model/sharding.py", "hooks that torch keeps nowhere else"),
    "._base": ("apex/_engine/autocast/kernels.py", "an attribute of our own class"),
    "._check_inf_per_device": (GRAD_SCALERS, GRAD_SCALER),
    "._destroy": (
        DISPATCHER,
        "torch.library's only way to end a registration",
    ),
    "._execution_engine": (
        "apex/parallel/delayed_reduction.py",
        "queue_callback of Variable: how torch's own DDP and FSDP end a backward pass",
    ),
    "._forward_pre_hooks": ("apex/_engine/model/state.py", HOOKS),
    "._get_scale_async": (GRAD_SCALERS, GRAD_SCALER),
    "._getframe": (
        f"{DEBUG} apex/_engine/mistakes.py apex/_unavailable.py {MODULES}",
        "of Python's sys",
    ),
    "._op": (DISPATCHER, "an overload's callable, 0.2 us faster than the overload itself"),
    "._overloadpacket": (DEBUG, TOOL),
    "._patch_step_function": (
        "apex/_engine/optimizer/optimizer_class.py",
        "gives an unpickled optimizer's class the step hooks, as Optimizer.__setstate__ does",
    ),
    "._per_optimizer_states": (GRAD_SCALERS, GRAD_SCALER),
    "._schema": (
        f"{DISPATCH_MODES} {DISPATCHER} {DEBUG}",
        "an operator's schema; torch.library documents it as the way to read one",
    ),
    "._sequence_nr": (DEBUG, TOOL),
    "._is_zerotensor": (
        "apex/_torch/sparse.py",
        "whether reading a gradient's memory would fail: autograd's zeros have none",
    ),
    "._spec": ("apex/_torch/dtensor.py", "a DTensor's layout, for another with the same one"),
    "._to_copy": (DEBUG, "a name of torch.ops.aten"),
    "._unsafe_view": (DEBUG, "a name of torch.ops.aten"),
    "._state_dict_hooks": (MODULES, "whether a module has amp's hook already"),
    "._values": (
        "apex/_torch/sparse.py",
        "the values of a sparse gradient to write into: Tensor.values() wants it coalesced",
    ),
    "._version": (
        "apex/_engine/masters.py apex/_engine/mistakes.py apex/_engine/session.py "
        "apex/_engine/model/state_dict.py apex/_engine/model/writes.py",
        "autograd's count of in-place writes, in the docs of torch.autograd",
    ),
}


def test_every_private_name_of_torch_is_known_with_its_places_and_a_reason():
    found = {
        name: " ".join(sorted(where))
        for name, where in scan().items()
        if not name.startswith(DOCUMENTED)
    }
    listed = {name: " ".join(sorted(where.split())) for name, (where, _) in KNOWN.items()}
    new = [f"{n}: {where}" for n, where in sorted(found.items()) if listed.get(n) != where]
    gone = [f"{n}: {where}" for n, where in sorted(listed.items()) if found.get(n) != where]
    assert not new + gone, (
        f"Private names of torch, as used: {new}; as listed in KNOWN: {gone}. A name that several "
        f"files use belongs into apex/_torch, with a plain form for a torch that lacks it."
    )


def test_the_reasons_are_given():
    assert all(len(reason) > 5 for _, reason in KNOWN.values())


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
