"""apex's op lists, which scripts may modify before ``amp.initialize``.

One module per namespace: ``functional_overrides``, ``torch_overrides`` and ``tensor_overrides``,
each with the mutable lists ``FP16_FUNCS``, ``FP32_FUNCS``, ``CASTS`` (promotion) and
``SEQUENCE_CASTS``; the first also has ``BANNED_FUNCS``, which scripts may add to the others.
``amp.initialize`` builds its session's op table from them. A name may be any function of torch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from apex._core.arguments import shown
from apex._core.op_rows import Category
from apex._core.op_table import OpTable, operators
from apex._engine.autocast.user_functions import Kind
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

_MODULES: dict[str, ModuleType] = {
    "torch.nn.functional": functional_overrides,
    "torch": torch_overrides,
    "torch.Tensor": tensor_overrides,
}

_LISTS: dict[str, tuple[Category, Kind]] = {
    "FP16_FUNCS": ("low_precision", "low_precision"),
    "FP32_FUNCS": ("fp32", "float"),
    "CASTS": ("promote", "promote"),
    "SEQUENCE_CASTS": ("promote", "promote"),
    "BANNED_FUNCS": ("banned", "float"),
}
"""The category of each list's operators, and the kind of its Python functions."""


def casts(dtype: torch.dtype) -> tuple[OpTable, list[tuple[Any, str, Kind]]]:
    """Returns the op table, and module, name and kind of the added Python functions of torch.

    Those have no operator, and are cast as the user's registered functions are.

    Raises:
        ValueError: If torch has no function of an added name.
    """
    table = OpTable.default().for_dtype(dtype)
    functions = []
    now = _names()
    for namespace, _, name in _ORIGINAL - now:
        table = table.without(namespace, name)
    for namespace, listed, name in sorted(now - _ORIGINAL):
        category, kind = _LISTS[listed]
        if operators(namespace, name):
            table = table.with_(namespace, name, category)
        else:
            functions.append((_MODULES[namespace].MODULE, name, kind))
    return table, functions


def _names() -> set[tuple[str, str, str]]:
    """Returns namespace, list and name of every entry."""
    names = set()
    for namespace, module in _MODULES.items():
        for listed in _LISTS:
            for entry in getattr(module, listed, ()):
                names.add((namespace, listed, _name(entry)))
    return names


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
