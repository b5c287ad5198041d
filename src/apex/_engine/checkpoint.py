"""Fp32 weights from what a checkpoint holds in 16 bits and, without names, in fp32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex._core import dtypes


class Matched(NamedTuple):
    """The fp32 form of a model's state dict.

    Attributes:
        weights: Every entry, 16-bit ones in fp32.
        rounded: The 16-bit entries that no master belongs to.
        unused: How many masters, or flat groups of them, belong to no entry.
        shapes: For each flat group the shapes of the parameters in it, in order.
    """

    weights: dict[str, Any]
    rounded: tuple[str, ...]
    unused: int
    shapes: list[list[torch.Size]]


class _Single:
    """Masters of one parameter each, in any order."""

    def __init__(self, masters: Iterable[Tensor]) -> None:
        self._unused = list(masters)
        self._used: list[Tensor] = []

    @property
    def unused(self) -> int:
        return len(self._unused)

    def take(self, entry: Tensor) -> Tensor | None:
        for index, master in enumerate(self._unused):
            if _rounds_to(master, entry):
                self._used.append(self._unused.pop(index))
                return master
        # A tied weight has two names and one master.
        return next((master for master in self._used if _rounds_to(master, entry)), None)


class _Flat:
    """One group's masters in one flat tensor, in the order of the model's parameters."""

    def __init__(self, flat: Tensor) -> None:
        self.shapes: list[torch.Size] = []
        self._rest = flat.flatten()

    @property
    def unused(self) -> int:
        return int(self._rest.numel() > 0)

    def take(self, entry: Tensor) -> Tensor | None:
        count = entry.numel()
        if not 0 < count <= self._rest.numel():
            return None
        master = self._rest[:count].view(entry.shape)
        if not _rounds_to(master, entry):
            return None
        self._rest = self._rest[count:]
        self.shapes.append(entry.shape)
        return master


def fp32_weights(
    entries: Mapping[str, Any], masters: Sequence[Tensor], flats: Sequence[Tensor] = ()
) -> Matched:
    """Returns a model's state dict in fp32, with the values of its masters.

    Masters carry no names: one belongs to the first entry of its shape that it rounds to. Flat
    groups are cut up in the order of the entries.

    Args:
        entries: The model's state dict; what is no tensor comes out as it is.
        masters: Fp32 masters of single parameters.
        flats: Fp32 masters of whole groups, concatenated; fp32 parameters among them.
    """
    single, groups = _Single(masters), [_Flat(flat) for flat in flats]
    weights: dict[str, Any] = {}
    rounded: list[str] = []
    for name, entry in entries.items():
        if not isinstance(entry, Tensor):  # a module's extra state
            weights[name] = entry
            continue
        low = dtypes.is_low_precision(entry)
        # Only flat groups hold fp32 parameters, too.
        sources: list[_Flat | _Single] = [*groups] if entry.is_floating_point() else []
        if low:
            sources.append(single)
        found = next((m for source in sources if (m := source.take(entry)) is not None), None)
        weights[name] = entry if not low else entry.float() if found is None else found
        if low and found is None:
            rounded.append(name)
    unused = single.unused + sum(group.unused for group in groups)
    return Matched(weights, tuple(rounded), unused, [group.shapes for group in groups])


def is_flat(state: Mapping[str, Any], flats: Sequence[Tensor]) -> bool:
    """Returns whether an optimizer with these flat masters stepped them as they are (apex, 2019).

    Args:
        state: The optimizer's state dict.
        flats: Fp32 masters of whole groups, concatenated.
    """
    return any(
        len(group["params"]) == 1 and _like(value, flat)
        for group, flat in zip(state["param_groups"], flats, strict=False)
        for value in state["state"].get(group["params"][0], {}).values()
    )


def cut(
    state: Mapping[str, Any], flats: Sequence[Tensor], shapes: Sequence[Sequence[torch.Size]]
) -> dict[str, Any]:
    """Returns the state dict of an optimizer of single parameters, from one of flat groups.

    Args:
        state: The optimizer's state dict, with one parameter in each group.
        flats: Fp32 masters of the groups, concatenated.
        shapes: For each group the shapes of its parameters, in order.

    Raises:
        ValueError: If these shapes do not make up a group.
    """
    groups: list[dict[str, Any]] = []
    single: dict[int, dict[str, Any]] = {}
    for group, flat, own in zip(state["param_groups"], flats, shapes, strict=True):
        sizes = [shape.numel() for shape in own]
        if sum(sizes) != flat.numel():
            raise ValueError(
                f"A group of the optimizer's state has {flat.numel()} elements, and the model's "
                f"parameters make up {sum(sizes)} of them. Pass the model state of the same save."
            )
        whole = state["state"].get(group["params"][0], {})
        first = len(single)
        pieces: list[dict[str, Any]] = [{} for _ in own]
        for name, value in whole.items():
            cuts = value.split(sizes) if _like(value, flat) else [value] * len(own)
            for piece, shape, part in zip(pieces, own, cuts, strict=True):
                # Parts of their own: a step count is counted up in place.
                piece[name] = part.reshape(shape).clone() if _like(value, flat) else deepcopy(part)
        single.update(enumerate(pieces, first))
        groups.append({**group, "params": list(range(first, len(single)))})
    return {**state, "state": {i: p for i, p in single.items() if p}, "param_groups": groups}


def _like(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == flat.numel()


def _rounds_to(master: Tensor, entry: Tensor) -> bool:
    same_shape = master.shape == entry.shape
    return same_shape and torch.equal(master.to(entry), entry)  # sync: a file is read on the host
