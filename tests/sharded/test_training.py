"""A sharded model trains as an unsharded one does."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from apex import amp
from tests.sharded.cases import (
    OPTIMIZERS,
    close,
    mesh,
    net,
    outcome,
    prepared,
    run,
    shard,
    sharded,
    wholes,
)
from tests.support.features import shards_on_cpu
from tests.training.cases import MIXED, backward, batches, train_step, train_step_with_closure

pytestmark = shards_on_cpu

DATA = list(batches(5, overflow_at={2}))


def alone(level, optimizer="fused AdamW", data=DATA, **options):
    return run(*prepared(level, net(), OPTIMIZERS[optimizer], **options), data)


def together(rank, optimizer, world_size):
    """All ranks have the same data: their mean gradient is each one's."""
    return {level: run(*sharded(level, world_size, OPTIMIZERS[optimizer]), DATA) for level in MIXED}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_train_as_one_process(optimizer, on_two_ranks):
    for results in on_two_ranks(together, optimizer, 2):
        for level in MIXED:
            assert close(alone(level, optimizer), results[level]), level


def on_four(rank):
    """Sharded over all, where two ranks hold nothing of a bias; and over pairs of replicas."""
    plane = mesh(2, 2, names=("replica", "shard"))
    pairs = {level: run(*prepared(level, shard(net(), plane)), DATA) for level in MIXED}
    return together(rank, "fused AdamW", 4), pairs


def test_four_ranks_and_two_pairs_of_replicas_train_as_one_process(on_four_ranks):
    for results in on_four_ranks(on_four):
        for result in results:
            for level in MIXED:
                assert close(alone(level), result[level]), level


def at_other_levels(rank):
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    return {
        "O0": run(*sharded("O0", 2, OPTIMIZERS["SGD"]), DATA),
        "O3": run(*sharded("O3", 2, OPTIMIZERS["SGD"]), DATA),
        "O4 offloaded": run(*sharded("O4", 2, OPTIMIZERS["SGD"], fsdp=offload), DATA),
        "O5 offloaded": run(*sharded("O5", 2, OPTIMIZERS["SGD"], fsdp=offload), DATA),
    }


def test_levels_without_mixed_precision_and_offloaded_parameters_train_alike(on_two_ranks):
    for results in on_two_ranks(at_other_levels):
        for name, result in results.items():
            assert close(alone(name[:2], "SGD"), result), name


def in_16_bits(rank):
    results = {}
    for name in ("O0", *MIXED, "O5 after a forward pass"):
        model = shard(net().bfloat16(), mesh(2))
        if len(name) > 2:  # its weights keep their dtype, so it may have run
            model(DATA[0][0].bfloat16())
        results[name] = run(*prepared(name[:2], model), DATA)
    return results


def test_models_that_arrive_in_16_bits_train_as_unsharded_ones_do(on_two_ranks):
    for results in on_two_ranks(in_16_bits):
        for name, result in results.items():
            expected = run(*prepared(name[:2], net().bfloat16()), DATA)
            assert close(expected, result), name


def halves(rank, world_size):
    results = {}
    for level in MIXED:
        model, optimizer = sharded(level, world_size)
        for x, y in batches(3):
            part = slice(rank, None, world_size)
            train_step(model, optimizer, x.repeat(2, 1)[part], y.repeat(2, 1)[part])
        results[level] = wholes(amp.master_params(optimizer))
    return results


def test_ranks_with_parts_of_a_batch_train_as_one_process_with_all_of_it(on_two_ranks):
    data = [(x.repeat(2, 1), y.repeat(2, 1)) for x, y in batches(3)]
    eps = {"O1": 2.0**-11, "O2": 2.0**-11, "O4": 2.0**-8, "O5": 2.0**-8}
    for results in on_two_ranks(halves, 2):
        for level in MIXED:
            for one, two in zip(alone(level, data=data)["masters"], results[level], strict=True):
                assert torch.allclose(one, two, rtol=8 * eps[level], atol=8 * eps[level]), level


def reduced_in_fp32(rank):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = shard(net(), mesh(2), mp_policy=policy)
    return run(*prepared("O5", model), DATA)


def test_gradients_may_be_exchanged_in_fp32(on_two_ranks):
    assert close(alone("O5"), on_two_ranks(reduced_in_fp32)[0])


