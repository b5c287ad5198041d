"""Gradients from before a backward pass, which a pass that begins without gradients puts aside."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from apex._engine import master_table
from apex._engine.masters import MasterPair, add_grads, widen_grads
from apex._torch.parameters import without_overrides


class Stash:
    """Gradients that were put aside, by ``id`` of their parameters, which come with them."""

    def __init__(self) -> None:
        """Starts empty."""
        # The last one has the values: it is a copy if the next pass may overwrite them.
        self._grads: dict[int, tuple[nn.Parameter, Tensor, Tensor]] = {}

    def __contains__(self, param: Tensor) -> bool:
        """Returns whether a gradient of the parameter is put aside."""
        return id(param) in self._grads

    def put_aside(self, params: Iterable[nn.Parameter], reused: Collection[int]) -> None:
        """Takes the parameters' gradients.

        Args:
            params: The parameters.
            reused: Ids of the parameters for which a wrapper writes the gradients of all passes to
                the same memory.
        """
        taken: dict[int, tuple[nn.Parameter, Tensor, Tensor]] = {}
        for param in params:
            grad = param.grad
            if grad is not None:
                values = grad.clone() if id(param) in reused else grad
                taken[id(param)] = param, grad, values
        for param, _, _ in taken.values():  # memory did not run out
            param.grad = None
        self._grads.update(taken)

    def drop(self, cleared: Iterable[Tensor]) -> None:
        """Drops the gradients of parameters that were cleared."""
        if self._grads:
            for param in cleared:
                self._grads.pop(id(param), None)

    def give_back(self) -> bool:
        """Adds the parameters' gradients to those put aside, in fp32 where there is a master.

        The sum is in the tensor from before, as autograd's own: scripts keep it, or clear it.
        Returns whether there are some.
        """
        if not self._grads:
            return False
        entries = [*self._grads.values()]
        params: list[nn.Parameter] = []
        grads: list[Tensor] = []
        pairs: list[MasterPair] = []
        with without_overrides():
            for param, _, values in entries:
                if param.grad is not None and param.grad is not values:
                    params.append(param)
                    grads.append(param.grad)
                pair = master_table.pair_of(param)
                if pair is not None:
                    pairs.append(pair)
                    param.grad_dtype = None  # a pass under DistributedDataParallel may have failed
                param.grad = values
            widen_grads(pairs)
            add_grads(params, grads)
            for param, grad, values in entries:
                if grad is not values and grad.dtype is values.dtype:  # it is a view
                    grad.copy_(values)
                    param.grad = grad
        self._grads.clear()  # memory did not run out
        return True
