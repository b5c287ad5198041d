"""The casts of Python code in the backward pass of a ``scale_loss`` block."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from apex._core.op_casts import floating_dtypes, tensors_in
from apex._core.op_table import AutocastSpec
from apex._core.tree import Args, Kwargs
from apex._engine.autocast.ambient import OFF, Casts, devices_on
from apex._engine.autocast.region import under
from apex._torch.autograd import autocast_depth, backward_id, leave_function_mode
from apex._torch.dynamo import at_tracing, inlined, untraced_frame

_RUNNERS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""The functions that run a backward pass."""


class BackwardAutocast(TorchFunctionMode):
    """The casts of one ``scale_loss`` block: as around it, but off in backward passes.

    Note [Casts in a backward pass]
        autograd's formulas compute in the dtypes of the forward. Python code in the same pass (a
        function's own backward, a hook) may mix dtypes, which apex cast. It may also run a forward
        again, with gradients enabled. So autocast is off in the pass, and a function mode, which
        formulas bypass, turns it on for such calls. A dispatch mode calls a formula's operators
        again, from Python: these stay uncast. A pass outside ``scale_loss`` runs under its
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
        if func in _RUNNERS:
            return self._run_pass(func, args, kwargs)
        is_formula = getattr(func, "namespace", "") == "aten"  # an operator, not a function
        if is_formula or not _is_in_pass(*self._start):
            return func(*args, **kwargs)
        mixes = len(floating_dtypes(tensors_in(args, kwargs))) > 1
        if not mixes and not torch.is_grad_enabled():
            return func(*args, **kwargs)
        return under(self._spec.device_types, self._spec.dtype, func, args, kwargs)

    @untraced_frame
    def _run_pass(self, run: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs a backward pass without casts, but with this mode, which is off in its own method.

        Args:
            run: The function that runs the pass.
            args: Its positional arguments: the tensors to begin with, and for some the inputs.
            kwargs: Its other arguments, which torch passes by keyword.
        """
        retains = kwargs.get("retain_graph")
        if retains is None:
            retains = kwargs["create_graph"]
        self._start = threading.get_ident(), autocast_depth()
        flag = _EntersMode(self, retains)
        kwargs["retain_graph"] = flag
        with Casts(devices_on()):
            try:
                return run(*args, **kwargs)
            finally:
                if flag.has_entered:
                    leave_function_mode(self)


class _EntersMode:
    """A flag that enters a mode when torch's engine reads it, which then begins the pass.

    A mode that is on at the call would handle the call itself, again and again.
    """

    def __init__(self, mode: TorchFunctionMode, value: bool) -> None:
        self._mode = mode
        self._value = value
        self.has_entered = False

    def __index__(self) -> int:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self.has_entered = True
        return int(self._value)

    def __bool__(self) -> bool:  # for a release of torch that reads a bool in place of a number
        return bool(self.__index__())


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
