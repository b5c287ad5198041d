"""apex's op lists, which scripts change before ``amp.initialize``.

Three modules, one a namespace: ``functional_overrides``, ``torch_overrides``, ``tensor_overrides``,
each with mutable ``FP16_FUNCS``, ``FP32_FUNCS``, ``CASTS`` (promotion), ``SEQUENCE_CASTS`` and
``BANNED_FUNCS``. ``amp.initialize`` reads them; the op table of that session follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from apex._core.op_table import Category, OpTable
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from apex.amp.lists._original import ORIGINAL

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


def op_table() -> OpTable:
    """Returns the op table with whatever the user changed in the lists.

    Raises:
        ValueError: For an added name that no operator is known for.
    """
    table = OpTable.default()
    for namespace, list_name, name in _changes(removed=True):
        del list_name
        table = table.without(namespace, name)
    for namespace, list_name, name in _changes(removed=False):
        table = table.with_(namespace, name, _LISTS[list_name])
    return table


def _changes(*, removed: bool) -> Iterator[tuple[str, str, str]]:
    for namespace, module in _MODULES.items():
        for list_name in _LISTS:
            before = set(ORIGINAL[namespace][list_name])
            now = {_name(entry) for entry in getattr(module, list_name)}
            for name in sorted(before - now if removed else now - before):
                yield namespace, list_name, name


def _name(entry: str | tuple[str, str]) -> str:
    # apex's BANNED_FUNCS hold a name and the message for it.
    return entry if isinstance(entry, str) else entry[0]
