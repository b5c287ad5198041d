"""Wrappers in unusual places: compiled, copied, several of one optimizer, joined, too early."""

import contextlib
import gc
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex.parallel import reduce_in_fp32
from tests.distributed import cases
from tests.support import loops
from tests.support.host_reads import Operators

pytestmark = pytest.mark.distributed


def accumulate(rank, parallel, optimizer, model):
    for step in range(6):
        with contextlib.nullcontext() if step % 2 else parallel.no_sync():
            cases.backward(parallel, optimizer, *cases.rank_batch(rank, step))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return cases.state(model, optimizer)


def hide(self, x):
    """Returns an object of the script's own, in which nothing finds tensors."""
    return SimpleNamespace(value=self.body(x))


def accumulate_hidden(rank, level, hides):
    model = body = cases.net(0)
    if hides:
        model = loops.Body(hide, body=body)
    model, optimizer = cases.initialized(level, model)
    wrapper = DistributedDataParallel(model)
    if hides:
        parts = {"wrapper": wrapper, "no_sync": wrapper.no_sync}
        wrapper = loops.Body(lambda self, x: self.wrapper(x).value, **parts)
    return accumulate(rank, wrapper, optimizer, body)


@pytest.mark.parametrize("level", loops.MIXED)
def test_a_model_whose_output_hides_its_tensors_accumulates_as_any(on_two_ranks, level):
    expected = cases.alike(on_two_ranks(accumulate_hidden, level, False))
    assert loops.same(cases.alike(on_two_ranks(accumulate_hidden, level, True)), expected)


