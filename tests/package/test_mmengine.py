"""MMEngine's wrapper, Runner and checkpoints on amp: our class, and MMEngine's own on this apex."""

import copy
import gc
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.testing import assert_close

from apex import amp
from tests.clients.libraries import need

need("mmengine.runner")
need("apex.integrations.mmengine")

from mmengine.optim import ApexOptimWrapper as Theirs  # noqa: E402 - after the check

from apex.integrations.mmengine import ApexOptimWrapper as Ours  # noqa: E402
from tests.package.mmengine_runs import runner, write_configs  # noqa: E402
from tests.support.loops import Net, each_of, every, masters, scaled_backward  # noqa: E402

EXACT = {"rtol": 0, "atol": 0}

pytestmark = pytest.mark.clients

kind = each_of(Ours, Theirs, ids=("ours", "mmengine"))


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def wrapped(kind, level, *, model=None, **options):
    """Returns a fresh net and the wrapper ``kind`` around its optimizer."""
    model = net() if model is None else model
    options = {"verbosity": 0, "loss_scale": 2.0**8, **options}
    return model, kind(optimizer=sgd(model), opt_level=level, **options)


def features(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator)


def loss_of(model, x):
    return model(x).float().pow(2).mean()


def iterate(model, wrapper, steps=(0,)):
    """Trains ``steps`` iterations on batches of these numbers."""
    for step in steps:
        with wrapper.optim_context(model):
            loss = loss_of(model, features(step))
        wrapper.update_params(loss)


def overflow(model, wrapper):
    """An iteration with gradients that are inf."""
    with wrapper.optim_context(model):
        loss = loss_of(model, features(0)) * torch.inf
    wrapper.update_params(loss)


def scale(wrapper, index=0):
    return wrapper.state_dict()["apex_amp"][f"loss_scaler{index}"]["loss_scale"]


def trained_by_hand(level, groups, **options):
    """The same net under the three lines; ``groups`` are the batches of each update."""
    model = net()
    options = {"loss_scale": 2.0**8, **options}
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **options)
    for steps in groups:
        for step in steps:
            loss = loss_of(model, features(step)) / len(steps)
            scaled_backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return masters(optimizer)


# -- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [[[0], [1], [2], [3]], [[0, 1], [2, 3]]], ids=["", "by 2"])
def test_it_trains_as_the_three_lines_do_which_share_the_loss(kind, level, updates):
    model, wrapper = wrapped(kind, level, accumulative_counts=len(updates[0]))
    wrapper.initialize_count_status(model, 0, 4)
    iterate(model, wrapper, range(4))
    assert_close(masters(wrapper.optimizer), trained_by_hand(level, updates), **EXACT)


def test_clip_grad_sees_the_unscaled_gradients_of_the_masters(kind, level):
    model, wrapper = wrapped(kind, level, clip_grad={"max_norm": 2.0**-10})
    wrapper.optimizer.param_groups[0]["lr"] = 1.0
    with wrapper.optim_context(model):
        loss = loss_of(model, features(0))
    before = masters(wrapper.optimizer)
    wrapper.update_params(loss)
    moved = [old - new for old, new in zip(before, masters(wrapper.optimizer), strict=True)]
    assert_close(get_total_norm(moved).item(), 2.0**-10, rtol=1e-3, atol=0)


# -- preparing -------------------------------------------------------------------------------


def test_gradients_are_synchronized_only_where_the_parameters_update():
    class Counting(nn.DataParallel):
        without_sync = 0

        def no_sync(self):
            self.without_sync += 1
            return torch.no_grad() if self.without_sync > 2 else torch.enable_grad()

    model, wrapper = wrapped(Ours, "O5", accumulative_counts=2)
    parallel = Counting(model)
    wrapper.initialize_count_status(model, 0, 3)
    iterate(parallel, wrapper, range(3))
    assert parallel.without_sync == 1


def test_backward_before_the_first_context_says_what_is_missing():
    model, wrapper = wrapped(Ours, "O1")
    with pytest.raises(RuntimeError, match=r"before amp\.initialize"):
        wrapper.backward(loss_of(model, features(0)))


def test_the_signature_is_that_of_mmengine():
    def arguments(kind):
        found = inspect.signature(kind.__init__).parameters.values()
        return [(each.name, each.default, each.kind) for each in found]

    assert arguments(Ours) == arguments(Theirs)


def test_every_argument_reaches_amp():
    given = {"cast_model_type": torch.bfloat16, "keep_batchnorm_fp32": False}
    given |= {"master_weights": False, "loss_scale": "128.0", "cast_model_outputs": torch.float64}
    model, wrapper = wrapped(Ours, "O2", **given)
    iterate(model, wrapper)
    options = amp._amp_state.opt_properties.options
    assert {name: options[name] for name in given} == {**given, "loss_scale": 128.0}


