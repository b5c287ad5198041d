"""Two processes under DistributedDataParallel train like one on the joined batch."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from apex.parallel.distributed import flatten, unflatten
from tests.training import cases

TOLERANCE = {"rtol": 2**-20, "atol": 2**-22}
BOTH = pytest.mark.parametrize("delay", [False, True])
two_ranks = pytest.mark.distributed


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(rank=None):
    """The whole batch, or the half that a rank gets."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(11))
    return x if rank is None else x[3 * rank : 3 * rank + 3]


def loss_of(model, x):
    return model(x).square().mean()


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def joined_grads(factor=1.0):
    model = net()
    (loss_of(model, batch()) * factor).backward()
    return grads(model)


def assert_close(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


# -- parity ----------------------------------------------------------------------------------


def three_steps(rank, options):
    model = net() if rank == 0 else nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, batch(rank)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@two_ranks
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay_allreduce": True},
        {"message_size": 8},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 3.0, "delay_allreduce": True},
        {"find_unused_parameters": False, "bucket_cap_mb": 1, "num_allreduce_streams": 2},
    ],
)
def test_two_ranks_train_like_one_process_on_the_joined_batch(on_two_ranks, options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, batch()).backward()
        optimizer.step()
    for params in on_two_ranks(three_steps, options):
        assert_close(params, [p.detach() for p in model.parameters()])


def one_backward(rank, options):
    wrapped = DistributedDataParallel(net(), **options)
    loss_of(wrapped, batch(rank)).backward()
    return grads(wrapped)


@two_ranks
@BOTH
def test_without_average_gradients_are_summed(on_two_ranks, delay):
    options = {"gradient_average": False, "delay_allreduce": delay}
    for result in on_two_ranks(one_backward, options):
        assert_close(result, joined_grads(2.0))


@two_ranks
@BOTH
def test_without_average_the_predivide_factor_still_divides(on_two_ranks, delay):
    options = {
        "gradient_average": False,
        "gradient_predivide_factor": 4.0,
        "delay_allreduce": delay,
    }
    for result in on_two_ranks(one_backward, options):
        assert_close(result, joined_grads(0.5))


def flat_gradient(rank, options):
    """The flat gradient of the mean over ranks, as MLPerf's GNMT reads it."""
    wrapped = DistributedDataParallel(net(), retain_allreduce_buffers=True, **options)
    loss_of(wrapped, batch(rank)).backward()
    [flat] = wrapped.allreduce_buffers
    return flat if wrapped.gradient_average else flat / torch.distributed.get_world_size()


@two_ranks
@BOTH
@pytest.mark.parametrize("average", [True, False])
def test_scripts_read_the_flat_gradient_and_whether_it_is_averaged(on_two_ranks, average, delay):
    options = {"gradient_average": average, "delay_allreduce": delay}
    expected = torch.cat([grad.flatten() for grad in joined_grads()])
    for flat in on_two_ranks(flat_gradient, options):
        assert_close([flat], [expected])


def large_fp16_gradient(rank, options):
    model = nn.Linear(1, 1, bias=False).half()
    wrapped = DistributedDataParallel(model, gradient_predivide_factor=1.0, **options)
    wrapped(torch.full((1, 1), 49152.0, dtype=torch.float16)).sum().backward()
    return model.weight.grad


@two_ranks
@BOTH
def test_always_fp32_sums_beyond_the_range_of_fp16(on_two_ranks, delay):
    options = {"allreduce_always_fp32": True, "delay_allreduce": delay}
    for grad in on_two_ranks(large_fp16_gradient, options):
        assert grad.dtype is torch.float16
        assert grad.item() == 49152.0


@two_ranks
@BOTH
def test_a_sum_in_fp16_overflows(on_two_ranks, delay):
    options = {"gradient_average": False, "delay_allreduce": delay}
    for grad in on_two_ranks(large_fp16_gradient, options):
        assert grad.item() == float("inf")


# -- delay_allreduce supports any graph ------------------------------------------------------