def accumulate_scaled_outputs(rank, level, ignored):
    """A model whose root owns a parameter. Names that DDP ignores would call it ``.own``."""
    model = loops.Body(lambda self, x: self.own * self.net(x), net=cases.net(0))
    model.own = nn.Parameter(torch.ones(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    model, optimizer = cases.initialized(level, model)
    return accumulate(rank, DistributedDataParallel(model), optimizer, model)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_an_ignored_name_that_torch_sends_accumulates_as_any(on_two_ranks, level):
    expected = cases.alike(on_two_ranks(accumulate_scaled_outputs, level, []))
    got = cases.alike(on_two_ranks(accumulate_scaled_outputs, level, ["own"]))
    assert loops.same(got, expected)


# -- compiled --------------------------------------------------------------------------------

COMPILED = {
    "around": lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
    "inside": lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
}


def accumulate_compiled(rank, level, where):
    try:
        for _ in range(2):  # the second model runs the first one's compiled code
            model, optimizer = cases.prepare(level, seed=rank)
            result = accumulate(rank, COMPILED[where](model), optimizer, model)
        return result
    finally:
        torch._dynamo.reset()


def accumulate_eager(rank, level):
    model, optimizer = cases.prepare(level, seed=rank)
    return accumulate(rank, DistributedDataParallel(model), optimizer, model)


@pytest.mark.parametrize("where", COMPILED)
def test_no_sync_of_compiled_models_is_that_of_eager_ones(on_two_ranks, where):
    first = cases.alike(on_two_ranks(accumulate_compiled, "O5", where))
    eager = on_two_ranks(accumulate_eager, "O5")[0]
    for found in zip(first["masters"], eager["masters"], strict=True):
        torch.testing.assert_close(*map(torch.tensor, found), rtol=2.0**-7, atol=2.0**-7)


def compiled_inside(model):
    compiled = torch.compile(model, backend="eager")
    wrapper = DistributedDataParallel(compiled)
    return wrapper, wrapper, compiled


def compiled_around(model):
    wrapper = DistributedDataParallel(model)
    compiled = torch.compile(wrapper, backend="aot_eager")
    return compiled, wrapper, compiled


def compiled_around_a_part(model):
    model[0] = DistributedDataParallel(model[0])
    compiled = torch.compile(model, backend="eager")
    return compiled, model[0], compiled


def sums_of_compiled(rank, level, compiled, ways):
    """Gradients of two models of a class, which take turns, and the means of their sums."""
    models = [nn.Sequential(nn.Linear(1, 1, bias=False)) for _ in range(2)]
    optimizers = [loops.sgd(model.parameters()) for model in models]
    cases.initialized(level, models, optimizers, loss_scale=8.0)
    calls = [compiled(model) for model in models]
    sums = [0.0, 0.0]
    try:
        for power, way_of_second in enumerate(ways):
            for index, way in enumerate(["sends", way_of_second]):
                parallel, wrapper, around = calls[index]
                value = torch.full((1, 1), 2.0**power * (1 + 2 * rank))
                with torch.no_grad():
                    next(amp.master_params(optimizers[index])).fill_(power + index)
                if "evaluated" in way:
                    with torch.no_grad():
                        parallel(value)
                with wrapper.no_sync() if "local" in way else contextlib.nullcontext():
                    loss = (around if way == "around" else parallel)(value).sum()
                assert loss.item() == value.item() * (power + index)
                if way == "empty":
                    with amp.scale_loss(loss, optimizers[index]):
                        continue
                if "plain" in way:
                    loss.backward()
                else:
                    loops.scaled_backward(loss, optimizers[index])
                sums[index] += 2.0**power * 2
        return [param.grad.item() for model in models for param in model.parameters()], sums
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("level", "compiled", "ways"),
    [
        ("O1", compiled_inside, ["sends", "around", "sends"]),
        ("O2", compiled_inside, ["sends", "around", "sends"]),
        ("O1", compiled_inside, ["local", "empty", "sends"]),
        ("O1", compiled_inside, ["plain", "local", "sends"]),
        ("O5", compiled_inside, ["plain local", "sends"] * 2),
        ("O5", compiled_inside, ["evaluated plain local", "sends"] * 2),
        ("O1", compiled_around, ["plain local", "sends"] * 2),
        ("O5", compiled_around, ["plain local", "sends"] * 2),
        ("O1", compiled_around_a_part, ["local", "sends"]),
        ("O2", compiled_around_a_part, ["sends", "local", "sends"]),
        ("O5", compiled_around_a_part, ["sends", "plain", "sends"]),
    ],
)
def test_ranks_share_sums_of_compiled_passes(on_two_ranks, level, compiled, ways):
    for grads, sums in on_two_ranks(sums_of_compiled, level, compiled, ways):
        assert grads == sums


# -- parameters that some ranks do not use ---------------------------------------------------


def use_some(rank, level):
    """Gradients after passes of which not every rank uses all weights; the first is local."""
    models = [loops.Weights("ab"), loops.Weights("c")]
    params = [param for model in models for param in model.parameters()]
    optimizers = [torch.optim.SGD([param], lr=0.125) for param in params]
    models, optimizers = cases.initialized(level, models, optimizers)
    first = DistributedDataParallel(models[0], find_unused_parameters=True)
    second = DistributedDataParallel(models[1])
    value = 2.0 + 4.0 * rank
    loops.scaled_backward(second(c=value), optimizers[2])
    with first.no_sync():
        loops.scaled_backward(first(**dict.fromkeys(("a", "ab")[rank], value)), optimizers[1])
    for names in (("ab", "ab"), ("a", "ab")):
        loss = first(**dict.fromkeys(names[rank], value)) + second(c=value)
        loops.scaled_backward(loss, optimizers[1:])
    return [param.grad.tolist() for param in params]


def test_ranks_that_use_different_parameters_have_the_same_gradients(on_two_ranks, level):
    for grads in on_two_ranks(use_some, level):
        assert grads == [[12.0] * 2, [10.0] * 2, [12.0] * 2]


# -- around the wrapper ------------------------------------------------------------------------


def train_partly_around(level, wrap, seed, batch_at):
    """Each step follows a pass through the module itself, which is local, and one that sends."""
    model, optimizer = cases.prepare(level, seed=0)
    parallel = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        cases.backward(model, optimizer, *batch_at(2 * step))
        cases.backward(parallel, optimizer, *batch_at(2 * step + 1))
        optimizer.step()
    return model, optimizer


@loops.every(level=["O1", "O2", "O5"], wrap=["torch", "torch views", "apex delayed"])
def test_a_pass_around_the_wrapper_is_sent_by_the_next_one_through_it(on_two_ranks, level, wrap):
    cases.assert_runs_as_one(on_two_ranks, train_partly_around, level, wrap)


# -- several losses of one forward pass --------------------------------------------------------


def two_heads(seed):
    heads = {"actor": loops.net(seed), "critic": loops.net(seed + 1)}
    return loops.Body(lambda self, x: (self.actor(x), self.critic(x)), **heads)


def train_two_heads(level, wrap, seed, batch_at):
    """The wrapper averages the gradients of both losses in the pass of the second.

    The second step adds them to those of the first.
    """
    model, optimizer = cases.initialized(level, two_heads(seed))
    parallel = wrap(model)
    for step in range(3):
        if step != 1:
            optimizer.zero_grad()
        x, y = batch_at(step)
        losses = [torch.nn.functional.mse_loss(output.float(), y) for output in parallel(x)]
        loops.scaled_backward(losses[0], optimizer, delay_unscale=True)
        loops.scaled_backward(losses[1], optimizer)
        optimizer.step()
    return model, optimizer


@loops.every(level=["O1", "O2", "O5"], wrap=["torch", "torch views", "apex delayed"])
def test_losses_of_one_forward_pass_may_use_different_parameters(on_two_ranks, level, wrap):
    cases.assert_runs_as_one(on_two_ranks, train_two_heads, level, wrap)


def enter_a_second_block(rank, level, delay, loss_id):
    model, optimizer = cases.initialized(level, two_heads(seed=rank), num_losses=2)
    parallel = DistributedDataParallel(model)
    losses = [output.float().sum() for output in parallel(cases.rank_batch(rank, 0)[0])]
    loops.scaled_backward(losses[0], optimizer, delay_unscale=delay)
    try:
        loops.scaled_backward(losses[1], optimizer, loss_id=loss_id)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_losses_of_one_forward_pass_need_one_check_and_one_scale(on_two_ranks, level):
    for message in on_two_ranks(enter_a_second_block, level, False, 0):
        assert "delay_unscale=True to all blocks but the last" in message
    for message in on_two_ranks(enter_a_second_block, level, True, 1):
        assert "Pass the same loss_id, or add up the losses in one block" in message


def fail_in_the_second_block(rank, level):
    """How far the step after it moves the masters of the first loss."""
    model, optimizer = cases.initialized(level, two_heads(seed=rank))
    parallel = DistributedDataParallel(model)
    before = loops.masters(optimizer)
    losses = [output.float().sum() for output in parallel(cases.rank_batch(0, 0)[0])]
    loops.scaled_backward(losses[0], optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="while the gradients are still scaled"):
        amp.clip_grad_norm_(optimizer, 1.0)
    failed = amp.scale_loss(losses[1], optimizer)
    with pytest.warns(match="An exception ended"), pytest.raises(ZeroDivisionError), failed:
        raise ZeroDivisionError
    optimizer.step()
    return [old - new for old, new in zip(before, loops.masters(optimizer), strict=True)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_wait_for_a_second_loss_are_unscaled_once(on_two_ranks, level):
    found, _ = on_two_ranks(fail_in_the_second_block, level)
    model, optimizer = cases.initialized(level, two_heads(seed=0))
    before = loops.masters(optimizer)
    loops.scaled_backward(model(cases.rank_batch(0, 0)[0])[0].float().sum(), optimizer)
    optimizer.step()
    moved = [old - new for old, new in zip(before, loops.masters(optimizer), strict=True)]
    torch.testing.assert_close(found, moved)


# -- around a part of the model --------------------------------------------------------------


def accumulate_in_a_part(rank, level, wrap, compiled):
    model, optimizer = cases.initialized(level, nn.Sequential(cases.net(rank)))
    model[0] = cases.WRAPPERS[wrap](model[0])
    model.no_sync = model[0].no_sync
    called = torch.compile(model, backend="eager") if compiled else model
    try:
        return accumulate(rank, called, optimizer, model)
    finally:
        torch._dynamo.reset()


PARTS = [
    ("O1", "torch", False),
    ("O2", "torch", False),
    ("O2", "torch", True),
    ("O5", "torch", False),
    ("O2", "apex delayed", False),
]


@pytest.mark.parametrize(("level", "wrap", "compiled"), PARTS)
def test_a_model_with_a_wrapped_part_trains_as_a_wrapped_model(on_two_ranks, level, wrap, compiled):
    first, second = on_two_ranks(accumulate_in_a_part, level, wrap, compiled)
    assert first == second == on_two_ranks(accumulate_eager, level)[0]


# -- several ---------------------------------------------------------------------------------


def train_one_optimizer_of_several_wrappers(rank, level, wrap):
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(5)]
    optimizer = torch.optim.SGD(models[-1].parameters(), lr=0.1, momentum=0.9)
    models, optimizer = cases.initialized(level, models, optimizer)
    wrappers = []
    for model in models:
        wrappers.append({**cases.WRAPPERS, **cases.OTHER_FORWARDS}[wrap](model))
        if rank == 0 and len(wrappers) == 2:  # they are found in another order
            gc.collect()
    optimizer.add_param_group({"params": [p for model in models[:-1] for p in model.parameters()]})
    for step in range(2):
        x, _ = cases.rank_batch(rank, step)
        for wrapper in wrappers:
            x = torch.tanh(wrapper(x))
        loops.descend(x.float().square().mean(), optimizer)
    return cases.state(nn.ModuleList(models), optimizer)


@loops.every(wrap=["torch", "parts"], level=loops.WITH_MASTERS)
def test_masters_of_several_wrappers_are_sent_in_one_order(on_two_ranks, level, wrap):
    cases.alike(on_two_ranks(train_one_optimizer_of_several_wrappers, level, wrap))


def train_one_wrapper_of_two_optimizers(rank, level):
    model = cases.net(rank)
    optimizers = [loops.sgd(model[index].parameters()) for index in (0, 2)]
    model, optimizers = cases.initialized(level, model, optimizers)
    parallel = DistributedDataParallel(model)
    cases.backward(parallel, optimizers, *cases.rank_batch(rank, 0))
    return [master.tolist() for each in optimizers for master in amp.master_params(each)]


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_masters_of_two_optimizers_are_those_of_the_first_rank(on_two_ranks, level):
    cases.alike(on_two_ranks(train_one_wrapper_of_two_optimizers, level))


def sum_beside_a_wrapper(rank, wrap, is_part):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    models = model if is_part else [*model]
    cases.initialized("O5", models, loops.sgd(model.parameters()))
    model[0] = wrap(model[0])
    x, y = cases.rank_batch(rank, 0)
    for _ in range(256):
        out = model(x) if is_part else model[1](model[0](x))
        nn.functional.mse_loss(out.float(), y[:, :1]).backward()
    return model[1].weight.grad.dtype, model[1].weight.grad.tolist()


@pytest.mark.parametrize("is_part", [True, False])
def test_gradients_beside_a_wrapper_add_up_as_without_one(on_two_ranks, is_part):
    beside = on_two_ranks(sum_beside_a_wrapper, DistributedDataParallel, is_part)
    alone = on_two_ranks(sum_beside_a_wrapper, nn.Sequential, is_part)
    assert beside == alone
    assert beside[0][0] is torch.float32


def two_wrapped_parts(level, **options):
    parts = {"first": loops.Weights("a"), "second": loops.Weights("b")}
    model = loops.Body(lambda self, k: self.first(a=k) + self.second(b=1.0), **parts)
    model, optimizer = cases.initialized(level, model, loops.sgd(model.parameters()), **options)
    model.first, model.second = map(DistributedDataParallel, parts.values())
    return model, optimizer


def hold_one_wrapper_back(rank, level, kind):
    model, optimizer = two_wrapped_parts(level, loss_scale=8.0)
    grads = []
    for waits in (False, True, False):
        with model.first.no_sync() if waits else contextlib.nullcontext():
            loss = model(rank + 1.0)
            if kind == "block" or (kind == "mixed" and not waits):
                loops.scaled_backward(loss, optimizer)
            else:
                loss.backward()
        grads.append([param.grad[0].item() for param in model.parameters()])
    return grads


@loops.every(kind=["block", "plain", "mixed"], level=loops.WITH_MASTERS)
def test_one_of_two_wrapped_parts_may_send_later(on_two_ranks, level, kind):
    found = on_two_ranks(hold_one_wrapper_back, level, kind)
    for rank, grads in enumerate(found):
        assert grads == [[1.5, 1.0], [rank + 2.5, 2.0], [4.5, 3.0]]


def overflow_in_the_part_that_waits(rank):
    model, optimizer = two_wrapped_parts("O2", loss_scale="dynamic")
    with model.first.no_sync():
        loops.scaled_backward(model(float("inf") if rank == 0 else 1.0), optimizer)
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    loops.scaled_backward(model(1.0), optimizer)
    optimizer.step()
    return scale, amp.step_was_skipped(optimizer), dict(amp.state_dict())


def test_an_overflow_of_a_part_that_waits_is_that_of_the_pass_that_sends_it(on_two_ranks):
    scale, skipped, after = cases.alike(on_two_ranks(overflow_in_the_part_that_waits))
    assert skipped
    assert after["loss_scaler0"]["loss_scale"] == scale / 2


HOOKS = {
    "fp16": lambda wrapper: wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "fp32": reduce_in_fp32,
}


def overflow_under_a_hook(rank, level, hook):
    parallel, optimizer = cases.wrapped(level, rank)
    HOOKS[hook](parallel)
    skipped = []
    for step in range(4):
        x, y = cases.rank_batch(rank, step)
        if (rank, step) == (1, 1):
            x[0, 0] = torch.inf
        loops.train_step(parallel, optimizer, x, y)
        skipped.append(bool(amp.step_was_skipped(optimizer)))
    return skipped, cases.state(parallel, optimizer)


@loops.every(hook=HOOKS, level=loops.DYNAMIC)
def test_under_a_hook_that_compresses_training_goes_on_after_an_inf(on_two_ranks, level, hook):
    first = cases.alike(on_two_ranks(overflow_under_a_hook, level, hook))
    assert first[0] == [False, True, False, False]


# -- a join ----------------------------------------------------------------------------------


def train_unevenly(rank, level):
    model = cases.net(rank)  # momentum would part: a join does not share it
    model, optimizer = loops.prepared(level, model=model)
    parallel = DistributedDataParallel(model)
    try:
        with parallel.join():
            data = [cases.rank_batch(rank, step) for step in range(2 + 2 * rank)]
            loops.train(parallel, optimizer, data=data)
    except RuntimeError as error:
        return str(error)
    return cases.state(model, optimizer)


def test_after_a_join_the_ranks_are_alike(on_two_ranks):
    first, second = on_two_ranks(train_unevenly, "O4")
    assert first["model"] == second["model"]


def test_a_join_with_masters_or_a_dynamic_scale_is_refused(on_two_ranks, level):
    for message in on_two_ranks(train_unevenly, level):
        assert "Use opt_level='O4'" in message


# -- gradients in a buffer ------------------------------------------------------------------


@contextlib.contextmanager
def all_reduces_waited_for():
    """The delayed all-reduce is not: on a CPU it may end after the step, also without amp."""
    all_reduce = dist.all_reduce

    def waiting(tensor, group=None, async_op=False):
        all_reduce(tensor, group=group)

    with mock.patch.object(dist, "all_reduce", waiting):
        yield


def train_with_a_delayed_all_reduce(rank, level, options):
    model, optimizer = loops.prepared(level, model=cases.net(rank), **options)
    delayed = model[2].weight
    parallel = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("2.weight", delayed)],
        param_to_hook_all_reduce=model[0].weight,
    )
    data = [cases.rank_batch(rank, step) for step in range(3)]
    try:
        with all_reduces_waited_for():
            loops.train(parallel, optimizer, data=data)
    except RuntimeError as error:
        return str(error)
    else:
        return cases.state(model, optimizer)
    finally:
        amp.restore(model, optimizer)  # the wrapper's hook keeps all alive


