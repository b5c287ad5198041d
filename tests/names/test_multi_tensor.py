"""amp_C's functions over lists of tensors, apex_C, and the applier."""

import math

import pytest
import torch

import amp_C
import apex_C
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier, multi_tensor_apply
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.support import fused, loops
from tests.support.host_reads import HostReads

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [FP16, BF16, FP32]
SHAPES = [(3, 4), (5,), (1,), (0,)]
INF, NAN = float("inf"), float("nan")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
EXACT = {"rtol": 0, "atol": 0}

ADAM = (0.1, 0.8, 0.9, 1e-6, 3, 1, 1, 0.1)
NORM = torch.full((1,), 5.0)
LAMB = (0.1, 0.8, 0.9, 1e-6, 3, 1, 0.1, 1, 1, NORM, 1.0, False)
# Number of lists, and arguments behind chunk_size, noop_flag and tensor_lists.
FUNCTIONS = {
    "multi_tensor_scale": (2, (1 / 3,)),
    "multi_tensor_axpby": (3, (1 / 3, 0.7, -1)),
    "multi_tensor_l2norm": (1, (True,)),
    "multi_tensor_l2norm_mp": (1, (True,)),
    "multi_tensor_l2norm_scale": (2, (1 / 3, True)),
    "multi_tensor_unscale_l2norm": (1, (1 / 3, True)),
    "multi_tensor_adam": (4, ADAM),
    "multi_tensor_adam_capturable": (4, (*ADAM, 1 / 3)),
    "multi_tensor_adam_capturable_master": (5, (*ADAM, 1 / 3)),
    "multi_tensor_adagrad": (3, (0.1, 1e-6, 0, 0.1)),
    "multi_tensor_novograd": (3, (torch.ones(3), 0.1, 0.8, 0.9, 1e-6, 3, 1, 0.1, 1, 1, 2)),
    "multi_tensor_lamb": (4, LAMB),
    "multi_tensor_lamb_mp": (4, (*LAMB, torch.zeros(1), 1 / 3)),
    "multi_tensor_lamb_stage1_cuda": (5, (torch.full((3,), 0.1), 2, 0.8, 0.9, 1e-6, NORM, 1.0)),
    "multi_tensor_lamb_stage2_cuda": (2, (torch.ones(3), torch.full((3,), 3.0), 0.1, 0.1, False)),
    "multi_tensor_sgd": (3, (0.1, 0.0, 0.0, 0.1, False, False, False, 1 / 3)),
}


def flag(value=0):
    return torch.tensor([value], dtype=torch.int32)


