"""Casts in backward passes: off in autograd's formulas, for mixed dtypes in Python code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from apex._core.op_casts import widest
from apex._core.op_table import CastSpec
from apex._engine.autocast.blocks import UncastBlock
from apex._engine.autocast.thread_casts import DEVICE_TYPES, threads
from apex._torch.dynamo import untraced, untraced_if_called
from apex._torch.function_modes import exit_function_modes, function_modes, push_function_mode

Cast = Callable[[Mapping[str, CastSpec], Callable[..., Any], Any, Any], Any]
"""Calls a function with positional and keyword arguments, by the spec of each device type."""

_on = operator.itemgetter(1)


class resolve_mixed(UncastBlock):  # noqa: N801 - reads as a function
    """Context of a backward pass of this thread; does nothing without casts.

    Note [Casts in a backward pass]
        autograd's formulas compute in the dtypes of the forward. Python code in the same pass (a
        function's own backward, a hook, a recompute) may mix dtypes, which apex cast. autocast
        cannot distinguish the two. So it is off during the pass, and a function mode, which
        formulas bypass, casts the arguments of Python calls that mix dtypes, by the rows of the
        session of the ``scale_loss`` block, or else of the thread that began the pass; of the
        newest session in a thread that has none. It leaves all others, and all in a pass that
        began with casts off. Compiled code called in the pass has these casts traced in.

    Its exit is idempotent; see Note [Interrupted blocks].

    Args:
        cast: Calls a function by these rows.
        newest: Returns the rows of the newest session for a device type.

    Attributes:
        modes: The number of function modes around it; ``None`` unless it is entered and in effect.
    """

    modes: int | None = None

    @untraced
    def __init__(self, cast: Cast, newest: Callable[[str], CastSpec | None]) -> None:
        self._cast = cast
        self._newest = newest

    @untraced
    def __enter__(self) -> None:  # type: ignore[override]
        here = threads.current
        if here.stale:
            here.settle()
        casts = here.pass_casts
        added = {} if casts is None else dict.fromkeys(casts.device_types, casts)
        if not (here.specs or added or here.off):
            found = {device: self._newest(device) for device in DEVICE_TYPES}
            added = {device: spec for device, spec in found.items() if spec is not None}
        if not (here.specs or added):
            return
        self.modes = function_modes()
        _, specs, _, off, mixes, _, _, switches = super().__enter__()
        here.mixes = mixes or not (specs or off) or any(map(_on, switches))
        if added:
            here.specs = here.specs | added
        if here.mixes:
            push_function_mode(_ResolveMixed(self._cast, here.specs))

    @untraced
    def __exit__(self, *error: object) -> None:
        if self.modes is not None:
            exit_function_modes(self.modes)
            super().__exit__()
            self.modes = None


class _ResolveMixed(TorchFunctionMode):
    """Casts Python calls that mix dtypes inside a backward pass, in whichever thread."""

    def __init__(self, cast: Cast, specs: Mapping[str, CastSpec]) -> None:
        self._cast = cast
        self._specs = specs

    @untraced_if_called
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if widest(args, kwargs) is None:
            return func(*args, **kwargs)
        return self._cast(self._specs, func, args, kwargs)
