"""Training runs that are cut in two; the second half is run in a process of its own.

``python -m tests.checkpoint.runs FOLDER`` resumes every checkpoint in the folder, in every way, and
writes what came out beside it.
"""

import copy
import itertools
import pathlib
import sys
import warnings

import torch

from apex import amp
from tests.support import training as t

OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.3, max_iter=2, history_size=2),
}
CONFIGS = list(itertools.product(t.LEVELS_SHORT, OPTIMIZERS))
# The order of the three loads, and how many of them come before `initialize`.
WAYS = list(zip(itertools.permutations(range(3)), (0, 1, 2, 3, 0, 3), strict=True))


def plain(name, seed):
    model = t.net(seed)
    return model, OPTIMIZERS[name](model.parameters())


def prepare(model, optimizer, level):
    amp.initialize(
        model, optimizer, opt_level=level, num_losses=2, loss_scale="dynamic", growth_interval=3,
        verbosity=0,
    )  # fmt: skip


def train(model, optimizer, name, steps):
    for x, y in steps:

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            # An overflow is in the second loss alone, so that the scales part.
            for loss_id, given in enumerate((x.nan_to_num(posinf=0.5), x)):
                loss = t.backward(model, optimizer, given, y, loss_id=loss_id)
            return loss

        if name == "LBFGS":
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()


def first_half(level, name):
    model, optimizer = plain(name, seed=0)
    prepare(model, optimizer, level)
    train(model, optimizer, name, t.batches(4, overflow_at={3}))
    return model, optimizer


def second_half(model, optimizer, name):
    """Returns all that a training holds after it."""
    train(model, optimizer, name, t.batches(3, seed=2))
    return {
        "weights": t.values(model.parameters()),
        "masters": t.masters(optimizer),
        "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
        "model": copy.deepcopy(dict(model.state_dict())),
        "scales": dict(amp.state_dict()),
    }


def resumed(saved, level, name, order, before):
    """Loads into other weights, ``before`` of the three ahead of ``initialize``, and trains on."""
    model, optimizer = plain(name, seed=5)
    parts = (model, optimizer, amp)
    for index in order[:before]:
        parts[index].load_state_dict(saved[index])
    prepare(model, optimizer, level)
    for index in order[before:]:
        parts[index].load_state_dict(saved[index])
    return second_half(model, optimizer, name)


def file_of(folder, kind, level, name):
    return pathlib.Path(folder) / f"{kind}-{level}-{name}.pt"


def resume_all(folder):
    """Runs in the new process: what every way of resuming differs in from the first result."""
    for config in CONFIGS:
        saved = file_of(folder, "saved", *config)
        expected = torch.load(file_of(folder, "expected", *config), weights_only=True)
        wrong = []
        for way in WAYS:
            found = resumed(torch.load(saved, weights_only=True), *config, *way)
            unlike = [part for part in expected if not t.same(expected[part], found[part])]
            if unlike:
                wrong.append(f"{way}: {', '.join(unlike)}")
        file_of(folder, "wrong", *config).write_text("\n".join(wrong))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "fp16 is emulated on this CPU")
    warnings.filterwarnings("ignore", module="torch")  # each release has some of its own
    resume_all(sys.argv[1])
