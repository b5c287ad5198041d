"""Fp32 weights from a checkpoint's 16-bit entries and its unnamed fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def fp32_weights(
    entries: Mapping[str, Any], masters: Sequence[Tensor] = (), flats: Sequence[Tensor] = ()
) -> Matched:
    """Returns a model's state dict in fp32, with the values of its masters.

    Masters carry no names: one matches the first entry of its shape that it rounds to. Flat groups
    are split in the order of the entries.

    Args:
        entries: The model's state dict; entries that are not tensors are returned unchanged.
        masters: Fp32 masters of single parameters.
        flats: Fp32 masters of whole groups, concatenated, including fp32 parameters.
    """
    unused, used = list(masters), list[Tensor]()
    rests = [flat.flatten() for flat in flats]
    shapes: list[list[torch.Size]] = [[] for _ in flats]
    weights: dict[str, Any] = {}
    rounded: list[str] = []
    for name, entry in entries.items():
        weights[name] = entry
        if not isinstance(entry, Tensor):  # a module's extra state
            continue
        # Flat groups include fp32 parameters; single masters do not.
        found = _next_part(entry, rests, shapes) if entry.is_floating_point() else None
        if dtypes.is_low_precision(entry):
            found = _single_master(entry, unused, used) if found is None else found
            weights[name] = entry.float() if found is None else found
            if found is None:
                rounded.append(name)
    left = len(unused) + sum(rest.numel() > 0 for rest in rests)
    return Matched(weights, tuple(rounded), left, shapes)


def _next_part(entry: Tensor, rests: list[Tensor], shapes: list[list[torch.Size]]) -> Tensor | None:
    """Takes an entry's master from the first flat group whose rest begins with it."""
    count = entry.numel()
    for index, rest in enumerate(rests):
        if 0 < count <= rest.numel() and _rounds_to(rest[:count].view(entry.shape), entry):
            rests[index] = rest[count:]
            shapes[index].append(entry.shape)
            return rest[:count].view(entry.shape)
    return None


def _single_master(entry: Tensor, unused: list[Tensor], used: list[Tensor]) -> Tensor | None:
    for index, master in enumerate(unused):
        if _rounds_to(master, entry):
            used.append(unused.pop(index))
            return master
    # A tied weight has two names and one master.
    return next((master for master in used if _rounds_to(master, entry)), None)


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
