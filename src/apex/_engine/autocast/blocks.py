"""Blocks of this thread without op casts, and the casts of Python code in backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from apex._core.op_casts import widest
from apex._core.op_table import CastSpec
from apex._torch.autograd import backward_id
from apex._torch.dispatcher import weight_cache_is_safe
from apex._torch.dynamo import at_tracing, untraced, untraced_frame, untraced_if_called

P = ParamSpec("P")
R = TypeVar("R")

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
"""Device types that torch has autocast for."""

is_on, set_on = torch.is_autocast_enabled, torch.set_autocast_enabled
get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

_OFF = torch.float32
"""The CPU's autocast dtype in ``disable_casts``, which no region uses.

By it, regions inside stay off: also those that torch.utils.checkpoint recomputes, that run in
autograd's threads, or that dynamo traces, for all of which torch carries the dtype along.
"""


def autocast_depth() -> int:
    """Returns how many ``torch.autocast`` blocks this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def is_off() -> bool:
    """Returns whether this thread is in an :func:`off` block."""
    return get_dtype("cpu") is _OFF


def under(
    devices: Sequence[str], dtype: torch.dtype | None, fn: Callable[P, R], /, *args: P.args,
    **kwargs: P.kwargs,
) -> R:  # fmt: skip
    """Calls ``fn`` under autocast to ``dtype``; ``None`` turns it off. Dynamo can trace it."""
    if not devices:
        return fn(*args, **kwargs)
    with torch.autocast(
        devices[0], dtype, enabled=dtype is not None, cache_enabled=weight_cache_is_safe
    ):
        return under(devices[1:], dtype, fn, *args, **kwargs)


@contextmanager
def off(devices: Sequence[str]) -> Iterator[None]:
    """A block in which casts of these device types are off, and regions stay off."""
    if not devices:
        with torch.autocast("cpu", _OFF, enabled=False, cache_enabled=False):
            yield
        return
    with torch.autocast(devices[0], enabled=False, cache_enabled=False), off(devices[1:]):
        yield


class UncastBlock:
    """Turns casts off in this thread; cheaper than :func:`off`. Its exit is idempotent."""

    _on: Sequence[str] = ()

    @untraced
    def __enter__(self) -> None:
        self._on = [device for device in DEVICE_TYPES if is_on(device)]
        for device in self._on:
            set_on(device, False)

    @untraced
    def __exit__(self, *error: object) -> None:
        on, self._on = self._on, ()
        for device in on:
            set_on(device, True)


class PassCasts:
    """The casts of one ``scale_loss`` block: as around it, but off in backward passes.

    Note [Casts in a backward pass]
        autograd's formulas compute in the dtypes of the forward. Python code in the same pass (a
        function's own backward, a hook, a recompute) may mix dtypes, which apex cast. So autocast
        is off in the pass, and a function mode, which formulas bypass, turns it on for Python
        calls that mix dtypes. ``torch.autograd.grad``, and a pass outside of ``scale_loss``, run
        under their thread's casts, as in ``torch.autocast``.

    Args:
        spec: The casts; ``None`` for none.
    """

    _mode: _BlockMode | None = None

    def __init__(self, spec: CastSpec | None) -> None:
        self._spec = spec

    @untraced
    def __enter__(self) -> None:
        if self._spec is not None:
            self._mode = _BlockMode(self._spec)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    @untraced
    def __exit__(self, *error: object) -> None:
        """Ends the block; idempotent."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _BlockMode(TorchFunctionMode):
    def __init__(self, spec: CastSpec) -> None:
        super().__init__()
        self._spec = spec
        self._start = 0, 0

    @untraced_if_called
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward or func is torch.autograd.backward:
            return self._run_pass(*args, **kwargs)
        if widest(args, kwargs) is None or not _is_in_pass(*self._start):
            return func(*args, **kwargs)
        return under(self._spec.device_types, self._spec.dtype, func, *args, **kwargs)

    @untraced_frame
    def _run_pass(
        self, tensors: Any, grad_tensors: Any = None, *, gradient: Any = None, **options: Any
    ) -> None:
        """Runs a backward pass without casts, but with this mode, which torch left to call it."""
        outputs = [*tensors] if isinstance(tensors, (list, tuple)) else [tensors]
        given = grad_tensors if gradient is None else gradient
        if given is None or isinstance(given, Tensor):
            given = [given] * len(outputs)
        self._start = threading.get_ident(), autocast_depth()
        entered = ExitStack()

        def grads() -> Any:
            entered.enter_context(self)  # torch has looked for modes by now
            yield from given

        with UncastBlock(), entered:
            torch.autograd.backward(outputs, grads(), **options)


@at_tracing
def _is_in_pass(thread: int, depth: int) -> bool:
    """Returns whether Python code of a backward pass runs, outside of autocast blocks in it.

    torch.utils.checkpoint recomputes in such blocks, which set the switch as in the forward.
    """
    outside = depth if thread == threading.get_ident() else 0
    return backward_id() != -1 and not is_off() and autocast_depth() == outside