class Branches(nn.Module):
    """One layer of three is used always, one in one rank only, one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.always, self.once, self.never = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x, with_second):
        y = self.always(x)
        return {"out": [self.once(y) if with_second else y]}


def run_branches(rank):
    wrapped = DistributedDataParallel(Branches(), delay_allreduce=True)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 2), rank == 1)["out"][0].sum().backward()
    return grads(wrapped)


@two_ranks
def test_delayed_a_parameter_used_in_one_rank_counts_as_zero_in_the_other(on_two_ranks):
    model = Branches()
    total = sum(model(torch.ones(1, 2), second)["out"][0].sum() for second in (False, True))
    (total / 2).backward()
    for always, once, _ in on_two_ranks(run_branches):
        assert_close([always, once], [model.always.weight.grad, model.once.weight.grad])


@two_ranks
def test_delayed_a_parameter_used_nowhere_has_no_gradient(on_two_ranks):
    for _, _, never in on_two_ranks(run_branches):
        assert never is None


def run_branches_in_no_sync(rank):
    wrapped = DistributedDataParallel(Branches(), delay_allreduce=True)
    with wrapped.no_sync():
        wrapped(torch.full((1, 2), 1.0 + rank), True)["out"][0].sum().backward()
    wrapped(torch.ones(1, 2), False)["out"][0].sum().backward()
    return grads(wrapped)


@two_ranks
def test_delayed_a_parameter_used_in_no_sync_only_is_reduced(on_two_ranks):
    model = Branches()
    apart = [model(torch.full((1, 2), value), True)["out"][0].sum() for value in (1.0, 2.0)]
    (sum(apart) / 2 + model(torch.ones(1, 2), False)["out"][0].sum()).backward()
    for always, once, never in on_two_ranks(run_branches_in_no_sync):
        assert_close([always, once], [model.always.weight.grad, model.once.weight.grad])
        assert never is None


class Checkpointed(nn.Module):
    """A layer that two checkpointed segments share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def run_checkpointed(rank):
    wrapped = DistributedDataParallel(Checkpointed(), delay_allreduce=True, gradient_average=False)
    loss_of(wrapped, batch(rank).requires_grad_()).backward()
    return grads(wrapped)


@two_ranks
def test_delayed_checkpointed_segments_are_reduced_once(on_two_ranks):
    model = Checkpointed()
    (2 * loss_of(model, batch().requires_grad_())).backward()
    for result in on_two_ranks(run_checkpointed):
        assert_close(result, grads(model))


def two_forwards(rank, separate):
    wrapped = DistributedDataParallel(net(), delay_allreduce=True)
    losses = [loss_of(wrapped, batch(rank)), loss_of(wrapped, batch(rank))]
    for loss in losses if separate else [sum(losses)]:
        loss.backward()
    return grads(wrapped)


@two_ranks
@pytest.mark.parametrize("separate", [False, True])
def test_delayed_two_forward_passes_before_backward_are_reduced(on_two_ranks, separate):
    for result in on_two_ranks(two_forwards, separate):
        assert_close(result, joined_grads(2.0))