def test_a_delayed_all_reduce_keeps_ranks_alike_or_is_refused(on_two_ranks):
    first, second = on_two_ranks(train_with_a_delayed_all_reduce, "O4", {})
    assert first["model"] == second["model"]
    for level, options in (("O1", {}), ("O1", {"loss_scale": 8.0}), ("O2", {}), ("O5", {})):
        for message in on_two_ranks(train_with_a_delayed_all_reduce, level, options):
            assert "Leave the option out" in message


# -- made too early --------------------------------------------------------------------------


def in_a_group_of_its_own(model):
    return DistributedDataParallel(model, process_group=torch.distributed.new_group())


def doubled(group, bucket):
    average = default_hooks.allreduce_hook(group, bucket)
    return average.then(lambda done: 2.0 * done.value())


def with_a_hook(model):
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, doubled)
    return wrapper


WRAPS = {**cases.WRAPPERS, "group": in_a_group_of_its_own, "hook": with_a_hook}


def train_around(rank, level, wrap, first, compiled):
    """Trains a model under a wrapper that is made before, or after, it is prepared."""
    model = cases.net(rank)
    wrapper = WRAPS[wrap](model) if first else None
    model, optimizer = cases.initialized(level, model)
    wrapper = wrapper or WRAPS[wrap](model)
    parallel = torch.compile(wrapper, backend="eager") if compiled else wrapper
    with torch.inference_mode(), torch.enable_grad():  # which has no effect
        wrapper(cases.rank_batch(rank, 0)[0])
    loops.train(parallel, optimizer, data=(cases.rank_batch(rank, step) for step in range(3)))
    torch._dynamo.reset()
    return cases.state(wrapper, optimizer)