def tensors(dtype, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def like(values, dtype=None):
    return [torch.full_like(v, 7.0, dtype=dtype) for v in values]


def clones(values):
    return [v.detach().clone() for v in values]


def called(name, lists, args):
    """Returns what the function wrote into its lists, and what it returned."""
    args = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    returned = getattr(amp_C, name)(65536, flag(), lists, *args)
    return [t for group in lists for t in group], list(returned or ())


# -- all functions -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_functions_round_what_they_give_in_fp32(dtype):
    shapes = [(40, 50), (300,), ()]
    for name, (count, args) in FUNCTIONS.items():
        low = [[t.abs() for t in tensors(dtype, seed, shapes)] for seed in range(count)]
        if name.endswith("_master"):
            low[4] = [t.float() for t in low[4]]
        wide = [[t.to(FP32, copy=True) for t in group] for group in low]
        written, returned = called(name, low, args)
        expected, wanted = called(name, wide, args)
        for one, other in zip(written, expected, strict=True):
            assert torch.equal(one, other.to(one.dtype)), name
        fused.assert_same(returned, wanted, rtol=1e-6, atol=0)


def test_the_number_of_lists_counts_and_empty_ones_give_nothing():
    assert {n for n in dir(amp_C) if n.startswith("multi_tensor")} == FUNCTIONS.keys()
    for name, (count, args) in FUNCTIONS.items():
        function, overflow = getattr(amp_C, name), flag()
        with pytest.raises(ValueError, match="lists of one length"):
            function(65536, flag(), [tensors(FP32)] * (count + 2), *args)
        result = function(65536, overflow, [[] for _ in range(count)], *args)
        assert overflow.item() == 0
        assert (result is None) is ("norm" not in name)
        assert result is None or (result[0].tolist(), result[1].tolist()) == ([0.0], [])


UNFIT_LISTS = [
    ([[torch.ones(2)], []], ValueError, "lists of one length"),
    ([[torch.ones(2)], [torch.ones(3)]], ValueError, "same number of elements"),
    ([[torch.ones(2, 3)], [torch.ones(2, 3).t()]], RuntimeError, "view size"),
    ([[torch.ones(2)], [None]], TypeError, "NoneType"),
    ([[torch.ones(2)], [torch.ones(2, dtype=torch.int64)]], TypeError, "int64"),
    ([[torch.ones(2)], [torch.ones(2).to_sparse()]], TypeError, "dense"),
    ([[torch.ones(2)], [torch.ones(2, device="meta")]], TypeError, "on meta"),
]


@pytest.mark.parametrize(("lists", "error", "message"), UNFIT_LISTS)
def test_lists_that_do_not_fit_are_refused(lists, error, message):
    overflow, before = flag(), clones(lists[0])
    with pytest.raises(error, match=message):
        amp_C.multi_tensor_scale(65536, overflow, lists, 2.0)
    fused.assert_same(lists[0], before, **EXACT)
    assert overflow.item() == 0


# -- scaling, sums and norms ---------------------------------------------------------------------


@pytest.mark.parametrize("target_dtype", DTYPES)
def test_scale_is_computed_in_fp32_rounded_once_and_checked(target_dtype):
    for source_dtype in DTYPES:
        sources = tensors(source_dtype)
        targets, overflow, factor = like(sources, target_dtype), flag(), torch.tensor(1 / 3)
        with HostReads() as reads:
            amp_C.multi_tensor_scale(65536, overflow, [sources, targets], factor)
        assert (reads.count, overflow.item()) == (0, 0)
        fused.assert_same(targets, [(s.float() * factor).to(target_dtype) for s in sources])
        for value in (INF, NAN):
            sources[1][3] = value
            amp_C.multi_tensor_scale(65536, overflow, [sources, targets], 1.0)
            assert overflow.item() == 1
            torch.testing.assert_close(targets[1][3].float(), torch.tensor(value), equal_nan=True)
        amp_C.multi_tensor_scale(65536, overflow, [targets[:1], targets[:1]], 1.0)
        assert overflow.item() == 1  # until the script resets it
    target, flat, overflow = torch.zeros(1, 1, dtype=FP16), torch.tensor([60000.0]), flag()
    amp_C.multi_tensor_scale(65536, overflow, [[flat], [target]], 10.0)
    assert (overflow.item(), target.item()) == (0, INF)  # the sources alone count


@pytest.mark.parametrize("dtype", DTYPES)
def test_axpby_is_computed_in_fp32_and_rounded_once(dtype):
    xs, ys, targets = tensors(dtype), tensors(BF16, seed=1), like(tensors(FP32), dtype)
    amp_C.multi_tensor_axpby(65536, flag(), [xs, ys, targets], 0.75, torch.tensor([-0.5]), -1)
    pairs = zip(xs, ys, strict=True)
    expected = [(0.75 * x.float() - 0.5 * y.float()).to(dtype) for x, y in pairs]
    fused.assert_same(targets, expected, **EXACT)
    for arg, bad, raised in [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1), (-1, 0, 1), (-1, 1, 1)]:
        lists, overflow = [tensors(dtype), tensors(FP32, seed=1)], flag()
        lists[bad][0][1, 1] = NAN
        amp_C.multi_tensor_axpby(65536, overflow, [*lists, lists[1]], 1.0, 1.0, arg)
        assert overflow.item() == raised


