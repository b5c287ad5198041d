"""apex's op lists, which scripts may modify before ``amp.initialize``.

One module per namespace: ``functional_overrides``, ``torch_overrides`` and ``tensor_overrides``,
each with the mutable lists ``FP16_FUNCS``, ``FP32_FUNCS``, ``CASTS`` (promotion) and
``SEQUENCE_CASTS``; the first also has ``BANNED_FUNCS``, which scripts may add to the others.
``amp.initialize`` builds its session's op table from them. A name may be any function of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from apex._core.arguments import shown
from apex._core.op_table import Category, OpTable, operators
from apex._engine.autocast.user_functions import Kind
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "op_table", "tensor_overrides", "torch_overrides"]

_MODULES: dict[str, ModuleType] = {
    "torch.nn.functional": functional_overrides,
    "torch": torch_overrides,
    "torch.Tensor": tensor_overrides,
}

_LISTS: dict[str, Category] = {
    "FP16_FUNCS": "low_precision",
    "FP32_FUNCS": "fp32",
    "CASTS": "promote",
    "SEQUENCE_CASTS": "promote",
    "BANNED_FUNCS": "banned",
}

_KINDS: dict[Category, Kind] = {
    "low_precision": "low_precision",
    "fp32": "float",
    "promote": "promote",
}


def op_table(dtype: torch.dtype) -> OpTable:
    """Returns the op table of a low-precision dtype, with the user's changes to the lists.

    Raises:
        ValueError: If torch has no function of an added name.
    """
    table = OpTable.default().for_dtype(dtype)
    for namespace, _, name in _changes(removed=True):
        table = table.without(namespace, name)
    for namespace, category, name in _changes(removed=False):
        if operators(namespace, name) or category not in _KINDS:
            table = table.with_(namespace, name, category)
    return table


def python_functions() -> list[tuple[Any, str, Kind]]:
    """Returns module, name and kind of each added name that is a Python function of torch.

    Those have no operator, and are cast as the user's registered functions are.
    """
    return [
        (_MODULES[namespace].MODULE, name, _KINDS[category])
        for namespace, category, name in _changes(removed=False)
        if category in _KINDS and not operators(namespace, name)
    ]


def _names() -> dict[tuple[str, str], set[str]]:
    """Returns the names in each list, by namespace and list."""
    return {
        (namespace, list_name): set(map(_name, getattr(module, list_name, ())))
        for namespace, module in _MODULES.items()
        for list_name in _LISTS
    }


def _changes(*, removed: bool) -> Iterator[tuple[str, Category, str]]:
    for (namespace, list_name), now in _names().items():
        before = _ORIGINAL[namespace, list_name]
        for name in sorted(before - now if removed else now - before):
            yield namespace, _LISTS[list_name], name


def _name(entry: object) -> str:
    # apex's BANNED_FUNCS pair each name with its message.
    name = entry[0] if isinstance(entry, tuple) and entry else entry
    if isinstance(name, str):
        return name
    raise TypeError(
        f"amp.lists holds {shown(name)}; it takes names of functions, such as 'einsum'. For a "
        "function of your own, use amp.half_function(fn) or amp.register_half_function."
    )


_ORIGINAL = _names()
