"""apex.parallel in one process: LARC, conversion, groups, multiproc, and what is refused."""

import copy
import functools
import json

import pytest
import torch
from torch import nn

from apex import amp, optimizers, parallel
from apex.parallel import distributed as d
from apex.parallel import multiproc
from tests.support import fused, loops
from tests.support.ranks import fake_group

LEVELS = ["O1", "O2", "O5"]


@pytest.fixture
def alone():
    """A process group of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(2, 4, 1)
        self.block = nn.Sequential(nn.BatchNorm2d(4, momentum=0.3, eps=1e-3), nn.ReLU())
        self.last = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        return self.norm(self.last(self.block(self.first(x)).mean((2, 3))))


def x():
    return torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(4))


# -- LARC ----------------------------------------------------------------------------------------

OPTIONS = [{}, {"clip": False}, {"trust_coefficient": 0.5, "eps": 1e-3}]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def step_by_hand(params, momentum, *, trust_coefficient=0.02, clip=True, eps=1e-8):
    """SGD on the gradients of LARC's paper, with the zero-norm rule of the original."""
    for param in params:
        value, grad = param.detach(), param.grad.float()
        param_norm, grad_norm = value.norm(), grad.norm()
        if param_norm and grad_norm:
            rate = trust_coefficient * param_norm / (grad_norm + 0.1 * param_norm + eps)
            grad = (grad + 0.1 * value) * ((rate / 0.1).clamp(max=1.0) if clip else rate)
        momentum[param] = 0.9 * momentum[param] + grad if param in momentum else grad
        param.data.add_(momentum[param], alpha=-0.1)


@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_larc_steps_the_masters_by_the_trust_ratio_and_skips_or_takes_closures(level):
    for options in OPTIONS:
        make = functools.partial(lambda own, params: parallel.LARC(sgd(params), **own), options)
        scale = {"loss_scale": "dynamic" if level in ("O1", "O2") else 8.0, "max_loss_scale": 8.0}
        model, optimizer = loops.prepared(level, make, **scale)
        *_, last = amp.master_params(optimizer)
        nn.init.zeros_(last)
        twin, momentum = list(map(nn.Parameter, loops.masters(optimizer))), {}
        for data in loops.batches(3):
            optimizer.zero_grad()
            loops.backward(model, optimizer, *data)
            next(amp.master_params(optimizer)).grad[:] *= bool(momentum)
            for param, stepped in zip(twin, amp.master_params(optimizer), strict=True):
                param.grad = stepped.grad.clone()
            optimizer.step()
            step_by_hand(twin, momentum, **options)
            masters = loops.masters(optimizer)
            torch.testing.assert_close(masters, loops.values(twin), rtol=2**-20, atol=2**-24)
        if level in ("O1", "O2"):
            loops.train_step(model, optimizer, *loops.overflowing())
            assert loops.same(loops.masters(optimizer), masters)
        else:
            loops.train_step_with_closure(model, optimizer, *loops.batch())
            assert not any(map(torch.equal, loops.masters(optimizer), masters))


@pytest.mark.parametrize("level", LEVELS)
def test_larc_scales_by_the_norm_of_weights_that_a_script_has_written(level):
    runs = []
    for reads in (True, False):
        model, optimizer = loops.prepared(level, lambda params: parallel.LARC(sgd(params)))
        loops.backward(model, optimizer, *loops.batch())
        with torch.no_grad():
            model[0].weight.mul_(0.25)
        if reads:
            assert all(param.grad is not None for param in amp.master_params(optimizer))
        optimizer.step()
        runs.append(loops.masters(optimizer))
    assert loops.same(*runs)


def test_larc_decays_each_group_by_its_own_rate():
    params, twins = fused.parameters(), fused.parameters()

    def larc(*groups):
        own = [{"params": each, "weight_decay": decay} for each, decay in groups]
        return parallel.LARC(torch.optim.SGD(own, lr=0.1))

    fused.run(larc((params[:2], 0.0), (params[2:], 0.5)), params, 2)
    for each in (larc((twins[:2], 0.0)), larc((twins[2:], 0.5))):
        fused.run(each, twins, 2)
    fused.assert_same(params, twins, rtol=0, atol=0)


