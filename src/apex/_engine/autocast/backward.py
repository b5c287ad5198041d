"""The casts of Python code in the backward pass of a ``scale_loss`` block."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from apex._core.op_casts import floating_dtypes, tensors_in
from apex._core.op_table import AutocastSpec
from apex._engine.autocast.ambient import OFF, Casts, devices_on
from apex._engine.autocast.region import under
from apex._torch.autograd import autocast_depth, backward_id, leave_function_mode
from apex._torch.dynamo import at_tracing, inlined, untraced_frame

_FIRST_GRADIENTS = (
    (Tensor.backward, "gradient"),
    (torch.autograd.backward, "grad_tensors"),
    (torch.autograd.grad, "grad_outputs"),
)
"""The functions that run a backward pass, and the name of their argument with first gradients."""


class BackwardAutocast(TorchFunctionMode):
    """The casts of one ``scale_loss`` block: as around it, but off in backward passes.

    Note [Casts in a backward pass]
        autograd's formulas compute in the dtypes of the forward. Python code in the same pass (a
        function's own backward, a hook) may mix dtypes, which apex cast. It may also run a forward
        again, with gradients enabled. So autocast is off in the pass, and a function mode, which
        formulas bypass, turns it on for such calls. A pass outside ``scale_loss`` runs under its
        thread's casts. There, our kernels do not cast the calls that this mode would not cast.
    """

    def __init__(self, spec: AutocastSpec) -> None:
        super().__init__()
        self._spec = spec
        # The thread of the last pass, and the autocast blocks that it was in.
        self._start = 0, 0

    @inlined
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for runner, name in _FIRST_GRADIENTS:
            if func is runner:
                return self._run_pass(func, name, *args, **kwargs)
        if not _is_in_pass(*self._start):
            return func(*args, **kwargs)
        mixes = len(floating_dtypes(tensors_in(args, kwargs))) > 1
        if not mixes and not torch.is_grad_enabled():
            return func(*args, **kwargs)
        return under(self._spec.device_types, self._spec.dtype, func, args, kwargs)

    @untraced_frame
    def _run_pass(self, run: Any, name: str, tensors: Any, *inputs: Any, **options: Any) -> Any:
        """Runs a backward pass without casts, but with this mode, which is off in its own method.

        Args:
            run: The function that runs the pass; torch passes it the first gradients by keyword.
            name: The keyword of the first gradients.
            tensors: The tensors to begin with.
            inputs: The other positional arguments.
            options: The keyword arguments.
        """
        gradients = options.get(name)
        if gradients is None:
            count = 1 if isinstance(tensors, Tensor) else len(tensors)
            gradients = [None] * count
        elif isinstance(gradients, Tensor):
            gradients = [gradients]
        self._start = threading.get_ident(), autocast_depth()
        with Casts(devices_on()), ExitStack() as until:
            options[name] = _entering(self, until, gradients)
            return run(tensors, *inputs, **options)


def _entering(mode: TorchFunctionMode, until: ExitStack, gradients: Iterable[Any]) -> Iterator[Any]:
    """Yields a pass's first gradients, and enters a mode when torch reads them.

    A mode that is on at the call would handle the call itself, again and again. torch looks for
    modes first, then reads the gradients, then starts the pass, so the mode is on only in the pass.
    """
    mode.__enter__()  # type: ignore[no-untyped-call]
    until.callback(leave_function_mode, mode)
    yield from gradients


@at_tracing
def _is_in_pass(thread: int, depth: int) -> bool:
    """Returns whether Python code of a backward pass runs, outside of autocast blocks in it.

    torch.utils.checkpoint recomputes in such blocks, with autocast's state from the forward.

    Args:
        thread: The thread that started the pass.
        depth: The number of autocast blocks around the pass, which other threads are not in.
    """
    if backward_id() == -1 or torch.get_autocast_dtype("cpu") is OFF:
        return False
    around = depth if thread == threading.get_ident() else 0
    return autocast_depth() == around