@pytest.mark.parametrize("dtype", [*DTYPES, FP64])
def test_norms_are_those_of_the_plain_loop(dtype):
    values = [*tensors(dtype), *tensors(FP32)]
    each = torch.stack([v.double().square().sum().sqrt() for v in values])
    expected = each.square().sum().sqrt().float().reshape(1), each.float()
    before, targets, inverse = clones(values), like(values, BF16), torch.tensor([1 / 128])
    found = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [values], True)
    fused.assert_same(found, expected, rtol=1e-5, atol=0)
    assert amp_C.multi_tensor_l2norm(65536, flag(), [values], None)[1].shape == (0,)
    found = amp_C.multi_tensor_l2norm_scale(65536, flag(), [values, targets], 0.5, True)
    fused.assert_same(found, expected, rtol=1e-5, atol=0)
    fused.assert_same(targets, [(v * 0.5).to(BF16) for v in values])
    found = amp_C.multi_tensor_unscale_l2norm(65536, flag(), [values], inverse, True)
    fused.assert_same(found, [norm / 128 for norm in expected], rtol=1e-5, atol=0)
    fused.assert_same(values, before, **EXACT)


def test_norms_neither_overflow_in_fp16_nor_lose_digits_and_report_what_is_not_finite():
    overflow = flag()
    norm, _ = amp_C.multi_tensor_l2norm(65536, overflow, [[torch.full((4,), 4e4, dtype=FP16)]])
    assert math.isclose(norm.item(), 8e4, rel_tol=1e-3)
    inverse = torch.tensor([1e-10])
    norm, _ = amp_C.multi_tensor_unscale_l2norm(65536, overflow, [[torch.tensor([1e25])]], inverse)
    assert math.isclose(norm.item(), 1e15, rel_tol=1e-5)
    assert overflow.item() == 0
    # torch's own on a CPU adds squares one by one, and is 1e-4 off here.
    many = torch.rand(2**22 + 3, generator=torch.Generator().manual_seed(0))
    norm, _ = amp_C.multi_tensor_l2norm(65536, overflow, [[many]])
    assert norm.item() == pytest.approx(many.double().norm().item(), rel=5e-6)
    many[0] = INF
    norm, _ = amp_C.multi_tensor_l2norm(65536, overflow, [[many]])
    assert (overflow.item(), norm.isfinite().item()) == (1, False)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_is_its_plain_loop(hysteresis):
    wanted, count, left, interval = 2.0**16, 0, hysteresis, 3
    scale, steps, tracker = torch.tensor([wanted]), flag(), flag(hysteresis)
    for overflow in [0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1]:
        left, count = (left - 1, 0) if overflow else (hysteresis, count + 1)
        if overflow and left <= 0:
            wanted /= 2
        elif count == interval:
            wanted, count = wanted * 2, 0
        found, args = torch.tensor([float(overflow)]), (2.0, 0.5, interval, hysteresis)
        with HostReads() as reads:
            returned = amp_C.update_scale_hysteresis(scale, steps, tracker, found, *args)
        assert reads.count == 0
        assert returned is scale
        assert (scale.item(), steps.item(), tracker.item()) == (wanted, count, left)
    scale = torch.tensor(2.0**127)
    amp_C.update_scale_hysteresis(scale, flag()[0], flag(1)[0], torch.zeros(1), 2.0, 0.5, 1, 1)
    assert scale.item() == 2.0**127  # the largest


# -- steps: the optimizers', whose rules test_optimizer_rules.py checks ---------------------------


def third_step(kind, names, **options):
    """Lists for an optimizer's third step, and what it makes of all but the gradients."""
    params = fused.parameters()
    optimizer = kind(params, lr=0.1, **options)
    fused.run(optimizer, params, 2)
    lists = [fused.gradients(params, 2), clones(params)]
    lists += [clones(optimizer.state[p][name] for p in params) for name in names]
    fused.run(optimizer, params, 1, first=2)
    return lists, [params, *([optimizer.state[p][name] for p in params] for name in names)]


