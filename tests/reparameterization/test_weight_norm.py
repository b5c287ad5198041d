"""Weight normalization by apex's functions: values, names, state dicts, removal."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.reparameterization import (
    Reparameterization,
    WeightNorm,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def normalized(v, g, dim):
    over = [axis for axis in range(v.dim()) if axis != dim]
    return g * v / v.square().sum(over, keepdim=True).sqrt()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, None])
def test_weight_is_magnitude_times_direction(dim, device):
    module = nn.Conv1d(3, 4, 2).to(device)
    before = module.weight.detach().clone()
    apply_weight_norm(module, "weight", dim=dim)
    torch.testing.assert_close(module.weight, before)
    nn.init.normal_(module.weight_g)
    nn.init.normal_(module.weight_v)
    axis = dim if dim is None else dim % 3
    torch.testing.assert_close(module.weight, normalized(module.weight_v, module.weight_g, axis))


def test_parts_have_apexs_names_and_shapes():
    module = apply_weight_norm(nn.Linear(20, 40), name="weight")
    assert module.weight_g.shape == (40, 1)
    assert module.weight_v.shape == (40, 20)


def test_parts_are_what_an_optimizer_trains():
    module = apply_weight_norm(nn.Linear(4, 3), "weight")
    params = list(module.parameters())
    assert len(params) == 3
    assert any(param is module.weight_g for param in params)
    assert any(param is module.weight_v for param in params)


def test_gradients_are_those_of_the_formula():
    module = apply_weight_norm(nn.Linear(4, 3, bias=False), "weight")
    x, parts = torch.randn(5, 4), [module.weight_v, module.weight_g]
    grads = torch.autograd.grad(module(x).square().sum(), parts)
    wanted = torch.autograd.grad((x @ normalized(*parts, 0).T).square().sum(), parts)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want)


def test_it_is_torchs_weight_norm():
    ours, torchs, x = nn.Linear(4, 3), None, torch.randn(2, 4)
    torchs = nn.utils.parametrizations.weight_norm(copy.deepcopy(ours))
    assert torch.equal(apply_weight_norm(ours, "weight")(x), torchs(x))
    assert list(ours.state_dict()) == list(torchs.state_dict())


def test_without_a_name_every_matrix_of_every_submodule_is_normalized():
    model = apply_weight_norm(net())
    names = [name for name, _ in model.named_parameters() if "original" not in name]
    assert names == ["0.bias", "2.bias"]
    assert "(0): _Computed(WeightNorm, dim=0)" in repr(model[0])
    assert not hasattr(model[0], "bias_g")


@pytest.mark.parametrize("hook_child", [True, False])
def test_a_name_with_dots_reaches_submodules(hook_child):
    model = apply_weight_norm(net(), "2.weight", hook_child=hook_child)
    assert hasattr(model[2], "weight_g")
    assert not hasattr(model[0], "weight_g")


def test_vectors_stay_as_they_are():
    module = apply_weight_norm(nn.Linear(4, 3), "bias")
    assert type(module) is nn.Linear


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_stay_as_they_are(kind):
    model = apply_weight_norm(nn.Sequential(kind(4, 3), nn.Linear(3, 3)))
    assert type(model[0]) is kind
    assert hasattr(model[1], "weight_g")


def test_recurrent_weights_are_normalized_by_name():
    cell, x = nn.LSTMCell(3, 4), torch.randn(2, 3)
    before = cell(x)[0]
    torch.testing.assert_close(apply_weight_norm(cell)(x)[0], before)
    assert cell.weight_hh_g.shape == (16, 1)


def test_the_original_class_is_left_alone():
    apply_weight_norm(nn.Linear(4, 3))
    assert not hasattr(nn.Linear(4, 3), "weight_g")


def test_remove_without_a_name_makes_all_plain_with_the_values_of_now():
    model, x = apply_weight_norm(net()), torch.randn(2, 4)
    nn.init.normal_(model[0].weight_g)
    before = model(x)
    remove_weight_norm(model)
    assert model.state_dict().keys() == net().state_dict().keys()
    assert type(model[0]) is nn.Linear
    assert torch.equal(model(x), before)
    assert model[0].weight.is_leaf


def test_remove_by_name_leaves_the_others():
    model = apply_weight_norm(net())
    remove_weight_norm(model, "0.weight")
    assert type(model[0]) is nn.Linear
    assert hasattr(model[2], "weight_g")


def test_remove_all_takes_the_module_itself_alone():
    model = apply_weight_norm(net())
    remove_weight_norm(model, remove_all=True)
    assert hasattr(model[0], "weight_g")
    remove_weight_norm(model[0], remove_all=True)
    assert type(model[0]) is nn.Linear


def test_one_of_two_weights_of_a_module_can_be_removed():
    cell = apply_weight_norm(nn.LSTMCell(3, 4))
    remove_weight_norm(cell, "weight_ih")
    assert not hasattr(cell, "weight_ih_g")
    assert hasattr(cell, "weight_hh_g")
    assert isinstance(cell.weight_ih, nn.Parameter)


def test_a_frozen_weight_comes_back_as_a_frozen_parameter():
    module = apply_weight_norm(nn.Linear(4, 3).requires_grad_(False))
    remove_weight_norm(module)
    assert isinstance(module.weight, nn.Parameter)
    assert not module.weight.requires_grad


def test_apply_after_remove_works():
    module = remove_weight_norm(apply_weight_norm(nn.Linear(4, 3)))
    assert apply_weight_norm(module).weight_g.shape == (3, 1)


def test_state_dict_saved_and_loaded_continues():
    model, other, x = apply_weight_norm(net()), apply_weight_norm(net()), torch.randn(2, 4)
    nn.init.normal_(model[0].weight_g)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_state_dict_with_apexs_names_loads():
    model, x = apply_weight_norm(net()), torch.randn(2, 4)
    v, g = torch.randn(3, 4), torch.rand(3, 1)
    state = {f"2.{name}": value for name, value in net()[2].state_dict().items() if name == "bias"}
    state |= {"0.weight_g": g, "0.weight_v": v, "0.bias": torch.zeros(3)}
    state |= {"2.weight_g": torch.rand(2, 1), "2.weight_v": torch.randn(2, 3)}
    model.load_state_dict(state)
    torch.testing.assert_close(model[0](x), x @ normalized(v, g, 0).T)


def test_state_dict_with_plain_weights_loads_after_removal_again():
    module = remove_weight_norm(apply_weight_norm(nn.Linear(4, 3)))
    plain = nn.Linear(4, 3)
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.weight, plain.weight)


def test_a_copy_has_its_own_parts():
    module = apply_weight_norm(nn.Linear(4, 3))
    twin, before = copy.deepcopy(module), module.weight.detach().clone()
    nn.init.zeros_(twin.weight_g)
    assert torch.equal(module.weight, before)
    assert not twin.weight.any()


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_normalized_models_train_under_amp(level):
    model = apply_weight_norm(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0
    )
    before = model[0].weight_g.detach().clone()
    with amp.scale_loss(model(torch.randn(5, 4)).float().square().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(model[0].weight_g, before)


class Doubled(Reparameterization):
    """As apex's users write them: names, parameters, and the weight that they give."""

    def compute_weight(self, module=None, name=None):
        if module is None:
            module = self.module
        if name is None:
            name = self.name
        module, name = Reparameterization.get_module_and_name(module, name)
        return getattr(module, name + "_half") * 2 + 0 * module.in_features

    def reparameterize(self, name, weight, dim):
        return [name + "_half"], [nn.Parameter(weight.data / 2)]