# -- checkpoints -----------------------------------------------------------------------------


def uninterrupted(kind, level, before, after):
    """Returns a checkpoint in the middle of a training with an overflow, and its end.

    Its session ends here: MMEngine's wrapper saves and loads the scales of all that live.
    """
    model, wrapper = wrapped(kind, level, loss_scale="dynamic")
    iterate(model, wrapper, before)
    overflow(model, wrapper)
    checkpoint = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    iterate(model, wrapper, after)
    return checkpoint, (masters(wrapper.optimizer), model.state_dict(), scale(wrapper))


@every(first=[Ours, Theirs], when=["before the first iteration", "after it"])
def test_training_goes_on_exactly_from_a_checkpoint_of_either_class(first, kind, level, when):
    (weights, state), end = uninterrupted(first, level, range(2), range(2, 4))
    model, wrapper = wrapped(kind, level, model=net(seed=1), loss_scale="dynamic")
    if when == "after it":
        iterate(model, wrapper, [7])
    model.load_state_dict(weights)
    wrapper.load_state_dict(state)
    iterate(model, wrapper, range(2, 4))
    assert_close((masters(wrapper.optimizer), model.state_dict(), scale(wrapper)), end, **EXACT)
    assert scale(wrapper) < 2.0**16


def test_scales_that_wait_for_the_first_iteration_are_saved_as_they_were_loaded():
    model, wrapper = wrapped(Ours, "O5", loss_scale="dynamic")
    overflow(model, wrapper)
    state = wrapper.state_dict()
    other, resumed = wrapped(Ours, "O5", loss_scale="dynamic")
    resumed.load_state_dict(state)
    assert state["apex_amp"]["loss_scaler0"]["loss_scale"] == 2.0**15
    assert resumed.state_dict()["apex_amp"] == state["apex_amp"]
    overflow(other, resumed)
    assert scale(resumed) == 2.0**14


