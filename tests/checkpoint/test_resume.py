"""A run that goes on from its state dicts in a new process is the run that never stopped.

``python -m tests.checkpoint.test_resume FILE`` is that process: it resumes every run in the file.
"""

import itertools
import pathlib
import subprocess
import sys

import pytest
import torch

from apex import amp
from tests.support import loops

OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.3, max_iter=2, history_size=2),
}
# The order of the three loads, and how many come before `initialize`; amp's own never does.
WAYS = list(zip(itertools.permutations(range(3)), (0, 1, 2, 1, 0, 0), strict=True))


def run(level, name, *, saved=None, order=(0, 1, 2), before=0):
    """Trains with two losses, from other weights and ``saved`` if given.

    Returns the state dicts, weights and masters after it, and the objects.
    """
    model = loops.net(0 if saved is None else 5)
    optimizer = OPTIMIZERS[name](model.parameters())
    parts = (model, optimizer, amp)
    for index in order[:before]:
        parts[index].load_state_dict(saved[index])
    amp.initialize(
        model, optimizer, opt_level=level, num_losses=2, growth_interval=3, verbosity=0,
        loss_scale=128.0 if name.startswith("LBFGS") else "dynamic",  # which takes a closure
    )  # fmt: skip
    for index in order[before:] if saved is not None else ():
        parts[index].load_state_dict(saved[index])
    return parts[:2], train_two_losses(*parts[:2], first=saved is None)


def train_two_losses(model, optimizer, *, first):
    """Returns all that a run holds after its first four steps, or after its last three."""
    takes_closure = isinstance(optimizer, torch.optim.LBFGS)
    overflows = {} if takes_closure else {3}
    for x, y in loops.batches(4, overflow_at=overflows) if first else loops.batches(3, seed=2):

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            # An overflow is in the second loss alone, so that the scales part.
            for loss_id, given in enumerate((x.nan_to_num(posinf=0.5), x)):
                loss = loops.backward(model, optimizer, given, y, loss_id=loss_id)
            return loss

        if takes_closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    states = [dict(part.state_dict()) for part in (model, optimizer, amp)]
    states += [loops.values(model.parameters()), loops.masters(optimizer)]
    return loops.saved_and_loaded(states)


@pytest.mark.slow
def test_runs_resumed_in_a_new_process_are_the_uninterrupted_ones_bit_for_bit(tmp_path):
    runs = {}
    for config in itertools.product(loops.LEVELS_SHORT, OPTIMIZERS):
        pair, saved = run(*config)
        runs[config] = saved, (expected := train_two_losses(*pair, first=False))
        # What makes the comparison worth its name:
        assert all(weight.isfinite().all() for weight in expected[3])
        scales = [[e["loss_scale"] for e in each[2].values()] for each in (saved, expected)]
        if not config[1].startswith("LBFGS"):
            assert scales[0] != scales[1]
            assert len(set(scales[0])) == 2
        del pair
    torch.save(runs, tmp_path / "runs.pt")
    command = [sys.executable, "-m", "tests.checkpoint.test_resume", str(tmp_path / "runs.pt")]
    subprocess.run(command, cwd=pathlib.Path(__file__).parents[2], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for config, (saved, expected) in torch.load(sys.argv[1], weights_only=False).items():
        for order, before in WAYS:
            copied = loops.saved_and_loaded(saved)
            found = run(*config, saved=copied, order=order, before=before)[1]
            assert loops.same(expected, found), (config, order, before)
