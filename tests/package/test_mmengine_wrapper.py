"""``ApexOptimWrapper``: ours, and MMEngine's own on this apex where the two promise the same."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.testing import assert_close

from apex import amp
from tests.package.mmengine_cases import (
    LEVELS,
    WRAPPER_IDS,
    WRAPPERS,
    Ours,
    Theirs,
    batch,
    iterate,
    loss_of,
    net,
    overflow,
    scale,
    sgd,
    values,
    wrapped,
)

pytestmark = pytest.mark.clients

both_kinds = pytest.mark.parametrize("kind", WRAPPERS, ids=WRAPPER_IDS)
all_levels = pytest.mark.parametrize("level", LEVELS)
EXACT = {"rtol": 0, "atol": 0}


def trained_by_hand(level, groups, **options):
    """The same net under the three lines; ``groups`` are the batches of each update."""
    model = net()
    options = {"loss_scale": 2.0**8, **options}
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **options)
    for steps in groups:
        for step in steps:
            loss = loss_of(model, batch(step)) / len(steps)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in amp.master_params(optimizer)]


# -- training --------------------------------------------------------------------------------


@both_kinds
@all_levels
def test_it_trains_as_the_three_lines_do(kind, level):
    model, wrapper = wrapped(kind, level)
    iterate(model, wrapper, range(3))
    assert_close(values(wrapper), trained_by_hand(level, [[0], [1], [2]]), **EXACT)


@both_kinds
@all_levels
def test_accumulated_iterations_update_once_and_share_the_loss(kind, level):
    model, wrapper = wrapped(kind, level, accumulative_counts=2)
    wrapper.initialize_count_status(model, 0, 4)
    iterate(model, wrapper, range(4))
    assert_close(values(wrapper), trained_by_hand(level, [[0, 1], [2, 3]]), **EXACT)


@both_kinds
@all_levels
def test_clip_grad_sees_the_unscaled_gradients_of_the_masters(kind, level):
    model, wrapper = wrapped(kind, level, optimizer=None, clip_grad={"max_norm": 2.0**-10})
    wrapper.optimizer.param_groups[0]["lr"] = 1.0
    with wrapper.optim_context(model):
        loss = loss_of(model, batch(0))
    before = values(wrapper)
    wrapper.update_params(loss)
    moved = [old - new for old, new in zip(before, values(wrapper), strict=True)]
    assert_close(get_total_norm(moved).item(), 2.0**-10, rtol=1e-3, atol=0)


@both_kinds
@all_levels
def test_an_overflow_skips_the_update_and_halves_the_dynamic_scale(kind, level):
    model, wrapper = wrapped(kind, level, loss_scale="dynamic")
    with wrapper.optim_context(model):
        before = values(wrapper)
    overflow(model, wrapper)
    assert_close(values(wrapper), before, **EXACT)
    assert scale(wrapper) == 2.0**15


@both_kinds
@all_levels
def test_disabled_it_trains_as_a_plain_wrapper(kind, level):
    from mmengine.optim import OptimWrapper

    model, wrapper = wrapped(kind, level, enabled=False)
    iterate(model, wrapper, range(3))
    plain_model = net()
    plain = OptimWrapper(sgd(plain_model))
    iterate(plain_model, plain, range(3))
    assert_close([*model.parameters()], [*plain_model.parameters()], **EXACT)


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


def test_one_model_under_two_wrappers_is_refused():
    model, first = wrapped(Ours, "O5")
    second = Ours(optimizer=sgd(model), opt_level="O5", verbosity=0)
    iterate(model, first)
    with (
        pytest.raises(RuntimeError, match=r"\(Net\).*another optimizer.*optim_context"),
        second.optim_context(model),
    ):
        pass


def test_backward_before_the_first_context_says_what_is_missing():
    model, wrapper = wrapped(Ours, "O1")
    with pytest.raises(RuntimeError, match=r"before amp\.initialize"):
        wrapper.backward(loss_of(model, batch(0)))


def test_the_signature_is_that_of_mmengine():
    def arguments(kind):
        found = inspect.signature(kind.__init__).parameters.values()
        return [(each.name, each.default, each.kind) for each in found]

    assert arguments(Ours) == arguments(Theirs)


def test_every_argument_reaches_amp():
    given = {
        "cast_model_type": torch.bfloat16,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": "128.0",
        "cast_model_outputs": torch.float64,
    }
    model, wrapper = wrapped(Ours, "O2", **given)
    iterate(model, wrapper)
    options = amp._amp_state.opt_properties.options
    assert {name: options[name] for name in given} == {**given, "loss_scale": 128.0}