def accumulated(rank, level, delays):
    """Two passes whose gradients ``fully_shard`` sends together, three times, one with inf."""
    model, optimizer = sharded(level, 2)
    data = list(batches(6, overflow_at={2}))
    scales = []
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        backward(model, optimizer, *first, delay_unscale=delays)
        scales.append(amp._amp_state.loss_scalers[-1].loss_scale())
        model.set_requires_gradient_sync(True)
        backward(model, optimizer, *second)
        optimizer.step()
    return scales, wholes(amp.master_params(optimizer))


def accumulated_alone(level):
    model, optimizer = prepared(level, net())
    data = list(batches(6, overflow_at={2}))
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        backward(model, optimizer, *first, delay_unscale=True)
        backward(model, optimizer, *second)
        optimizer.step()
    return wholes(amp.master_params(optimizer))


@pytest.mark.parametrize("delays", [False, True])
def test_the_scale_waits_for_gradients_that_fully_shard_keeps_back(delays, on_two_ranks):
    for scales, masters in on_two_ranks(accumulated, "O5", delays):
        assert scales == [2.0**12, 2.0**12, 2.0**11]
        assert close(accumulated_alone("O5"), masters)


def accumulated_in_replicas(rank, level):
    """Two passes summed over the shards; with the second, the sum is averaged over the replicas."""
    scales, results = [], []
    for shape in ((2, 1), (1, 2)):
        over = mesh(*shape, names=("replicas", "shards"))
        model, optimizer = growing(level, shard(net(), over))
        for first, second in zip(DATA[::2], DATA[1::2], strict=False):
            optimizer.zero_grad()
            model.set_requires_all_reduce(False)
            backward(model, optimizer, *first)
            scales.append(amp._amp_state.loss_scalers[-1].loss_scale())
            model.set_requires_all_reduce(True)
            backward(model, optimizer, *second)
            optimizer.step()
        results.append(wholes(amp.master_params(optimizer)))
    return scales, results


def growing(level, model):
    """A scale that grows after every pass that decides on it."""
    options = {"loss_scale": "dynamic", "growth_interval": 1, "max_loss_scale": 2.0**12}
    model, optimizer = prepared(level, model, OPTIMIZERS["SGD"], **options)
    amp._amp_state.loss_scalers[-1]._loss_scale = 16.0
    return model, optimizer


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_the_scale_waits_for_gradients_that_replicas_average_later(level, on_two_ranks):
    model, optimizer = growing(level, net())
    for first, second in zip(DATA[::2], DATA[1::2], strict=False):
        optimizer.zero_grad()
        backward(model, optimizer, *first, delay_unscale=True)
        backward(model, optimizer, *second)
        optimizer.step()
    for scales, results in on_two_ranks(accumulated_in_replicas, level):
        assert scales == 2 * [16.0 * 2**step for step in range(len(DATA) // 2)]
        for result in results:
            assert close(wholes(amp.master_params(optimizer)), result)


def without_replicas_to_wait_for(rank):
    model, optimizer = sharded("O5", 2)
    model.set_requires_all_reduce(False)  # no effect in torch: there are no replicas
    return run(model, optimizer, DATA)


def test_shards_without_replicas_wait_for_nothing(on_two_ranks):
    for result in on_two_ranks(without_replicas_to_wait_for):
        assert close(alone("O5"), result)


def with_closures(rank):
    model, optimizer = sharded("O5", 2, OPTIMIZERS["SGD"])
    for x, y in DATA:
        train_step_with_closure(model, optimizer, x, y)
    return outcome(model, optimizer)


def test_closures_step_and_skip_as_in_one_process(on_two_ranks):
    model, optimizer = prepared("O5", net(), OPTIMIZERS["SGD"])
    for x, y in DATA:
        train_step_with_closure(model, optimizer, x, y)
    for result in on_two_ranks(with_closures):
        assert close(outcome(model, optimizer), result)


def clipped(rank, level):
    model, optimizer = sharded(level, 2)
    backward(model, optimizer, *DATA[0])
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    optimizer.step()
    return norm.full_tensor(), wholes(amp.master_params(optimizer))


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_clipping_sees_the_norm_of_the_whole_gradient(level, on_two_ranks):
    model, optimizer = prepared(level, net())
    backward(model, optimizer, *DATA[0])
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    optimizer.step()
    for results in on_two_ranks(clipped, level):
        assert close([norm, wholes(amp.master_params(optimizer))], list(results))