@pytest.mark.parametrize("hook_child", [True, False])
def test_own_reparameterizations_can_be_applied_and_removed(hook_child):
    model = net()
    before = model[2].weight.detach().clone()
    apply_reparameterization(model, Doubled, "2.weight", hook_child=hook_child)
    assert torch.equal(model[2].weight_half, before / 2)
    assert torch.equal(model[2].weight, before)
    remove_reparameterization(model, Doubled)
    assert type(model[2]) is nn.Linear


@pytest.mark.parametrize("hook_child", [True, False])
def test_a_rule_is_what_apply_returns_with_apexs_attributes(hook_child):
    model = net()
    before = model[0].weight.detach().clone()
    rule = Reparameterization.apply(model, "0.weight", -2, WeightNorm, hook_child)
    assert (rule.name, rule.module) == (("weight", model[0]) if hook_child else ("0.weight", model))
    assert (rule.dim, rule.retain_forward) == (0, True)
    assert rule.reparameterization_names == ["weight_g", "weight_v"]
    assert rule.get_params(model[0])[0] is model[0].weight_g
    nn.init.ones_(model[0].weight_g)
    assert torch.equal(rule.compute_weight(), model[0].weight)
    assert torch.equal(rule.compute_weight(model, "0.weight"), model[0].weight)
    rule.remove(rule.module)
    assert isinstance(model[0].weight, nn.Parameter)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_a_rule_gives_names_and_parameters_of_a_weight(dim):
    weight = torch.randn(3, 4)
    names, (g, v) = WeightNorm("weight", dim, nn.Linear(4, 3)).reparameterize("w", weight, dim)
    assert names == ["w_g", "w_v"]
    assert torch.equal(v, weight)
    torch.testing.assert_close(normalized(v, g, dim if dim is None else dim % 2), weight)