def adam_case(kind=FusedAdam, **options):
    options = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, **options}
    return third_step(kind, ("exp_avg", "exp_avg_sq"), **options)


def assert_stepped(lists, expected):
    for found, wanted in zip(lists[1 : 1 + len(expected)], expected, strict=True):
        fused.assert_same(found, wanted, **CLOSE)


def global_norm(grads):
    return amp_C.multi_tensor_l2norm(65536, flag(), [grads])[0]


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_adagrad_and_novograd_step_as_the_optimizers_whatever_the_flag_says(mode):
    for correct in (0, 1):
        lists, expected = adam_case(adam_w_mode=mode == 1, bias_correction=bool(correct))
        args = (0.1, 0.8, 0.9, 1e-6, 3, mode, correct, 0.1)
        multi_tensor_applier(amp_C.multi_tensor_adam, flag(1), lists, *args)
        assert_stepped(lists, expected)
    options = {"eps": 1e-6, "weight_decay": 0.1}
    lists, expected = third_step(FusedAdagrad, ["sum"], adagrad_w_mode=mode == 1, **options)
    amp_C.multi_tensor_adagrad(65536, flag(1), lists, 0.1, 1e-6, mode, 0.1)
    assert_stepped(lists, expected)
    options |= {"betas": (0.8, 0.9), "reg_inside_moment": mode == 0}
    for norm_type in (0, 2):
        names = ("exp_avg", "exp_avg_sq")
        own = {"norm_type": norm_type, "grad_averaging": norm_type == 2, **options}
        lists, expected = third_step(FusedNovoGrad, names, **own)
        norms = torch.stack(lists.pop())
        args = (norms, 0.1, 0.8, 0.9, 1e-6, 3, 1, 0.1, int(norm_type == 2), mode, norm_type)
        amp_C.multi_tensor_novograd(65536, flag(1), lists, *args)
        assert_stepped(lists, expected[:2])
        torch.testing.assert_close(norms, torch.stack(expected[2]), **CLOSE)


@loops.every(weight_decay=[0.0, 0.1], nvlamb=[False, True])
def test_lamb_steps_as_the_optimizer_in_one_call_and_in_two_stages(weight_decay, nvlamb):
    options = {"kind": FusedLAMB, "weight_decay": weight_decay, "use_nvlamb": nvlamb}
    lists, expected = adam_case(**options)
    norm = global_norm(lists[0])
    args = (0.1, 0.8, 0.9, 1e-6, 3, 1, weight_decay, 1, 1, norm, 1.0, nvlamb)
    multi_tensor_applier(amp_C.multi_tensor_lamb, flag(1), lists, *args)
    assert_stepped(lists, expected)
    lists, expected = adam_case(**options)
    updates = [torch.zeros_like(p) for p in lists[1]]
    decay = torch.full((len(updates),), weight_decay)
    args = (decay, 2, 0.8, 0.9, 1e-6, norm.item(), 1.0)
    amp_C.multi_tensor_lamb_stage1_cuda(65536, flag(), [*lists, updates], *args)
    norms = [amp_C.multi_tensor_l2norm(65536, flag(), [x], True)[1] for x in (lists[1], updates)]
    args = (*norms, 0.1, weight_decay, nvlamb)
    amp_C.multi_tensor_lamb_stage2_cuda(65536, flag(), [lists[1], updates], *args)
    assert_stepped(lists, expected)


def test_the_second_stage_without_a_decay_gives_every_tensor_a_trust_ratio():
    runs = []
    for rest in ((), (0.0, True)):
        params, updates = tensors(FP32), tensors(FP32, seed=1)
        norms = [amp_C.multi_tensor_l2norm(65536, flag(), [x], True)[1] for x in (params, updates)]
        args = (*norms, 0.1, *rest)
        amp_C.multi_tensor_lamb_stage2_cuda(65536, flag(), [params, updates], *args)
        runs.append(params)
    fused.assert_same(*runs, **EXACT)


