"""What cannot be prepared is refused, with the reason, and nothing is changed."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

from apex import amp, optimizers
from apex._torch import fsdp
from tests.sharded.cases import close, mesh, net, prepared, shard, sharded, whole, wholes
from tests.support.features import shards_on_cpu
from tests.training.cases import MIXED, backward, batch, loss_of, same, sgd


def message(fn, *args, **options):
    try:
        fn(*args, **options)
    except RuntimeError as error:
        return str(error)
    return None


def with_batchnorm(apart):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    if apart:
        fully_shard(model[1], mesh=mesh(2))
    return fully_shard(model, mesh=mesh(2))


def fresh(**options):
    """A sharded net, after the end of earlier ones' casts: sharded modules refer to each other."""
    gc.collect()
    return shard(net(), mesh(2), **options)


def ran(level):
    model = fresh()
    model(batch()[0])
    return message(prepared, level, model)


def computing_in(dtype, level):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    return message(prepared, level, fresh(mp_policy=policy))


def hooked(level):
    model = fresh()
    model[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    return message(prepared, level, model)


def refused(rank):
    fused = {"lr": 0.1, "fused": True}
    return {
        "batch norm": message(prepared, "O5", with_batchnorm(apart=False)),
        "batch norm apart": message(prepared, "O5", with_batchnorm(apart=True)),
        "batch norm cast": message(
            prepared, "O5", with_batchnorm(apart=False), keep_batchnorm_fp32=False
        ),
        "batch norm O4": message(prepared, "O4", with_batchnorm(apart=False)),
        "ran": [ran(level) for level in MIXED],
        "bf16": [computing_in(torch.bfloat16, level) for level in MIXED],
        "hooks": [hooked(level) for level in MIXED],
        "fused SGD": message(sharded, "O5", 2, lambda p: torch.optim.SGD(p, **fused)),
        "fused Adagrad": message(sharded, "O5", 2, lambda p: torch.optim.Adagrad(p, **fused)),
        "FusedNovoGrad": message(sharded, "O5", 2, optimizers.FusedNovoGrad),
    }


@shards_on_cpu
def test_refusals_name_the_reason(on_two_ranks):
    for found in on_two_ranks(refused):
        assert "1.weight (float32)" in found["batch norm"].replace("1.bias", "1.weight")
        assert "keep_batchnorm_fp32=False" in found["batch norm"]
        assert (
            found["batch norm apart"] is found["batch norm cast"] is found["batch norm O4"] is None
        )
        assert [text and "first forward pass" in text for text in found["ran"]] == [
            None,
            True,
            None,
            True,
        ]
        assert [text and "MixedPrecisionPolicy" in text for text in found["bf16"]] == [
            None,
            True,
            None,
            None,
        ]
        assert [text and "gradient hooks" in text for text in found["hooks"]] == [
            None,
            True,
            None,
            True,
        ]
        assert "fused=True" in found["fused SGD"]
        assert "fused=True" in found["fused Adagrad"]
        assert "FusedNovoGrad" in found["FusedNovoGrad"]


def sharded_too_late(rank):
    found = []
    for level in ("O4", "O5"):
        model, optimizer = prepared(level, net())
        shard(model, mesh(2))
        found.append([message(backward, model, optimizer, *batch()) for _ in range(2)])
    return found


@shards_on_cpu
def test_fully_shard_after_initialize_is_told_with_the_right_order(on_two_ranks):
    for found in on_two_ranks(sharded_too_late):
        for level in found:
            for text in level:
                assert "fully_shard was called after amp.initialize" in text
                assert "model, optimizer = amp.initialize(model, optimizer)" in text


def with_a_parameter_of_no_model(rank):
    model, temperature = shard(net(), mesh(2)), nn.Parameter(torch.ones(()))
    optimizer = sgd([{"params": model.parameters()}, {"params": [temperature]}])
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    before = temperature.item()
    with amp.scale_loss(loss_of(model, *batch()) * temperature, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return temperature.item() != before


@shards_on_cpu
def test_a_plain_parameter_of_no_model_trains_beside_a_sharded_model(on_two_ranks):
    assert on_two_ranks(with_a_parameter_of_no_model) == [True, True]


def restored(rank):
    found = []
    for level in MIXED:
        model, optimizer = sharded(level, 2)
        before = [param.dtype for param in model.parameters()]
        model(batch()[0])
        text = message(amp.restore, model, optimizer)
        found.append((text, before == [param.dtype for param in model.parameters()]))
    return found


@shards_on_cpu
def test_restore_of_16_bit_weights_that_fully_shard_has_gathered_is_refused(on_two_ranks):
    for found in on_two_ranks(restored):
        for level, (text, same_dtypes) in zip(MIXED, found, strict=True):
            assert same_dtypes
            assert (text is None) == (level in ("O1", "O4"))


@pytest.mark.parametrize("level", ["O0", *MIXED])
def test_a_model_with_flat_parameters_in_it_is_refused(level):
    wrapped = FullyShardedDataParallel.__new__(
        FullyShardedDataParallel
    )  # made on accelerators only
    nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = net()
    for model in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(RuntimeError, match=r"FullyShardedDataParallel in it.*\n.*fully_shard"):
            amp.initialize(model, opt_level=level, verbosity=0)


def restored_before_it_ran(rank):
    model, optimizer = sharded("O5", 2, sgd)
    amp.restore(model, optimizer)
    values = {name: whole(value) for name, value in model.state_dict().items()}
    loss_of(model, *batch()).backward()
    optimizer.step()
    return values, wholes(model.parameters())


@shards_on_cpu
def test_restore_before_the_first_pass_gives_exact_weights_that_train(on_two_ranks):
    model = net()
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = sgd(model.parameters())
    loss_of(model, *batch()).backward()
    optimizer.step()
    for values, trained in on_two_ranks(restored_before_it_ran):
        assert same(values, exact)
        assert close(wholes(model.parameters()), trained)


def after_an_evaluation(rank):
    model = fully_shard(net(), mesh=mesh(2))
    optimizer = sgd(model.parameters())
    with torch.no_grad():
        model(batch()[0])  # leaves gathered parameters in the root
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    backward(model, optimizer, *batch())
    return all(param.grad is not None for param in amp.master_params(optimizer))


@shards_on_cpu
def test_a_model_that_has_evaluated_can_be_prepared_where_parameters_stay(on_two_ranks):
    assert on_two_ranks(after_an_evaluation) == [True, True]


def groups_where_torch_keeps_other_state(rank):
    model = shard(net(), mesh(2))
    known = len(fsdp.param_groups(model))
    for layer in (model, model[0], model[2]):
        state = layer._get_fsdp_state()
        # The second is the name of torch 2.11.
        delattr(
            state, next(n for n in ("_fsdp_param_groups", "_fsdp_param_group") if n in vars(state))
        )
    return known, fsdp.param_groups(model), fsdp.defers_reduction(fsdp.param_groups(model))


def test_a_torch_that_keeps_its_state_elsewhere_is_not_looked_into(on_two_ranks):
    for found in on_two_ranks(groups_where_torch_keeps_other_state):
        assert found == (2, [], False)


def test_a_model_in_deepspeed_is_refused():
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(RuntimeError, match="DeepSpeed"):
        amp.initialize(engine(), verbosity=0)
