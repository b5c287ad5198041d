"""Every refusal: its class, its words, and that nothing has changed after it."""

import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import apex.amp as amp
from apex.parallel import LARC
from tests.amp.cases import LEVELS, Net, nothing_changes, prepared, sgd

every_level = pytest.mark.parametrize("level", LEVELS)


def refused(error, words, models, optimizers=None, *, level="O5", **kwargs):
    """Fails unless ``initialize`` raises ``error`` with these words and changes nothing."""
    given = [
        each for part in (models, optimizers) for each in (part if type(part) is list else [part])
    ]
    with nothing_changes(*given), pytest.raises(error, match=words) as e:
        amp.initialize(models, optimizers, opt_level=level, **kwargs)
    assert type(e.value) is error


# -- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_float64_model_is_refused_where_operators_cast(level):
    model = Net()
    model.last.double()
    words = r"parameter last\.weight is float64.*model\.float\(\) first, or use a level"
    refused(RuntimeError, words, model, sgd(model), level=level)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_float64_model_is_accepted_where_scripts_allow_it(level):
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = amp.initialize(Net().double(), opt_level=level, verbosity=0)
    assert model.first.weight.dtype is torch.float64


def trains(model, x, **options):
    model, optimizer = amp.initialize(model, sgd(model), verbosity=0, loss_scale=8.0, **options)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    with amp.scale_loss(model(x).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    after = list(amp.master_params(optimizer))
    assert all(p.isfinite().all() for p in after)
    return any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_float64_model_trains_where_it_is_converted(level):
    assert trains(Net().double(), torch.ones(2, 4), opt_level=level)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_float64_model_trains_where_no_operator_casts(level):
    x = torch.ones(2, 4, dtype=torch.float64)
    assert trains(Net().double(), x, opt_level=level, patch_torch_functions=False)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_float64_buffers_and_scalars_are_no_obstacle(level):
    model = Net()
    model.register_buffer("constant", torch.ones(2, dtype=torch.float64))
    model.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    assert trains(model, torch.ones(2, 4), opt_level=level)


@every_level
def test_inference_mode_is_refused(level):
    model = Net()
    with torch.inference_mode():
        refused(RuntimeError, "inference_mode.*before the block", model, sgd(model), level=level)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_made_in_inference_mode_is_refused_where_it_is_converted(level):
    with torch.inference_mode():
        model = nn.Linear(4, 2)
    words = "weight was created under torch.inference_mode.*outside of the block"
    with pytest.raises(RuntimeError, match=words):
        amp.initialize(model, opt_level=level, verbosity=0)
    assert type(model) is nn.Linear
    assert model.weight.dtype is torch.float32


@every_level
def test_a_data_parallel_model_is_refused(level):
    model = Net()
    words = "wrapped in DataParallel.*Call amp.initialize first, then wrap"
    refused(RuntimeError, words, DataParallel(model), sgd(model), level=level)


@every_level
def test_a_distributed_data_parallel_model_is_refused(level):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Net())
        words = "wrapped in DistributedDataParallel.*Call amp.initialize first, then wrap"
        refused(RuntimeError, words, model, sgd(model), level=level)
    finally:
        torch.distributed.destroy_process_group()


@every_level
def test_a_model_on_the_meta_device_is_refused(level):
    model = Net().to("meta")
    words = r"parameter first\.weight is on the meta device.*to_empty\(device=\.\.\.\)"
    refused(RuntimeError, words, model, sgd(model), level=level)


@every_level
def test_a_lazy_model_is_refused(level):
    model = nn.Sequential(nn.LazyLinear(2))
    words = r"parameter 0\.weight is not initialized yet \(a lazy module\).*one batch"
    refused(RuntimeError, words, model, level=level)


@every_level
def test_a_model_passed_twice_is_refused(level):
    model = Net()
    refused(ValueError, "same model twice. Pass each model once", [model, model], level=level)


@every_level
@pytest.mark.parametrize("first", ["O2", "O3", "O5"])
def test_a_prepared_16_bit_model_is_refused(first, level):
    model, _ = prepared(first)
    words = r"Net, which it has already prepared\. Only.*amp\.restore\(model, optimizer\)"
    refused(RuntimeError, words, model, level=level)


