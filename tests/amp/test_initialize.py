import copy
import inspect

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.parallel import LARC
from tests.amp.cases import (
    LEVELS,
    LOW,
    Final,
    Net,
    backward,
    loss_of,
    nothing_changes,
    prepared,
    sgd,
    train,
)

ARGUMENTS = {
    "models": inspect.Parameter.empty,
    "optimizers": None,
    "enabled": True,
    "opt_level": "O1",
    "cast_model_type": None,
    "patch_torch_functions": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": None,
    "cast_model_outputs": None,
    "num_losses": 1,
    "verbosity": 1,
    "min_loss_scale": None,
    "max_loss_scale": 2.0**24,
}
ADDED = {
    "patch_torch_functions_type": None,
    "fp32_modules": (),
    "growth_interval": 2000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "keep_fp32_values": False,
}


# -- the signature ---------------------------------------------------------------------------


def test_the_fourteen_arguments_have_apex_order_and_defaults():
    parameters = inspect.signature(amp.initialize).parameters
    positional = {k: p.default for k, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(ARGUMENTS.items())


def test_what_is_added_is_keyword_only_and_behind():
    parameters = inspect.signature(amp.initialize).parameters
    assert {k: p.default for k, p in list(parameters.items())[14:]} == ADDED
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ADDED)


def test_all_fourteen_may_be_passed_by_keyword():
    model = Net()
    given = {**ARGUMENTS, "models": model, "optimizers": sgd(model), "opt_level": "O5"}
    model, optimizer = amp.initialize(**given)
    assert model.first.weight.dtype is torch.bfloat16
    assert next(amp.master_params(optimizer)).dtype is torch.float32


def test_all_fourteen_may_be_passed_by_position():
    model = Net()
    values = (True, "O5", None, None, None, None, None, None, 2, 0, None, 2.0**24)
    amp.initialize(model, sgd(model), *values)
    assert list(amp.state_dict()) == ["loss_scaler0", "loss_scaler1"]


def test_a_level_passed_as_third_argument_is_a_truthy_enabled_and_runs_at_o1():
    model = Net()
    with pytest.warns(UserWarning, match=r"the level is 'O1'\. Pass .*: opt_level='O5'") as caught:
        model, _ = amp.initialize(model, sgd(model), "O5", verbosity=0)
    assert caught[0].filename == __file__
    assert amp._amp_state.opt_properties.opt_level == "O1"
    assert model.first.weight.dtype is torch.float32


def test_the_level_itself_passed_as_third_argument_is_no_mistake():
    model = Net()  # as MadryLab's robustness passes it
    amp.initialize(model, sgd(model), "O1", verbosity=0)
    assert amp._amp_state.opt_properties.enabled


@pytest.mark.parametrize("flag", [False, 0, "False", None, torch.tensor(False)])
def test_what_reads_as_false_disables(flag):
    model = Net()
    amp.initialize(model, sgd(model), enabled=flag)
    assert type(model) is Net


@pytest.mark.parametrize("flag", [1, "True", torch.tensor(True)])
def test_what_reads_as_true_enables(flag):
    model = Net()
    amp.initialize(model, sgd(model), enabled=flag, opt_level="O5", verbosity=0)
    assert model.first.weight.dtype is torch.bfloat16


def test_the_docstring_names_every_argument_and_level():
    text = inspect.getdoc(amp.initialize)
    assert all(f"{name}:" in text for name in (*ARGUMENTS, *ADDED))
    assert all(level in text for level in LEVELS)


# -- what comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_objects_come_back(level):
    model = Net()
    optimizer = sgd(model)
    given = model, optimizer
    assert amp.initialize(model, optimizer, opt_level=level, verbosity=0) == given


def test_a_model_alone_comes_back_alone():
    model = Net()
    assert amp.initialize(model, opt_level="O5", verbosity=0) is model


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_models_and_optimizers_come_back_as_given(kind):
    models = kind([Net(), Net()])
    optimizers = kind([sgd(model) for model in models])
    back = amp.initialize(models, optimizers, opt_level="O5", verbosity=0)
    assert back == (models, optimizers)
    assert all(type(each) is kind for each in back)


def test_a_list_of_one_comes_back_as_a_list():
    models = [Net()]
    assert amp.initialize(models, opt_level="O5", verbosity=0) == models


def test_an_empty_optimizer_list_comes_back_as_an_empty_list():
    model = Net()
    back = amp.initialize(model, [], opt_level="O5", verbosity=0)
    assert back == (model, [])


