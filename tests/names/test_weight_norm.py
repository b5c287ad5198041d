"""apex.reparameterization: values, names, state dicts, removal, rules of users."""

import copy

import pytest
import torch
from torch import nn

from apex.reparameterization import (
    Reparameterization,
    WeightNorm,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def normalized(v, g, dim):
    over = [axis for axis in range(v.dim()) if axis != dim]
    return g * v / v.square().sum(over, keepdim=True).sqrt()


@pytest.mark.parametrize("dim", [0, 1, 2, -1, None])
def test_a_weight_is_magnitude_times_direction(dim):
    module = nn.Conv1d(3, 4, 2)
    before, axis = module.weight.detach().clone(), dim if dim is None else dim % 3
    assert apply_weight_norm(module, "weight", dim=dim) is module
    torch.testing.assert_close(module.weight, before)
    parts = [module.weight_v, module.weight_g]
    nn.init.normal_(module.weight_g)
    torch.testing.assert_close(module.weight, normalized(*parts, axis))
    grads = torch.autograd.grad(module.weight.square().sum(), parts)
    wanted = torch.autograd.grad(normalized(*parts, axis).square().sum(), parts)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)
    assert {id(part) for part in parts} <= {id(param) for param in module.parameters()}
    assert not hasattr(nn.Conv1d(3, 4, 2), "weight_g")


def test_it_is_torchs_weight_norm_of_every_matrix_but_embeddings():
    ours = nn.Linear(4, 3)
    torchs = nn.utils.parametrizations.weight_norm(copy.deepcopy(ours))
    x = torch.randn(2, 4)
    assert torch.equal(apply_weight_norm(ours, "weight")(x), torchs(x))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    model = apply_weight_norm(nn.Sequential(*net(), nn.Embedding(4, 3)))
    names = [name for name, _ in model.named_parameters() if "original" not in name]
    assert names == ["0.bias", "2.bias", "3.weight"]
    assert type(apply_weight_norm(nn.Linear(4, 3), "bias")) is nn.Linear
    cell, x = nn.LSTMCell(3, 4), torch.randn(2, 3)
    before = cell(x)[0]
    torch.testing.assert_close(apply_weight_norm(cell)(x)[0], before)


def test_removal_gives_plain_weights_with_the_values_of_now():
    model, x = apply_weight_norm(net()), torch.randn(2, 4)
    nn.init.normal_(model[0].weight_g)
    before = model(x)
    remove_weight_norm(model, remove_all=True)  # of the module itself alone
    remove_weight_norm(model, "2.weight")
    assert type(model[2]) is nn.Linear
    assert hasattr(model[0], "weight_g")
    remove_weight_norm(model)
    assert model.state_dict().keys() == net().state_dict().keys()
    assert torch.equal(model(x), before)
    assert model[0].weight.is_leaf
    cell = remove_weight_norm(apply_weight_norm(nn.LSTMCell(3, 4)), "weight_ih")
    assert not hasattr(cell, "weight_ih_g")
    assert hasattr(cell, "weight_hh_g")
    frozen = remove_weight_norm(apply_weight_norm(nn.Linear(4, 3).requires_grad_(False)))
    assert isinstance(frozen.weight, nn.Parameter)
    assert not frozen.weight.requires_grad
    assert apply_weight_norm(frozen).weight_g.shape == (3, 1)


def test_state_dicts_of_ours_and_of_apex_load_and_copies_are_apart():
    model, other, x = apply_weight_norm(net()), apply_weight_norm(net()), torch.randn(2, 4)
    nn.init.normal_(model[0].weight_g)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    v, g = torch.randn(3, 4), torch.rand(3, 1)
    state = {"0.weight_g": g, "0.weight_v": v, "0.bias": torch.zeros(3), "2.bias": torch.zeros(2)}
    model.load_state_dict(state | {"2.weight_g": torch.rand(2, 1), "2.weight_v": torch.randn(2, 3)})
    torch.testing.assert_close(model[0](x), x @ normalized(v, g, 0).T)
    twin, before = copy.deepcopy(model), model[0].weight.detach().clone()
    nn.init.zeros_(twin[0].weight_g)
    assert torch.equal(model[0].weight, before)
    assert not twin[0].weight.any()


class Doubled(Reparameterization):
    """As apex's users write them: names, parameters, and the weight that they give."""

    def compute_weight(self, module=None, name=None):
        names = module or self.module, name or self.name
        module, name = Reparameterization.get_module_and_name(*names)
        return getattr(module, name + "_half") * 2 + 0 * module.in_features

    def reparameterize(self, name, weight, dim):
        return [name + "_half"], [nn.Parameter(weight.data / 2)]


@pytest.mark.parametrize("hook_child", [True, False])
def test_rules_of_users_and_their_attributes(hook_child):
    model = net()
    before = model[2].weight.detach().clone()
    apply_reparameterization(model, Doubled, "2.weight", hook_child=hook_child)
    assert torch.equal(model[2].weight_half, before / 2)
    assert torch.equal(model[2].weight, before)
    remove_weight_norm(model)
    assert hasattr(model[2], "weight_half")
    remove_reparameterization(model, Doubled)
    assert type(model[2]) is nn.Linear
    rule = Reparameterization.apply(model, "0.weight", -2, WeightNorm, hook_child)
    assert (rule.name, rule.module) == (("weight", model[0]) if hook_child else ("0.weight", model))
    assert (rule.dim, rule.retain_forward) == (0, True)
    assert rule.reparameterization_names == ["weight_g", "weight_v"]
    assert rule.get_params(model[0])[0] is model[0].weight_g
    assert torch.equal(rule.compute_weight(model, "0.weight"), model[0].weight)
    rule.remove(rule.module)
    assert isinstance(model[0].weight, nn.Parameter)
    assert Reparameterization.apply(net(), "0.bias", 0, WeightNorm) is None


BAD_ARGUMENTS = [
    (ValueError, r"no parameter 'kernel'; it has \['weight', 'bias'\]",
     lambda: apply_weight_norm(nn.Linear(4, 3), "kernel")),
    (ValueError, "already",
     lambda: apply_weight_norm(apply_weight_norm(nn.Linear(4, 3)), "weight")),
    (TypeError, r"apply_reparameterization got .*a torch\.nn\.Module",
     lambda: apply_weight_norm(None)),
    (ValueError, "'weight' has no WeightNorm",
     lambda: remove_weight_norm(nn.Linear(4, 3), "weight")),
    (TypeError, "Pass a class such as WeightNorm",
     lambda: apply_reparameterization(nn.Linear(4, 3))),
    (NotImplementedError, "must define reparameterize",
     lambda: apply_reparameterization(nn.Linear(4, 3), Reparameterization, "weight")),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_a_refusal_leaves_every_module_as_it_was():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'1\.weight' has 2 dimensions, so dim=2 is out of range"):
        apply_weight_norm(model, dim=2)
    assert [type(module) for module in model] == [nn.Conv2d, nn.Linear]
    module = apply_weight_norm(nn.Linear(4, 3), "weight")
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Tanh(), unsafe=True)
    with pytest.raises(ValueError, match="parametrizations other than apex's"):
        remove_weight_norm(module, "weight")