MADE_FIRST = [
    ("O0", "torch", False),
    ("O4", "torch", False),
    ("O2", "torch", False),
    ("O2", "group", False),
    ("O5", "torch", False),
    ("O5", "torch", True),
    ("O5", "torch views", False),
    ("O5", "torch static", False),
    ("O5", "apex", False),
    ("O5", "apex delayed", False),
]


@pytest.mark.parametrize(("level", "wrap", "compiled"), MADE_FIRST)
def test_a_wrapper_made_before_the_cast_trains_as_one_made_after(
    on_two_ranks, level, wrap, compiled
):
    first, second = on_two_ranks(train_around, level, wrap, True, compiled)
    assert first == second == on_two_ranks(train_around, level, wrap, False, compiled)[0]


def train_a_part(rank, level, first, mixed):
    part = cases.net(rank)
    if mixed:  # as libraries load models
        part[0].bfloat16()
    model = nn.Sequential(DistributedDataParallel(part) if first else part)
    model, optimizer = cases.initialized(level, model)
    if not first:
        model[0] = DistributedDataParallel(part)
    return cases.train_on_data_of(rank, model, optimizer)


@pytest.mark.parametrize(("level", "mixed"), [("O4", True), ("O5", False), ("O5", True)])
def test_a_part_wrapped_before_its_parameters_are_cast_trains_as_one_wrapped_after(
    on_two_ranks, level, mixed
):
    first, second = on_two_ranks(train_a_part, level, True, mixed)
    assert first == second == on_two_ranks(train_a_part, level, False, mixed)[0]