def test_a_disabled_wrapper_trains_without_amp():
    model, wrapper = wrapped(Ours, "O5", enabled=False)
    iterate(model, wrapper, range(2))
    plain = net()
    optimizer = sgd(plain)
    for step in range(2):
        loss_of(plain, features(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(model.state_dict(), plain.state_dict(), **EXACT)


def test_a_disabled_wrapper_needs_no_amp_beside_an_enabled_one():
    model, disabled = wrapped(Ours, "O5", enabled=False)
    with disabled.optim_context(model):
        loss = loss_of(model, features(0))
    iterate(*wrapped(Ours, "O5"))
    disabled.update_params(loss)
    assert not torch.equal(next(model.parameters()), next(net().parameters()))


def test_a_plain_checkpoint_leaves_the_scales_as_they_are():
    model, wrapper = wrapped(Ours, "O5", loss_scale="dynamic")
    overflow(model, wrapper)
    wrapper.load_state_dict(sgd(net()).state_dict())
    assert scale(wrapper) == 2.0**15


@pytest.mark.parametrize("prepared", [False, True])
def test_scales_that_make_no_sense_are_refused_before_anything_changes(prepared):
    model, wrapper = wrapped(Ours, "O5")
    if prepared:
        iterate(model, wrapper)
    state = wrapper.state_dict()
    state["param_groups"][0]["lr"] = 99.0
    state["apex_amp"] = {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}
    with pytest.raises(RuntimeError, match=r"loss_scaler0\['loss_scale'\] is 0.0"):
        wrapper.load_state_dict(state)
    assert wrapper.get_lr() == {"lr": [0.125]}


# -- OptimWrapperDict ------------------------------------------------------------------------


def pair(kind, level, seed=0):
    """Two nets, each with its own wrapper, in MMEngine's container."""
    from mmengine.optim import OptimWrapperDict

    nets = [net(seed), net(seed + 10)]
    wrappers = [wrapped(kind, level, model=each, loss_scale="dynamic")[1] for each in nets]
    return nets, OptimWrapperDict(generator=wrappers[0], discriminator=wrappers[1])


def iterate_pair(nets, wrappers, steps):
    for step in steps:
        for model, wrapper in zip(nets, wrappers.values(), strict=True):
            iterate(model, wrapper, [step])


def test_wrappers_of_a_dict_resume_each_with_its_own_scale(level):
    nets, wrappers = pair(Ours, level)
    iterate_pair(nets, wrappers, [0])
    overflow(nets[1], wrappers["discriminator"])
    weights = copy.deepcopy([each.state_dict() for each in nets])
    state = copy.deepcopy(wrappers.state_dict())
    iterate_pair(nets, wrappers, [1, 2])

    new_nets, new = pair(Ours, level, seed=1)
    for each, own in zip(new_nets, weights, strict=True):
        each.load_state_dict(own)
    new.load_state_dict(state)
    iterate_pair(new_nets, new, [1, 2])
    scales = [scale(each) for each in new.values()]
    assert scales == [scale(each) for each in wrappers.values()]
    assert scales[0] > scales[1]
    for name, wrapper in wrappers.items():
        assert_close(masters(new[name].optimizer), masters(wrapper.optimizer), **EXACT)


# -- two ranks -------------------------------------------------------------------------------


def train_on_rank(rank, kind, level, updates):
    """Two updates of some accumulated iterations each; the ranks see different data."""
    from mmengine.model import MMDistributedDataParallel

    model = net(seed=rank)  # DDP takes rank 0's values to all
    parallel = MMDistributedDataParallel(model)
    _, wrapper = wrapped(kind, level, model=model, accumulative_counts=updates)
    for step in range(2 * updates):
        with wrapper.optim_context(parallel):
            output = parallel(features(10 * rank + step))
        wrapper.update_params(output.float().pow(2).mean())
    return [value.tolist() for value in masters(wrapper.optimizer)]


def train_parts_on_rank(rank, kind, level):
    """An update of a model whose children are wrapped, one by one."""
    from mmengine.model import MMSeparateDistributedDataParallel

    warnings.simplefilter("ignore", FutureWarning)  # of an argument that MMEngine gives to DDP
    model = nn.Sequential(net(seed=rank), nn.Linear(2, 2))
    parallel = MMSeparateDistributedDataParallel(model)
    _, wrapper = wrapped(kind, level, model=model)
    with wrapper.optim_context(parallel):
        output = model(features(rank))
    wrapper.update_params(output.float().pow(2).mean())
    return [value.tolist() for value in masters(wrapper.optimizer)]


@pytest.mark.distributed
def test_ranks_stay_together_where_each_child_has_a_wrapper(on_two_ranks, kind, level):
    first, second = on_two_ranks(train_parts_on_rank, kind, level)
    assert first == second


@pytest.mark.distributed
@pytest.mark.parametrize("updates", [1, 2])
def test_ranks_stay_together_and_learn_from_the_data_of_both(on_two_ranks, kind, updates, level):
    first, second = on_two_ranks(train_on_rank, kind, level, updates)
    assert first == second
    eps = torch.finfo(torch.bfloat16 if level == "O5" else torch.float16).eps
    batches = [[0, 1, 10, 11], [2, 3, 12, 13]] if updates == 2 else [[0, 10], [1, 11]]
    alone = trained_by_hand(level, batches)
    assert_close([*map(torch.tensor, first)], alone, rtol=4 * eps, atol=4 * eps)


# -- the Runner ------------------------------------------------------------------------------

BY_SCOPE = "apex.ApexOptimWrapper"
BY_PATH = "apex.integrations.mmengine.ApexOptimWrapper"
BY_NAME = "ApexOptimWrapper"


@pytest.mark.parametrize(("name", "kind"), [(BY_SCOPE, Ours), (BY_PATH, Ours), (BY_NAME, Theirs)])
def test_the_registry_finds_both_classes_by_their_names(name, kind):
    from mmengine.registry import OPTIM_WRAPPERS

    assert OPTIM_WRAPPERS.get(name) is kind


# MMEngine's checkpoints hold its log history, which torch.load refuses by default.
RESUMED = [(BY_SCOPE, "O1"), (BY_SCOPE, "O2"), (BY_PATH, "O5"), (BY_NAME, "O5")]


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
@pytest.mark.parametrize(("name", "level"), RESUMED)
def test_a_resumed_run_ends_as_a_whole_one_and_saves_fp32(name, level, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    config = write_configs(tmp_path, name, level)
    whole = runner(config, tmp_path / "whole")
    whole.train()
    weights, end = whole.model.state_dict(), scale(whole.optim_wrapper)
    saved = torch.load(tmp_path / "whole/epoch_3.pth", weights_only=False)
    floating = [value for value in saved["state_dict"].values() if value.is_floating_point()]
    assert {value.dtype for value in floating} == {torch.float32}
    assert saved["optimizer"]["apex_amp"] == whole.optim_wrapper.state_dict()["apex_amp"]
    del whole  # and its session: MMEngine's own wrapper loads the scales of all that live
    gc.collect()

    # Not epoch 1: its three iterations end in the middle of two that accumulate.
    checkpoint = str(tmp_path / "whole" / "epoch_2.pth")
    resumed = runner(config, tmp_path / "resumed", load_from=checkpoint, resume=True)
    resumed.train()
    assert resumed.optim_wrapper.inner_count == 9
    assert_close(resumed.model.state_dict(), weights, rtol=0, atol=0)
    assert scale(resumed.optim_wrapper) == end
