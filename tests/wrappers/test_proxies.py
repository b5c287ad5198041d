"""Models that are proxies: objects that stand for a module and whose class cannot be assigned.

Whatever is asked of a prepared proxy has the same answer, to the last bit, as of the same model
without the proxy.
"""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex.parallel import LARC, SyncBatchNorm, convert_syncbn_model
from tests.amp.cases import nothing_changes
from tests.training import cases
from tests.wrappers import proxies
from tests.wrappers.cases import CASTS_DOWN, LEVELS, dtype_of
from tests.wrappers.proxies import KINDS, Heading, Slotted, Transparent, Trunk, prepared, whole

every_level = pytest.mark.parametrize("level", LEVELS)
every_kind = pytest.mark.parametrize("kind", KINDS)
with_head = pytest.mark.parametrize("kind", ["with a forward", "of slots"])


def pairs(kind, level, **options):
    """The proxy and its optimizer, and the same without the proxy."""
    return [prepared(model, level, **options) for model in (KINDS[kind](), whole())]


def train(model, optimizer, count=3, seed=1):
    return [cases.train_step(model, optimizer, *b) for b in cases.batches(count, seed=seed)]


def everything(model, optimizer):
    return [
        dict(model.state_dict()),
        cases.masters(optimizer),
        [param.dtype for param in model.parameters()],
        optimizer.state_dict(),
        cases.grads(amp.master_params(optimizer)),
    ]


def assert_alike(first, second):
    assert cases.same(everything(*first), everything(*second))


# -- training --------------------------------------------------------------------------------


@every_kind
@every_level
def test_a_proxy_trains_as_its_model(level, kind):
    proxied, plain = pairs(kind, level)
    for x, y in cases.batches(3, overflow_at={1}):
        assert cases.same(*(cases.train_step(*pair, x, y) for pair in (proxied, plain)))
    assert_alike(proxied, plain)
    assert proxied[0](x).dtype is plain[0](x).dtype


@every_level
def test_the_same_object_comes_back(level):
    proxy = KINDS["with a forward"]()
    inner = proxy.inner
    model = amp.initialize(proxy, opt_level=level, verbosity=0)
    assert model is proxy
    assert model.inner is inner
    assert isinstance(model, Trunk)
    assert issubclass(type(model), Heading)
    assert type(model).__qualname__ == "Heading"


@every_level
def test_gradients_accumulate(level):
    trained = pairs("with a forward", level, loss_scale=128.0)
    for model, optimizer in trained:
        for x, y in cases.batches(3):
            cases.backward(model, optimizer, x, y)
        optimizer.step()
    assert_alike(*trained)


@every_level
def test_larc_steps(level):
    trained = pairs(
        "with a forward", level, make_optimizer=lambda params: LARC(proxies.momentum(params))
    )
    for pair in trained:
        train(*pair)
    assert cases.same(*(everything(model, larc.optim) for model, larc in trained))


@pytest.mark.parametrize("before", [True, False])
@every_level
def test_batch_norm_is_synchronized_before_or_after(level, before):
    trained = []
    for model in (KINDS["with a forward"](), whole()):
        if before:
            assert convert_syncbn_model(model) is model
        pair = prepared(model, level)
        if not before:
            assert convert_syncbn_model(model) is model
        assert isinstance(model.norm, SyncBatchNorm)
        train(*pair)
        trained.append(pair)
    assert_alike(*trained)


def test_a_proxy_of_a_batch_norm_is_synchronized():
    assert isinstance(convert_syncbn_model(Transparent(nn.BatchNorm1d(2))), SyncBatchNorm)


@every_kind
@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_zero_grad_of_the_proxy_clears_the_masters_gradients(level, kind):
    model, optimizer = prepared(KINDS[kind](), level)
    cases.backward(model, optimizer, *cases.batch())
    model.zero_grad()
    assert all(param.grad is None for param in amp.master_params(optimizer))


@with_head
@pytest.mark.parametrize("level", CASTS_DOWN)
def test_float_gives_exact_values_and_a_proxy_that_computes_in_fp32(level, kind):
    proxied, plain = pairs(kind, level)
    for pair in (proxied, plain):
        train(*pair)
        assert pair[0].float() is pair[0]
        assert cases.train_step(*pair, *cases.batch()).dtype is torch.float32
    assert_alike(proxied, plain)
    assert {param.dtype for param in proxied[0].parameters()} == {torch.float32}


@with_head
@every_level
def test_a_call_from_another_thread_casts(level, kind):
    (model, _), (plain, _) = pairs(kind, level)
    x, _ = cases.batch()
    results = []
    for each in (model, plain):
        each.eval()
        thread = threading.Thread(target=lambda each=each: results.append(each(x)))
        thread.start()
        thread.join()
    assert cases.same(*results)


