"""Sharded models (FSDP2) train under amp as under plain FSDP2; what is refused names the way."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from apex import amp
from tests.distributed.cases import rank_batch
from tests.support import loops
from tests.support.features import averages_on_cpu, shards_on_cpu
from tests.support.sharding import mesh, whole

pytestmark = [pytest.mark.distributed, shards_on_cpu]

POLICIES = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16, summed in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"param_dtype": torch.float16},
    "fp16, summed in fp32": {"param_dtype": torch.float16, "reduce_dtype": torch.float32},
}
STEPS = 4
DYNAMIC = {"loss_scale": "dynamic", "max_loss_scale": 2.0**8}


def sharded(policy, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))
    options = {"mesh": mesh(2), "mp_policy": MixedPrecisionPolicy(**POLICIES[policy])}
    for layer in (model[0], model[3]):
        fully_shard(layer, **options)
    # A batch norm computes in fp32, as under O2 and O5.
    fully_shard(model[2], mesh=mesh(2), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
    fully_shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(rank, policy, dtype=None):
    """FSDP2's own loop, with torch.autocast where there is a dtype."""
    model, optimizer = sharded(policy)
    for step in range(STEPS):
        x, y = rank_batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loops.loss_of(model, x, y)
        loss.backward()
        optimizer.step()
    return whole(model)


def prepare_sharded(level, policy, seed=0, **options):
    return amp.initialize(*sharded(policy, seed), opt_level=level, verbosity=0, **options)


def train_sharded(model, optimizer, rank, steps, overflow_at=None):
    for step in steps:
        x, y = rank_batch(rank, step)
        loss = loops.loss_of(model, x, y)
        if step == overflow_at and rank == 1:
            loss = loss * torch.inf
        loops.descend(loss, optimizer)
    return whole(model)


def outcome(rank, level, policy, options, overflow_at=None, steps=STEPS):
    model, optimizer = prepare_sharded(level, policy, **options)
    weights = train_sharded(model, optimizer, rank, range(steps), overflow_at)
    return weights, dict(amp.state_dict()["loss_scaler0"])


class Stem(nn.Module):
    """A root that owns a layer for its input, as a ViT or a CNN does."""

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, scale=None):
        if scale is not None:
            x = (x * scale["by"] + 1.001).tanh()
        return self.head(self.block(self.stem(x)).relu())


BF16 = {"param_dtype": torch.bfloat16}
ROOTS = {  # the policy of the root and its block, and whether the root computes on its inputs
    "owns a layer": (BF16, False),
    "computes on its inputs": (BF16, True),
    "casts its outputs": ({**BF16, "output_dtype": torch.float32}, False),
    "leaves its inputs": ({**BF16, "cast_forward_inputs": False}, True),
    "is not sharded": ({**BF16, "output_dtype": torch.float32}, True),
}


