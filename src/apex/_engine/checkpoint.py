"""Fp32 weights from a checkpoint's 16-bit entries and its unnamed fp32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex._core import dtypes, tree


class Matched(NamedTuple):
    """The fp32 form of a model's state dict.

    Attributes:
        weights: Every entry, 16-bit ones in fp32.
        rounded: The 16-bit entries that match no master.
        unused: Number of masters, or flat groups of them, that match no entry.
        shapes: For each flat group, the shapes of its parameters in order.
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

    Masters carry no names: one matches the first entry of its shape that it rounds to. Flat groups
    are split in the order of the entries.

    Args:
        entries: The model's state dict; entries that are not tensors are returned unchanged.
        masters: Fp32 masters of single parameters.
        flats: Fp32 masters of whole groups, concatenated, including fp32 parameters.
    """
    single, groups = _Single(masters), [_Flat(flat) for flat in flats]
    weights: dict[str, Any] = {}
    rounded: list[str] = []
    for name, entry in entries.items():
        if not isinstance(entry, Tensor):  # a module's extra state
            weights[name] = entry
            continue
        low = dtypes.is_low_precision(entry)
        # Flat groups include fp32 parameters; single masters do not.
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
    """Returns whether an optimizer stepped these flat masters directly (apex, 2019).

    Args:
        state: The optimizer's state dict.
        flats: Fp32 masters of whole groups, concatenated.
    """
    return any(
        len(group["params"]) == 1 and _like(value, flat)
        for group, flat in zip(state["param_groups"], flats, strict=False)
        for value in tree.tensors(state["state"].get(group["params"][0], {}))
    )


def split_flat_state(
    state: Mapping[str, Any], flats: Sequence[Tensor], shapes: Sequence[Sequence[torch.Size]]
) -> dict[str, Any]:
    """Splits an optimizer's state dict over flat groups into one over single parameters.

    Args:
        state: The optimizer's state dict, with one parameter in each group.
        flats: Fp32 masters of the groups, concatenated.
        shapes: For each group, the shapes of its parameters in order.

    Raises:
        ValueError: If the shapes do not add up to a group's size, or the state is in 8 bits or
            fewer.
    """
    groups: list[dict[str, Any]] = []
    single: dict[int, dict[str, Any]] = {}
    for group, flat, own in zip(state["param_groups"], flats, shapes, strict=True):
        sizes = [shape.numel() for shape in own]
        if sum(sizes) != flat.numel():
            raise ValueError(
                f"A group of the optimizer's state has {flat.numel()} elements, but the model's "
                f"parameters make up {sum(sizes)}. Pass the model state saved with it."
            )
        whole = state["state"].get(group["params"][0], {})
        if _is_quantized(whole):
            raise ValueError(
                "The optimizer's state of a flat group is stored in 8 bits or fewer, in blocks "
                "that do not end where parameters do, so it cannot be split. Load the weights "
                "(to='weights') and train with a new optimizer."
            )
        first = len(single)
        pieces: list[dict[str, Any]] = [{} for _ in own]
        for name, value in whole.items():
            cuts = value.split(sizes) if _like(value, flat) else [value] * len(own)
            for piece, shape, part in zip(pieces, own, cuts, strict=True):
                # Copied, because step counts are incremented in place.
                piece[name] = part.reshape(shape).clone() if _like(value, flat) else deepcopy(part)
        single.update(enumerate(pieces, first))
        groups.append({**group, "params": list(range(first, len(single)))})
    return {**state, "state": {i: p for i, p in single.items() if p}, "param_groups": groups}


def _is_quantized(state: Mapping[str, Any]) -> bool:
    """Returns whether a parameter's state holds codes, plain or inside a subclass of Tensor."""
    return any(
        type(t) not in (Tensor, nn.Parameter) or dtypes.is_code(t) for t in tree.tensors(state)
    )


def _like(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == flat.numel()


def _rounds_to(master: Tensor, entry: Tensor) -> bool:
    same_shape = master.shape == entry.shape
    return same_shape and torch.equal(master.to(entry), entry)  # sync: a file is read on the host