@with_head
@every_level
def test_the_module_inside_casts_where_it_is_called_itself(level, kind):
    model, _ = prepared(KINDS[kind](), level)
    module = prepared(proxies.seeded(Trunk), level)[0]
    x, _ = cases.batch()
    for _ in range(2):
        assert cases.same(model.inner.eval()(x), module.eval()(x))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(x[:, :3])  # a call that failed leaves nothing behind


def test_an_interrupt_at_any_line_of_the_proxy_s_forward_leaves_the_casts():
    model, _ = prepared(KINDS["with a forward"](), "O5")
    model.eval()
    x, _ = cases.batch()
    expected = model(x)
    lines = []

    def trace(frame, event, arg):
        if Path(frame.f_code.co_filename).name != "proxy_class.py":
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) - 1 == interrupt_at:
                raise KeyboardInterrupt
        return trace

    interrupt_at, count = None, 1
    while interrupt_at is None or interrupt_at < count:
        lines.clear()
        sys.settrace(trace)
        try:
            model(x)
        except KeyboardInterrupt:
            assert interrupt_at is not None
        finally:
            sys.settrace(None)
        if interrupt_at is None:
            count, interrupt_at = len(lines), -1
        interrupt_at += 1
        assert cases.same(model(x), expected)
        assert cases.same(model.inner(x).dtype, torch.float32)
    assert count > 10


@every_level
def test_a_forward_set_on_the_proxy_is_run_inside_and_put_back(level):
    model = KINDS["without one"]()
    model.forward = lambda x: -model.inner(x)
    own = model.forward
    prepared_model, optimizer = prepared(model, level)
    (plain, _) = prepared(whole(), level)
    x, _ = cases.batch()
    assert cases.same(prepared_model.eval()(x), -plain.eval()(x))
    amp.restore(prepared_model, optimizer)
    assert model.__dict__ == {"inner": model.inner, "forward": own}


def on_a_rank(rank, level):
    """What a proxy and its model hold after training under DistributedDataParallel."""
    held = []
    for model, optimizer in pairs("with a forward", level, max_loss_scale=2.0**8):
        wrapped = DistributedDataParallel(model)
        losses = train(wrapped, optimizer, seed=rank)
        held.append([losses, dict(model.state_dict()), cases.masters(optimizer)])
    return cases.same(*held), held[0][2]


@pytest.mark.distributed
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_ranks_train_a_proxy_as_its_model(on_two_ranks, level):
    (alike, masters), (other_alike, other_masters) = on_two_ranks(on_a_rank, level)
    assert alike
    assert other_alike
    assert cases.same(masters, other_masters)


# -- resume, copies, files --------------------------------------------------------------------