def failed_backward(rank):
    wrapped = DistributedDataParallel(net(), delay_allreduce=True)

    def fail(grad):
        raise KeyError

    y = wrapped(batch(rank))
    handle = wrapped.module[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        y.sum().backward()
    handle.remove()
    wrapped.zero_grad()
    loss_of(wrapped, batch(rank)).backward()
    return grads(wrapped)


@two_ranks
def test_delayed_a_backward_pass_that_raised_leaves_the_next_one_right(on_two_ranks):
    for result in on_two_ranks(failed_backward):
        assert_close(result, joined_grads())


def wrapped_again(rank):
    module = net()
    DistributedDataParallel(module, delay_allreduce=True, gradient_average=False)
    wrapped = DistributedDataParallel(module, delay_allreduce=True)
    loss_of(wrapped, batch(rank)).backward()
    return grads(wrapped)


@two_ranks
def test_delayed_the_hooks_of_a_wrapper_end_with_it(on_two_ranks):
    for result in on_two_ranks(wrapped_again):
        assert_close(result, joined_grads())


# -- accumulation ----------------------------------------------------------------------------


def accumulate(rank, delay):
    wrapped = DistributedDataParallel(net(), delay_allreduce=delay)
    wrapped.disable_allreduce()
    loss_of(wrapped, batch(rank)).backward()
    local = grads(wrapped)
    wrapped.enable_allreduce()
    loss_of(wrapped, batch(rank)).backward()
    return local, grads(wrapped)


@two_ranks
@BOTH
def test_disable_allreduce_keeps_gradients_local(on_two_ranks, delay):
    for rank, (local, _) in enumerate(on_two_ranks(accumulate, delay)):
        model = net()
        loss_of(model, batch(rank)).backward()
        assert_close(local, grads(model))


@two_ranks
@BOTH
def test_enable_allreduce_reduces_the_accumulated_gradients_too(on_two_ranks, delay):
    for _, total in on_two_ranks(accumulate, delay):
        assert_close(total, joined_grads(2.0))


def reduce_by_hand(rank, options, by_bucket):
    wrapped = DistributedDataParallel(net(), **options)
    wrapped.disable_allreduce()
    loss_of(wrapped, batch(rank)).backward()
    if by_bucket:
        params = list(wrapped.parameters())
        flat = wrapped.allreduce_bucket([p.grad for p in params[:2]], 0, force_default_stream=True)
        assert torch.equal(flat, torch.cat([p.grad.flatten() for p in params[:2]]))
        wrapped.allreduce_maybe_retain([p.grad for p in params[2:]], 1)
    else:
        if rank == 0:
            wrapped.module[0].bias.grad = None
        wrapped.allreduce_fallback()
    return grads(wrapped)


@two_ranks
@pytest.mark.parametrize("options", [{}, {"delay_allreduce": True, "allreduce_always_fp32": True}])
def test_gradients_can_be_reduced_by_hand_bucket_by_bucket(on_two_ranks, options):
    for result in on_two_ranks(reduce_by_hand, options, True):
        assert_close(result, joined_grads())


@two_ranks
def test_gradients_can_be_reduced_by_hand_at_once_and_missing_ones_count_as_zero(on_two_ranks):
    model = net()
    loss_of(model, batch(1)).backward()
    expected = joined_grads()
    expected[1] = model[0].bias.grad / 2
    for result in on_two_ranks(reduce_by_hand, {}, False):
        assert_close(result, expected)


def test_what_torch_does_by_itself_changes_nothing_when_called(alone):
    wrapped = DistributedDataParallel(net())
    loss_of(wrapped, batch()).backward()
    before = grads(wrapped)
    wrapped.sync_bucket_structure()
    wrapped.comm_ready_buckets(wrapped.module[0].weight)
    assert_close(grads(wrapped), before)


def test_a_subclass_may_register_hooks_of_its_own(alone):
    class Own(DistributedDataParallel):
        def create_hooks(self):
            super().create_hooks()
            self.created = True

    wrapped = Own(net(), delay_allreduce=True)
    assert wrapped.created
    assert copy.deepcopy(wrapped).created


class OnFirstOnly(DistributedDataParallel):
    """Reduces over fewer processes than there are, as hierarchical data parallelism does."""

    def allreduce_bucket(self, bucket, bucket_idx, force_default_stream):
        flat = flatten(bucket)
        assert force_default_stream
        assert not self.allreduce_different_streams
        with torch.cuda.stream(self.main_stream):
            torch.distributed.broadcast(flat, src=0)
        if not self.retain_allreduce_buffers:
            lists = [unflatten(flat, bucket), bucket]
            multi_tensor_applier(self.multi_tensor_scale, self._overflow_buf, lists, 1.0)
        return flat


def grads_of_the_first(rank, options):
    wrapped = OnFirstOnly(net(), **options)
    for _ in range(2):
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank)).backward()
    return grads(wrapped), loss_of(copy.deepcopy(wrapped), batch(rank)).item()


@two_ranks
@pytest.mark.parametrize(
    "options", [{}, {"delay_allreduce": True}, {"retain_allreduce_buffers": True}]
)
def test_a_subclass_may_reduce_its_buckets_itself(on_two_ranks, options):
    model = net()
    loss_of(model, batch(0)).backward()
    for reduced, _ in on_two_ranks(grads_of_the_first, options):
        assert_close(reduced, grads(model))


def accumulate_in_no_sync(rank, delay):
    wrapped = DistributedDataParallel(net(), delay_allreduce=delay)
    with wrapped.no_sync():
        loss_of(wrapped, batch(rank)).backward()
    loss_of(wrapped, batch(rank)).backward()
    return grads(wrapped)


@two_ranks
@BOTH
def test_no_sync_of_torch_works(on_two_ranks, delay):
    for total in on_two_ranks(accumulate_in_no_sync, delay):
        assert_close(total, joined_grads(2.0))


# -- buffers, copies, amp --------------------------------------------------------------------


def run_with_buffers(rank, options):
    wrapped = DistributedDataParallel(nn.BatchNorm1d(2), **options)
    for _ in range(2):
        wrapped(norm_input(rank))
    return wrapped.module.running_mean


