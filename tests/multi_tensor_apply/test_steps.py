"""Steps against plain loops, and the flag that leaves them out."""

import pytest
import torch

import amp_C
from apex.multi_tensor_apply import multi_tensor_applier
from tests.multi_tensor_apply.lists import (
    BF16,
    FP16,
    INF,
    NAN,
    assert_same,
    clones,
    flag,
)
from tests.optimizers import cases, plain


def plain_adam(count=1, **options):
    """A plain loop that has taken `count` steps, with the lists that amp_C gets for the last."""
    params = [p.detach() for p in cases.parameters()]
    rule = {
        "lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "w_mode": True,
        "bias_correction": True, **options,
    }  # fmt: skip
    kind = plain.LAMB if "averaging" in options else plain.Adam
    reference = kind(params, **rule)
    for index in range(count - 1):
        reference.step(cases.gradients(params, index))
    zero = torch.zeros(())
    lists = [
        cases.gradients(params, count - 1),
        clones(reference.params),
        [
            (s.get("m", zero) + torch.zeros_like(p))
            for s, p in zip(reference.state, params, strict=True)
        ],
        [
            (s.get("v", zero) + torch.zeros_like(p))
            for s, p in zip(reference.state, params, strict=True)
        ],
    ]
    reference.step(lists[0])
    return reference, lists


