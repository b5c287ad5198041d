"""Which casts are on in a thread: a block's own; outside, those of the newest live session."""

import contextlib
import gc
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from apex import amp
from tests.support.loops import Body, every, in_a_thread, prepared, product, scaled_backward

LOW = {"O1": torch.float16, "O4": torch.bfloat16}


def session(level, model=None):
    return prepared(level, model=model or nn.Linear(2, 2))


def state():
    enabled = torch.is_autocast_enabled("cpu")
    return enabled and torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


BLOCKS = {
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", torch.float16),
    "off": lambda: torch.autocast("cpu", enabled=False),
    "uncached": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "disable_casts": amp.disable_casts,
}


@every(first=[0, 1, 2], levels=[("O1", "O4", "O1"), ("O4", "O1", "O1"), ("O4", "O4", "O1")])
def test_the_newest_live_session_s_casts_are_on(levels, first):
    sessions = [session(level) for level in levels]
    names = [*levels]
    while sessions:
        sessions.pop(min(first, len(sessions) - 1))
        names.pop(min(first, len(names) - 1))
        gc.collect()
        assert product() is (LOW[names[-1]] if names else torch.float32)


NEXT = [lambda held: held[0](torch.ones(1, 2)), lambda held: amp.restore(*held)]


@every(then=NEXT, ended=["in a block", "in a thread"], level=["O0", "O5"])
def test_casts_that_ended_elsewhere_go_at_the_next_call_of_any_model(level, ended, then):
    first, other = session("O1"), session(level)
    if ended == "in a block":
        with torch.autocast("cpu", torch.bfloat16):
            amp.restore(*first)
    else:
        in_a_thread(lambda: amp.restore(*first))
    then(other)
    assert product() is torch.float32


@pytest.mark.parametrize("level", LOW)
def test_casts_that_end_in_inference_mode_stay_off(level):
    model, optimizer = session(level)
    with torch.inference_mode():
        del model, optimizer
        gc.collect()
    other, _ = session("O0")
    other(torch.ones(1, 2))
    assert state() == (False, True)


@pytest.mark.parametrize("level", LOW)
def test_casts_end_with_the_last_model_whose_optimizer_trains_on(level):
    model, optimizer = session(level, nn.Linear(2, 2))
    amp.restore(model)
    output = model(torch.ones(1, 2))
    assert output.dtype is product() is torch.float32
    scaled_backward(output.sum(), optimizer)
    assert torch.equal(model.bias.grad, torch.ones(2))


def test_casts_end_with_a_restored_model_that_hooks_keep_alive():
    model = nn.Linear(2, 2)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    amp.initialize(model, [*optimizers.values()], opt_level="O4", verbosity=0)
    handles = [
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
        for param in optimizers
    ]
    model(torch.ones(1, 2)).sum().backward()
    amp.restore(model)
    del model
    assert product() is torch.float32
    for handle in handles:  # the collector does not see into them
        handle.remove()


def test_casts_end_beside_a_dtype_that_the_script_set():
    before = torch.get_autocast_dtype("cuda")
    held = [*session("O4")]
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        held.clear()
        gc.collect()
        assert product() is torch.float32
    finally:
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_session_that_begins_in_a_block_casts_in_its_models_only(device):
    with torch.autocast(device, enabled=False):
        model, _ = session("O4", Product(2, 2))
        assert product() is torch.float32
    assert product() is torch.float32
    assert model(torch.ones(1, 2))[1] is torch.bfloat16


def test_disable_casts_nests_and_is_for_models_too():
    model, _ = session("O4", Product(2, 2))
    with amp.disable_casts():
        with amp.disable_casts():
            assert product() is torch.float32
        assert model(torch.ones(1, 2))[1] is product() is torch.float32
    assert model(torch.ones(1, 2))[1] is product() is torch.bfloat16


def test_a_forward_that_raises_leaves_no_casts_in_a_thread_without():
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError

    model, _ = session("O4", Fails(2, 2))

    def run():
        with pytest.raises(KeyError):
            model(torch.ones(1, 2))
        return product()

    assert in_a_thread(run) is torch.float32