def train_twice(rank, levels, wrap, rewraps):
    """A model is restored, and perhaps prepared again, under its old wrapper or another one."""
    model, optimizer = cases.initialized(levels[0], cases.net(rank))
    wrapper = WRAPS[wrap](model)
    loops.train(wrapper, optimizer, data=[cases.rank_batch(rank, 0)])
    amp.restore(wrapper, optimizer)
    if levels[1]:
        cases.initialized(levels[1], model, optimizer)
    if rewraps:
        wrapper = WRAPS[wrap](model)
    for step in range(1, 4):
        loops.plain_step(wrapper, optimizer, *cases.rank_batch(rank, step))
    return cases.state(model, optimizer)


AGAIN = [("O4", "O5"), ("O5", "O4"), ("O5", "O5"), ("O5", "O3"), ("O5", None), ("O3", None)]


@loops.every(levels=AGAIN, wrap=["torch", "apex delayed"])
def test_a_wrapper_of_a_restored_model_sends_its_gradients(on_two_ranks, levels, wrap):
    first, second = on_two_ranks(train_twice, levels, wrap, False)
    assert first == second == on_two_ranks(train_twice, levels, wrap, True)[0]


def test_a_wrapper_of_a_model_that_is_cast_thrice_has_one_hook(on_two_ranks):
    first, second = on_two_ranks(train_twice, ("O5", "O5"), "hook", False)
    assert first == second == on_two_ranks(train_twice, ("O5", "O5"), "hook", True)[0]