def norm_input(rank):
    return torch.full((2, 2), float(rank)) + torch.eye(2)


@two_ranks
@BOTH
def test_buffers_stay_each_ranks_own(on_two_ranks, delay):
    for rank, mean in enumerate(on_two_ranks(run_with_buffers, {"delay_allreduce": delay})):
        norm = nn.BatchNorm1d(2)
        for _ in range(2):
            norm(norm_input(rank))
        assert torch.equal(mean, norm.running_mean)


@two_ranks
@BOTH
def test_broadcast_buffers_of_torch_sends_those_of_rank_0(on_two_ranks, delay):
    # torch 2.6 has the older name only.
    parameters = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    name = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in parameters)
    options = {"delay_allreduce": delay, name: True}
    first, second = on_two_ranks(run_with_buffers, options)
    # Each rank's last batch moved the same start by a tenth of its mean: 0.5 and 1.5.
    torch.testing.assert_close(second - first, torch.full((2,), 0.1))


def run_copy(rank, options, pickled):
    wrapped = DistributedDataParallel(net(), **options)
    copied = pickle.loads(pickle.dumps(wrapped)) if pickled else copy.deepcopy(wrapped)
    loss_of(copied, batch(rank)).backward()
    return grads(copied), grads(wrapped)


@two_ranks
@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_a_copy_reduces_its_own_gradients_by_the_same_options(on_two_ranks, delay, pickled):
    options = {"delay_allreduce": delay, "gradient_average": False}
    for own, original in on_two_ranks(run_copy, options, pickled):
        assert_close(own, joined_grads(2.0))
        assert original == [None] * 4


def train_with_amp(rank, level, delay):
    model = cases.net(seed=rank)  # rank 0's weights go to all when it is wrapped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapped = DistributedDataParallel(model, delay_allreduce=delay)
    for i in range(3):
        x, y = cases.batch(2 * i + rank)
        if i == 1 and rank == 0 and level in ("O1", "O2"):
            x = x * float("inf")
        optimizer.zero_grad()
        cases.backward(wrapped, optimizer, x, y)
        optimizer.step()
    return cases.masters(optimizer), amp.state_dict()["loss_scaler0"]["loss_scale"]


@two_ranks
@BOTH
@pytest.mark.parametrize("level", cases.MIXED)
def test_at_every_level_ranks_stay_the_same_and_skip_together(on_two_ranks, level, delay):
    (first, scale), (second, other) = on_two_ranks(train_with_amp, level, delay)
    assert cases.same(first, second)
    assert scale == other
    if level in ("O1", "O2"):
        assert scale == 2.0**15


def run_compiled(rank, delay):
    wrapped = DistributedDataParallel(net(), delay_allreduce=delay)
    compiled = torch.compile(wrapped, backend="eager")
    for _ in range(2):
        wrapped.zero_grad()
        loss_of(compiled, batch(rank)).backward()
    return grads(wrapped)


@two_ranks
@BOTH
def test_a_compiled_wrapper_reduces(on_two_ranks, delay):
    for result in on_two_ranks(run_compiled, delay):
        assert_close(result, joined_grads())


def run_with_unused(rank):
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    wrapped(torch.ones(1, 2), rank == 1)["out"][0].sum().backward()
    return grads(wrapped)


@two_ranks
def test_find_unused_parameters_of_torch_works(on_two_ranks):
    for result, delayed in zip(
        on_two_ranks(run_with_unused), on_two_ranks(run_branches), strict=True
    ):
        assert_close(result[:2], delayed[:2])
        assert result[2] is None


# -- bad input -------------------------------------------------------------------------------


def different_modules(rank):
    with pytest.raises(RuntimeError, match=r"between rank 0 and ranks \[1\]"):
        DistributedDataParallel(nn.Linear(2, 2 + rank))


@two_ranks
def test_ranks_with_different_modules_are_refused_everywhere(on_two_ranks):
    on_two_ranks(different_modules)