@with_head
@every_level
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(level, kind):
    model, optimizer = prepared(KINDS[kind](), level)
    train(model, optimizer, seed=1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    train(model, optimizer, seed=2)
    uninterrupted = everything(model, optimizer), dict(amp.state_dict())
    del model, optimizer
    gc.collect()

    model, optimizer = prepared(KINDS[kind](), level)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    train(model, optimizer, seed=2)
    assert cases.same(uninterrupted, (everything(model, optimizer), dict(amp.state_dict())))


@every_kind
@every_level
def test_restore_gives_the_proxy_back(level, kind):
    model = KINDS[kind]()
    types, names = (type(model), type(model.inner)), sorted(vars(model.inner))
    plain = prepared(whole(), level)
    pair = prepared(model, level)
    for each in (pair, plain):
        train(*each)
        amp.restore(*each)
    assert (type(model), type(model.inner)) == types
    assert sorted(vars(model.inner)) == names
    assert cases.same(dict(model.state_dict()), dict(plain[0].state_dict()))
    with amp.disable_casts():
        assert cases.same(*(each.eval()(cases.batch()[0]) for each in (model, plain[0])))


@every_level
def test_a_restored_proxy_is_prepared_again(level):
    model, optimizer = prepared(KINDS["with a forward"](), level)
    amp.restore(model.inner, optimizer)  # the proxy is let be
    model.eval()
    x, _ = cases.batch()
    assert cases.same(model(x), model.inner.head(model.inner(x)))
    model.train()
    again = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    plain = prepared(whole(), level)
    for pair in (again, plain):
        train(*pair)
    assert_alike(again, plain)
    amp.restore(*again)
    assert type(model) is Heading


@every_kind
@every_level
def test_a_deep_copy_trains_as_the_original(level, kind):
    original = prepared(KINDS[kind](), level)
    train(*original, seed=1)
    copied = copy.deepcopy(original)
    assert type(copied[0]) is type(original[0])
    assert copied[0].inner is not original[0].inner
    for pair in (original, copied):
        train(*pair, seed=2)
    assert_alike(original, copied)


def test_a_copy_made_while_the_proxy_runs_casts():
    model, _ = prepared(KINDS["with a forward"](), "O5")
    copies = []
    handle = model.first.register_forward_hook(lambda *_: copies.append(copy.deepcopy(model)))
    model.eval()
    x, _ = cases.batch()
    expected = model(x)
    handle.remove()
    assert cases.same(copies[0](x), expected)


@every_level
def test_a_shallow_copy_shares_the_module(level):
    model, _ = prepared(KINDS["with a forward"](), level)
    twin = copy.copy(model)
    assert type(twin) is type(model)
    x, _ = cases.batch()
    assert twin.inner is model.inner
    assert cases.same(twin.eval()(x), model.eval()(x))


@pytest.mark.parametrize("protocol", [0, 2, 5])
@every_kind
@every_level
def test_a_file_of_the_whole_proxy_computes_as_the_model_does(level, kind, protocol):
    model, optimizer = prepared(KINDS[kind](), level)
    train(model, optimizer)
    model.eval()
    loaded = pickle.loads(pickle.dumps(model, protocol))
    x, _ = cases.batch()
    assert cases.same(model(x), loaded(x))
    assert loaded.head.weight.dtype is dtype_of(level)
    if level in CASTS_DOWN:
        amp.restore(loaded)
    assert type(loaded) is type(KINDS[kind]())


@with_head
@pytest.mark.parametrize("level", ["O1"])
def test_where_no_parameters_are_cast_the_file_loads_without_apex(level, kind):
    model, optimizer = prepared(KINDS[kind](), level)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    x, _ = cases.batch()
    script = f"""
import io, sys, types, torch
for name in ("apex", "tests.training"):  # what proxies.py imports for itself
    sys.modules[name] = types.ModuleType(name)
sys.modules["tests.training"].cases = None
model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False).eval()
print(type(model).__name__, model(torch.tensor({x.tolist()})).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], input=file.getvalue(), capture_output=True, check=True
    )
    with amp.disable_casts():
        expected = amp.restore(model, optimizer)[0].eval()(x).tolist()
    assert done.stdout.decode() == f"{type(model).__name__} {expected}\n"


def test_a_forward_of_its_own_set_on_the_proxy_is_its_own_in_files():
    for level in ("O4", "O5"):
        model = KINDS["with a forward"]()
        model.forward = model.forward
        model, _ = prepared(model, level)
        loaded = pickle.loads(pickle.dumps(model))
        x, _ = cases.batch()
        assert cases.same(model.eval()(x), loaded.eval()(x))


# -- tools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
def test_explain_shows_what_it_shows_of_the_model(level):
    x, _ = cases.batch()
    shown = [
        [
            (row.module, row.op, row.dtypes_in, row.dtype_out, row.decided_by, row.calls)
            for row in amp.debug.explain(model, x).ops
        ]
        for model, _ in pairs("with a forward", level)
    ]
    assert shown[0] == shown[1]
    assert any(row[0] == "head" for row in shown[0])


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_overflows_are_traced_and_named(level):
    found = []
    for pair in pairs("with a forward", level, loss_scale="dynamic"):
        model, optimizer = pair
        model.first.weight.data[0, 0] = torch.inf
        with amp.debug.trace_overflow(model) as trace:
            cases.backward(model, optimizer, *cases.batch())
        numerics = amp.debug.check_numerics(model, optimizer)
        found.append((trace.first.module, trace.first.op, str(numerics)))
        names = [row.name for row in amp.debug.why_skipped(optimizer)]
        found[-1] += (names,)
    assert found[0] == found[1]
    assert "first.weight" in found[0][2]


def test_an_armed_trace_watches_the_proxy():
    for given in (None, "proxy"):
        model, optimizer = prepared(KINDS["of slots"](), "O5", loss_scale="dynamic")
        handle = amp.debug.arm(optimizer, 1, model=model if given else None)
        for x, y in cases.batches(2, overflow_at={0, 1}):
            cases.backward(model, optimizer, x, y)
        assert handle.trace is not None
        handle.disarm()


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_history_and_frozen_updates_follow_the_proxy(level):
    shown = []
    for model, optimizer in pairs("with a forward", level):
        with amp.debug.History(optimizer) as history:
            train(model, optimizer)
        cases.backward(model, optimizer, *cases.batch())
        with amp.debug.frozen_updates(optimizer) as updates:
            optimizer.step()
        shown.append((history.to_json(), updates.frozen, updates.wanted))
    assert shown[0] == shown[1]


# -- what else has a class that cannot be assigned ---------------------------------------------


class Lying(nn.Linear):
    @property
    def __class__(self):
        return nn.Bilinear


class Guarded(nn.Linear):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise TypeError("this object keeps its class")
        super().__setattr__(name, value)


class Tagged(type):
    """A metaclass that asks for a keyword with each class."""

    def __new__(meta, name, bases, names, *, tag):
        return super().__new__(meta, name, bases, names)

    def __init__(cls, name, bases, names, *, tag):
        super().__init__(name, bases, names)
        cls.tag = tag


class WithTag(nn.Linear, metaclass=Tagged, tag="model"):
    pass


class TaggedProxy(Heading, metaclass=Tagged, tag="proxy"):
    pass


class WithSlots(nn.Linear):
    __slots__ = ("note",)


class WithLayout(nn.Linear, Exception):
    """Is laid out in C."""


@pytest.mark.parametrize("kind", [Lying, Guarded, WithTag, WithSlots, WithLayout])
@every_level
def test_a_module_whose_class_resists_is_prepared_as_any_other(level, kind):
    models = [proxies.seeded(lambda make=make: make(4, 2)) for make in (kind, nn.Linear)]
    for model in models:
        pair = prepared(model, level)
        train(*pair)
        x, _ = cases.batch()
        model.__dict__["seen"] = cases.same(model(x), copy.deepcopy(model)(x))
        amp.restore(*pair)
    assert cases.same(*(dict(model.state_dict()) for model in models))
    assert models[0].seen
    assert type(models[0]) is kind


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_a_module_with_a_lying_class_is_saved_whole(level):
    model, _ = prepared(Lying(4, 2), level)
    loaded = pickle.loads(pickle.dumps(model))
    x, _ = cases.batch()
    assert cases.same(model(x), loaded(x))
    assert issubclass(type(loaded), Lying)


def test_a_proxy_with_a_metaclass_is_prepared():
    proxied = prepared(TaggedProxy(proxies.seeded(Trunk)), "O5")
    plain = prepared(whole(), "O5")
    for pair in (proxied, plain):
        train(*pair)
    assert_alike(proxied, plain)


class Fixed(Heading):
    def __init_subclass__(cls):
        raise TypeError("no subclass, please")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mock.MagicMock(spec=nn.Module), TypeError, r"MagicMock.*modules\(\) yields none"),
        (lambda: mock.Mock(spec=nn.Module), TypeError, r"Mock.*Pass the module itself"),
        (lambda: Fixed(Trunk()), TypeError, r"Fixed.*forward of its own.*Pass the module inside"),
        (lambda: Transparent(nn.DataParallel(Trunk())), RuntimeError, "wrapped in"),
        (lambda: Transparent(Trunk().to("meta")), RuntimeError, "meta device"),
    ],
)
@every_level
def test_what_cannot_be_prepared_is_refused_in_a_sentence(level, make, error, message):
    model, other = make(), whole()
    kind = type(model)
    with nothing_changes(other), pytest.raises(error, match=message):
        amp.initialize([other, model], opt_level=level, verbosity=0)
    assert type(model) is kind


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_proxy_of_a_scripted_module_is_refused():
    with pytest.raises(RuntimeError, match="scripted"):
        amp.initialize(Transparent(torch.jit.script(nn.Linear(1, 1))), verbosity=0)


def test_a_proxy_and_its_module_are_the_same_model():
    proxy = KINDS["with a forward"]()
    with pytest.raises(ValueError, match="same model twice"):
        amp.initialize([proxy, proxy.inner], verbosity=0)
    amp.initialize(proxy, opt_level="O5", verbosity=0)
    with pytest.raises(RuntimeError, match="already prepared"):
        amp.initialize(proxy.inner, opt_level="O5", verbosity=0)


@pytest.mark.parametrize("kind", ["with a forward", "of slots"])
def test_a_failure_leaves_the_proxy_as_it_was(kind):
    model = KINDS[kind]()
    optimizer = proxies.momentum(model.parameters())
    inner, names = type(model.inner), sorted(vars(model.inner))
    with (
        mock.patch.object(torch.Tensor, "to", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert type(model) is type(KINDS[kind]())
    assert (type(model.inner), sorted(vars(model.inner))) == (inner, names)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_disabled_initialize_leaves_a_proxy_alone():
    model = KINDS["of slots"]()
    optimizer = proxies.momentum(model.parameters())
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert amp.restore(model, optimizer) == (model, optimizer)
    assert type(model) is Slotted


def test_the_session_ends_with_the_proxy_and_its_module():
    model, optimizer = prepared(KINDS["with a forward"](), "O4")
    inner = model.inner
    del model, optimizer
    gc.collect()
    assert len(amp._amp_state.sessions()) == 1
    del inner
    gc.collect()
    assert not amp._amp_state.sessions()
