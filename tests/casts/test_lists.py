"""``amp.lists``, which scripts change before ``amp.initialize``."""

import importlib

import pytest
import torch
from torch import nn

import apex.amp as amp
from tests.support.loops import every, prepared

NAMESPACES = {
    "functional_overrides": nn.functional,
    "torch_overrides": torch,
    "tensor_overrides": torch.Tensor,
}
LISTS = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS")
BANNED = "BANNED_FUNCS"


@pytest.fixture
def lists(monkeypatch):
    """``amp.lists``, put back afterwards."""
    for module in (getattr(amp.lists, namespace) for namespace in NAMESPACES):
        for kind in (*LISTS, BANNED):
            if kind in vars(module):
                monkeypatch.setattr(module, kind, list(getattr(module, kind)))
            else:
                monkeypatch.setattr(module, kind, None, raising=False)
                monkeypatch.delattr(module, kind)
    return amp.lists


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_lists_are_mutable_lists_with_their_module(lists, namespace):
    module = importlib.import_module(f"apex.amp.lists.{namespace}")
    assert module is getattr(lists, namespace)
    assert module.MODULE is NAMESPACES[namespace]
    assert all(type(getattr(module, kind)) is list for kind in LISTS)


def test_the_lists_hold_apex_s_names(lists):
    assert "linear" in lists.functional_overrides.FP16_FUNCS
    assert "softmax" in lists.functional_overrides.FP32_FUNCS
    assert "mm" in lists.torch_overrides.FP16_FUNCS
    assert lists.torch_overrides.SEQUENCE_CASTS == ["cat", "stack"]
    assert "__matmul__" in lists.tensor_overrides.FP16_FUNCS
    assert [name for name, _ in lists.functional_overrides.BANNED_FUNCS] == ["binary_cross_entropy"]


def test_a_script_may_ban_a_function_of_another_namespace(lists):
    lists.torch_overrides.BANNED_FUNCS = [("exp", "")]
    _keep = prepared("O1")
    with pytest.raises(NotImplementedError, match="exp"):
        torch.exp(torch.ones(1, dtype=torch.float16))


def dtype_of(function, *shape):
    low = torch.ones(*shape, dtype=torch.bfloat16)
    return function(low).dtype


def test_a_name_removed_before_initialize_is_not_cast(lists):
    lists.functional_overrides.FP32_FUNCS.remove("softmax")
    _keep = prepared("O4")
    assert dtype_of(lambda x: nn.functional.softmax(x, -1), 3) is torch.bfloat16
    assert dtype_of(lambda x: nn.functional.log_softmax(x, -1), 3) is torch.float32


def test_a_method_removed_before_initialize_works_in_place(lists):
    lists.tensor_overrides.FP32_FUNCS.remove("__ipow__")
    _keep = prepared("O4")
    x = low = torch.ones(2, dtype=torch.bfloat16)
    x **= 2
    assert x is low


def test_a_list_may_be_replaced_as_a_whole(lists):
    lists.torch_overrides.FP32_FUNCS = ["exp"]
    _keep = prepared("O4")
    assert (dtype_of(torch.exp, 1), dtype_of(torch.log, 1)) == (torch.float32, torch.bfloat16)


def test_a_name_that_no_operator_is_known_for_is_refused_with_the_remedy(lists):
    lists.torch_overrides.FP32_FUNCS.append("frobnicate")
    with pytest.raises(ValueError, match=r"torch\.frobnicate.*amp\.register_float_function"):
        prepared("O4")


@every(entry=[torch.exp, None, 3, ()], name=["FP32_FUNCS", "BANNED_FUNCS"])
def test_what_is_no_name_is_refused(lists, name, entry):
    setattr(lists.torch_overrides, name, [entry])
    with pytest.raises(TypeError, match=r"amp\.lists holds .*; it takes names of functions"):
        prepared("O4")


def test_lists_changed_after_initialize_change_nothing(lists):
    _keep = prepared("O4")
    lists.functional_overrides.FP32_FUNCS.remove("softmax")
    assert dtype_of(lambda x: nn.functional.softmax(x, -1), 3) is torch.float32


def test_an_emptied_banned_list_bans_nothing(lists):
    lists.functional_overrides.BANNED_FUNCS.clear()
    _keep = prepared("O1")
    half = torch.full((2,), 0.5, dtype=torch.float16)
    assert torch.isfinite(nn.functional.binary_cross_entropy(half, half))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_operator_that_was_listed_once_takes_numbers_in_later_sessions(lists, level):
    lists.torch_overrides.FP32_FUNCS.append("add")
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level=level, verbosity=0)
    low = torch.float16 if level == "O1" else torch.bfloat16
    assert torch.add(torch.ones(2, dtype=low), 1.0).dtype is torch.float32
    amp.restore(model)
    lists.torch_overrides.FP32_FUNCS.remove("add")
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level=level, verbosity=0)
    for x in (torch.ones(2).to(low), torch.ones(()).to(low), torch.ones(2, dtype=torch.int64)):
        with amp.disable_casts():
            plain = torch.add(x, 1.5).dtype
        assert torch.add(x, 1.5).dtype is plain
    amp.restore(model)