def test_larc_scales_by_what_a_grad_scaler_has_unscaled():
    params, twins = fused.parameters(), fused.parameters()
    larc = functools.partial(parallel.LARC, trust_coefficient=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    fused.give(params, [64.0 * grad for grad in fused.gradients(params, 0)])
    scaler.step(larc(optimizers.FusedSGD(params, lr=0.1)))
    fused.run(larc(optimizers.FusedSGD(twins, lr=0.1)), twins, 1)
    fused.assert_same(params, twins, rtol=0, atol=0)


def test_larc_is_a_wrapper_that_leaves_the_optimizers_options():
    model = ConvNet()
    inner = sgd(model.first.parameters())
    optimizer = parallel.LARC(inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer) == repr(inner)
    optimizer.add_param_group({"params": list(model.last.parameters())})

    def closure():
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]
    model(x()).sum().backward()
    assert optimizer.step(lambda: 7.0) == 7.0
    other = parallel.LARC(sgd([{"params": group["params"]} for group in inner.param_groups]))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert str(other.state_dict()) == str(optimizer.state_dict())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.first.parameters())


def test_larc_refuses_bad_input():
    with pytest.raises(TypeError, match=r"LARC got Linear; it wraps a torch\.optim\.Optimizer"):
        parallel.LARC(nn.Linear(1, 1))
    optimizer = sgd(ConvNet().parameters())
    with pytest.raises(ValueError, match="trust_coefficient is -1"):
        parallel.LARC(optimizer, trust_coefficient=-1.0)
    with pytest.raises(TypeError, match="clip is 'no'; it must be a bool"):
        parallel.LARC(optimizer, clip="no")


# -- convert_syncbn_model and groups -------------------------------------------------------------


def test_conversion_keeps_everything_but_the_class():
    model, plain, calls = ConvNet().eval(), ConvNet().eval(), []
    before = [*model.parameters(), *model.buffers()]
    handle = model.norm.register_forward_hook(lambda *args: calls.append(1))
    assert parallel.convert_syncbn_model(model) is model
    layer = model.block[0]
    assert type(layer) is type(model.norm) is parallel.SyncBatchNorm
    assert (layer.eps, layer.momentum, layer.num_features, layer.training) == (1e-3, 0.3, 4, False)
    assert all(map(lambda a, b: a is b, before, [*model.parameters(), *model.buffers()]))
    assert torch.equal(model.train()(x()), plain.train()(x()))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    handle.remove()
    model(x())
    assert calls == [1]
    assert torch.equal(copy.deepcopy(model)(x()), model(x()))
    layer.fuse_relu = True
    assert parallel.convert_syncbn_model(model).block[0].fuse_relu
    single = nn.InstanceNorm1d(2)
    assert type(parallel.convert_syncbn_model(single)) is nn.InstanceNorm1d


def test_what_cannot_be_converted_is_refused_and_nothing_changes():
    model = ConvNet()
    with pytest.raises(TypeError, match="convert_syncbn_model got list"):
        parallel.convert_syncbn_model([model])
    with pytest.raises(TypeError, match="process_group is"):
        parallel.convert_syncbn_model(model, [0, 1])
    layer = nn.BatchNorm1d(2)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    model = nn.Sequential(nn.BatchNorm1d(2), layer)
    with pytest.raises(ValueError, match="with a parametrization"):
        parallel.convert_syncbn_model(model)
    assert type(model[0]) is nn.BatchNorm1d
    layer, _optimizer = loops.prepared("O2", model=nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="prepared on its own"):
        parallel.convert_syncbn_model(layer)


def test_groups_are_neighbouring_ranks():
    with fake_group(3, 4):
        for size, ranks in ((1, [3]), (2, [2, 3]), (4, [0, 1, 2, 3])):
            group = parallel.create_syncbn_process_group(size)
            assert torch.distributed.get_process_group_ranks(group) == ranks
        assert parallel.create_syncbn_process_group(0) is None
        with pytest.raises(ValueError, match="group_size is -1; it must be an integer"):
            parallel.create_syncbn_process_group(-1)
        with pytest.raises(ValueError, match="divisible"):
            parallel.create_syncbn_process_group(3)
        with pytest.raises(TypeError, match="contains this process"):
            parallel.SyncBatchNorm(3, process_group=torch.distributed.new_group([0, 1]))


# -- DistributedDataParallel, Reducer, flat calls ------------------------------------------------


def test_a_wrapper_is_torchs_and_takes_options_without_a_meaning_today(alone):
    model = nn.Linear(2, 2)
    options = {"allreduce_trigger_params": list(model.parameters()), "num_allreduce_streams": 2}
    options |= {"allreduce_communicators": ([None], [None]), "gradient_average_split_factor": 2.0}
    wrapped = parallel.DistributedDataParallel(model, message_size=2**20, prof=True, **options)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    assert wrapped.bucket_bytes_cap == 4 * 2**20
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    wrapped.sync_bucket_structure()
    wrapped.comm_ready_buckets(model.weight)
    delayed = parallel.DistributedDataParallel(model, delay_allreduce=True)
    with torch.no_grad():
        assert not delayed(torch.ones(1, 2)).requires_grad