@pytest.mark.parametrize(("name", "dim"), [("0.bias", 0), ("", 0)])
def test_apply_returns_none_where_nothing_is_computed(name, dim):
    assert Reparameterization.apply(net(), name, dim, WeightNorm) is None


def test_a_weight_is_computed_from_the_parts_that_torch_gives():
    """As of a replica in another thread, whose rule is the original's."""
    module = apply_weight_norm(nn.Linear(4, 3))
    g, v = torch.rand(3, 1), torch.randn(3, 4)
    torch.testing.assert_close(module.parametrizations.weight[0](g, v), normalized(v, g, 0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_normalized_modules_compile_whole():
    module, x = apply_weight_norm(nn.Linear(4, 3)), torch.randn(2, 4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    torch.compiler.reset()


@pytest.mark.parametrize("method", ["compute_weight", "reparameterize"])
def test_a_class_without_a_rule_says_what_to_define(method):
    args = ("w", torch.ones(2, 2), 0) if method == "reparameterize" else ()
    with pytest.raises(NotImplementedError, match=f"Reparameterization must define {method}"):
        getattr(Reparameterization("w", 0, nn.Linear(2, 2)), method)(*args)


def test_a_failed_rule_leaves_the_module_as_it_was():
    module = nn.Linear(4, 3)
    with pytest.raises(NotImplementedError):
        apply_reparameterization(module, Reparameterization, "weight")
    assert type(module) is nn.Linear
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_removal_of_one_class_leaves_another():
    model = apply_weight_norm(net())

    class Other(Reparameterization):
        pass

    remove_reparameterization(model, Other)
    assert hasattr(model[0], "weight_g")


def test_a_missing_parameter_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"no parameter 'kernel'; it has \['weight', 'bias'\]"):
        apply_weight_norm(nn.Linear(4, 3), "kernel")


def test_a_missing_submodule_is_refused():
    with pytest.raises(AttributeError, match="encoder"):
        apply_weight_norm(net(), "encoder.weight")


def test_a_normalized_weight_is_refused_the_second_time():
    module = apply_weight_norm(nn.Linear(4, 3), "weight")
    with pytest.raises(ValueError, match="already"):
        apply_weight_norm(module, "weight")


def test_a_second_call_without_a_name_changes_nothing():
    module = apply_weight_norm(apply_weight_norm(nn.Linear(4, 3)))
    assert len(module.parametrizations.weight) == 1


def test_a_dimension_that_one_of_all_weights_lacks_leaves_every_module_as_it_was():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'1\.weight' has 2 dimensions, so dim=2 is out of range"):
        apply_weight_norm(model, dim=2)
    assert [name for name, _ in model.named_parameters()] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]


@pytest.mark.parametrize("given", [None, "net", [nn.Linear(1, 1)]])
def test_anything_but_a_module_is_refused(given):
    with pytest.raises(TypeError, match=r"apply_reparameterization got .*a torch\.nn\.Module"):
        apply_weight_norm(given)
    with pytest.raises(TypeError, match=r"remove_reparameterization got .*a torch\.nn\.Module"):
        remove_weight_norm(given)


@pytest.mark.parametrize("dim", [2, -3, "x"])
def test_a_dimension_out_of_range_is_refused(dim):
    with pytest.raises(ValueError, match="2 dimensions"):
        apply_weight_norm(nn.Linear(4, 3), "weight", dim=dim)


def test_removal_of_what_is_not_normalized_is_refused():
    with pytest.raises(ValueError, match="'weight' has no WeightNorm"):
        remove_weight_norm(nn.Linear(4, 3), "weight")


def test_removal_beside_other_parametrizations_is_refused():
    module = apply_weight_norm(nn.Linear(4, 3), "weight")
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Tanh(), unsafe=True)
    with pytest.raises(ValueError, match="parametrizations other than apex's"):
        remove_weight_norm(module, "weight")


def test_apply_without_a_class_is_refused():
    with pytest.raises(TypeError, match="Pass a class such as WeightNorm"):
        apply_reparameterization(nn.Linear(4, 3))
