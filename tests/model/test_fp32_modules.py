"""Modules that stay in fp32 inside a 16-bit model."""

import pytest
import torch
from torch import nn

from tests.model.nets import LOW, Tied, converted, dtypes_of, x


def kept(model, *rules, level="O5"):
    return converted(model, level, fp32_modules=rules)


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


def fp32_names(model):
    return {name for name, dtype in dtypes_of(model).items() if dtype is torch.float32}


def test_a_type_keeps_all_its_modules():
    model = kept(Two(), nn.LayerNorm)
    assert len(fp32_names(model)) == 8
    assert all(".norm." in name or ".inner.1." in name for name in fp32_names(model))


def test_a_pattern_keeps_the_modules_it_names_and_all_below():
    model = kept(Two(), "two*")
    assert fp32_names(model) == {f"two.{name}" for name, _ in Block().named_parameters()}


def test_inputs_go_up_and_outputs_back_down():
    model = kept(Two(), "two")
    outputs = []
    model.two.register_forward_hook(lambda m, args, out: outputs.append(out.dtype))
    model(x())
    assert model.one.seen == [(LOW, None)]
    assert model.two.seen == [(torch.float32, torch.float32)]
    assert outputs == [LOW]


def test_batch_norm_rule_and_fp32_modules_add_up():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Linear(3, 3))
    kept(model, nn.LayerNorm)
    assert model[0].weight.dtype is model[1].weight.dtype is torch.float32
    assert not model[0]._forward_hooks
    assert model(x()).dtype is torch.float32


NO_MODULES = [
    ("two.nrom", r"'two\.nrom', which matches no submodule.*two\.norm"),
    (nn.InstanceNorm1d, r"InstanceNorm1d, which matches no submodule.*LayerNorm"),
    (3, r"3, which matches no submodule\. Available: "),
    (nn.ReLU(), r"ReLU\(\), which matches no submodule\. Available: "),
]


@pytest.mark.parametrize(("rule", "words"), NO_MODULES)
def test_what_matches_nothing_is_refused_with_close_names(rule, words):
    model = Two()
    with pytest.raises(ValueError, match=words):
        kept(model, rule)
    assert type(model) is Two


def test_a_match_in_another_model_of_the_call_is_enough():
    one, other = kept([nn.Linear(1, 1), Two()], "two")
    assert one.weight.dtype is LOW
    assert other.two.norm.weight.dtype is torch.float32


def test_a_tensor_shared_by_fp32_modules_is_kept():
    model = Tied()
    kept(model, "head", "embed")
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype is torch.float32
    assert model(torch.tensor([1])).dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_at_levels_that_cast_no_weights_they_are_refused(level):
    with pytest.raises(ValueError, match="O2, O3 or O5"):
        kept(Two(), "two", level=level)


def test_only_the_topmost_matching_module_casts():
    model = kept(Two(), "two", nn.LayerNorm)
    assert len(model.two._forward_hooks) == 1
    assert not model.two.norm._forward_hooks
    assert len(model.one.norm._forward_hooks) == 1
