"""Resolves mixed dtypes in Python code inside the backward pass of ``scale_loss``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from apex._core.op_casts import widest
from apex._engine.autocast.region import CastRegion, UncastRegion
from apex._torch import autograd
from apex._torch.autograd import backward_id
from apex._torch.dynamo import untraced
from apex._torch.function_modes import exit_function_modes, function_modes, push_function_mode


class resolve_mixed:  # noqa: N801 - reads as a function
    """Context of a backward pass in which Python code may mix dtypes.

    See Note [Casts in a backward pass]. Does nothing for a region without casts. Its exit is
    idempotent; see Note [Interrupted blocks].
    """

    _modes: int | None = None

    def __init__(self, region: CastRegion | UncastRegion) -> None:
        self._region = region

    @untraced
    def __enter__(self) -> None:
        if isinstance(self._region, CastRegion):
            self._modes = function_modes()
            push_function_mode(_ResolveMixed(self._region))

    @untraced
    def __exit__(self, *error: object) -> None:
        if self._modes is not None:
            exit_function_modes(self._modes)
            self._modes = None


class _ResolveMixed(TorchFunctionMode):
    """Runs Python calls that mix dtypes inside a backward pass in a cast region.

    autograd's formulas bypass function modes, so they cost nothing extra.
    """

    def __init__(self, region: CastRegion) -> None:
        super().__init__()
        self._run = region.run

    @untraced
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        begin = _PASSES.get(func)
        if begin is not None:
            return begin(self, func, *args, **kwargs)
        if backward_id() == -1 or widest(args, kwargs) is None:
            return func(*args, **kwargs)
        return self._run(func, *args, **kwargs)


# torch disables a function mode while it handles a call, so a backward pass that begins in the call
# would lack it. A call with graph edges in place of tensors is not handled by modes.


def _method(
    mode: _ResolveMixed,
    func: Any,
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if gradient is None and inputs is None and _is_plain_scalar(tensor):
        keep = create_graph if retain_graph is None else retain_graph
        _call_in(mode, autograd.run_backward, tensor, torch.ones_like(tensor), keep, create_graph)
    else:
        passes = torch.autograd.backward
        _backward(mode, passes, (tensor,), gradient, retain_graph, create_graph, inputs=inputs)


def _is_plain_scalar(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.requires_grad
        and tensor.is_floating_point()
        and tensor.numel() == 1
    )


def _backward(
    mode: _ResolveMixed,
    func: Any,
    tensors: Sequence[Any],
    *args: Any,
    inputs: Any = None,
    **kwargs: Any,
) -> None:
    inputs = _sequence(inputs)
    if _have_edges([*tensors, *(inputs or ())]):
        tensors, inputs = _edges(tensors), None if inputs is None else _edges(inputs)
        _call_in(mode, torch.autograd.backward, tensors, *args, inputs=inputs, **kwargs)
    else:
        func(tensors, *args, inputs=inputs, **kwargs)


def _gradients(
    mode: _ResolveMixed, func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    tensors = [*(_sequence(outputs) or ()), *(_sequence(inputs) or ())]
    named = isinstance(inputs, dict)
    if named or kwargs.get("materialize_grads") or not _have_edges(tensors):
        return func(outputs, inputs, *args, **kwargs)
    outputs, inputs = _edges(_sequence(outputs) or ()), _edges(_sequence(inputs) or ())
    return _call_in(mode, torch.autograd.grad, outputs, inputs, *args, **kwargs)


def _call_in(mode: _ResolveMixed, func: Any, *args: Any, **kwargs: Any) -> Any:
    modes = function_modes()
    try:
        try:
            push_function_mode(mode)
            return func(*args, **kwargs)
        finally:
            exit_function_modes(modes)
    finally:  # see Note [Interrupted blocks]
        exit_function_modes(modes)


_PASSES: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _method,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _gradients,
}


def _sequence(given: Any) -> Sequence[Any] | None:
    if isinstance(given, dict):
        return tuple(given.values())
    return (given,) if isinstance(given, (Tensor, GradientEdge)) else given


def _have_edges(given: Sequence[Any]) -> bool:
    """Returns whether all are graph edges, or plain tensors that have one."""
    return all(
        isinstance(each, GradientEdge)
        or (type(each) in (Tensor, torch.nn.Parameter) and each.requires_grad)
        for each in given
    )


def _edges(given: Sequence[Any]) -> list[Any]:
    return [each if isinstance(each, GradientEdge) else get_gradient_edge(each) for each in given]
