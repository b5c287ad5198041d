"""Every name that apex's own modules define is at its path, or its error says what to use.

``support/reference/apex_names.json`` lists them: facts read from NVIDIA/apex at e13873d
(reparameterization at the last commit that has it), with parameters in order. Left out are names
with a leading underscore and ``parallel.multiproc``, whose import started processes.
"""

import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch

from apex import _unavailable, fp16_utils, optimizers
from apex.amp import handle
from apex.contrib import optimizers as contrib
from apex.normalization import fused_layer_norm
from apex.parallel import LARC

NAMES = json.loads((Path(__file__).parents[1] / "support/reference/apex_names.json").read_text())

DELEGATED = ["zero_grad", "state_dict", "load_state_dict", "add_param_group"]
"""Methods that wrappers of optimizers look up in their optimizer, without one of their own."""

WRAPPERS = ["apex.amp.opt.OptimWrapper", "apex.parallel.LARC.LARC"]


@pytest.fixture(autouse=True)
def installed():
    """``import apex`` does this."""
    _unavailable.install()


def fault(entry):
    """Returns what is wrong with a name, or an empty string."""
    path = f"{entry['module']}.{entry['name']}"
    try:
        owner, found = None, importlib.import_module(entry["module"])
        for part in entry["name"].split("."):
            owner, found = found, getattr(found, part)
    except (ImportError, AttributeError) as error:
        text = str(error)
        helps = entry["module"] in text and ("use " in text or "Use " in text)
        return "" if helps else f"{path} is missing: {text}"
    if "parameters" not in entry:
        return ""
    given = parameters(owner, found, entry)
    # Our steps take grad_scaler by keyword: GradScaler passes itself to a step that names it, and
    # warns.
    wanted = [name for name in entry["parameters"] if name != "grad_scaler"]
    return "" if given[: len(wanted)] == wanted else f"{path} takes {given}, not {wanted}"


def parameters(owner, found, entry):
    """Returns the parameters' names in the data's form, without ``self``."""
    named = []
    for each in inspect.signature(found).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(n.startswith("*") for n in named):
            named.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        named.append(stars + each.name)
    bound = entry["kind"] == "method" and not isinstance(
        inspect.getattr_static(owner, entry["name"].rpartition(".")[2]), staticmethod | classmethod
    )
    return named[1:] if bound else named


def test_every_name_of_the_original_is_at_its_path_or_says_what_to_use():
    assert len(NAMES) > 300
    paths = {f"{entry['module']}.{entry['name']}": entry for entry in NAMES}
    for wrapper in WRAPPERS:
        for name in DELEGATED:
            del paths[f"{wrapper}.{name}"]
    faults = {path: text for path, entry in paths.items() if (text := fault(entry))}
    assert list(faults.values()) == []


@pytest.mark.parametrize("wrap", [LARC, handle.NoOpHandle().wrap_optimizer])
def test_a_wrapper_has_the_methods_of_its_optimizer(wrap):
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    wrapper = wrap(optimizer)
    for name in DELEGATED:
        assert getattr(wrapper, name) == getattr(optimizer, name)


# -- names that are not here -------------------------------------------------------------------


def test_import_and_find_spec_say_what_to_use_instead():
    for name in _unavailable.INSTEAD:
        for find in (importlib.import_module, importlib.util.find_spec):
            with pytest.raises(ModuleNotFoundError) as raised:
                find(name)
            instead = _unavailable.INSTEAD[name]
            assert str(raised.value) == f"{name} is not part of this apex: use {instead}."


def test_imports_of_what_is_inside_say_it_too():
    with pytest.raises(ImportError, match="scaled_dot_product_attention"):
        from apex.contrib.multihead_attn import SelfMultiheadAttn  # noqa: F401
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


DEFAULTS = [
    (optimizers.FusedAdam, {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}),
    (optimizers.FusedLAMB, {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}),
    (contrib.FusedAdam, {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}),
    (optimizers.FusedNovoGrad, {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}),
    (optimizers.FusedSGD, {"momentum": 0.0, "weight_decay": 0.0, "set_grad_none": False}),
    (optimizers.FusedAdagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    (LARC, {"trust_coefficient": 0.02, "clip": True, "eps": 1e-8}),
    (fp16_utils.DynamicLossScaler, {"init_scale": 2.0**32, "scale_window": 1000}),
    (fused_layer_norm.fused_layer_norm_affine, {"eps": 1e-6}),
]


@pytest.mark.parametrize(("function", "expected"), DEFAULTS)
def test_defaults_are_the_original_s(function, expected):
    params = inspect.signature(function).parameters
    assert {name: params[name].default for name in expected} == expected
