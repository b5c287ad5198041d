"""Pairs of a low-precision model parameter and its fp32 master; gradients in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex._pickle import rebuild
from apex._torch import dtensor
from apex._torch.dynamo import untraced


class Pair(NamedTuple):
    """A parameter of the model and the fp32 one that the optimizer steps in its place."""

    model: nn.Parameter
    master: nn.Parameter

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its kind; see :mod:`apex._pickle`."""
        return rebuild, ("pair", *self)


def make_master(param: nn.Parameter, exact: Tensor | None = None) -> nn.Parameter:
    """Returns an fp32 parameter with the value of ``param``.

    Args:
        param: A low-precision parameter.
        exact: Its value before rounding, where still known; taken over without a copy when fp32.
    """
    # Not detach(): that shares autograd's version counter, and a write into the master would count
    # as one into the model's parameter.
    value = param.data if exact is None else exact.data
    return nn.Parameter(value.to(torch.float32), requires_grad=True)


@torch.no_grad()
def take_exact(pair: Pair, before: Tensor, exact: Tensor) -> None:
    """Gives a master that began with the rounded values the exact ones.

    Where parameter or master was written since, both are left.

    Args:
        pair: Parameter and master.
        before: The parameter's values when the master was made from them.
        exact: The values that were rounded to ``before``.
    """
    model, master, before, exact = dtensor.locals_of([*pair, before, exact])
    untouched = (model == before) & (master == before)
    master.data.copy_(torch.where(untouched, exact.to(master.dtype), master))


@torch.no_grad()
def follow_model(pair: Pair, before: Tensor) -> None:
    """Takes those model values into the master that were written since ``before``.

    A changed value that the master rounds to leaves the master's own. On the device, without a
    host sync.

    Args:
        pair: Parameter and master.
        before: The parameter's values when the master was made.
    """
    model, master, before = dtensor.locals_of([*pair, before])
    known = (model == before) | (master.to(model.dtype) == model)
    # By .data: a loss that uses masters directly may already hold them for its backward pass.
    master.data.copy_(torch.where(known, master, model.to(master.dtype)))


@untraced
def copy_to_model(pairs: Sequence[Pair]) -> None:
    """Writes every master's value, rounded, into its model parameter."""
    if pairs:
        models = dtensor.locals_of([pair.model for pair in pairs])
        with torch.no_grad():
            torch._foreach_copy_(models, dtensor.locals_of([pair.master for pair in pairs]))


def fp32_grads(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns fp32 copies of the parameters' gradients (sparse ones stay sparse).

    Every parameter must have a gradient.
    """
    copies: list[Tensor] = []
    sources: list[Tensor] = []
    result: list[Tensor] = []
    sharded = dtensor.any_dtensor(params)
    for param in params:
        grad = param.grad
        if grad is None:
            raise ValueError("fp32_grads got a parameter without a gradient.")
        if grad.is_sparse:
            # Rows are summed in fp32: in 16 bits the sum of duplicates could overflow.
            result.append(grad.to(torch.float32).coalesce())
            continue
        if sharded and not dtensor.same_layout(param, grad):
            # Summed over ranks in fp32, too.
            result.append(dtensor.laid_out_as(param, grad.to(torch.float32)))
            continue
        # In the parameter's layout: torch's fused CPU kernels take the gradient's for granted.
        copy = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
        copies.append(copy)
        sources.append(grad)
        result.append(copy)
    if copies:
        torch._foreach_copy_(dtensor.locals_of(copies), dtensor.locals_of(sources))
    return result


def sums(values: Sequence[Tensor], addends: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns ``values[i] + addends[i]``, in the memory of ``values`` where both are dense.

    ``None`` adds nothing; the addends do not change.
    """
    result = list(values)
    targets: list[Tensor] = []
    dense: list[Tensor] = []
    for index, (value, addend) in enumerate(zip(values, addends, strict=True)):
        if addend is None:
            continue
        if value.is_sparse:
            result[index] = addend + value  # torch adds sparse to dense, not dense to sparse
        elif addend.is_sparse:
            result[index] = value + addend
        else:
            targets.append(value)
            dense.append(addend)
    if targets:
        torch._foreach_add_(dtensor.locals_of(targets), dtensor.locals_of(dense))
    return result


def add_grads_(params: Sequence[nn.Parameter], fresh: Sequence[Tensor]) -> None:
    """Adds ``fresh[i]`` to the gradient of ``params[i]``; sets it where there is none."""
    targets: list[Tensor] = []
    addends: list[Tensor] = []
    for param, grad in zip(params, fresh, strict=True):
        if param.grad is None:
            param.grad = grad
        elif param.grad.is_sparse:
            param.grad = grad + param.grad  # torch adds sparse to dense, not dense to sparse
        elif grad.is_sparse:
            param.grad = param.grad + grad
        else:
            targets.append(param.grad)
            addends.append(grad)
    if targets:
        torch._foreach_add_(dtensor.locals_of(targets), dtensor.locals_of(addends))