def train_root(rank, root, level):
    torch.manual_seed(0)
    options, computes = ROOTS[root]
    model = Stem()
    is_sharded = root != "is not sharded"
    if is_sharded:
        fully_shard(model.block, mesh=mesh(2), mp_policy=MixedPrecisionPolicy(**BF16))
    outermost = model if is_sharded else model.block
    fully_shard(outermost, mesh=mesh(2), mp_policy=MixedPrecisionPolicy(**options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    dtype = torch.float32 if options.get("cast_forward_inputs", True) else torch.bfloat16
    outputs = []
    for step in range(3):
        x, y = rank_batch(rank, step)
        scale = {"scale": {"by": torch.tensor(1.3, dtype=dtype)}} if computes else {}
        output = model(x.to(dtype), **scale)
        outputs.append(output.detach())
        (output - y.to(output.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs, whole(model)


@pytest.mark.parametrize("root", ROOTS)
def test_arguments_and_outputs_of_every_root_are_fsdp2_s_own_at_o0(on_two_ranks, root):
    expected = on_two_ranks(train_root, root, None)
    assert loops.same(on_two_ranks(train_root, root, "O0"), expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_sharding_after_initialize_is_refused_before_the_first_step(on_two_ranks, level):
    for errors in on_two_ranks(shard_late, level):
        assert len(errors) == 5
        assert all("Call it first" in told for told in errors)


def shard_late(rank, level):
    errors = []
    for parts in (["block"], ["block", ""]):
        for policy in ("fp32", "bf16"):
            model, optimizer = loops.prepared(level, model=Stem())
            for part in parts:
                options = MixedPrecisionPolicy(**POLICIES[policy])
                fully_shard(model.get_submodule(part), mesh=mesh(2), mp_policy=options)
            with pytest.raises(RuntimeError) as raised:
                loops.train_step(model, optimizer, *rank_batch(rank, 0))
            errors.append(str(raised.value))
    model, optimizer = loops.prepared(level, model=Stem())
    parallelize_module(model.block, mesh(2), ColwiseParallel())
    with pytest.raises(RuntimeError) as raised:
        loops.train_step(model, optimizer, *rank_batch(rank, 0))
    return [*errors, str(raised.value)]


def flatten_late(rank, level, keeps_params):
    """FSDP1 around a prepared model: what its first block says, or the weights after some steps."""
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    options = {"use_orig_params": keeps_params, "device_id": torch.device("cpu")}
    parallel = FullyShardedDataParallel(model, **options)
    try:
        for step in range(STEPS):
            with parallel.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                loss = loops.loss_of(parallel, *rank_batch(rank, step))
                loops.scaled_backward(loss, optimizer) if level else loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        loss.backward()  # until then, FSDP1's hooks keep the model alive
        return str(error)
    with FullyShardedDataParallel.summon_full_params(parallel):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("keeps_params", [True, False])
def test_flat_parameters_are_refused_where_ranks_would_part(on_two_ranks, level, keeps_params):
    for told in on_two_ranks(flatten_late, level, keeps_params):
        assert "FullyShardedDataParallel flattened" in told
        assert "Use opt_level='O4'" in told


def test_flat_parameters_that_do_not_part_train_as_without_amp(on_two_ranks):
    expected = on_two_ranks(flatten_late, None, True)
    found = on_two_ranks(flatten_late, "O4", True)
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-8)


def initialize_flattened(rank, level):
    """Passes ``initialize`` an FSDP1 wrapper, then the module inside it."""
    model = nn.Linear(4, 2)
    parallel = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for part in (parallel, model):
        with pytest.raises(RuntimeError, match="FullyShardedDataParallel has flattened"):
            amp.initialize(part, opt_level=level, verbosity=0)


def test_initialize_takes_no_flattened_model(on_two_ranks, level):
    on_two_ranks(initialize_flattened, level)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16, summed in fp32"])
def test_o0_computes_as_plain_fsdp2_with_the_same_policy(on_two_ranks, policy):
    expected = on_two_ranks(plain, policy)
    for (weights, _), alone in zip(on_two_ranks(outcome, "O0", policy, {}), expected, strict=True):
        assert all(map(torch.equal, weights, alone))


def test_o4_computes_as_fsdp2_under_autocast(on_two_ranks):
    expected = on_two_ranks(plain, "fp32", torch.bfloat16)
    for (weights, _), alone in zip(on_two_ranks(outcome, "O4", "fp32", {}), expected, strict=True):
        torch.testing.assert_close(weights, alone, rtol=0, atol=8e-3)


@pytest.mark.parametrize(("level", "policy"), [("O0", "fp16"), ("O1", "fp32")])
def test_a_dynamic_scale_trains_within_fp16_of_fp32(on_two_ranks, level, policy):
    expected = on_two_ranks(plain, "fp32")
    results = on_two_ranks(outcome, level, policy, DYNAMIC)
    for (weights, scale), alone in zip(results, expected, strict=True):
        assert scale == {"loss_scale": 2.0**8, "unskipped": STEPS}
        torch.testing.assert_close(weights, alone, rtol=0, atol=8e-3)


@pytest.mark.parametrize(("level", "policy"), [("O0", "fp16"), ("O1", "fp32")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(on_two_ranks, level, policy):
    skipped = on_two_ranks(outcome, level, policy, DYNAMIC, STEPS - 1)
    stopped = on_two_ranks(outcome, level, policy, DYNAMIC, None, STEPS - 1)
    for (weights, scale), (before, _) in zip(skipped, stopped, strict=True):
        assert scale == {"loss_scale": 2.0**7, "unskipped": 0}
        assert all(map(torch.equal, weights, before))


def overflow_and_zero(rank):
    """The second rank has no element; its gradients are zero or inf when the next block begins."""
    model = nn.Linear(4, 1, bias=False)
    fully_shard(model, mesh=mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level="O4", loss_scale="dynamic", verbosity=0)
    for factor in (float("inf") if rank == 0 else 1.0, 1.0):
        loops.scaled_backward(model(torch.full((1, 4), factor)).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loops.scale(), whole(model)


def test_a_rank_without_a_shard_goes_on_after_an_overflow(on_two_ranks):
    first, second = on_two_ranks(overflow_and_zero)
    assert first[0] == second[0] == 2.0**15
    assert loops.same(first[1], second[1])


def accumulate(rank, level):
    torch.manual_seed(0)
    model = Stem()
    fully_shard(model.block, mesh=mesh(2))
    fully_shard(model, mesh=mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    if level:
        options = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
        model, optimizer = amp.initialize(model, optimizer, **options)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        loss = loops.loss_of(model, *rank_batch(rank, step))
        loops.scaled_backward(loss, optimizer) if level else loss.backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def test_scaled_passes_without_a_reduction_add_up_in_a_root_that_owns_layers(on_two_ranks):
    """Its parameters stay gathered from a forward to the backward pass."""
    assert loops.same(on_two_ranks(accumulate, "O0"), on_two_ranks(accumulate, None))


def wait_for_another_block(rank):
    """The gradient of a restored model, which it leaves unsent over another model's block."""
    model = nn.Linear(2, 2, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    fully_shard(model, mesh=mesh(2), mp_policy=policy)
    amp.initialize(model, opt_level="O0", verbosity=0)
    other, optimizer = prepare_sharded("O0", "fp32", loss_scale=2.0**16)
    amp.restore(model)
    for sends in (False, True):
        model.set_requires_gradient_sync(sends)
        model(torch.ones(1, 2)).sum().backward()
        loops.scaled_backward(loops.loss_of(other, *rank_batch(rank, 0)), optimizer)
    return model.weight.grad.full_tensor().tolist()


def test_blocks_leave_what_a_restored_model_has_yet_to_send(on_two_ranks):
    """fp16 would not hold it with a scale."""
    assert on_two_ranks(wait_for_another_block) == [[[2.0, 2.0], [2.0, 2.0]]] * 2


def unsent(rank, level, policy, shape, loss_ids, factor=1.0):
    """Whole gradients after passes that each add a factor; all but the last leave it unsent.

    And how many checks each loss scale has passed.
    """
    model = nn.Linear(2, 2, bias=False)
    plane = mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    fully_shard(model, mesh=plane, mp_policy=MixedPrecisionPolicy(**POLICIES[policy]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    options = {"num_losses": 2, "loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    for scaler, scale in zip(amp._amp_state.loss_scalers, (2.0**4, 2.0**6), strict=True):
        scaler._loss_scale = scale
    for index, loss_id in enumerate(loss_ids, start=1):
        defers = (
            model.set_requires_gradient_sync if len(shape) == 1 else model.set_requires_all_reduce
        )
        defers(index == len(loss_ids))
        loss = model(torch.ones(1, 2)).float().sum() * factor
        loss.backward() if loss_id is None else loops.scaled_backward(
            loss, optimizer, loss_id=loss_id
        )
    checks = [scaler["unskipped"] for scaler in amp.state_dict().values()]
    return model.weight.grad.full_tensor(), checks


CHECKS = {(0, 1): [1, 1], (0, None): [0, 0], (None, 0): [1, 0], (1, None, 0, 1): [1, 1]}


@averages_on_cpu
@loops.every(loss_ids=CHECKS, shape=[(2,), (2, 1)])
@pytest.mark.parametrize(("level", "policy"), [("O1", "fp32"), ("O0", "fp16")])
def test_gradients_that_ranks_have_yet_to_share_have_no_scale(
    on_two_ranks, level, policy, shape, loss_ids
):
    for grad, checks in on_two_ranks(unsent, level, policy, shape, loss_ids):
        assert torch.equal(grad, torch.full((2, 2), float(len(loss_ids))))
        assert checks == CHECKS[loss_ids]


@averages_on_cpu
@loops.every(
    shape=[(2,), (2, 1)],
    case=[("fp16", 2.0**-26), ("fp16, summed in fp32", 2.0**9)],
)
def test_unsent_gradients_add_up_beyond_the_range_of_fp16(on_two_ranks, shape, case):
    policy, factor = case
    for grad, _ in on_two_ranks(unsent, "O0", policy, shape, (0, 1, 1), factor):
        assert torch.equal(grad, torch.full((2, 2), 3.0 * factor))


def send_more(rank):
    model = loops.Weights("ab")
    fully_shard(model, mesh=mesh(2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer = loops.sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level="O0", loss_scale=8.0, verbosity=0)
    for names in ("a", "ab"):
        model.set_requires_gradient_sync(names == "ab")
        loops.scaled_backward(model(**dict.fromkeys(names, torch.ones(()))), optimizer)
    return [param.grad.full_tensor().tolist() for param in model.parameters()]


def test_a_pass_that_sends_may_reach_more_parameters_than_those_before(on_two_ranks):
    assert on_two_ranks(send_more) == [[[2.0] * 2, [1.0] * 2]] * 2


def checks_beside(rank):
    """How many checks a scale has passed after a pass of a model beside one that sends later."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model in models:
        fully_shard(model, mesh=mesh(2))
    optimizers = [loops.sgd(model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level="O1", verbosity=0, **DYNAMIC)
    models[0].set_requires_gradient_sync(False)
    models[1].set_requires_all_reduce(False)  # over replicas, which it has not
    loops.scaled_backward(models[1](torch.ones(1, 2)).float().sum(), optimizers[1])
    return amp.state_dict()["loss_scaler0"]["unskipped"]


def test_a_pass_is_checked_beside_a_model_that_sends_later(on_two_ranks):
    assert on_two_ranks(checks_beside) == [1, 1]


def grads_beside(rank, level):
    """Gradients of a plain model that no optimizer steps, after a pass through it and a sharded."""
    torch.manual_seed(0)
    model, head = Stem(), nn.Linear(2, 2)
    fully_shard(model, mesh=mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    if level:
        amp.initialize([model, head], optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    loss = head(model(rank_batch(rank, 0)[0])).square().mean()
    loops.scaled_backward(loss, optimizer) if level else loss.backward()
    return [param.grad for param in head.parameters()]


def test_a_block_unscales_plain_models_beside_a_sharded_one(on_two_ranks):
    assert loops.same(on_two_ranks(grads_beside, "O0"), on_two_ranks(grads_beside, None))


def pretrain(rank, level):
    """As torchtitan: weights made on the meta device, checkpointed blocks, a norm of shards."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(16, 8), *(Block() for _ in range(2)), nn.Linear(8, 16))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index in (1, 2):
        model[index] = checkpoint_wrapper(model[index])
        fully_shard(model[index], mesh=mesh(2), mp_policy=policy)
    fully_shard(model, mesh=mesh(2), mp_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            torch.manual_seed(8 * step + 2 * rank + part)
            tokens, labels = torch.randint(16, (2, 3, 5)).unbind()
            logits = model(tokens).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 60
            loss.backward()
            losses.append(loss.detach())
        grads = [param.grad for param in model.parameters()]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True).full_tensor()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm, foreach=True)
        optimizer.step()
        scheduler.step()
    return losses, whole(model), [group["lr"] for group in optimizer.param_groups]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed)


def test_a_pretraining_loop_of_today_trains_bit_by_bit_as_without_amp(on_two_ranks):
    assert loops.same(on_two_ranks(pretrain, "O0"), on_two_ranks(pretrain, None))


CASES = [("O0", "bf16"), ("O0", "fp16"), ("O1", "fp32"), ("O4", "fp32")]


@pytest.mark.parametrize(("level", "policy"), CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(on_two_ranks, level, policy):
    for whole_run, resumed in on_two_ranks(interrupted, level, policy):
        assert all(map(torch.equal, whole_run, resumed))


def interrupted(rank, level, policy):
    options = {**DYNAMIC, "growth_interval": 3}
    model, optimizer = prepare_sharded(level, policy, **options)
    train_sharded(model, optimizer, rank, range(2))
    files = (*get_state_dict(model, optimizer), amp.state_dict())
    copies = copy.deepcopy(files)
    expected = train_sharded(model, optimizer, rank, range(2, STEPS))
    del model, optimizer
    model, optimizer = prepare_sharded(level, policy, seed=1, **options)
    set_state_dict(model, optimizer, model_state_dict=copies[0], optim_state_dict=copies[1])
    amp.load_state_dict(copies[2])
    return expected, train_sharded(model, optimizer, rank, range(2, STEPS))


def refusals(rank):
    found = {}
    for level in ("O2", "O3", "O5"):
        model, optimizer = sharded("fp32")
        before = whole(model)
        with pytest.raises(RuntimeError) as raised:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert all(map(torch.equal, before, whole(model)))
        found[level] = str(raised.value)
    split = parallelize_module(nn.Sequential(nn.Linear(4, 2)), mesh(2), {"0": ColwiseParallel()})
    with pytest.raises(RuntimeError) as raised:
        amp.initialize(split, opt_level="O5", verbosity=0)
    found["tensor parallel"] = str(raised.value)
    return found


def test_levels_that_cast_dtensors_are_refused_with_the_way(on_two_ranks):
    for found in on_two_ranks(refusals):
        for level, dtype in (("O2", "float16"), ("O3", "float16"), ("O5", "bfloat16")):
            assert "is a DTensor" in found[level]
            assert f"MixedPrecisionPolicy(param_dtype=torch.{dtype})" in found[level]
            assert "opt_level='O0'" in found[level]
        assert "loss_scale='dynamic'" in found["O2"]
        assert "is a DTensor" in found["tensor parallel"]
