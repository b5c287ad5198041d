"""apex.parallel on two ranks: training is that of one process on the joined batch."""

import copy
import gc
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.parallel import (
    DistributedDataParallel,
    ReduceOp,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    reduce_in_fp32,
)
from apex.parallel import distributed as d
from tests.support import loops
from tests.support.features import needs_masters
from tests.support.loops import Body, each_of, scaled_backward

pytestmark = pytest.mark.distributed
TOLERANCE = {"rtol": 2**-20, "atol": 2**-22}
FP16, BF16 = torch.float16, torch.bfloat16
delay = each_of(False, True)


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def rows_of(rank=None):
    """The whole batch, or the half that a rank gets."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(11))
    return x if rank is None else x[3 * rank : 3 * rank + 3]


def loss_of(model, x):
    return model(x).square().mean()


def grads(model):
    return loops.grads(model.parameters())


def joined_grads(factor=1.0):
    model = net()
    (loss_of(model, rows_of()) * factor).backward()
    return grads(model)


def assert_close(first, second, **tolerance):
    torch.testing.assert_close([*first], [*second], **(tolerance or TOLERANCE))


# -- DistributedDataParallel ---------------------------------------------------------------------


def three_steps(rank, options):
    model = net() if rank in (0, None) else nn.Sequential(*map(copy.deepcopy, net()))
    wrapped = model if rank is None else DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, rows_of(rank)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


WRAPPER_OPTIONS = [
    {},
    {"delay_allreduce": True},
    {"message_size": 8, "num_allreduce_streams": 2},
    {"allreduce_always_fp32": True},
    {"gradient_predivide_factor": 2.0},
    {"gradient_predivide_factor": 3.0, "delay_allreduce": True},
]


@pytest.mark.parametrize("options", WRAPPER_OPTIONS)
def test_ranks_train_like_one_process(on_two_ranks, options):
    expected = three_steps(None, {})
    for params in on_two_ranks(three_steps, options):
        assert_close(params, expected)


def one_backward(rank, options):
    wrapped = DistributedDataParallel(net(), retain_allreduce_buffers=True, **options)
    loss_of(wrapped, rows_of(rank)).backward()
    [flat] = wrapped.allreduce_buffers  # as MLPerf's GNMT reads it
    return grads(wrapped), flat


@pytest.mark.parametrize("predivide", [1.0, 4.0])
def test_without_average_gradients_are_summed(on_two_ranks, delay, predivide):
    options = {"gradient_average": False, "gradient_predivide_factor": predivide}
    for result, flat in on_two_ranks(one_backward, {**options, "delay_allreduce": delay}):
        assert_close(result, joined_grads(2.0 / predivide))
        assert torch.equal(flat, torch.cat([grad.flatten() for grad in result]))


def one_gradient(rank, dtype, value, options):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    wrapped = DistributedDataParallel(model, **options)
    wrapped(torch.full((1, 1), value, dtype=dtype)).sum().backward()
    return model.weight.grad.item()


def test_always_fp32_sums_beyond_the_range_of_fp16(on_two_ranks, delay):
    options = {"allreduce_always_fp32": True, "delay_allreduce": delay}
    assert on_two_ranks(one_gradient, FP16, 49152.0, options) == [49152.0] * 2
    options |= {"gradient_predivide_factor": 3.0}
    assert on_two_ranks(one_gradient, BF16, 1.5078125, options) == [1.5078125] * 2
    options = {"gradient_average": False, "delay_allreduce": delay}
    assert on_two_ranks(one_gradient, FP16, 49152.0, options) == [float("inf")] * 2


def test_fp32_or_a_predivisor_below_1_keeps_what_torch_s_division_would_lose(on_two_ranks, delay):
    for options in ({"allreduce_always_fp32": True}, {"gradient_predivide_factor": 0.5}):
        options["delay_allreduce"] = delay
        assert on_two_ranks(one_gradient, FP16, 2.0**-24, options) == [2.0**-24] * 2


def branches():
    """One layer of three is used always, one in one rank only, one never."""

    def forward(self, x, with_second):
        y = self.always(x)
        return {"out": [self.once(y) if with_second else y]}

    torch.manual_seed(3)
    layers = {name: nn.Linear(2, 2, bias=False) for name in ("always", "once", "never")}
    return Body(forward, **layers)


def run_branches(rank, in_no_sync):
    wrapped = DistributedDataParallel(branches(), delay_allreduce=True)
    x = torch.ones(1, 2)
    if in_no_sync:
        wrapped(x, False)["out"][0].sum().backward()
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(x, rank == 1)["out"][0].sum().backward()
        assert (wrapped.module.once.weight.grad is None) == (rank == 0)  # nothing was sent
        wrapped(x, False)["out"][0].sum().backward()
    for _ in range(0 if in_no_sync else 2):
        wrapped.zero_grad()
        wrapped(x, rank == 1)["out"][0].sum().backward()
    return grads(wrapped)


@pytest.mark.parametrize("in_no_sync", [False, True])
def test_delayed_a_parameter_may_be_used_in_one_rank_or_nowhere(on_two_ranks, in_no_sync):
    model, x = branches(), torch.ones(1, 2)
    total = sum(model(x, second)["out"][0].sum() for second in (False, True)) / 2
    (total + model(x, False)["out"][0].sum() * in_no_sync).backward()
    for always, once, never in on_two_ranks(run_branches, in_no_sync):
        assert_close([always, once], [model.always.weight.grad, model.once.weight.grad])
        assert never is None


def checkpointed():
    """A layer that two checkpointed segments share."""

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x

    torch.manual_seed(3)
    return Body(forward, layer=nn.Linear(4, 4))


def run_odd_passes(rank, in_no_sync):
    """Checkpoints; two forward passes; two passes of one; a pass after one that failed."""
    wrapped = DistributedDataParallel(checkpointed(), delay_allreduce=True, gradient_average=False)
    loss_of(wrapped, rows_of(rank).requires_grad_()).backward()
    again = DistributedDataParallel(net(), delay_allreduce=True)
    first = loss_of(again, rows_of(rank))
    with again.no_sync() if in_no_sync else nullcontext():
        second = loss_of(again, rows_of(rank))
    (first + second).backward()
    retained = DistributedDataParallel(net(), delay_allreduce=True)
    loss = loss_of(retained, rows_of(rank))
    loss.backward(retain_graph=True)
    loss.backward()
    failing = DistributedDataParallel(net(), delay_allreduce=True)
    handle = failing.module[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing(rows_of(rank)).sum().backward()
    handle.remove()
    failing.zero_grad()
    loss_of(failing, rows_of(rank)).backward()
    return [grads(each) for each in (wrapped, again, retained, failing)]


@pytest.mark.parametrize("in_no_sync", [False, True])
def test_delayed_any_pass_is_reduced_once(on_two_ranks, in_no_sync):
    model = checkpointed()
    (2 * loss_of(model, rows_of().requires_grad_())).backward()
    for segments, joined, twice, after_failure in on_two_ranks(run_odd_passes, in_no_sync):
        assert_close(segments, grads(model))
        assert_close([*joined, *twice], [*joined_grads(2.0), *joined_grads(2.0)])
        assert_close(after_failure, joined_grads())


def run_with_ignored_and_frozen(rank):
    model = net()
    model[2].weight.requires_grad_(False)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    wrapped = DistributedDataParallel(model, delay_allreduce=True)
    loss_of(wrapped, rows_of(rank)).backward()
    return grads(wrapped)


def test_delayed_ignored_and_frozen_parameters_are_left_out(on_two_ranks):
    weight, _, _, bias = joined_grads()
    for rank, result in enumerate(on_two_ranks(run_with_ignored_and_frozen)):
        model = net()
        loss_of(model, rows_of(rank)).backward()
        assert result.pop(2) is None
        assert_close(result, [weight, model[0].bias.grad, bias])


def reduce_by_hand(rank):
    wrapped = DistributedDataParallel(net())
    wrapped.disable_allreduce()
    loss_of(wrapped, rows_of(rank)).backward()
    assert wrapped.allreduce_buffers == []
    params = list(wrapped.parameters())
    flat = wrapped.allreduce_bucket([p.grad for p in params[:2]], 0, force_default_stream=True)
    assert torch.equal(flat, torch.cat([p.grad.flatten() for p in params[:2]]))
    wrapped.allreduce_maybe_retain([p.grad for p in params[2:]], 1)
    by_bucket = grads(wrapped)
    wrapped.zero_grad()
    loss_of(wrapped, rows_of(rank)).backward()
    if rank == 0:
        wrapped.module[0].bias.grad = None
    wrapped.allreduce_fallback()
    return by_bucket, grads(wrapped)


def test_gradients_can_be_reduced_by_hand_and_missing_ones_count_as_zero(on_two_ranks):
    model = net()
    loss_of(model, rows_of(1)).backward()
    expected = joined_grads()
    expected[1] = model[0].bias.grad / 2
    for by_bucket, at_once in on_two_ranks(reduce_by_hand):
        assert_close(by_bucket, joined_grads())
        assert_close(at_once, expected)


def of_this_rank(rank, kind, options):
    groups = [dist.new_group([0]), dist.new_group([1])]
    wrapped = kind(net(), process_group=groups[rank], **options)
    if kind is TorchDDP:
        reduce_in_fp32(wrapped)
    loss_of(wrapped, rows_of(rank)).backward()
    return grads(wrapped)


def test_gradients_are_averaged_in_the_wrapper_s_own_group(on_two_ranks):
    for kind, options in (
        (TorchDDP, {}),
        (DistributedDataParallel, {"allreduce_always_fp32": True}),
        (DistributedDataParallel, {"delay_allreduce": True}),
    ):
        for rank, result in enumerate(on_two_ranks(of_this_rank, kind, options)):
            model = net()
            loss_of(model, rows_of(rank)).backward()
            assert_close(result, grads(model))


def recast(rank, options):
    """The model becomes bf16 after it was wrapped, and plain again."""
    model = net()
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    scaled_backward(loss_of(wrapped, rows_of(rank)), optimizer)
    low = grads(wrapped)
    optimizer.zero_grad()
    amp.restore(model, optimizer)
    loss_of(wrapped, rows_of(rank)).backward()
    return low, grads(wrapped)


@needs_masters
@pytest.mark.parametrize("options", WRAPPER_OPTIONS)
def test_a_model_may_be_cast_after_it_is_wrapped(on_two_ranks, options):
    for low, full in on_two_ranks(recast, options):
        assert_close([grad.float() for grad in low], joined_grads(), rtol=2**-5, atol=2**-6)
        assert_close(full, joined_grads())


def subclassed(rank):
    class Own(DistributedDataParallel):
        def allreduce_bucket(self, bucket, bucket_idx, force_default_stream):
            raise AssertionError

    with pytest.raises(TypeError, match=r"Own overrides allreduce_bucket.* register_comm_hook"):
        Own(net())


def test_a_subclass_with_buckets_of_its_own_is_refused(on_two_ranks):
    on_two_ranks(subclassed)


def passes_of_others(rank, delay):
    wrapped = DistributedDataParallel(net(), delay_allreduce=delay, gradient_average=False)
    loss_of(wrapped, rows_of(rank)).backward()
    x = rows_of(rank).requires_grad_()
    torch.autograd.grad(wrapped(x).sum(), x)
    result, model = grads(wrapped), wrapped.module
    del wrapped
    gc.collect()
    model.zero_grad()
    loss_of(model, x).backward()
    return result, grads(model)


def test_autograd_grad_reduces_nothing_and_a_wrapper_that_is_gone_leaves_no_hooks(
    on_two_ranks, delay
):
    for rank, (result, alone) in enumerate(on_two_ranks(passes_of_others, delay)):
        assert_close(result, joined_grads(2.0))
        model = net()
        loss_of(model, rows_of(rank)).backward()
        assert_close(alone, grads(model))


def running_mean(rank, delay, broadcasts):
    norm = DistributedDataParallel(nn.BatchNorm1d(2), delay_allreduce=delay)
    norm.broadcast_buffers |= broadcasts
    for _ in range(2):
        norm(torch.full((2, 2), float(rank)) + torch.eye(2))
    return norm.module.running_mean


def buffers_and_copies(rank, delay):
    means = running_mean(rank, delay, False), running_mean(rank, delay, True)
    wrapped = DistributedDataParallel(net(), delay_allreduce=delay, gradient_average=False)
    found = []
    for copied in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        loss_of(copied, rows_of(rank)).backward()
        found.append(grads(copied))
    compiled = torch.compile(wrapped, backend="eager")
    loss_of(compiled, rows_of(rank)).backward()
    return means, [*found, grads(wrapped)]


def test_buffers_are_each_ranks_own_and_copies_and_compiled_wrappers_reduce(on_two_ranks, delay):
    for rank, (means, found) in enumerate(on_two_ranks(buffers_and_copies, delay)):
        last = 0.1 * (rank + 0.5)  # the other mean begins each pass as that of the first rank
        assert_close(means, torch.tensor([[0.9 * last + last] * 2, [0.9 * 0.05 + last] * 2]))
        for result in found:
            assert_close(result, joined_grads(2.0))


# -- reduce_in_fp32, Reducer, flat calls ---------------------------------------------------------


def averaged(rank, value, in_fp32):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1.0)
    wrapped = TorchDDP(model)
    if in_fp32:
        reduce_in_fp32(wrapped)
    scaled_backward(wrapped(torch.full((1, 4), value)).sum(), optimizer)
    return [param.grad.tolist() for param in amp.master_params(optimizer)]


def test_reduce_in_fp32_keeps_what_the_division_would_lose_in_fp16(on_two_ranks):
    assert on_two_ranks(averaged, 2.0**-24, True) == [[[[2.0**-24] * 4]]] * 2
    assert on_two_ranks(averaged, 2.0**-24, False) == [[[[0.0] * 4]]] * 2


def test_reduce_in_fp32_sums_beyond_the_range_of_fp16(on_two_ranks):
    assert on_two_ranks(averaged, 2.0**15, True) == [[[[2.0**15] * 4]]] * 2


def reduced(rank):
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, rank + 1.0)
    reducer = Reducer(module)
    module.weight.grad = torch.full((1, 2), float(rank))
    reducer.reduce()
    given = {"a": [torch.full((3,), rank + 1.0)], "b": torch.full((2,), rank).half()}
    Reducer(given.values()).reduce()
    tensors = [torch.full((2,), rank), torch.full((2,), float(rank))]
    d.flat_dist_call(tensors, dist.broadcast, (1,))
    mean = torch.tensor([rank + 1.0, 5.0 - rank])
    d.apply_flat_dist_call([mean], dist.all_reduce, (ReduceOp.SUM,))
    every = module.weight, module.weight.grad, given["a"][0], given["b"], *tensors, mean
    return [each.detach().flatten().tolist() for each in every]


def test_reducers_and_flat_calls(on_two_ranks):
    expected = [[1.0] * 2, [0.5] * 2, [1.5] * 3, [0.5] * 2, [1] * 2, [1.0] * 2, [1.5, 4.5]]
    assert on_two_ranks(reduced) == [expected] * 2


def reduced_after_other_passes(rank, level):
    """A rank runs two passes, the other one, which reaches one parameter only."""
    model = loops.Weights("ab")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    reducer = Reducer(model)
    if rank == 0:
        scaled_backward(0.3 * model.a.float().sum() + model.b.sum(), optimizer, delay_unscale=True)
    with amp.scale_loss(0.7 * model.a.float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        reducer.reduce()
    optimizer.step()
    return loops.masters(optimizer)


@needs_masters
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_reducer_gives_ranks_that_ran_other_passes_the_same_gradients(on_two_ranks, level):
    first, second = on_two_ranks(reduced_after_other_passes, level)
    assert loops.same(first, second)
    assert not loops.same(*first)


# -- SyncBatchNorm -------------------------------------------------------------------------------

SHAPES = [(6, 3), (6, 3, 5), (6, 3, 2, 2), (6, 3, 2, 1, 2)]
EPS = {FP16: 2**-10, BF16: 2**-7, torch.float32: 2**-20, torch.float64: 2**-44}


class AnyRank(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, x):
        pass


def data(shape, dtype=torch.float32, offset=0.0):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(shape, generator=generator) + offset).to(dtype) for _ in range(2)]


def passed(kind, tensors, device="cpu", **options):
    """Everything that one training pass gives: output, gradients, statistics."""
    bn = kind(3, **options)
    if bn.affine:
        with torch.no_grad():
            bn.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            bn.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    x, pull = (t.to(device) for t in tensors)
    bn.to(device, torch.float64 if x.dtype is torch.float64 else torch.float32)
    output = bn(x.requires_grad_())
    output.backward(pull)
    assert device == "cuda" or x.grad is not None
    # On a GPU, torch's function gives an empty batch no gradients.
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, *bn.parameters())]
    stats = [t for t in (bn.running_mean, bn.running_var) if t is not None]
    return [t.detach().cpu() for t in (output, *grads, *stats)]


def pass_of_rank(rank, shape, dtype, cut, options, device="cpu"):
    half = [t[:cut] if rank == 0 else t[cut:] for t in data(shape, dtype)]
    return passed(SyncBatchNorm, half, device, **options)


def assert_joined(results, expected, dtype=torch.float32, affine=True):
    first, second = results
    rows = [torch.cat(pair) for pair in zip(first[:2], second[:2], strict=True)]
    count = 2 if affine else 0
    sums = [a + b for a, b in zip(first[2 : 2 + count], second[2 : 2 + count], strict=True)]
    assert_close(first[2 + count :], second[2 + count :], rtol=0, atol=0)
    for index, pair in enumerate(zip([*rows, *sums, *first[2 + count :]], expected, strict=True)):
        own = 8 * (EPS[dtype] if index < 2 else min(EPS[dtype] * 4, 2**-8))
        torch.testing.assert_close(*pair, rtol=own, atol=own)


FULL, FLAT = torch.float32, (6, 3, 2)
OPTIONS = [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.5}]
JOINED = [(shape, FULL, cut, {}) for shape in SHAPES for cut in (3, 1, 0)]
JOINED += [(FLAT, dtype, 2, {}) for dtype in (FP16, BF16, torch.float64)]
JOINED += [(FLAT, FULL, 2, options) for options in OPTIONS]


@pytest.mark.parametrize(("shape", "dtype", "cut", "options"), JOINED)
def test_two_ranks_give_batch_norm_on_the_joined_batch(on_two_ranks, shape, dtype, cut, options):
    results = on_two_ranks(pass_of_rank, shape, dtype, cut, options)
    expected = passed(AnyRank, data(shape, dtype), **options)
    assert_joined(results, expected, dtype, affine=options.get("affine", True))


@pytest.mark.gpu(kernels="gloo copies tensors from the GPU by itself")
@loops.every(cut=[3, 0], dtype=[torch.float32, FP16, BF16])
def test_on_a_gpu_two_ranks_give_batch_norm_on_the_joined_batch(on_two_ranks, dtype, cut):
    results = on_two_ranks(pass_of_rank, (6, 3, 2, 2), dtype, cut, {}, "cuda")
    assert_joined(results, passed(AnyRank, data((6, 3, 2, 2), dtype)), dtype)


def special_passes(rank):
    half = slice(0, 3) if rank == 0 else slice(3, 6)
    x, z = (t[half] for t in data((6, 3, 2)))
    large = SyncBatchNorm(3)(data((6, 3, 2), offset=1000.0)[0][half])
    last = SyncBatchNorm(3, channel_last=True)(x.movedim(1, -1)).movedim(-1, 1)
    residual = SyncBatchNorm(3, fuse_relu=True)(x, z)
    alone = SyncBatchNorm(3)(torch.full((1, 3), float(rank)))
    averaged = SyncBatchNorm(3, momentum=None)
    averaged(x), averaged(z)
    frozen = SyncBatchNorm(3)
    frozen.track_running_stats = False
    frozen(x)
    empty = SyncBatchNorm(3)
    empty(torch.ones(0, 3))
    one = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="one value per channel over all processes"):
        one(torch.ones(1 - rank, 3))
    groups = [dist.new_group([0]), dist.new_group([1])]
    own = SyncBatchNorm(3, process_group=groups[rank])
    assert copy.deepcopy(own).process_group is groups[rank]
    converted = convert_syncbn_model(nn.BatchNorm1d(3), groups[rank], channel_last=True)
    assert converted.process_group is groups[rank]
    assert converted.channel_last
    evaluated = SyncBatchNorm(3).eval()(torch.eye(3)) if rank == 0 else None  # no communication
    assert rank or torch.equal(evaluated, torch.eye(3) / (1 + 1e-5) ** 0.5)
    kept = empty.running_mean.tolist(), one.running_mean.tolist(), one.num_batches_tracked.item()
    assert kept == ([0.0] * 3, [0.0] * 3, 0)
    assert empty.running_var.tolist() == frozen.running_var.tolist() == [1.0] * 3
    stats = averaged.running_mean, averaged.running_var
    return [t.detach() for t in (large, last, residual, own(x), alone, *stats)]


def test_special_layers_and_batches(on_two_ranks):
    ranks = on_two_ranks(special_passes)
    large, last, residual = (torch.cat([r[index] for r in ranks]) for index in range(3))
    x, z = data((6, 3, 2))
    wide = F.batch_norm(data((6, 3, 2), offset=1000.0)[0].double(), None, None, training=True)
    torch.testing.assert_close(large, wide.float(), rtol=0, atol=2**-11)
    plain = F.batch_norm(x, None, None, training=True)
    assert_close([last, residual], [plain, torch.relu(plain + z)], rtol=1e-5, atol=1e-5)
    own = [F.batch_norm(half, None, None, training=True) for half in (x[:3], x[3:])]
    assert_close([r[3] for r in ranks], own, rtol=1e-5, atol=1e-5)
    assert_close([r[4] for r in ranks], [-torch.ones(1, 3), torch.ones(1, 3)], rtol=0, atol=1e-4)
    averaged = nn.BatchNorm1d(3, momentum=None)
    averaged(x), averaged(z)
    for own in ranks:
        assert_close(own[5:], [averaged.running_mean, averaged.running_var])


def normalized_in_pairs(rank):
    group = create_syncbn_process_group(2)
    return SyncBatchNorm(1, process_group=group)(torch.full((1, 1), float(rank))).item()


def test_statistics_are_those_of_the_group(on_ranks):
    assert on_ranks(4, normalized_in_pairs) == pytest.approx([-1.0, 1.0] * 2, abs=1e-4)
