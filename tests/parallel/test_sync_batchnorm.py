"""SyncBatchNorm in one process is batch norm; in two it is batch norm on the joined batch."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.parallel import SyncBatchNorm
from apex.parallel.sync_batch_norm_function import Running, sync_batch_norm

two_ranks = pytest.mark.distributed
SHAPES = [(6, 3), (6, 3, 5), (6, 3, 2, 2), (6, 3, 2, 1, 2), (6, 3, 1, 2, 1, 2)]
LOW = [torch.float16, torch.bfloat16]
EPS = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-20, torch.float64: 2**-44}
FIELDS = ("output", "grad", "weight", "bias", "mean", "var")


def data(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def layer(cls=SyncBatchNorm, affine=True, **options):
    result = cls(3, affine=affine, **options)
    if affine:
        with torch.no_grad():
            result.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            result.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    return result


def passed(bn, x, pull):
    """Everything that one training pass gives, by the names in FIELDS."""
    x = x.clone().requires_grad_()
    output = bn(x)
    output.backward(pull)
    params = [None if p is None else p.grad for p in (bn.weight, bn.bias)]
    stats = [None if t is None else t.clone() for t in (bn.running_mean, bn.running_var)]
    return [output.detach(), x.grad, *params, *stats]


def plain(shape, dtype=torch.float32, **options):
    """The pass of torch's batch norm on the whole batch."""
    bn = layer(nn.BatchNorm3d if len(shape) == 5 else AnyRank, **options)
    return passed(bn, *data(shape, dtype))


class AnyRank(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, x):
        pass


def assert_same(result, expected, dtype=torch.float32):
    for name, one, other in zip(FIELDS, result, expected, strict=True):
        if one is None or other is None:
            assert one is other, name
            continue
        own = EPS[dtype] if name in ("output", "grad") else min(EPS[dtype] * 4, 2**-8)
        torch.testing.assert_close(one, other, rtol=8 * own, atol=8 * own, msg=name)


# -- two processes ---------------------------------------------------------------------------


def halves(tensors, rank, cut):
    return [t[:cut] if rank == 0 else t[cut:] for t in tensors]


def pass_of_rank(rank, shape, dtype, cut, options, device="cpu"):
    bn = layer(**options).to(device)
    tensors = [t.to(device) for t in halves(data(shape, dtype), rank, cut)]
    return [None if t is None else t.cpu() for t in passed(bn, *tensors)]


def joined(results):
    """Both ranks' passes as one: rows side by side, parameter gradients summed."""
    first, second = results
    rows = [torch.cat(pair) for pair in zip(first[:2], second[:2], strict=True)]
    sums = [None if a is None else a + b for a, b in zip(first[2:4], second[2:4], strict=True)]
    return rows + sums + first[4:]


@two_ranks
@pytest.mark.parametrize("cut", [3, 1, 0])
@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_give_batch_norm_on_the_joined_batch(on_two_ranks, shape, cut):
    results = on_two_ranks(pass_of_rank, shape, torch.float32, cut, {})
    assert_same(joined(results), plain(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
def test_on_a_gpu_one_process_is_batch_norm_by_the_kernels_of_its_own(dtype, layout, affine):
    bn = layer(AnyRank, affine=affine).to(
        torch.float64 if dtype is torch.float64 else torch.float32
    )
    twin = copy.deepcopy(bn).cuda()
    x, pull = data((6, 3, 2, 4), dtype)

    def synced(x):
        running = Running(twin.running_mean, twin.running_var, twin.momentum)
        return sync_batch_norm(x, twin.weight, twin.bias, running, twin.eps, None)

    there = x.cuda().to(memory_format=layout).requires_grad_()
    output = synced(there)
    assert output.is_contiguous(memory_format=layout)
    output.backward(pull.cuda())
    grads = [None if p is None else p.grad for p in (twin.weight, twin.bias)]
    result = [output, there.grad, *grads, twin.running_mean, twin.running_var]
    result = [None if tensor is None else tensor.detach().cpu() for tensor in result]
    assert_same(result, passed(bn, x, pull), dtype)


@pytest.mark.gpu(kernels="gloo copies tensors from the GPU by itself")
@two_ranks
@pytest.mark.parametrize("cut", [3, 1, 0])
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_on_a_gpu_two_ranks_give_batch_norm_on_the_joined_batch(on_two_ranks, dtype, shape, cut):
    results = on_two_ranks(pass_of_rank, shape, dtype, cut, {}, "cuda")
    assert_same(joined(results), passed(layer(AnyRank), *data(shape, dtype)), dtype)


@two_ranks
@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_two_ranks_take_any_dtype(on_two_ranks, dtype):
    bn = layer(AnyRank).to(torch.float32 if dtype in LOW else dtype)
    expected = passed(bn, *data((6, 3, 2), dtype))
    assert_same(joined(on_two_ranks(pass_in_dtype, dtype)), expected, dtype)


def pass_in_dtype(rank, dtype):
    bn = layer().to(torch.float32 if dtype in LOW else dtype)
    return passed(bn, *halves(data((6, 3, 2), dtype), rank, 2))


@two_ranks
@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.5}],
)
def test_two_ranks_take_every_option(on_two_ranks, options):
    results = on_two_ranks(pass_of_rank, (6, 3, 2), torch.float32, 2, options)
    assert_same(joined(results), plain((6, 3, 2), **options))


