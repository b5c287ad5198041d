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
from tests.support import training as cases

OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.3, max_iter=2, history_size=2),
}
CONFIGS = list(itertools.product(("O1", "O2", "O5"), OPTIMIZERS, (1, 2)))
ORDERS = list(itertools.permutations(range(3)))
# How many of the three loads come before `initialize`.
BEFORE = (0, 3)
FIRST, SECOND = 4, 3


def options(level, losses):
    """One loss scales as the level says, two dynamically at every level; both move soon."""
    own = {} if losses == 1 else {"loss_scale": "dynamic"}
    return {"opt_level": level, "num_losses": losses, "growth_interval": 3, "verbosity": 0, **own}


def plain(name, seed):
    model = cases.net(seed)
    return model, OPTIMIZERS[name](model.parameters())


def train(model, optimizer, name, losses, steps):
    for x, y in steps:

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            for loss_id in range(losses):
                # An overflow is in the last loss alone, so that the scales part.
                finite = x if loss_id == losses - 1 else x.nan_to_num(posinf=0.5)
                loss = cases.loss_of(model, finite, y)
                with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                    scaled_loss.backward()
            return loss

        if name == "LBFGS":
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()


def first_half(level, name, losses):
    """Trains, with an overflow in the last step but one (one loss) or in the last (two)."""
    model, optimizer = amp.initialize(*plain(name, seed=0), **options(level, losses))
    dynamic = losses == 2 or level in ("O1", "O2")
    overflow_at = {FIRST - 3 + losses} if dynamic else ()
    train(model, optimizer, name, losses, cases.batches(FIRST, overflow_at=overflow_at))
    return model, optimizer


def second_half(model, optimizer, name, losses):
    train(model, optimizer, name, losses, cases.batches(SECOND, seed=2))


def states(model, optimizer):
    return [part.state_dict() for part in (model, optimizer, amp)]


def everything(model, optimizer):
    return {
        "weights": cases.values(model.parameters()),
        "masters": cases.masters(optimizer),
        "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
        "model": copy.deepcopy(dict(model.state_dict())),
        "scales": dict(amp.state_dict()),
    }


def resumed(saved, level, name, losses, order, before):
    """Loads into other weights, ``before`` of the three ahead of ``initialize``, and trains on."""
    model, optimizer = plain(name, seed=5)
    parts = (model, optimizer, amp)
    for index in order[:before]:
        parts[index].load_state_dict(saved[index])
    amp.initialize(model, optimizer, **options(level, losses))
    for index in order[before:]:
        parts[index].load_state_dict(saved[index])
    second_half(model, optimizer, name, losses)
    return everything(model, optimizer)


def file_of(folder, kind, level, name, losses):
    return pathlib.Path(folder) / f"{kind}-{level}-{name}-{losses}.pt".replace(" ", "-")


def ways(level, name, losses):
    # Each order once before and once after `initialize`, and one split in the middle.
    whole = [(order, before) for order in ORDERS for before in BEFORE]
    return [*whole, ((2, 0, 1), 1), ((1, 2, 0), 2)]


def resume_all(folder):
    """Runs in the new process: what every way of resuming differs in from the first result."""
    for config in CONFIGS:
        saved = file_of(folder, "saved", *config)
        expected = torch.load(file_of(folder, "expected", *config), weights_only=True)
        wrong = []
        for way in ways(*config):
            found = resumed(torch.load(saved, weights_only=True), *config, *way)
            unlike = [part for part in expected if not cases.same(expected[part], found[part])]
            if unlike:
                wrong.append(f"{way}: {', '.join(unlike)}")
        file_of(folder, "wrong", *config).write_text("\n".join(wrong))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "fp16 is emulated on this CPU")
    warnings.filterwarnings("ignore", module="torch")  # each release has some of its own
    resume_all(sys.argv[1])
