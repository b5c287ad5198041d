"""What scripts do with an optimizer beside stepping it."""

import copy
import importlib
import inspect
import io
import pickle

import pytest
import torch

from apex import optimizers
from apex.multi_tensor_apply import multi_tensor_applier
from tests.optimizers import cases

every = pytest.mark.parametrize("name", cases.MAKERS)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_load_continue_is_the_uninterrupted_run(name, dtype):
    params = cases.parameters(dtype)
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = cases.MAKERS[name](resumed)
    other.load_state_dict(torch.load(file, weights_only=True))
    cases.run(optimizer, params, 3, first=2)
    cases.run(other, resumed, 3, first=2)
    cases.assert_same(params, resumed, rtol=0, atol=0)


@every
def test_loading_adds_nothing_to_the_groups(name):
    """A later load of a distributed checkpoint would look for it in the file."""
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 1)
    before = [{*group} for group in optimizer.param_groups]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [{*group} for group in optimizer.param_groups] == before


@pytest.mark.parametrize(
    ("name", "torch_s"),
    [
        ("FusedAdam", lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)),
        ("FusedSGD", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)),
        ("FusedAdagrad", lambda p: torch.optim.Adagrad(p, lr=0.05)),
    ],
)
def test_the_state_of_torch_s_own_class_loads_and_continues_it(name, torch_s):
    params = cases.parameters()
    optimizer = torch_s(params)
    cases.run(optimizer, params, 2)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = cases.MAKERS[name](resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    cases.run(optimizer, params, 3, first=2)
    cases.run(other, resumed, 3, first=2)
    cases.assert_same(params, resumed, rtol=1e-5, atol=1e-6)


@every
def test_resume_after_steps_by_flag_is_exact(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    optimizer.found_inf = torch.zeros(())
    cases.run(optimizer, params, 2)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = cases.MAKERS[name](resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.found_inf = torch.zeros(())
    cases.run(optimizer, params, 2, first=2)
    cases.run(other, resumed, 2, first=2)
    cases.assert_same(params, resumed, rtol=0, atol=0)


def check_refused(name, state, message):
    optimizer = cases.MAKERS[name](cases.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"{name} got the state of another {message}"):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad"])
def test_the_state_of_another_model_is_refused(name):
    """torch's fused kernels would write outside the memory of what is too small."""
    params = cases.parameters(shapes=[(3, 2), *cases.SHAPES[1:]])
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 1)
    check_refused(name, optimizer.state_dict(), r"model or .*shape \(3, 2\) for .*shape \(3, 4\)")


@pytest.mark.parametrize(
    ("name", "saved", "message"),
    [
        ("FusedAdam", "FusedNovoGrad", r"model or optimizer: exp_avg_sq has the shape \(\) for"),
        ("FusedNovoGrad", "FusedAdam", r"model or optimizer: .*FusedNovoGrad keeps \(\)\. Load"),
        ("FusedAdam", "FusedSGD", r"optimizer: its parameter groups have no betas\. Load"),
        ("FusedSGD", "FusedAdam", r"optimizer: its parameter groups have no momentum\. Load"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(name, saved, message):
    params = cases.parameters()
    optimizer = cases.MAKERS[saved](params)
    cases.run(optimizer, params, 1)
    check_refused(name, optimizer.state_dict(), message)


@every
@pytest.mark.parametrize("kept", [3, {"count": 3}])
def test_an_entry_beside_the_state_of_parameters_is_loaded(name, kept):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 1)
    optimizer.state["steps"] = kept
    other = cases.MAKERS[name](cases.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.state["steps"] == kept


@every
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copy_continues_alike(name, how):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    cases.run(optimizer, params, 2)
    other = how(optimizer)
    copied = [p for group in other.param_groups for p in group["params"]]
    cases.run(other, copied, 2, first=2)
    cases.run(optimizer, params, 2, first=2)
    cases.assert_same(params, copied, rtol=0, atol=0)


@every
def test_copy_keeps_the_settings(name):
    optimizer = cases.MAKERS[name](cases.parameters())
    other = copy.deepcopy(optimizer)
    for setting in ("set_grad_none", *optimizer.settings):
        assert getattr(other, setting) == getattr(optimizer, setting)


@every
def test_step_returns_the_closures_loss(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)

    def closure():
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    before = closure()
    assert torch.equal(optimizer.step(closure), before)
    assert not torch.equal(closure(), before)


@every
def test_scheduler_moves_the_learning_rate(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    cases.run(optimizer, params, 1)
    scheduler.step()
    before = [p.detach().clone() for p in params]
    cases.run(optimizer, params, 1)
    cases.assert_same(params, before, rtol=0, atol=0)


@every
def test_groups_have_options_of_their_own(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name]([{"params": params[:2]}, {"params": params[2:], "lr": 0.0}])
    before = [p.detach().clone() for p in params]
    cases.run(optimizer, params, 1)
    moved = [not torch.equal(a, b) for a, b in zip(before, params, strict=True)]
    assert moved == [True, True, False, False]


@every
def test_group_that_is_added_steps(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params[:2])
    cases.run(optimizer, params, 1)
    optimizer.add_param_group({"params": params[2:]})
    before = [p.detach().clone() for p in params]
    cases.run(optimizer, params, 1)
    assert not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))


@every
def test_learning_rate_may_be_a_tensor(name):
    params, twins = cases.parameters(), cases.parameters()
    optimizer, reference = cases.MAKERS[name](params), cases.MAKERS[name](twins)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    cases.run(optimizer, params, 2)
    cases.run(reference, twins, 2)
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)


@every
def test_sparse_gradients_are_refused_before_anything_changes(name):
    params = cases.parameters(shapes=[(3,), (4, 2)])
    optimizer = cases.MAKERS[name](params)
    before = cases.snapshot(optimizer)
    grads = cases.gradients(params, 0)
    params[0].grad, params[1].grad = grads[0], grads[1].to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    after = cases.snapshot(optimizer)
    cases.assert_same(before[0], after[0], rtol=0, atol=0)
    assert (before[1], before[2]) == (after[1], after[2])


@every
def test_complex_parameters_are_refused(name):
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="complex64"):
        cases.MAKERS[name]([param]).step()


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad_drops_gradients_only_if_set_so(set_grad_none):
    params = cases.parameters()
    optimizer = optimizers.FusedAdam(params, set_grad_none=set_grad_none)
    cases.give(params, cases.gradients(params, 0))
    optimizer.zero_grad()
    assert all((p.grad is None) is set_grad_none for p in params)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_amsgrad_is_refused(name):
    with pytest.raises(RuntimeError, match="does not support the AMSGrad variant"):
        getattr(optimizers, name)(cases.parameters(), amsgrad=True)


def test_an_adjusted_scale_is_refused():
    optimizers.FusedAdam(cases.parameters(), amp_scale_adjustment=1.0, use_mt=True)
    with pytest.raises(ValueError, match="amp_scale_adjustment is 2"):
        optimizers.FusedAdam(cases.parameters(), amp_scale_adjustment=2.0)


def test_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        optimizers.FusedAdam(cases.parameters(), momentum=0.9)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_retired_argument_of_adams_step_is_explained(name):
    optimizer = optimizers.FusedAdam(cases.parameters())
    with pytest.raises(RuntimeError, match=f"no longer takes {name}"):
        optimizer.step(**{name: 1.0})


def test_masters_need_capturable():
    with pytest.raises(RuntimeError, match="capturable=True"):
        optimizers.FusedAdam(cases.parameters(), master_weights=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FusedAdam", {"lr": -1.0}),
        ("FusedAdam", {"betas": (1.0, 0.9)}),
        ("FusedLAMB", {"eps": -1.0}),
        ("FusedAdam", {"max_grad_norm": -1.0}),
        ("FusedLAMB", {"max_grad_norm": -1.0}),
        ("FusedSGD", {"lr": 0.1, "momentum": -1.0}),
        ("FusedSGD", {"lr": 0.1, "nesterov": True}),
        ("FusedAdagrad", {"weight_decay": -1.0}),
        ("FusedNovoGrad", {"betas": (0.9, float("nan"))}),
    ],
)
def test_value_outside_its_range_is_refused(name, options):
    with pytest.raises(ValueError, match=r"it must be|it needs"):
        getattr(optimizers, name)(cases.parameters(), **options)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedAdagrad"])
@pytest.mark.parametrize("lr", ["0.1", None])
def test_rate_that_is_no_number_is_refused(name, lr):
    with pytest.raises(TypeError, match=f"lr is {lr!r}; it must be a number"):
        getattr(optimizers, name)(cases.parameters(), lr=lr)


@pytest.mark.parametrize("betas", [0.9, None, (0.9,), (0.9, 0.99, 0.999), "0.9,0.999"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_betas_that_are_no_pair_are_refused(name, betas):
    with pytest.raises(TypeError, match=r"betas is .*; it must be two numbers"):
        getattr(optimizers, name)(cases.parameters(), betas=betas)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("FusedAdam", "bias_correction"),
        ("FusedLAMB", "grad_averaging"),
        ("FusedNovoGrad", "init_zero"),
        ("FusedSGD", "dampening"),
    ],
)
@pytest.mark.parametrize("per_group", [False, True])
def test_options_that_are_strings_are_refused(name, option, per_group):
    options, params = {option: "False"}, cases.parameters()
    if per_group:
        options, params = {}, [{"params": params, **options}]
    with pytest.raises(TypeError, match=rf"{option} is 'False'; it must be a number or a bool"):
        getattr(optimizers, name)(params, lr=0.1, **options)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("FusedAdam", "adam_w_mode"),
        ("FusedLAMB", "adam_w_mode"),
        ("FusedLAMB", "use_nvlamb"),
        ("FusedSGD", "wd_after_momentum"),
        ("FusedAdagrad", "adagrad_w_mode"),
        ("FusedNovoGrad", "set_grad_none"),
    ],
)
def test_modes_read_the_string_false_and_refuse_others(name, option):
    optimizer = getattr(optimizers, name)(cases.parameters(), lr=0.1, **{option: "False"})
    assert not getattr(optimizer, option)
    with pytest.raises(TypeError, match=f"{option} is 'no'; it must be a bool"):
        getattr(optimizers, name)(cases.parameters(), lr=0.1, **{option: "no"})