def test_without_a_process_group_it_is_refused():
    with pytest.raises(RuntimeError, match="DistributedDataParallel needs a process group"):
        DistributedDataParallel(net())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_param": True}, "shared_param is not supported"),
        ({"shared_param": False}, "shared_param is not supported"),
        ({"message_size": 0}, "message_size is 0; it must be at least 1"),
        ({"gradient_predivide_factor": 0.0}, "must be a positive number"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, "needs delay_allreduce=False"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, "needs delay_allreduce=False"),
        ({"delay_allreduce": True, "find_unused_parameters": True}, "supports any graph"),
        ({"delay_allreduce": True, "static_graph": True}, "supports any graph"),
    ],
)
def test_bad_options_are_refused(alone, options, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(net(), **options)


def test_positional_device_ids_are_refused(alone):
    with pytest.raises(TypeError, match="device_ids="):
        DistributedDataParallel(net(), [0])


def test_anything_but_a_module_is_refused(alone):
    with pytest.raises(TypeError, match=r"got list; it takes a torch\.nn\.Module"):
        DistributedDataParallel([net()])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_predivide_factor": "2"}, "gradient_predivide_factor is '2'; it must be a num"),
        ({"gradient_predivide_factor": None}, "gradient_predivide_factor is None; it must be a"),
        ({"delay_allreduce": "no"}, "delay_allreduce is 'no'; it must be a bool"),
        ({"allreduce_always_fp32": "no"}, "allreduce_always_fp32 is 'no'; it must be a bool"),
        ({"gradient_average": "no"}, "gradient_average is 'no'; it must be a bool"),
        ({"process_group": "gloo"}, "process_group is 'gloo'; it takes the result of"),
    ],
)
def test_options_of_a_wrong_type_are_refused(alone, options, words):
    with pytest.raises(TypeError, match=words):
        DistributedDataParallel(net(), **options)


def test_a_module_on_the_meta_device_is_refused(alone):
    with pytest.raises(RuntimeError, match=r"weight is on the meta device.*to_empty\(device="):
        DistributedDataParallel(nn.Linear(2, 2, device="meta"))


def test_an_unknown_keyword_is_refused(alone):
    with pytest.raises(TypeError, match="no_such_option"):
        DistributedDataParallel(net(), no_such_option=1)


def test_a_sparse_gradient_cannot_be_delayed(alone):
    wrapped = DistributedDataParallel(nn.Embedding(3, 2, sparse=True), delay_allreduce=True)
    loss = wrapped(torch.tensor([1])).sum()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        loss.backward()


@pytest.mark.parametrize("call", ["join", "register_comm_hook"])
def test_what_needs_torchs_communication_is_refused_with_delay(alone, call):
    wrapped = DistributedDataParallel(net(), delay_allreduce=True)
    args = (None, lambda state, bucket: None) if call == "register_comm_hook" else ()
    with pytest.raises(ValueError, match=call), getattr(wrapped, call)(*args):
        pass


# -- what it is ------------------------------------------------------------------------------


def test_it_is_torchs_class(alone):
    assert isinstance(DistributedDataParallel(net()), nn.parallel.DistributedDataParallel)


def test_state_dict_keys_have_the_prefix_module(alone):
    assert list(DistributedDataParallel(net()).state_dict()) == [
        f"module.{name}" for name in net().state_dict()
    ]


def test_options_without_a_meaning_today_are_accepted(alone):
    model = net()
    wrapped = DistributedDataParallel(
        model,
        allreduce_trigger_params=list(model.parameters()),
        retain_allreduce_buffers=True,
        num_allreduce_streams=2,
        allreduce_communicators=([None], [None]),
        gradient_average_split_factor=2.0,
        prof=True,
    )
    loss_of(wrapped, batch()).backward()
    assert_close(grads(wrapped), joined_grads())


def test_message_size_sets_torchs_buckets(alone):
    wrapped = DistributedDataParallel(nn.Linear(2, 2), message_size=2**20)
    assert wrapped.bucket_bytes_cap == 4 * 2**20


def test_outputs_keep_their_types(alone):
    wrapped = DistributedDataParallel(Branches(), delay_allreduce=True)
    assert isinstance(wrapped(torch.ones(1, 2), True)["out"], list)


def test_without_gradients_a_forward_pass_sends_nothing(alone):
    wrapped = DistributedDataParallel(net(), delay_allreduce=True)
    with torch.no_grad():
        assert not wrapped(batch()).requires_grad


def train_with_norm(rank):
    model = convert_syncbn_model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()))
    torch.manual_seed(2)
    for param in model.parameters():
        nn.init.normal_(param)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, batch(rank)).backward()
        optimizer.step()
    return [t.detach() for t in (*model.parameters(), *model.buffers())]


@two_ranks
def test_with_synchronized_norms_ranks_train_like_one_process(on_two_ranks, alone):
    expected = train_with_norm(None)
    for result in on_two_ranks(train_with_norm):
        assert_close(result, expected)
