import pytest
import torch
from torch import nn

from apex._engine.model import ModelPlan, check, convert, restore
from tests._engine.conversion_cases import LOW, O1, PlainRegion, Tied, converted, dtypes_of, x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.seen = []

    def forward(self, given, *, extra=None):
        self.seen.append((given.dtype, None if extra is None else extra["e"].dtype))
        return self.inner(self.norm(given))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Block()
        self.two = Block()

    def forward(self, given):
        middle = self.one(given)
        return middle, self.two(middle, extra={"e": middle})


def plan(*rules, **kwargs):
    return ModelPlan(LOW, LOW, torch.float32, fp32_modules=rules, **kwargs)


def fp32_names(model):
    return {name for name, dtype in dtypes_of(model).items() if dtype is torch.float32}


def test_a_type_keeps_all_its_modules():
    model = converted(Two(), plan(nn.LayerNorm))
    assert len(fp32_names(model)) == 8
    assert all(".norm." in name or ".inner.1." in name for name in fp32_names(model))


def test_a_pattern_keeps_the_modules_it_names_and_all_below():
    model = converted(Two(), plan("two*"))
    assert fp32_names(model) == {f"two.{name}" for name, _ in Block().named_parameters()}


def test_inputs_go_up_and_outputs_back_down():
    model = converted(Two(), plan("two"))
    outputs = []
    model.two.register_forward_hook(lambda m, args, out: outputs.append(out.dtype))
    model(x())
    assert model.one.seen == [(LOW, None)]
    assert model.two.seen == [(torch.float32, torch.float32)]
    assert outputs == [LOW]


def test_only_the_topmost_matching_module_casts():
    model = converted(Two(), plan("two", nn.LayerNorm))
    assert len(model.two._forward_hooks) == 1
    assert not model.two.norm._forward_hooks
    assert len(model.one.norm._forward_hooks) == 1


def test_a_module_of_several_names_casts_once():
    shared = nn.LayerNorm(3)
    model = converted(nn.Sequential(shared, nn.Linear(3, 3), shared), plan(nn.LayerNorm))
    assert len(shared._forward_hooks) == 1
    assert model(x()).dtype is torch.float32


def test_any_name_of_a_shared_module_matches():
    shared = nn.LayerNorm(3)
    model = converted(nn.Sequential(shared, nn.Linear(3, 3), shared), plan("2"))
    assert model[0].weight.dtype is torch.float32


def test_batch_norm_rule_and_fp32_modules_add_up():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Linear(3, 3))
    converted(model, plan(nn.LayerNorm, keep_batchnorm_fp32=True))
    assert model[0].weight.dtype is model[1].weight.dtype is torch.float32
    assert not model[0]._forward_hooks
    assert model(x()).dtype is torch.float32


def test_gradients_flow_through():
    model = converted(Two(), plan("two"))
    model(x())[1].square().sum().backward()
    assert model.two.norm.weight.grad.dtype is torch.float32
    assert model.one.norm.weight.grad.dtype is LOW


def test_restore_removes_the_hooks():
    model = converted(Two(), plan("two"))
    restore(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs


def test_a_pattern_that_matches_nothing_is_refused_with_close_names():
    with pytest.raises(ValueError, match=r"'two\.nrom', which matches no submodule.*two\.norm"):
        check(Two(), plan("two.nrom"))


def test_a_type_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"InstanceNorm1d, which matches no submodule.*LayerNorm"):
        check(Two(), plan(nn.InstanceNorm1d))


def test_the_model_itself_is_no_match():
    with pytest.raises(ValueError, match="Two, which matches no submodule"):
        check(Two(), plan(Two))


def test_a_match_in_another_model_of_the_call_is_enough():
    check(nn.Linear(1, 1), plan("two"), others=[Two()])


def test_a_convert_without_a_match_of_its_own_works():
    model = converted(nn.Linear(3, 1), plan("two"))
    assert model.weight.dtype is LOW


def test_a_tensor_shared_with_a_cast_module_is_refused():
    with pytest.raises(ValueError, match=r"head\.weight stays in fp32.*embed\.weight"):
        check(Tied(), plan("head"))


def test_a_tensor_shared_by_fp32_modules_is_kept():
    model = Tied()
    check(model, plan("head", "embed"))
    converted(model, plan("head", "embed"))
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype is torch.float32
    assert model(torch.tensor([1])).dtype is torch.float32


def test_unchecked_sharing_keeps_fp32():
    model = Tied()
    convert(model, plan("head"), PlainRegion())
    assert model.embed.weight.dtype is torch.float32


@pytest.mark.parametrize("param_dtype", [None, torch.float32])
def test_without_low_precision_parameters_the_plan_is_refused(param_dtype):
    with pytest.raises(ValueError, match="O2, O3 or O5"):
        ModelPlan(param_dtype, None, None, fp32_modules=("head",))


def test_a_single_string_is_refused():
    with pytest.raises(TypeError, match=r"fp32_modules=\('head',\)"):
        ModelPlan(LOW, LOW, None, fp32_modules="head")


@pytest.mark.parametrize("rule", [3, int, nn.Linear(1, 1)])
def test_other_rules_are_refused(rule):
    with pytest.raises(TypeError, match=r"module types.*and name patterns"):
        ModelPlan(LOW, LOW, None, fp32_modules=(rule,))


def test_plans_without_fp32_modules_attach_no_hooks():
    model = converted(Two(), O1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