@two_ranks
def test_running_statistics_are_the_same_in_every_rank(on_two_ranks):
    first, second = on_two_ranks(pass_of_rank, (6, 3, 2), torch.float32, 2, {})
    assert torch.equal(first[4], second[4])
    assert torch.equal(first[5], second[5])


def large_mean(rank):
    bn = SyncBatchNorm(3)
    x = data((6, 3, 2))[0] + 1000.0
    return bn(halves([x], rank, 2)[0]).detach()


@two_ranks
def test_a_large_mean_costs_no_precision(on_two_ranks):
    x = data((6, 3, 2))[0] + 1000.0
    expected = F.batch_norm(x.double(), None, None, training=True).float()
    torch.testing.assert_close(torch.cat(on_two_ranks(large_mean)), expected, rtol=0, atol=2**-11)


def channels_last_pass(rank):
    bn = layer(channel_last=True)
    x, pull = (t.movedim(1, -1) for t in data((6, 3, 2, 2)))
    return passed(bn, *halves([x, pull], rank, 2))


@two_ranks
def test_channel_last_takes_channels_as_the_last_dimension(on_two_ranks):
    result = joined(on_two_ranks(channels_last_pass))
    result[:2] = [t.movedim(-1, 1) for t in result[:2]]
    assert_same(result, plain((6, 3, 2, 2)))


def residual_pass(rank):
    bn = layer(fuse_relu=True)
    x, z = halves(data((6, 3, 2)), rank, 2)
    return bn(x, z).detach()


@two_ranks
def test_a_residual_is_added_before_the_relu(on_two_ranks):
    x, z = data((6, 3, 2))
    expected = torch.relu(layer(AnyRank)(x) + z)
    torch.testing.assert_close(torch.cat(on_two_ranks(residual_pass)), expected)


def one_value_in_all(rank):
    bn = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="one value per channel over all processes"):
        bn(torch.ones(1 - rank, 3))
    return bn.num_batches_tracked.item(), bn.running_mean.tolist()


@two_ranks
def test_one_value_over_all_ranks_is_refused_and_changes_nothing(on_two_ranks):
    assert on_two_ranks(one_value_in_all) == [(0, [0.0] * 3)] * 2


def one_value_each(rank):
    bn = SyncBatchNorm(3)
    return bn(torch.full((1, 3), float(rank))).detach()


@two_ranks
def test_one_value_in_each_rank_is_enough(on_two_ranks):
    first, second = on_two_ranks(one_value_each)
    torch.testing.assert_close(first, -torch.ones(1, 3), rtol=0, atol=1e-4)
    torch.testing.assert_close(second, torch.ones(1, 3), rtol=0, atol=1e-4)


def all_empty(rank):
    bn = SyncBatchNorm(3)
    output = bn(torch.ones(0, 3))
    return output.shape, bn.running_mean.tolist(), bn.running_var.tolist()


@two_ranks
def test_empty_batches_everywhere_move_no_statistics(on_two_ranks):
    assert on_two_ranks(all_empty) == [((0, 3), [0.0] * 3, [1.0] * 3)] * 2


def in_own_group(rank):
    groups = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
    bn = layer(process_group=groups[rank])
    return passed(bn, *halves(data((6, 3, 2)), rank, 3))


@two_ranks
def test_statistics_are_those_of_the_group(on_two_ranks):
    for rank, result in enumerate(on_two_ranks(in_own_group)):
        assert_same(result, passed(layer(AnyRank), *halves(data((6, 3, 2)), rank, 3)))


def copied_with_group(rank):
    groups = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
    bn = SyncBatchNorm(3, process_group=groups[rank])
    return copy.deepcopy(bn).process_group is groups[rank]


@two_ranks
def test_a_copy_shares_the_process_group(on_two_ranks):
    assert on_two_ranks(copied_with_group) == [True, True]


def evaluate_on_one_rank(rank, options):
    bn = layer(**options).eval()
    return bn(torch.eye(3)).tolist() if rank == 0 else None


@two_ranks
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_evaluation_sends_nothing(on_two_ranks, options):
    result, _ = on_two_ranks(evaluate_on_one_rank, options)
    assert result == layer(AnyRank, **options).eval()(torch.eye(3)).tolist()


def recomputed(rank):
    bn = layer()
    x, pull = halves(data((6, 3, 2)), rank, 2)
    x.requires_grad_()
    checkpoint(bn, x, use_reentrant=False).backward(pull)
    return x.grad


@two_ranks
def test_checkpointing_gives_the_same_gradients(on_two_ranks):
    expected = plain((6, 3, 2))[1]
    torch.testing.assert_close(torch.cat(on_two_ranks(recomputed)), expected)


def under_autocast(rank, dtype):
    bn = layer()
    x, pull = halves(data((6, 3, 2), dtype), rank, 2)
    with torch.autocast("cpu", torch.bfloat16):
        return passed(bn, x, pull)


