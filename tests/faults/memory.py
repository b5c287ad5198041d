"""An out-of-memory error at any operator, and what models and optimizers hold."""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex.amp import _amp_state


class OutOfMemory(TorchDispatchMode):
    """Raises ``torch.OutOfMemoryError`` at the ``at``-th operator inside, counted from 1.

    Args:
        at: Which operator fails.
        lasting: Whether all that allocate fail after it, too, as when memory stays full. What
            writes into memory that is there goes on working.
        spare: Names of operators that do not fail.
    """

    def __init__(self, at, *, lasting=False, spare=()):
        super().__init__()
        self.at, self.lasting, self.spare = at, lasting, spare
        self.count = 0
        self.raised = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() not in self.spare:
            self.count += 1
            again = self.lasting and self.raised and allocates(func)
            if self.count == self.at or again:
                self.raised = True
                raise torch.OutOfMemoryError(f"simulated at operator {self.count}, {func}")
        return func(*args, **(kwargs or {}))


def allocates(func):
    return any(value.alias_info is None for value in func._schema.returns)


def sweep(make, act, *, lasting, spare=(), every=1, limit=2000):
    """Yields what ``make()`` gave for every operator of ``act`` that fails in turn, after it did.

    ``act(*made)`` is called under :class:`OutOfMemory` with a fresh ``made`` each time, until it
    goes through. With ``every`` above 1 only each such operator fails.
    """
    for at in range(1, limit, every):
        made = make()
        before = [snapshot(each) for each in made]
        mode = OutOfMemory(at, lasting=lasting, spare=spare)
        try:
            with mode:
                act(*made)
        except RuntimeError:  # torch's own load_state_dict tells of the error in one of its own
            assert mode.raised
            failed = True
        else:
            failed = False
        assert failed is mode.raised, "the error was swallowed"
        if not failed:
            assert at > 1, "no operator ran"
            return
        yield made, before
    raise AssertionError(f"more than {limit} operators")


def live_sessions():
    gc.collect()
    return len(_amp_state.sessions())


def snapshot(each):
    """Everything that a user can see of a model or an optimizer, to the last bit."""
    if isinstance(each, torch.optim.Optimizer):
        params = [param for group in each.param_groups for param in group["params"]]
        tensors = params
        rest = [
            [(index, {k: seen(v) for k, v in each.state.get(p, {}).items()})]
            for index, p in enumerate(params)
        ]
        rest.append([{k: v for k, v in g.items() if k != "params"} for g in each.param_groups])
        rest.append(len(each.state))
    elif isinstance(each, torch.nn.Module):
        tensors = [*each.parameters(), *each.buffers()]
        rest = [
            {k: len(v) for k, v in vars(module).items() if k.endswith("_hooks")}
            for module in each.modules()
        ]
    else:
        return each
    return type(each), sorted(vars(each)), rest, [(id(t), seen(t), seen(t.grad)) for t in tensors]


def seen(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().double().tolist()
    return value