@pytest.mark.parametrize("level", LOW)
def test_an_operator_that_raises_leaves_the_casts_on(level):
    """Also after the model has seen fp64 data, from which on amp's own kernels cast."""

    def tries(self, x):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(2, 3), x)
        return product()

    model, _ = session(level, Body(tries, layer=nn.Linear(2, 2)))
    for x in (torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)):
        assert model(x) is LOW[level]
        assert model(x.float()) is LOW[level]


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_sessions_and_blocks(seed):
    """Against the rule: a block decides; outside of blocks, the newest session that began there."""
    random_ = random.Random(seed)
    start, live, began = state(), [], []
    blocks = []  # each with the state at its begin
    for _ in range(60):
        action = random_.choice(["begin", "end", "enter", "leave"])
        if action == "begin" and len(live) < 4:
            level = random_.choice(["O1", "O4"])
            live.append(session(level))
            if not blocks:
                began.append((live[-1][0], level))
        elif action == "end" and live:
            amp.restore(*live.pop(random_.randrange(len(live))))
        elif action == "enter" and len(blocks) < 3:
            block = BLOCKS[random_.choice([*BLOCKS])]()
            block.__enter__()
            blocks.append((block, state()))
        elif action == "leave" and blocks:
            blocks.pop()[0].__exit__(None, None, None)
        with amp.disable_casts():  # an amp call
            pass
        alive = [level for model, level in began if any(model is m for m, _ in live)]
        if blocks:
            assert state() == blocks[-1][1]
        elif alive:
            assert state() == (LOW[alive[-1]], False)
        else:
            assert state() == start
    while blocks:
        blocks.pop()[0].__exit__(None, None, None)
    for made in live:
        amp.restore(*made)
    assert state() == start


# -- the user's own autocast ----------------------------------------------------------------------


class Product(nn.Linear):
    def forward(self, x):
        return super().forward(x), product()


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_users_own_autocast_stays_beside_a_live_session(level):
    model, _ = session(level, Product(2, 2))
    _casting = session("O4")
    x = torch.ones(1, 2)
    assert model(x)[1] is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x)[1] is torch.bfloat16
    assert product() is torch.bfloat16


def test_a_users_own_autocast_follows_the_op_table_of_a_live_session_of_its_dtype():
    _held = session("O4")

    def results(low):
        with torch.autocast("cpu", low):
            return product(), torch.exp(torch.ones(2, dtype=low)).dtype

    assert in_a_thread(lambda: results(torch.bfloat16)) == (torch.bfloat16, torch.float32)
    assert in_a_thread(lambda: results(torch.float16)) == (torch.float16, torch.float16)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("block", "dtype"),
    [(contextlib.nullcontext, torch.float32), (BLOCKS["bf16"], torch.bfloat16)],
    ids=["of the session", "of the script"],
)
def test_a_recompute_of_a_model_without_casts_has_those_of_its_forward(reentrant, block, dtype):
    found = []

    class Noting(nn.Linear):
        def forward(self, x):
            found.append(product())
            return super().forward(x)

    model, _ = session("O0", Noting(2, 2))
    _casting = session("O4")
    x = torch.ones(1, 2, requires_grad=True)
    with block():
        out = checkpoint(model, x, use_reentrant=reentrant)
    in_a_thread(lambda: model(x))  # there are no casts to turn off
    out.float().sum().backward()
    assert found == [dtype, torch.float32, dtype]


def test_casts_are_off_in_a_model_without_inside_one_with():
    inner, _ = session("O0", Product(2, 2))

    class Outer(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                own = inner(x)[1]
            return inner(x)[1], own, product()

    outer, _ = session("O4", Outer(2, 2))
    assert outer(torch.ones(1, 2)) == (torch.float32, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("reentrant", [True, False])
def test_casts_that_a_checkpointed_function_turns_off_are_off_in_another_thread(reentrant):
    """autograd's device threads recompute, and have no casts of their own."""
    layer, found = nn.Linear(2, 2), []
    _held = session("O4")

    def block(x):
        with amp.disable_casts():
            y = layer(x)
            found.append(product())
        return layer(y)

    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        out = checkpoint(block, x, use_reentrant=reentrant)
        in_a_thread(out.float().sum().backward)
    assert found == [torch.float32] * 2


# -- weights --------------------------------------------------------------------------------------


class Twice(nn.Linear):
    def forward(self, x):
        with torch.set_grad_enabled(self.training):
            first = super().forward(x)
        return super().forward(x) + first.detach()


def test_a_weight_first_used_without_grad_gets_its_gradient():
    model, _ = session("O4", Twice(2, 2).eval())
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