def test_one_model_may_have_several_optimizers():
    model = Net()
    heads = [
        torch.optim.SGD(model.first.parameters(), 0.1),
        torch.optim.SGD([*model.last.parameters()], 0.1),
    ]
    model, heads = amp.initialize(model, heads, opt_level="O5", verbosity=0)
    backward(loss_of(model), heads)
    before = [p.detach().clone() for head in heads for p in amp.master_params(head)]
    for head in heads:
        head.step()
    after = [p for head in heads for p in amp.master_params(head)]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_one_optimizer_may_span_several_models():
    models = [Net(), Net()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O5", verbosity=0)
    assert all(p.dtype is torch.float32 for p in amp.master_params(optimizer))
    backward(loss_of(models[0]) + loss_of(models[1]), optimizer)
    assert all(p.grad is not None for p in amp.master_params(optimizer))


def test_an_optimizer_may_hold_parameters_of_no_model_beside_the_models():
    model = Net()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    backward(loss_of(model) * temperature, optimizer)
    optimizer.step()
    assert temperature != 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_larc_around_an_optimizer_is_accepted_and_comes_back(level):
    model = Net()
    larc = LARC(sgd(model))
    model, back = amp.initialize(model, larc, opt_level=level, verbosity=0)
    assert back is larc
    before = model.first.weight.detach().clone()
    train(model, larc)
    assert not torch.equal(model.first.weight, before)


# -- models that need no cast ----------------------------------------------------------------


def test_a_double_model_at_o0_is_cast_to_fp32():
    model = amp.initialize(Net().double(), opt_level="O0", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_without_parameters_is_prepared():
    model = amp.initialize(nn.ReLU(), opt_level="O4", verbosity=0)
    assert model(torch.ones(2)).tolist() == [1.0, 1.0]


# -- several calls ---------------------------------------------------------------------------


def test_each_call_has_its_own_levels_and_scales():
    first, second = prepared("O2"), prepared("O5", num_losses=2)
    assert first[0].first.weight.dtype is LOW["O2"]
    assert second[0].first.weight.dtype is LOW["O5"]
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [2.0**16, 1.0, 1.0]


def test_training_at_two_levels_by_turns_equals_training_at_each_alone():
    def losses(level, other=None):
        torch.manual_seed(0)
        model, optimizer = prepared(level)
        partner = prepared(other) if other else None
        found = []
        for _ in range(3):
            found += train(model, optimizer, steps=1)
            if partner:
                train(*partner, steps=1)
        return found

    alone = losses("O4")
    for other in ("O0", "O1", "O5"):
        assert losses("O4", other) == alone


def test_a_model_without_op_casts_computes_in_fp32_beside_one_with_them():
    plain, _ = prepared("O0")
    casting, _ = prepared("O4")
    x = torch.randn(3, 4)
    assert plain(x).dtype is torch.float32
    assert casting(x).dtype is torch.bfloat16


# -- all or nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_in_the_midst_of_it_leaves_everything_as_it_was(level):
    model = Net()
    loss_of(model).backward()  # gradients are there already
    optimizers = [sgd(model, momentum=0.9), Final(model.parameters(), lr=0.1)]
    optimizers[0].step()
    before = copy.deepcopy([model.state_dict(), *(opt.state_dict() for opt in optimizers)])
    grads = [p.grad.clone() for p in model.parameters()]
    with nothing_changes(model, *optimizers), pytest.raises(TypeError, match="Final is final"):
        amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    after = [model.state_dict(), *(opt.state_dict() for opt in optimizers)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


def test_an_error_in_a_registered_function_leaves_everything_as_it_was():
    amp.register_half_function(str, "upper")  # str takes no attributes
    model = Net()
    optimizer = sgd(model)
    with nothing_changes(model, optimizer), pytest.raises(TypeError, match="immutable type"):
        amp.initialize(model, optimizer, opt_level="O4", verbosity=0)


def test_after_an_error_the_same_objects_can_be_prepared():
    model = Net()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="Unexpected optimization level"):
        amp.initialize(model, optimizer, opt_level="O9")
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    losses = train(model, optimizer, steps=8)
    assert losses[-1] < 0.9 * losses[0]


def test_an_optimizer_class_that_registers_its_subclasses_never_sees_amp_s():
    seen = []

    class Registering(torch.optim.SGD):
        def __init_subclass__(cls):
            seen.append(cls)

    model = Net()
    optimizer = Registering(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    train(model, optimizer)
    assert seen == []
    assert isinstance(optimizer, Registering)