def assert_adam(reference, lists):
    expected = [
        reference.params, [s["m"] for s in reference.state], [s["v"] for s in reference.state]
    ]  # fmt: skip
    for found, wanted in zip(lists[1:4], expected, strict=True):
        assert_same(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("bias_correction", [0, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_adam_is_its_plain_loop(mode, bias_correction, count):
    reference, lists = plain_adam(count, w_mode=mode == 1, bias_correction=bias_correction)
    args = (0.1, 0.8, 0.9, 1e-6, count, mode, bias_correction, 0.1)
    multi_tensor_applier(amp_C.multi_tensor_adam, flag(), lists, *args)
    assert_adam(reference, lists)


@pytest.mark.parametrize("count", [1, 3])
def test_adam_capturable_unscales_and_steps(count):
    reference, lists = plain_adam(count)
    lists[0] = [g * 64.0 for g in lists[0]]
    args = (
        torch.tensor(0.1), 0.8, 0.9, 1e-6, torch.tensor([count], dtype=torch.int32), 1, 1, 0.1,
        torch.tensor([1 / 64]),
    )  # fmt: skip
    with cases.HostReads() as reads:
        multi_tensor_applier(amp_C.multi_tensor_adam_capturable, flag(), lists, *args)
    assert reads.count == 0
    assert_adam(reference, lists)
    assert_same(lists[0], cases.gradients(lists[0], count - 1))


def master_lists():
    reference, lists = plain_adam()
    masters = lists[1]
    lists[1] = [p.bfloat16() for p in masters]
    return reference, [*lists, masters]


def call_master(noop_flag, lists):
    args = (torch.tensor(0.1), 0.8, 0.9, 1e-6, torch.tensor([1]), 1, 1, 0.1, torch.ones(1))
    amp_C.multi_tensor_adam_capturable_master(65536, noop_flag, lists, *args)


def test_adam_capturable_master_steps_masters_and_rounds_them():
    reference, lists = master_lists()
    call_master(flag(), lists)
    assert_same(lists[4], reference.params, rtol=1e-5, atol=1e-6)
    assert_same(lists[1], [m.bfloat16() for m in lists[4]])


def call_sgd(noop_flag, lists, *, first_run=False, scale=1.0, **options):
    settings = {
        "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "lr": 0.1, "nesterov": False,
        "first_run": first_run, "wd_after_momentum": False, "scale": scale,
    }  # fmt: skip
    args = {**settings, **options}.values()
    multi_tensor_applier(amp_C.multi_tensor_sgd, noop_flag, lists, *args)


def plain_sgd(count, **options):
    params = [p.detach() for p in cases.parameters()]
    settings = {
        "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "lr": 0.1, "nesterov": False,
        "wd_after_momentum": False,
    }  # fmt: skip
    reference = plain.SGD(params, **{**settings, **options})
    for index in range(count - 1):
        reference.step(cases.gradients(params, index))
    lists = [
        cases.gradients(params, count - 1),
        clones(reference.params),
        [
            s.get("buffer", torch.zeros_like(p)).clone()
            for s, p in zip(reference.state, params, strict=True)
        ],
    ]
    reference.step(lists[0])
    return reference, lists


@pytest.mark.parametrize("first_run", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"dampening": 0.5}, {"wd_after_momentum": True}, {"momentum": 0.0}],
    ids=str,
)
def test_sgd_is_its_plain_loop(options, first_run):
    reference, lists = plain_sgd(1 if first_run else 3, **options)
    call_sgd(flag(), lists, first_run=first_run, **options)
    assert_same(lists[1], reference.params, rtol=1e-5, atol=1e-6)
    if options.get("momentum", 0.9):
        buffers = [s["buffer"] for s in reference.state]
        assert_same(lists[2], buffers, rtol=1e-5, atol=1e-6)


def test_sgd_multiplies_gradients_by_scale_and_keeps_them():
    reference, lists = plain_sgd(3)
    lists[0] = [g * 32.0 for g in lists[0]]
    before = clones(lists[0])
    call_sgd(flag(), lists, scale=1 / 32)
    assert_same(lists[1], reference.params, rtol=1e-5, atol=1e-6)
    assert_same(lists[0], before)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_sgd_takes_16_bit_gradients_and_writes_a_16_bit_copy(dtype):
    _, lists = plain_sgd(3)
    lists[0] = [g.to(dtype) for g in lists[0]]
    expected = [[g.float() for g in lists[0]], clones(lists[1]), clones(lists[2])]
    copies = [torch.zeros_like(p, dtype=dtype) for p in lists[1]]
    call_sgd(flag(), [*lists, copies])
    call_sgd(flag(), expected)
    assert_same(lists[1], expected[1])
    assert_same(copies, [p.to(dtype) for p in expected[1]])


@pytest.mark.parametrize("mode", [0, 1])
def test_adagrad_is_its_plain_loop(mode):
    params = [p.detach() for p in cases.parameters()]
    reference = plain.Adagrad(params, lr=0.1, eps=1e-6, weight_decay=0.1, w_mode=mode == 1)
    lists = [cases.gradients(params, 0), params, [torch.zeros_like(p) for p in params]]
    reference.step(lists[0])
    multi_tensor_applier(amp_C.multi_tensor_adagrad, flag(), lists, 0.1, 1e-6, mode, 0.1)
    assert_same(lists[1], reference.params, rtol=1e-5, atol=1e-6)
    assert_same(lists[2], [s["sum"] for s in reference.state], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("mode", [0, 1])
def test_novograd_is_its_plain_loop(mode, norm_type):
    params = [p.detach() for p in cases.parameters()]
    reference = plain.NovoGrad(
        params, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, bias_correction=True,
        averaging=True, inside=mode == 0, norm_type=norm_type, init_zero=True,
    )  # fmt: skip
    averages, norms = [torch.zeros_like(p) for p in params], torch.zeros(len(params))
    for step in (1, 2):
        grads = cases.gradients(params, step)
        reference.step(grads)
        args = (norms, 0.1, 0.8, 0.9, 1e-6, step, 1, 0.1, 1, mode, norm_type)
        multi_tensor_applier(amp_C.multi_tensor_novograd, flag(), [grads, params, averages], *args)
    assert_same(params, reference.params, rtol=1e-5, atol=1e-6)
    assert_same([norms], [torch.stack([s["norm"] for s in reference.state])], rtol=1e-5, atol=0)


def lamb_case(count=2, weight_decay=0.1, nvlamb=False, averaging=True):
    return plain_adam(
        count, averaging=averaging, max_grad_norm=1.0, use_nvlamb=nvlamb,
        weight_decay=weight_decay,
    )  # fmt: skip


def global_norm(grads):
    return amp_C.multi_tensor_l2norm(65536, flag(), [grads])[0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("nvlamb", [False, True])
@pytest.mark.parametrize("averaging", [0, 1])
def test_lamb_is_its_plain_loop(weight_decay, nvlamb, averaging):
    reference, lists = lamb_case(2, weight_decay, nvlamb, averaging)
    norm = global_norm(lists[0])
    args = (0.1, 0.8, 0.9, 1e-6, 2, 1, weight_decay, averaging, 1, norm, 1.0, nvlamb)
    multi_tensor_applier(amp_C.multi_tensor_lamb, flag(), lists, *args)
    assert_adam(reference, lists)


def call_lamb_mp(noop_flag, lists, scale=32.0):
    norm = global_norm(lists[0])
    args = (
        torch.tensor(0.1), 0.8, 0.9, 1e-6, torch.tensor([2], dtype=torch.int32), 1, 0.1, 1, 1,
        norm, torch.tensor([scale]), False, torch.zeros(1), torch.tensor([1 / scale]),
    )  # fmt: skip
    with cases.HostReads() as reads:
        multi_tensor_applier(amp_C.multi_tensor_lamb_mp, noop_flag, lists, *args)
    assert reads.count == 0


def test_lamb_mp_steps_on_scaled_gradients():
    reference, lists = lamb_case()
    lists[0] = [g * 32.0 for g in lists[0]]
    call_lamb_mp(flag(), lists)
    assert_adam(reference, lists)


def test_lamb_mp_writes_16_bit_copies():
    reference, lists = lamb_case()
    copies = [torch.zeros_like(p, dtype=BF16) for p in lists[1]]
    call_lamb_mp(flag(), [*lists, copies], scale=1.0)
    assert_adam(reference, lists)
    assert_same(copies, [p.bfloat16() for p in lists[1]])


@pytest.mark.parametrize("as_number", [False, True])
def test_lamb_in_two_stages_is_its_plain_loop(as_number):
    reference, lists = lamb_case()
    updates = [torch.zeros_like(p) for p in lists[1]]
    norm = global_norm(lists[0])
    norm = norm.item() if as_number else norm
    decay = torch.full((len(updates),), 0.1)
    multi_tensor_applier(
        amp_C.multi_tensor_lamb_stage1_cuda, flag(), [*lists, updates], decay, 1, 0.8, 0.9, 1e-6,
        norm, 1.0,
    )  # fmt: skip
    norms = [amp_C.multi_tensor_l2norm(65536, flag(), [x], True)[1] for x in (lists[1], updates)]
    multi_tensor_applier(
        amp_C.multi_tensor_lamb_stage2_cuda, flag(), [lists[1], updates], *norms, 0.1, 0.1, False
    )
    assert_adam(reference, lists)


@pytest.mark.parametrize(
    ("arguments", "adaptive"),
    [((), True), ((0.0,), False), ((0.0, True), True), ((0.1,), True)],
)
def test_lamb_stage2_adapts_the_rate_where_asked(arguments, adaptive):
    param, update = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    norms = torch.tensor([5.0]), torch.tensor([1.0])
    expected = param - (0.5 if adaptive else 0.1) * update
    amp_C.multi_tensor_lamb_stage2_cuda(65536, flag(), [[param], [update]], *norms, 0.1, *arguments)
    torch.testing.assert_close(param, expected)


@pytest.mark.parametrize("norms", [(0.0, 1.0), (1.0, 0.0)])
def test_lamb_stage2_adapts_nothing_by_a_norm_of_0(norms):
    param, update = torch.tensor([3.0]), torch.tensor([1.0])
    param_norm, update_norm = (torch.tensor([norm]) for norm in norms)
    lists = [[param], [update]]
    amp_C.multi_tensor_lamb_stage2_cuda(65536, flag(), lists, param_norm, update_norm, 0.1, 0.1)
    torch.testing.assert_close(param, torch.tensor([2.9]))


READS_FLAG = {
    "sgd": lambda f: (call_sgd, f(lambda: [*plain_sgd(3)[1]])),
    "adam_capturable_master": lambda f: (call_master, f(lambda: master_lists()[1])),
    "lamb_mp": lambda f: (call_lamb_mp, f(lambda: lamb_case()[1])),
}


@pytest.mark.parametrize("name", READS_FLAG)
def test_step_that_reads_the_flag_leaves_all_as_it_is(name):
    def copied(make):
        lists = make()
        lists[0][0].view(-1)[0] = NAN
        if name != "adam_capturable_master":
            lists.append([torch.full_like(p, 3.0, dtype=BF16) for p in lists[1]])
        return lists

    call, lists = READS_FLAG[name](copied)
    before = [clones(tensors) for tensors in lists]
    call(flag(1), lists)
    for found, kept in zip(lists, before, strict=True):
        assert_same(found, kept, rtol=0, atol=0, equal_nan=True)


def test_adam_capturable_leaves_all_as_it_is():
    _, lists = plain_adam(3)
    lists[0][0][0, 0] = INF
    before = [clones(tensors) for tensors in lists]
    args = (0.1, 0.8, 0.9, 1e-6, torch.tensor([3]), 1, 1, 0.1, torch.full((1,), 0.5))
    amp_C.multi_tensor_adam_capturable(65536, flag(1), lists, *args)
    for found, kept in zip(lists, before, strict=True):
        assert_same(found, kept)


def test_adam_and_lamb_step_whatever_the_flag_says():
    for reference, lists, call in (
        (*plain_adam(3), lambda f, x: amp_C.multi_tensor_adam(
            1, f, x, 0.1, 0.8, 0.9, 1e-6, 3, 1, 1, 0.1)),
        (*lamb_case(), lambda f, x: amp_C.multi_tensor_lamb(
            1, f, x, 0.1, 0.8, 0.9, 1e-6, 2, 1, 0.1, 1, 1, global_norm(x[0]), 1.0)),
    ):  # fmt: skip
        call(flag(1), lists)
        assert_adam(reference, lists)