@pytest.mark.parametrize("first", ["O0", "O1", "O4"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_prepared_fp32_model_is_refused_at_16_bit_levels(first, level):
    model, _ = prepared(first)
    refused(RuntimeError, "Net, which it has already prepared", model, level=level)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_that_shares_weights_with_one_of_an_earlier_call_is_refused(level):
    first, _ = prepared(level)
    model = nn.Sequential(first.last, nn.Linear(2, 2))
    words = r"parameter 0\.weight belongs to a model of an earlier call.*to one call, as lists"
    refused(RuntimeError, words, model, sgd(model), level=level)
    amp.initialize(model, opt_level=level, verbosity=0)  # for inference: no second master
    amp.restore(model)


@pytest.mark.parametrize("given", [None, "net", 3, torch.ones(1), nn.Linear, {"net": nn.ReLU()}])
def test_what_is_no_model_is_refused(given):
    kind = "the class Linear" if given is nn.Linear else type(given).__name__
    words = f"got {kind} instead of a model.*models come first, optimizers second"
    refused(TypeError, words, given)


def test_what_is_no_model_in_a_list_is_refused_and_leaves_the_models_before_it():
    refused(TypeError, "got int instead of a model", [Net(), 3])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused():
    refused(RuntimeError, "scripted model", torch.jit.script(nn.Linear(1, 1)))


def test_one_bad_model_among_good_ones_leaves_them_all():
    models = [Net().half(), Net().double()]
    words = "is float64"
    refused(RuntimeError, words, models, [sgd(model) for model in models], level="O4")


# -- optimizers ------------------------------------------------------------------------------


@every_level
def test_a_prepared_optimizer_is_refused(level):
    keep, optimizer = prepared("O2")
    model = Net()
    words = r"optimizer \(SGD\) that it has already prepared.*amp\.restore\(model, optimizer\)"
    refused(RuntimeError, words, model, optimizer, level=level)
    del keep


def test_larc_around_a_prepared_optimizer_is_refused():
    keep, optimizer = prepared("O2")
    refused(RuntimeError, "already prepared", Net(), LARC(optimizer))
    del keep


@pytest.mark.parametrize("given", ["sgd", 3, torch.optim.SGD, lambda: None, {}])
def test_what_is_no_optimizer_is_refused(given):
    kind = "the class SGD" if given is torch.optim.SGD else type(given).__name__
    words = f"got {kind} instead of an optimizer.*torch.optim.Optimizer"
    refused(TypeError, words, Net(), given)


def test_what_is_no_optimizer_in_a_list_is_refused():
    model = Net()
    refused(TypeError, "got NoneType instead of an optimizer", model, [sgd(model), None])


@every_level
def test_an_optimizer_that_holds_no_parameter_of_the_models_is_refused(level):
    words = r"optimizer \(SGD\) that holds no parameter of the given models\. Pass the model that"
    refused(ValueError, words, Net(), sgd(Net()), level=level)


def test_an_optimizer_made_before_the_model_got_new_parameters_is_refused():
    model = Net()
    optimizer = sgd(model)
    for part in (model.first, model.norm, model.last):
        part._parameters = {k: nn.Parameter(p.detach()) for k, p in part._parameters.items()}
    refused(ValueError, "create the optimizer after moving the model", model, optimizer)


@every_level
def test_an_optimizer_without_parameters_is_refused(level):
    model = Net()
    optimizer = sgd(model)
    optimizer.param_groups[0]["params"].clear()
    words = r"optimizer \(SGD\) without parameters\. Create it with the model's parameters"
    refused(ValueError, words, model, optimizer, level=level)


def test_an_optimizer_without_groups_is_refused():
    model = Net()
    optimizer = sgd(model)
    optimizer.param_groups.clear()
    refused(ValueError, "without parameters", model, optimizer)


def test_an_optimizer_passed_twice_is_refused():
    model = Net()
    optimizer = sgd(model)
    refused(ValueError, "same optimizer twice", model, [optimizer, optimizer])
    refused(ValueError, "same optimizer twice", model, [optimizer, LARC(optimizer)])


# -- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -1, 1.5, "2", True, None])
def test_num_losses_must_be_a_positive_integer(given):
    words = re.escape(f"num_losses is {given!r}; it must be an integer of at least 1")
    model = Net()
    refused(ValueError, words, model, sgd(model), num_losses=given)


def test_num_losses_may_be_0_where_no_optimizer_is_given():
    refused(
        ValueError, "num_losses is -1; it must be an integer of at least 0", Net(), num_losses=-1
    )
    amp.initialize(Net(), num_losses=0, verbosity=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"growth_factor": 1.0}, "growth_factor is 1.0; it must be above 1"),
        ({"growth_factor": float("inf")}, "growth_factor is inf; it must be above 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor is 1.0; it must be in \(0, 1\)"),
        ({"backoff_factor": 0.0}, r"backoff_factor is 0.0; it must be in \(0, 1\)"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be at least 1"),
        ({"min_loss_scale": 0.0}, "min_loss_scale is 0.0; it must be a positive number or None"),
        ({"max_loss_scale": -1.0}, "max_loss_scale is -1.0; it must be a positive number"),
        ({"min_loss_scale": 2.0**25}, "min_loss_scale is 33554432.0; it must be at most 16777216"),
    ],
)
def test_a_number_outside_its_range_is_refused(given, words):
    refused(ValueError, words, Net(), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_loss_scale": "3"}, "max_loss_scale is '3'; it must be a number"),
        ({"min_loss_scale": "3"}, "min_loss_scale is '3'; it must be a number"),
        ({"growth_interval": 2.5}, "growth_interval is 2.5; it must be an integer"),
        ({"growth_factor": None}, "growth_factor is None; it must be a number"),
        ({"backoff_factor": True}, "backoff_factor is True; it must be a number"),
    ],
)
def test_what_is_no_number_is_refused_by_name(given, words):
    refused(TypeError, words, Net(), **given)


