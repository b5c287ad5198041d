"""DataParallel: the wrapper itself, and its replicas in threads."""

import torch
from torch import nn

from apex import amp
from tests.model.cases import EPS, prepare
from tests.support import loops
from tests.support.reference.plain_loops import Loop


def replicate(model):
    """Copies a model as torch.nn.parallel.replicate does, which itself needs GPUs."""
    list(model.parameters())  # which it broadcasts first
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in copies.items():
        for key, child in module._modules.items():
            replica._modules[key] = copies[child]
        for key, param in module._parameters.items():
            setattr(replica, key, param.view_as(param))
        for key, buffer in module._buffers.items():
            replica._buffers[key] = buffer.clone()
    return copies[model]


class DataParallelOnCPU(nn.Module):
    """Runs two replicas in two threads, each on half of the batch."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        replicas = [replicate(self.module) for _ in range(2)]
        halves = x.chunk(2)
        outputs = [None, None]

        def work(rank):
            outputs[rank] = replicas[rank](halves[rank])

        loops.in_two_threads(work)
        return torch.cat(outputs)


def test_without_gpus_the_wrapper_trains_as_its_model(level):
    model, optimizer = loops.prepared(level)
    wrapped = nn.DataParallel(model)
    loop = Loop(level, loops.net().parameters(), loops.sgd)
    for x, y in loops.batches(3):
        assert torch.equal(loops.train_step(wrapped, optimizer, x, y), loop.train_step(x, y))
    assert loops.same(loops.masters(optimizer), loop.stepped)


def test_replicas_in_threads_give_what_the_model_gives_and_train_it(level):
    model, optimizer = prepare(level)
    x = torch.cat([loops.batch(1)[0], loops.batch(2)[0]])
    wrapped = DataParallelOnCPU(model)
    output = wrapped(x)
    assert output.dtype is model(x).dtype
    assert torch.equal(output, torch.cat([model(half) for half in x.chunk(2)]))
    expected = prepare(level)
    for x, y in loops.batches(3):
        loops.train_step(wrapped, optimizer, x, y)
        loops.train_step(*expected, x, y)
    # The halves' gradients are rounded each by itself before they are added.
    lists = loops.net().parameters(), loops.masters(optimizer), loops.masters(expected[1])
    for start, after, reference in zip(*lists, strict=True):
        moved = (reference - start).abs().max()
        assert moved > 0
        assert (after - reference).abs().max() <= 4 * EPS[level] * moved + 1e-6


def test_a_replicas_state_dict_is_that_of_a_plain_replica(level):
    expected = replicate(loops.net()).state_dict()
    model, _ = prepare(level)
    assert list(replicate(model).state_dict()) == list(expected)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}


def test_plain_passes_of_replicas_add_in_fp32():
    model, optimizer = prepare("O5")
    wrapped = DataParallelOnCPU(model)
    x, y = loops.batch()
    loops.loss_of(wrapped, x, y).backward()
    first = [grad.float() for grad in loops.grads(model.parameters())]
    for _ in range(9):
        loops.loss_of(wrapped, x, y).backward()
    for grad, param in zip(first, amp.master_params(optimizer), strict=True):
        torch.testing.assert_close(param.grad, 10 * grad, rtol=1e-6, atol=0.0)