def test_a_model_instead_of_parameters_is_refused():
    with pytest.raises(TypeError, match=r"FusedAdam got the model Linear.*Pass model\.parameters"):
        optimizers.FusedAdam(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("dtype", ["fp16", 16])
def test_a_reduced_precision_that_is_no_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match=f"reduced_precision_dtype is {dtype!r}; it must be None"):
        optimizers.FusedMixedPrecisionLamb(cases.parameters(), reduced_precision_dtype=dtype)


def test_novograd_refuses_other_norms():
    with pytest.raises(RuntimeError, match="norm_type=1"):
        optimizers.FusedNovoGrad(cases.parameters(), norm_type=1)


def test_sgd_requires_a_learning_rate():
    with pytest.raises(ValueError, match="lr"):
        optimizers.FusedSGD(cases.parameters())


class OwnStep(optimizers.FusedAdam):
    """Steps by the functions that apex's class holds, as fairseq's subclass does."""

    def step(self, closure=None):
        (group,) = self.param_groups
        group["step"] = group.get("step", 0) + 1
        grads = [p.grad for p in group["params"]]
        averages = [
            [self.state[p].setdefault(name, torch.zeros_like(p)) for p in group["params"]]
            for name in ("exp_avg", "exp_avg_sq")
        ]
        multi_tensor_applier(
            self.multi_tensor_adam, self._dummy_overflow_buf, [grads, group["params"], *averages],
            group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode,
            int(group["bias_correction"]), group["weight_decay"],
        )  # fmt: skip