# -- fp32_modules ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_fp32_modules_are_refused_where_the_model_is_not_cast(level):
    words = "fp32_modules names modules.*O2, O3 or O5"
    refused(ValueError, words, Net(), level=level, fp32_modules=[nn.Linear])


def test_fp32_modules_that_match_nothing_are_refused():
    refused(
        ValueError,
        "fp32_modules holds 'frist', which matches.*first",
        Net(),
        fp32_modules=["frist"],
    )
    refused(ValueError, "fp32_modules holds LSTM, which matches", Net(), fp32_modules=[nn.LSTM])


@pytest.mark.parametrize("given", ["first", nn.Linear])
def test_fp32_modules_must_be_a_sequence(given):
    refused(TypeError, "fp32_modules is.*it accepts a sequence", Net(), fp32_modules=given)


def test_fp32_modules_of_none_are_none():
    model = amp.initialize(Net(), opt_level="O5", fp32_modules=None, verbosity=0)
    assert model.first.weight.dtype is torch.bfloat16


def test_fp32_modules_must_hold_types_and_patterns():
    refused(TypeError, "fp32_modules holds 3; it takes module types", Net(), fp32_modules=[3])


# -- the machine -----------------------------------------------------------------------------


@every_level
def test_cudnn_switched_off_is_refused_on_a_cpu_model_too(level):
    model = Net()
    with torch.backends.cudnn.flags(enabled=False):
        words = r"needs torch\.backends\.cudnn\.enabled = True; it is False"
        refused(RuntimeError, words, model, sgd(model), level=level)


# -- devices ---------------------------------------------------------------------------------


@pytest.mark.gpu
@every_level
def test_parameters_may_be_on_several_devices(level):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(2, 2), nn.Linear(2, 2).cuda()

        def forward(self, x):
            return self.high(self.low(x).cuda())

    model = Split()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    loss = model(torch.ones(3, 2)).float().pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    changed = zip(before, amp.master_params(optimizer), strict=True)
    assert not any(torch.equal(old, new) for old, new in changed)


def test_a_verbosity_that_is_no_integer_is_refused():
    before = amp._amp_state.verbosity
    refused(TypeError, "verbosity is 'loud'; it must be an integer", Net(), verbosity="loud")
    assert amp._amp_state.verbosity == before


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_part_of_a_model_that_is_passed_as_a_model_is_named_where_it_fails(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    amp.initialize([model, model[0]], opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match="got 0 of the model Sequential as a model, too"):
        model(torch.ones(2, 4))
