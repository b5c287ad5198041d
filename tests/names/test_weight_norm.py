"""apex.reparameterization: values, names, state dicts, removal."""

import copy
import pickle

import pytest
import torch
from torch import nn

from apex import reparameterization
from apex.reparameterization import apply_weight_norm, remove_weight_norm


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
    remove_weight_norm(model, "2.weight", remove_all=True)  # of the module itself alone
    assert hasattr(model[2], "weight_g")
    remove_weight_norm(model, "2.weight")
    assert type(model[2]) is nn.Linear
    assert hasattr(model[0], "weight_g")
    remove_weight_norm(model)
    assert model.state_dict().keys() == net().state_dict().keys()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), before)
    assert model[0].weight.is_leaf
    assert not model[0]._load_state_dict_pre_hooks
    cell = remove_weight_norm(apply_weight_norm(nn.LSTMCell(3, 4)), "weight_ih")
    assert not hasattr(cell, "weight_ih_g")
    assert hasattr(cell, "weight_hh_g")
    frozen = remove_weight_norm(apply_weight_norm(nn.Linear(4, 3).requires_grad_(False)))
    assert isinstance(frozen.weight, nn.Parameter)
    assert not frozen.weight.requires_grad
    assert apply_weight_norm(frozen).weight_g.shape == (3, 1)
    with torch.no_grad():
        assert remove_weight_norm(apply_weight_norm(nn.Linear(4, 3))).weight.requires_grad


def test_other_parametrizations_stay():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), *net())
    assert apply_weight_norm(apply_weight_norm(model)) is model
    assert len(model[1].state_dict()) == 3
    remove_weight_norm(model)
    assert [name for name, _ in model.named_parameters() if "original" in name] == [
        "0.parametrizations.weight.original"
    ]


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


def test_rules_of_users_are_refused_with_what_to_use():
    with pytest.raises(AttributeError, match="register_parametrization"):
        _ = reparameterization.Reparameterization
    with pytest.raises(AttributeError, match="register_parametrization"):
        _ = reparameterization.weight_norm
    with pytest.raises(ImportError, match="register_parametrization"):
        from apex.reparameterization import Reparameterization  # noqa: F401


BAD_ARGUMENTS = [
    (ValueError, r"no parameter 'kernel'; it has \['weight', 'bias'\]",
     lambda: apply_weight_norm(nn.Linear(4, 3), "kernel")),
    (ValueError, "already",
     lambda: apply_weight_norm(apply_weight_norm(nn.Linear(4, 3)), "weight")),
    (TypeError, r"apply_weight_norm got .*a torch\.nn\.Module",
     lambda: apply_weight_norm(None)),
    (TypeError, r"remove_weight_norm got .*a torch\.nn\.Module",
     lambda: remove_weight_norm(None)),
    (ValueError, "'weight' has no weight norm",
     lambda: remove_weight_norm(nn.Linear(4, 3), "weight")),
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
