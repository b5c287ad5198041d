"""Two threads train two models at once, and data-loader workers see none of amp's casts."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from apex import amp
from tests.support import loops, ranks

PAIRS = [("O1", "O4"), ("O2", "O5"), ("O1", "O2"), ("O4", "O5"), ("O0", "O3")]
STEPS = 4


def train_copy(level, seed, model):
    """Returns the losses, weights and scale of a short training of a copy of ``model``."""
    model = copy.deepcopy(model)
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS["Adam"], model=model)
    losses = [loops.train_step(model, optimizer, x, y) for x, y in loops.batches(STEPS, seed=seed)]
    outside = loops.product()
    optimizer.zero_grad()
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        scale = scaled_loss.item()
    return losses, loops.masters(optimizer), loops.values(model.parameters()), outside, scale


@pytest.mark.parametrize("levels", PAIRS, ids="+".join)
def test_two_threads_at_different_levels_give_what_each_gives_alone(levels):
    models = [loops.net(seed) for seed in range(2)]  # here: threads share one generator
    alone = [train_copy(level, seed, models[seed]) for seed, level in enumerate(levels)]
    together = [None, None]

    def work(index):
        together[index] = train_copy(levels[index], index, models[index])

    loops.in_two_threads(work)
    assert loops.same(together, alone)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_one_model_in_two_threads_at_once_gives_what_it_gives_alone(level):
    model, _ = loops.prepared(level)
    data = [x for x, _ in loops.batches(40)]
    with torch.no_grad():
        expected = [model(x) for x in data]
        found = [None] * len(data)

        def work(half):
            with torch.no_grad():
                for index in range(half, len(data), 2):
                    found[index] = model(data[index])

        loops.in_two_threads(work)
    assert loops.same(found, expected)


def use_the_weight_cache():
    sys.setswitchinterval(1e-6)
    model = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    model(torch.ones(1, 2).double())  # from now on the kernel of linear is ours, too
    x = torch.ones(2, 2)

    def work(_):
        weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(8)]
        for _ in range(300):
            with torch.autocast("cpu", torch.bfloat16):  # whose end clears the weight cache
                for weight in weights:
                    nn.functional.linear(x @ weight, weight)

    loops.in_two_threads(work)


def test_two_threads_that_use_the_weight_cache_do_not_wait_for_each_other():
    """In a process of its own: a deadlock with the GIL held stops every thread."""
    ranks.in_new_process(use_the_weight_cache)


class Products(Dataset):
    """Plain torch operators of the op lists, as data sets and transforms use them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.full((2, 2), 1.0 + index / 3)
        return torch.mm(x, x).exp() / 1e3


def test_data_loader_workers_compute_without_casts():
    plain = torch.stack([Products()[index] for index in range(len(Products()))])
    model, optimizer = loops.prepared("O4")
    loops.train_step(model, optimizer, *loops.batch())
    loader = DataLoader(
        Products(), batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=60
    )
    assert loops.same(torch.cat(list(loader)), plain)
    assert Products()[1].dtype is torch.float32
    assert torch.mm(plain[0], plain[0]).dtype is torch.bfloat16
