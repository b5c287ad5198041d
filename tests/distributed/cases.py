"""Ranks under a wrapper and one process on all their data: nets, batches, what is compared."""

from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

import apex.parallel
from apex import amp
from tests.support import loops
from tests.support.loops import LEVELS, loss_of, masters, net, scaled_backward

START_SCALE = 2.0**8
EPS = {level: torch.finfo(LEVELS[level].compute).eps for level in LEVELS}


def rank_batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)


WRAPPERS = {
    "torch": DistributedDataParallel,
    "apex": apex.parallel.DistributedDataParallel,
    "apex delayed": lambda m: apex.parallel.DistributedDataParallel(m, delay_allreduce=True),
    "torch views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "torch static": lambda model: DistributedDataParallel(model, static_graph=True),
}


def call_parts(self, x):
    """Calls the parts of a model in place of its forward."""
    for part in self.model:
        x = part(x.to(self.model[0].weight.dtype))
    return x


class TrainStep(DistributedDataParallel):
    """Runs the module without torch's forward, as the wrapper of mmcv 1 does."""

    def forward(self, x):
        output = self.module(x)
        if self.require_backward_grad_sync:
            self.reducer.prepare_for_backward([])
        return output


OTHER_FORWARDS = {
    "parts": lambda model: DistributedDataParallel(loops.Body(call_parts, model=model)),
    "train step": TrainStep,
}


def prepare(level, seed, **options):
    return initialized(level, net(seed), **options)


def wrapped(level, seed, wrapper="torch"):
    model, optimizer = prepare(level, seed)
    return WRAPPERS[wrapper](model), optimizer


def initialized(level, model, optimizer=None, **options):
    # At the usual scale a rank's part may overflow where the joined batch does not.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, max_loss_scale=START_SCALE, **options
    )


def backward(model, optimizer, x, y, share=1.0, **options):
    loss = loss_of(model, x, y) * share
    scaled_backward(loss, optimizer, **options)


def train_on_data_of(rank, model, optimizer, steps=3):
    """Trains on the rank's data; returns what has to be alike on all ranks."""
    loops.train(model, optimizer, data=(rank_batch(rank, step) for step in range(steps)))
    return state(model, optimizer)


def run_on_rank(rank, program, level, wrapper, *args):
    pair = program(
        level, {**WRAPPERS, **OTHER_FORWARDS}.get(wrapper), rank, partial(rank_batch, rank), *args
    )
    return state(*pair)


def assert_runs_as_one(on_two_ranks, program, level, wrapper, *args, eps=4):
    """Runs a program on two ranks under a wrapper, and in one process on the batches of both.

    It takes the level, the wrapper, a seed, batches by number and ``args``, and returns model and
    optimizer.
    """
    found = alike(on_two_ranks(run_on_rank, program, level, wrapper, *args))
    _, optimizer = program(level, lambda model: model, 0, joined, *args)
    assert_trained_alike(found, optimizer, level, eps)


def local(model, when=True):
    """Where ranks do not share the gradients of a pass, if there are ranks."""
    is_local = when and isinstance(model, DistributedDataParallel)
    return model.no_sync() if is_local else nullcontext()


def state(model, optimizer):
    """What has to be alike on all ranks."""
    model = getattr(model, "module", model)
    return {
        "masters": [value.tolist() for value in masters(optimizer)],
        "model": [param.detach().float().tolist() for param in model.parameters()],
        "scales": dict(amp.state_dict()),
    }


def alike(results):
    """What all ranks have returned."""
    first, *others = results
    assert all(other == first for other in others)
    return first


def joined(step):
    """The batches of two ranks as one."""
    parts = [rank_batch(rank, step) for rank in range(2)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def assert_trained_as_one(ranks_state, level, model, optimizer=None, *, steps=3, eps=4):
    """As below, for a model that one process trains on the data of two ranks."""
    model, optimizer = initialized(level, model, optimizer)
    loops.train(model, optimizer, data=map(joined, range(steps)))
    assert_trained_alike(ranks_state, optimizer, level, eps)


def assert_trained_alike(ranks_state, optimizer, level, eps=4):
    """Masters of the ranks and of one process agree within some roundings of the level's dtype."""
    tolerance = eps * EPS[level]
    found = [*map(torch.tensor, ranks_state["masters"])]
    expected = [master.float() for master in masters(optimizer)]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