@loops.every(level=loops.LEVELS, wrap=["torch static", "torch views"])
def test_a_single_rank_may_wrap_before_or_after_initialize(on_ranks, level, wrap):
    first, second = (
        on_ranks(1, train_around, level, wrap, first, False) for first in (True, False)
    )
    assert first == second


def test_a_model_is_restored_after_the_end_of_its_process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, optimizer = loops.prepared("O5", model=loops.Net())
        wrapper = DistributedDataParallel(model)
        loops.train(wrapper, optimizer)
    finally:
        torch.distributed.destroy_process_group()
    exact = loops.masters(optimizer)
    amp.restore(model, optimizer)
    assert loops.same(exact, loops.values(wrapper.parameters()))


def first_blocks(rank, level):
    """Collectives of a block that is not entered, and of the start of the first two that are."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = cases.initialized(level, model, optimizer)
    parallel = DistributedDataParallel(model)
    counts = []
    for enters in (False, True, True):
        loss = loops.loss_of(parallel, cases.rank_batch(rank, 0)[0], torch.zeros(3, 4))
        with Operators() as seen:
            block = amp.scale_loss(loss, optimizer)
            scaled_loss = block.__enter__() if enters else loss
        counts.append(sum(name.startswith("c10d.") for name in seen.names))
        scaled_loss.backward()
        if enters:
            block.__exit__(None, None, None)
    optimizer.zero_grad()
    return counts, [master.tolist() for master in loops.masters(optimizer)]


@pytest.mark.parametrize(("level", "broadcasts"), [("O1", 0), ("O2", 1), ("O4", 0), ("O5", 1)])
def test_the_first_block_that_is_entered_broadcasts_masters_once(on_two_ranks, level, broadcasts):
    first = cases.alike(on_two_ranks(first_blocks, level))
    assert first[0] == [0, broadcasts, 0]