def test_delayed_sparse_gradients_are_refused(alone):
    model = nn.Embedding(2, 2, sparse=True)
    wrapped = parallel.DistributedDataParallel(model, delay_allreduce=True)
    with pytest.raises(RuntimeError, match=r"sparse gradient.* sparse=False"):
        wrapped(torch.tensor([0])).sum().backward()


BAD_OPTIONS = [
    ({"shared_param": True}, ValueError, "shared_param is not supported"),
    ({"message_size": 0}, TypeError, "message_size is 0; .* above 0"),
    ({"message_size": [0]}, TypeError, "device_ids="),
    ({"gradient_predivide_factor": 0.0}, ValueError, "must be a positive number"),
    ({"delay_allreduce": True, "static_graph": True}, ValueError, "any graph"),
    ({"delay_allreduce": "no"}, TypeError, "delay_allreduce is 'no'; it must be a bool"),
    ({"delay_allreduce": True, "allreduce_trigger_params": [1]}, ValueError, "Omit it"),
    ({"no_such_option": 1}, TypeError, "no_such_option"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(alone, options, error, message):
    with pytest.raises(error, match=message):
        parallel.DistributedDataParallel(nn.Linear(2, 2), **options)


def test_without_a_process_group_calls_are_refused():
    for call in (parallel.Reducer, parallel.DistributedDataParallel):
        with pytest.raises(ValueError, match="init_process_group"):
            call(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="init_process_group"):
        parallel.create_syncbn_process_group(2)


def test_tensors_are_split_by_type_and_found_in_any_nesting():
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    half, bf16, full, double = (torch.ones(2, dtype=dtype) for dtype in dtypes)
    split = d.split_half_float_double([full, double, half, bf16, full])
    assert [[t.dtype for t in bucket] for bucket in split] == [
        [torch.float16], [torch.bfloat16], [torch.float32] * 2, [torch.float64]
    ]  # fmt: skip
    by_type = d.split_by_type([full, half, full])
    assert {name: len(ts) for name, ts in by_type.items()} == {
        "torch.FloatTensor": 2, "torch.HalfTensor": 1
    }  # fmt: skip
    found = []
    d.extract_tensors([full, (half, {"no": 1}, None, "text"), iter([double])], found)
    assert [t.dtype for t in found] == [torch.float32, torch.float16, torch.float64]


# -- multiproc -----------------------------------------------------------------------------------

SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
written = sys.argv[1] + os.environ["RANK"]
with open(written, "w") as file:
    json.dump([{name: os.environ[name] for name in names}, sys.argv[2:]], file)
os.replace(written, os.path.join(sys.argv[1], os.environ["RANK"]))  # whole, or not at all
if "fail" in sys.argv:
    import time
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(60)
    open(os.path.join(sys.argv[1], "was not terminated"), "w")
if "kill" in sys.argv:
    os.kill(os.getpid(), 9)
"""


SCRIPTS = [
    (0, "", ["--lr", "0.1"], ["--lr", "0.1"]),
    (0, "", ["--rank", "9", "--world-size", "9"], ["--rank", "{}", "--world-size", "2"]),
    (0, "'--rank'", [], ["--rank", "{}"]),
    (3, "", ["fail"], ["fail"]),
    (-9, "", ["kill"], ["kill"]),
]


@pytest.mark.parametrize(("status", "text", "given", "received"), SCRIPTS)
def test_multiproc_starts_each_rank(tmp_path, monkeypatch, caplog, status, text, given, received):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "out").mkdir()
    script = tmp_path / "script.py"
    script.write_text(SHOW + text)
    assert multiproc.main([str(script), str(tmp_path / "out"), *given]) == status
    assert "torchrun --nproc-per-node=2" in caplog.text
    found = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").iterdir())]
    for variables, arguments in found:
        assert arguments == [each.format(variables["RANK"]) for each in received]
        assert variables["RANK"] == variables["LOCAL_RANK"]
        assert (variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("2", "127.0.0.1")
    if not status:  # else a process may have ended before it wrote
        assert [variables["RANK"] for variables, _ in found] == ["0", "1"]
        assert len({variables["MASTER_PORT"] for variables, _ in found}) == 1