def test_the_first_run_of_sgd_starts_the_momentum_with_the_gradient():
    grads, momenta = tensors(FP32), like(tensors(FP32))
    lists = [grads, tensors(FP32, seed=1), momenta]
    amp_C.multi_tensor_sgd(65536, flag(), lists, 0.0, 0.9, 0.5, 0.1, False, True, False)
    fused.assert_same(momenta, tensors(FP32), **EXACT)


COUNT, SCALE, INVERSE = torch.tensor([3], dtype=torch.int32), torch.tensor([64.0]), 1 / 64


def adam_capturable(noop, lists):
    args = (torch.tensor(0.1), 0.8, 0.9, 1e-6, COUNT, 1, 1, 0.1, torch.tensor([INVERSE]))
    amp_C.multi_tensor_adam_capturable(65536, noop, lists, *args)


def lamb_mp(noop, lists):
    args = (torch.tensor(0.1), 0.8, 0.9, 1e-6, COUNT, 1, 0.1, 1, 1, global_norm(lists[0]))
    rest = (SCALE, False, torch.zeros(1), torch.tensor([INVERSE]))
    amp_C.multi_tensor_lamb_mp(65536, noop, lists, *args, *rest)


def sgd(noop, lists):
    amp_C.multi_tensor_sgd(65536, noop, lists, 0.1, 0.9, 0.0, 0.1, True, False, False, INVERSE)


def sgd_case():
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    return third_step(FusedSGD, ["momentum_buffer"], **options)


DEVICE_STEPS = {"adam": (adam_case, adam_capturable), "sgd": (sgd_case, sgd),
                "lamb": (lambda: adam_case(FusedLAMB), lamb_mp)}  # fmt: skip


@pytest.mark.parametrize("name", DEVICE_STEPS)
def test_steps_by_device_scalars_take_scaled_gradients_and_write_16_bit_copies(name):
    make, call = DEVICE_STEPS[name]
    lists, expected = make()
    lists[0] = [g * 64.0 for g in lists[0]]
    copies = [torch.zeros_like(p, dtype=BF16) for p in lists[1]]
    given = [lists[0], copies, *lists[2:], lists[1]] if name == "adam" else [*lists, copies]
    before = [clones(each) for each in given]
    with HostReads() as reads:
        call(flag(1), given)
        unchanged = [clones(each) for each in given]
        call(flag(), given)
    assert reads.count == 0
    assert all(torch.equal(*pair) for both in zip(before, unchanged) for pair in zip(*both))  # noqa: B905
    assert_stepped(lists, expected)
    fused.assert_same(copies, [p.bfloat16() for p in lists[1]], **EXACT)
    if name == "adam":  # which leaves unscaled gradients
        fused.assert_same(lists[0], fused.gradients(lists[0], 2), **EXACT)


# -- apex_C and the applier ----------------------------------------------------------------------


def test_the_applier_is_available_and_passes_its_chunk_size():
    assert multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 65536
    multi_tensor_applier.check_avail()
    buffer, lists = torch.zeros(1), [[torch.ones(1)]]
    called_with = MultiTensorApply(7)(lambda *args: args, buffer, lists, 1.0, True)
    assert called_with == (7, buffer, lists, 1.0, True)
    assert multi_tensor_apply.MultiTensorApply is MultiTensorApply


@pytest.mark.parametrize("dtype", DTYPES)
def test_unflatten_undoes_flatten_by_views(dtype):
    parts = [torch.randn(2, 3).to(dtype), torch.randn(()).to(dtype), torch.zeros(0, 2).to(dtype)]
    flat = apex_C.flatten(parts)
    assert (flat.shape, flat.dtype) == ((7,), dtype)
    views = apex_C.unflatten(flat, parts)
    fused.assert_same(views, parts, **EXACT)
    views[0].fill_(1.0)
    assert flat[:6].tolist() == [1.0] * 6
    assert not torch.equal(parts[0], views[0])
    assert apex_C.flatten([torch.arange(6).view(2, 3).t()]).tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(RuntimeError, match="sum exactly to 8"):
        apex_C.unflatten(torch.zeros(8), parts)
