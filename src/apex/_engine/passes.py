"""What a backward pass finds: gradients of the dtype that it adds to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from apex._engine import master_table
from apex._engine.masters import (
    MasterPair,
    keep_narrow,
    narrow_grads,
    replaced_views,
    widen_nonzero_grads,
)
from apex._engine.wrappers.ddp import wrappers
from apex._torch.autograd import adds_to_any, at_end_of_pass, backward_id, is_transformed
from apex._torch.dynamo import inlined, is_compiling
from apex._torch.parameters import without_overrides


def prepare_grads(pairs: Sequence[MasterPair], params: Sequence[Tensor]) -> None:
    """Makes gradients fp32 for a pass that adds to them; of 16 bits, if ranks send them.

    Args:
        pairs: Those of the parameters.
        params: Parameters that the pass, which may run already, reaches together.
    """
    if is_transformed():
        return
    if wrappers.states:
        sent = wrappers.sent(params)
        narrowed = [pair for pair in pairs if id(pair.model) in sent]
        pairs = [pair for pair in pairs if id(pair.model) not in sent]
        narrow_grads(narrowed)
        if backward_id() != -1 and adds_to_any(params):
            keep_narrow(narrowed)
            at_end_of_pass(partial(wrappers.end_pass, params, sent=sent))
    widen_nonzero_grads(pairs, views=bool(wrappers.states))


def return_views() -> None:
    """Writes fp32 gradients to the views of a script's buffer that they are in place of.

    The views are the gradients again, so that the script finds them in its buffer, or clears them.
    """
    if not replaced_views:
        return
    replaced = [*replaced_views]
    del replaced_views[: len(replaced)]  # another thread may add more
    if wrappers.of([param for param, _, _ in replaced]):
        return
    with without_overrides():
        for param, grad, view in replaced:
            if param.grad is grad:
                param.grad = view.copy_(grad)


def hook_pairs(pairs: Iterable[MasterPair]) -> None:
    """Prepares each gradient by a hook of its own, where no hook of an output runs."""
    for pair in pairs:
        if not pair.is_hooked:
            pair.hook(hook)


def hook(param: Tensor) -> RemovableHandle:
    """Prepares the gradient of a parameter that requires one, until the hook is removed."""
    handle: RemovableHandle = param.register_hook(_PassReaches(param))  # type: ignore[no-untyped-call]
    return handle


class _PassReaches:
    """A hook of a parameter, by which its gradient is prepared."""

    __torch_unserializable__ = True
    """torch sends the parameter to other processes without the hook, and without a warning."""

    def __init__(self, param: Tensor) -> None:
        self._param = weakref.ref(param)

    @inlined  # a pass in a compiled function calls it as a frame of its own
    def __call__(self, gradient: object) -> None:
        param = self._param()
        is_traced = is_compiling()  # by compiled autograd
        if param is not None and not is_traced:
            prepare_grads(master_table.pairs_of([param]), [param])