def test_subclass_may_step_by_the_functions_of_its_class():
    params, twins = cases.parameters(), cases.parameters()
    cases.run(OwnStep(params, weight_decay=0.1), params, 3)
    cases.run(optimizers.FusedAdam(twins, weight_decay=0.1), twins, 3)
    cases.assert_same(params, twins, rtol=0, atol=0)


FUNCTIONS = {
    "FusedAdam": "adam adam_capturable adam_capturable_master",
    "FusedSGD": "sgd",
    "FusedAdagrad": "adagrad",
    "FusedLAMB": "l2norm lamb",
    "FusedMixedPrecisionLamb": "l2norm lamb",
    "FusedNovoGrad": "novograd",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_optimizer_holds_its_multi_tensor_functions(name):
    optimizer = cases.MAKERS[name](cases.parameters())
    for function in FUNCTIONS[name].split():
        assert callable(getattr(optimizer, f"multi_tensor_{function}"))
    assert optimizer._dummy_overflow_buf.tolist() == [0]


SIGNATURES = {
    "fused_adam.FusedAdam": "lr bias_correction betas eps adam_w_mode weight_decay amsgrad "
    "set_grad_none capturable master_weights max_grad_norm eps_inside_sqrt use_mt "
    "amp_scale_adjustment",
    "fused_lamb.FusedLAMB": "lr bias_correction betas eps weight_decay amsgrad adam_w_mode "
    "grad_averaging set_grad_none max_grad_norm use_nvlamb",
    "fused_sgd.FusedSGD": "lr momentum dampening weight_decay nesterov wd_after_momentum "
    "materialize_master_grads set_grad_none",
    "fused_novograd.FusedNovoGrad": "lr bias_correction betas eps weight_decay amsgrad "
    "reg_inside_moment grad_averaging norm_type init_zero set_grad_none",
    "fused_adagrad.FusedAdagrad": "lr eps weight_decay set_grad_none adagrad_w_mode",
    "fused_mixed_precision_lamb.FusedMixedPrecisionLamb": "lr step bias_correction betas eps "
    "weight_decay amsgrad adam_w_mode grad_averaging max_grad_norm use_nvlamb "
    "reduced_precision_dtype",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_are_apexs_in_their_order(path):
    module, _, name = path.partition(".")
    found = getattr(importlib.import_module(f"apex.optimizers.{module}"), name)
    assert getattr(optimizers, name) is found
    assert " ".join(list(inspect.signature(found).parameters)[1:]) == SIGNATURES[path]