@two_ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(on_two_ranks, dtype):
    expected = passed(layer(AnyRank), *data((6, 3, 2), dtype))
    assert_same(joined(on_two_ranks(under_autocast, dtype)), expected, dtype)


def under_amp(rank, level, dtype):
    caster = nn.Linear(1, 1)
    amp.initialize(caster, opt_level=level, verbosity=0)
    bn = layer()
    return passed(bn, *halves(data((6, 3, 2), dtype), rank, 2))


@two_ranks
@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_of_amp_change_nothing(on_two_ranks, level, dtype):
    results = on_two_ranks(under_amp, level, dtype)
    bn = layer(AnyRank).to(torch.float64 if dtype is torch.float64 else torch.float32)
    expected = passed(bn, *data((6, 3, 2), dtype))
    # The layer's own statistics are fp32 here, whatever the input.
    expected[4:] = [t.float() for t in expected[4:]]
    expected[2:4] = [t.float() for t in expected[2:4]]
    assert_same(joined(results), expected, min(dtype, torch.float32, key=precision))


def precision(dtype):
    return -EPS[dtype]


# -- one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_alone_it_is_batch_norm_bit_by_bit(shape, grouped, request):
    if grouped:
        request.getfixturevalue("alone")
    for one, other in zip(passed(layer(), *data(shape)), plain(shape), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("param_dtype", [*LOW, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
def test_alone_any_input_goes_with_any_parameters(dtype, param_dtype):
    bn = layer().to(param_dtype)
    result = passed(bn, *data((6, 3, 2), dtype))
    assert [t.dtype for t in result] == [dtype] * 2 + [param_dtype] * 4
    expected = passed(layer(AnyRank).double(), *(t.double() for t in data((6, 3, 2), dtype)))
    worst = max(EPS[dtype], EPS[param_dtype])
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=16 * worst, atol=16 * worst)


@pytest.mark.parametrize("param_dtype", [*LOW, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
def test_evaluation_takes_any_input_with_any_parameters(dtype, param_dtype):
    bn = layer().to(param_dtype).eval()
    x = data((6, 3, 2), dtype)[0]
    worst = max(EPS[dtype], EPS[param_dtype])
    expected = layer(AnyRank).double().eval()(x.double())
    assert bn(x).dtype is dtype
    torch.testing.assert_close(bn(x).double(), expected, rtol=8 * worst, atol=8 * worst)


def test_evaluation_without_running_statistics_goes_by_the_batch():
    x = data((6, 3, 2))[0]
    options = {"track_running_stats": False}
    assert torch.equal(layer(**options).eval()(x), layer(AnyRank, **options).eval()(x))


def test_without_momentum_running_statistics_are_plain_averages():
    bn, expected = layer(momentum=None), layer(AnyRank, momentum=None)
    for x in data((6, 3, 2)):
        bn(x)
        expected(x)
    assert torch.equal(bn.running_var, expected.running_var)
    assert bn.num_batches_tracked == 2


def test_one_value_per_channel_is_refused_and_changes_nothing():
    bn = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="one value per channel"):
        bn(torch.ones(1, 3))
    assert bn.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("shape", "options"),
    [((3,), {}), ((2, 4), {}), ((2, 3, 4), {"channel_last": True}), ((2, 4, 3), {})],
)
def test_a_wrong_shape_is_refused(shape, options):
    with pytest.raises(ValueError, match="rank 2 or more with 3 channels"):
        SyncBatchNorm(3, **options)(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_a_wrong_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match="it takes float16, bfloat16, float32 and float64"):
        SyncBatchNorm(3)(torch.ones(2, 3, dtype=dtype))


def test_it_is_a_batch_norm_of_torch():
    assert isinstance(SyncBatchNorm(3), nn.modules.batchnorm._BatchNorm)


def test_state_dict_is_that_of_batch_norm():
    bn = SyncBatchNorm(3)
    bn.load_state_dict(nn.BatchNorm2d(3).state_dict())
    assert list(bn.state_dict()) == list(nn.BatchNorm2d(3).state_dict())


def test_it_pickles_with_its_options():
    bn = pickle.loads(pickle.dumps(SyncBatchNorm(3, channel_last=True, fuse_relu=True)))
    assert bn.channel_last
    assert bn.fuse_relu
    assert bn(torch.ones(2, 2, 3)).shape == (2, 2, 3)


def test_it_shows_its_options():
    assert "channel_last=True, fuse_relu=False" in repr(SyncBatchNorm(3, channel_last=True))


def test_group_and_layout_can_be_set_later(one_of_four):
    bn = SyncBatchNorm(3)
    group = torch.distributed.new_group([2, 3])
    bn._specify_process_group(group)
    bn._specify_channel_last(True)
    assert bn.process_group is group
    assert bn.channel_last


def test_gradients_are_right_by_finite_differences():
    from apex.parallel.sync_batch_norm_function import sync_batch_norm

    x, weight, bias = torch.randn(4, 3, 2), torch.randn(3), torch.randn(3)
    inputs = [t.double().requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *t: sync_batch_norm(*t, None, 1e-3, None), inputs)
