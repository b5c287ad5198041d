"""Private names of torch that the sources use: each is known, in one place, and has a reason."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import apex
from apex import amp
from apex._torch import private
from tests.training import cases

SOURCES = Path(apex.__file__).parents[1]
KINDS = (nn.Module, torch.optim.Optimizer, torch.Tensor, torch.optim.Adam, torch.library.Library)
THEIRS = {
    name for kind in KINDS for name in dir(kind) if name[0] == "_" and not name.startswith("__")
}


def files():
    return [f for top in ("apex", "amp_C", "apex_C") for f in sorted((SOURCES / top).rglob("*.py"))]


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

PLACE = "apex/_torch/private.py"
TRACING = "apex/_torch/dynamo.py"
MULTI = "apex/_core/foreach/"
DISPATCHER = "apex/_torch/dispatcher.py"
DEBUG = "apex/debug/"
TOOLS = "apex/tools/"
GRAD_SCALER = "GradScaler's own interface to optimizers: called by it, or read from it"
NO_PLAIN_FORM = "op casts stand on it: without it there are none to fall back to"
FUSED = "only where has_fused finds its kernel; the foreach form is the plain one"
FUNCTION_MODES = "a mode's own block cannot be ended twice, which an interrupt asks for"
TOOL = "a tool for diagnosis, outside of training"

KNOWN = {
    "torch._C": (
        f"{PLACE} {TRACING} {DISPATCHER} {DEBUG}",
        "the module itself",
    ),
    "torch._C._dispatch_has_kernel": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._dispatch_has_kernel_for_dispatch_key": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._dispatch_keyset_full_after": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._dispatch_tls_set_dispatch_key_excluded": (DISPATCHER, NO_PLAIN_FORM),
    "torch._C._len_torch_function_stack": (PLACE, FUNCTION_MODES),
    "torch.overrides._push_mode": (PLACE, FUNCTION_MODES),
    "torch.overrides._pop_mode": (PLACE, FUNCTION_MODES),
    "torch._C._autograd": (DEBUG, TOOL),
    "torch._utils": (PLACE, "plain_flatten, plain_unflatten"),
    "torch._disable_dynamo": (TRACING, "the plain form of what tracing does faster"),
    "torch._guards": (TRACING, "asked only where dynamo is loaded"),
    "torch._fused_adagrad_": (f"{MULTI}adagrad.py", FUSED),
    "torch._fused_adam_": (f"{MULTI}adam.py", FUSED),
    "torch._fused_adamw_": (f"{MULTI}adam.py", FUSED),
    "torch._fused_sgd_": (f"{MULTI}sgd.py", FUSED),
    "torch._weight_norm": (
        "apex/reparameterization/weight_norm.py",
        "torch.nn.utils.weight_norm itself calls it; old checkpoints depend on its formula",
    ),
    "torch.nn.modules.batchnorm._BatchNorm": (
        "apex/_engine/model/selection.py apex/fp16_utils/fp16util.py "
        "apex/parallel/convert_syncbn.py apex/parallel/optimized_sync_batchnorm.py "
        f"{DEBUG}",
        "the common class of batch norms, in torch since 0.2; scripts test for it by this name",
    ),
    "torch.utils._python_dispatch._get_current_dispatch_mode": (DEBUG, TOOL),
    "torch._ops": (DEBUG, TOOL),
    "._FrameAction": (TRACING, "of dynamo's eval_frame; without it torch._disable_dynamo"),
    "._FrameExecStrategy": (TRACING, "of dynamo's eval_frame; without it torch._disable_dynamo"),
    "._apply": (
        "apex/_engine/model/module_class.py apex/reparameterization/apply.py",
        "the method under Module.to and .cuda: overridden as subclasses in torch do",
    ),
    "._backward_hooks": ("apex/_engine/model/sharding.py", "hooks that torch keeps nowhere else"),
    "._base": ("apex/_engine/autocast/kernels.py", "an attribute of our own class"),
    "._cdata": (DEBUG, TOOL),
    "._check_inf_per_device": ("apex/optimizers/fused_optimizer.py", GRAD_SCALER),
    "._destroy": (
        DISPATCHER,
        "torch.library's only way to end a registration",
    ),
    "._execution_engine": (
        "apex/parallel/delayed_reduction.py",
        "queue_callback of Variable: how torch's own DDP and FSDP end a backward pass",
    ),
    "._get_scale_async": ("apex/optimizers/fused_optimizer.py", GRAD_SCALER),
    "._getframe": (DEBUG, "of Python's sys"),
    "._load_from_state_dict": (
        "apex/_engine/model/module_class.py",
        "the documented place for subclasses to change what is loaded",
    ),
    "._overloadpacket": (DEBUG, TOOL),
    "._patch_step_function": (
        "apex/_engine/optimizer/optimizer_class.py",
        "gives an unpickled optimizer's class the step hooks, as Optimizer.__setstate__ does",
    ),
    "._per_optimizer_states": ("apex/optimizers/fused_optimizer.py", GRAD_SCALER),
    "._replace": ("apex/fp16_utils/host_scale.py", "of Python's named tuples"),
    "._schema": (
        f"{DISPATCHER} {DEBUG}",
        "an operator's schema; torch.library documents it as the way to read one",
    ),
    "._sequence_nr": (DEBUG, TOOL),
    "._to_copy": (DEBUG, "a name of torch.ops.aten"),
    "._unsafe_view": (DEBUG, "a name of torch.ops.aten"),
    "._values": (
        f"apex/_core/finite.py apex/_engine/scaler.py {DEBUG}",
        "the values of a sparse gradient to write into: Tensor.values() gives a copy's",
    ),
    "._version": (
        "apex/_engine/optimizer/binding.py",
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
        f"files use belongs into {PLACE}, with a plain form for a torch that lacks it."
    )


def test_the_reasons_are_given():
    assert all(len(reason) > 5 for _, reason in KNOWN.values())


# -- the plain forms are forced --------------------------------------------------------------

PLAIN = {
    "check_and_unscale_": private.plain_check_and_unscale_,
    "update_scale_": private.plain_update_scale_,
    "group": private.plain_group,
    "flatten": private.plain_flatten,
    "unflatten": private.plain_unflatten,
    "backward_id": private._not_in_backward,
}


def test_each_name_that_may_be_missing_has_a_plain_form():
    without = private._found(object(), "_anything", PLAIN["group"])
    assert without is PLAIN["group"]
    chosen = [name for name in PLAIN if getattr(private, name) is PLAIN[name]]
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
    private.check_and_unscale_(grads, flags[0], inverse)
    private.plain_check_and_unscale_(copies, flags[1], inverse)
    assert cases.same(copies, grads)
    assert flags[0] == flags[1] == (bad is not None)


@pytest.mark.parametrize("overflow", [0.0, 1.0])
@pytest.mark.parametrize("start", [(2.0**16, 0), (8.0, 2), (torch.finfo(torch.float32).max, 2)])
def test_plain_scale_update_is_torch_s(overflow, start):
    results = []
    for update in (private.update_scale_, private.plain_update_scale_):
        scale, steps = torch.tensor(start[0]), torch.tensor(start[1], dtype=torch.int32)
        update(scale, steps, torch.tensor(overflow), 2.0, 0.5, 3)
        results.append((scale, steps))
    assert cases.same(*results)


def test_plain_groups_flattening_and_views_are_torch_s():
    tensors = [torch.randn(2, 3), torch.randn(4).half(), torch.randn(1), torch.randn(()).half()]
    pairs = [tensors, [tensor + 1 for tensor in tensors]]
    groups = [make(pairs) for make in (private.group, private.plain_group)]
    parts = [{key: value[0] for key, value in group.items()} for group in groups]
    assert parts[0].keys() == parts[1].keys()
    assert all(cases.same(parts[0][key], parts[1][key]) for key in parts[0])
    same = tensors[::2]
    flat = private.plain_flatten(same)
    assert cases.same(flat, private.flatten(same))
    views = private.plain_unflatten(flat, same)
    assert cases.same(list(views), list(private.unflatten(flat, same)))
    assert all(view.untyped_storage().data_ptr() == flat.data_ptr() for view in views)


@pytest.mark.parametrize("level", cases.LEVELS)
def test_training_is_the_same_with_every_plain_form(level, monkeypatch):
    def result():
        made = cases.prepared(level, cases.OPTIMIZERS["SGD"])
        losses = [cases.train_step(*made, x, y) for x, y in cases.batches(4, overflow_at={1})]
        return losses, cases.masters(made[1]), dict(amp.state_dict())

    expected = result()
    for name, plain in PLAIN.items():
        monkeypatch.setattr(private, name, plain)
    assert cases.same(result(), expected)
