"""Dispatch modes, and operators in them: how they alias arguments; torch's fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


def exit_mode(mode: TorchDispatchMode) -> None:
    """Exits a mode if it is the innermost one; idempotent."""
    if _get_current_dispatch_mode() is mode:
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]


@contextmanager
def suspend_modes(until: TorchDispatchMode | None = None) -> Iterator[None]:
    """Suspends this thread's dispatch modes inside the block.

    A mode entered inside the block ends up below them. Exiting a mode pops the top of torch's
    stack, whichever mode that is, so the code that entered the suspended modes still pops its own.
    Only the base class's methods run: a mode's own ``__exit__`` may print a table, for example.

    Args:
        until: Suspends only the modes above this one; None suspends all.
    """
    above = []
    while (top := _get_current_dispatch_mode()) is not None and top is not until:
        above.append(top)
        exit_mode(top)
    try:
        yield
    finally:
        for mode in reversed(above):
            TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]


def records_operators() -> bool:
    """Returns whether operators run on fake tensors, as DTensor's, or ``make_fx`` records them."""
    keys = torch._C._TorchDispatchModeKey
    return any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY)))


_OPERANDS = {"_fused_adam_": 5, "_fused_adamw_": 5, "_fused_sgd_": 3, "_fused_adagrad_": 3}


def operands(func: Any) -> int:
    """Returns how many arguments of a fused operator are lists of tensors like the parameters.

    The first two are parameters and gradients; a list of step counts may follow. Other operators
    have none.
    """
    return _OPERANDS.get(func.overloadpacket.__name__, 0)


def receives(func: Any) -> bool:
    """Returns whether an operator is a collective that writes to its first argument, when it can.

    It returns an object to wait for.
    """
    name: str = func._schema.name
    return name.startswith("c10d::") and name.endswith("_")


def written_arguments(func: Any) -> list[Any]:
    """Returns the schemas of the arguments that an operator writes."""
    arguments = func._schema.arguments
    if receives(func):  # its schema does not say
        return [arguments[0]]
    aliased = [argument for argument in arguments if argument.alias_info is not None]
    return [argument for argument in aliased if argument.alias_info.is_write]
