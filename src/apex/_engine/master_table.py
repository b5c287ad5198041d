"""Every master of this process, and the fp32 values that are kept for other 16-bit tensors.

The table holds pairs weakly: the state of a model keeps those of its parameters, and the state of
an optimizer those of its groups.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from apex._core import dtypes, rounding
from apex._engine.masters import (
    Master,
    MasterPair,
    fp32_deepcopy,
    make_master,
    mark_exact,
    mark_synced,
    master_class_of,
    update_masters_from_model,
    update_model_from_masters,
)
from apex._torch import parameters, processes
from apex._torch.copies import is_readable

exact: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
"""The fp32 values of tensors without a master, from before they were rounded."""

_by_param = weakref.WeakValueDictionary[int, MasterPair]()

# Fp32 copies of other 16-bit tensors in the pickles that are being made.
_stand_ins: MutableMapping[Tensor, weakref.ref[Tensor]] = WeakTensorKeyDictionary()


def pair_of(param: Tensor) -> MasterPair | None:
    """Returns the pair of a model parameter, or ``None``."""
    return _by_param.get(id(param))


def pairs_of(params: Iterable[Tensor]) -> list[MasterPair]:
    """Returns the pairs of those parameters that have one."""
    return [*filter(None, map(pair_of, params))]


def all_pairs() -> list[MasterPair]:
    """Returns every pair, in the order in which they were made."""
    pairs = [reference() for reference in _by_param.valuerefs()]
    return [pair for pair in pairs if pair is not None]


def create(param: nn.Parameter, value: Tensor | None = None) -> MasterPair:
    """Returns the pair of a low-precision parameter.

    ``value`` is the parameter's value before rounding, if known.
    """
    pair = pair_of(param)
    if pair is None:
        if value is None or value.dtype is param.dtype:
            value = rounding.exact_value(param, exact.get(param))
        # Fake tensors, which nothing trains, may also be of another class.
        if not issubclass(type(param), (nn.Parameter, parameters.FakeTensor)):
            raise TypeError(
                f"A trained 16-bit parameter is a {type(param).__name__}, which cannot have an "
                "fp32 master. Use opt_level='O4', which keeps weights in fp32."
            )
        master = make_master(value, master_class_of(type(param)))
        pair = MasterPair(param, cast(Master, master))
        _by_param[id(param)] = pair
        pair.count()
    elif value is not None and value.dtype is not param.dtype:
        # An optimizer has kept it from before ``amp.restore``.
        parameters.set_data(pair.master, make_master(value))
        mark_synced([pair])
    return pair


def exact_value(tensor: Tensor) -> Tensor | None:
    """Returns the fp32 value of a parameter or buffer, or ``None`` if unknown."""
    pair = pair_of(tensor)
    if pair is None:
        return exact.get(tensor)
    update_model_from_masters([pair])
    return pair.master


def master_of(tensor: Tensor) -> Tensor:
    """Returns a parameter's master, updated from its weight; other tensors unchanged."""
    pair = pair_of(tensor)
    if pair is None or pair.master.device != tensor.device:
        return tensor
    update_masters_from_model([pair])
    return pair.master


def in_fp32(tensor: Tensor) -> Tensor:
    """Returns the exact fp32 value of a 16-bit tensor, to be read only; others unchanged."""
    master = master_of(tensor)
    if not dtypes.is_low_precision(master):
        return master
    return rounding.exact_value(tensor, exact_value(tensor))


def copy_to(memo: dict[int, Any], tensor: Tensor) -> None:
    """Puts an fp32 copy of a 16-bit tensor into the memo of a deep copy."""
    pair = pair_of(tensor)
    if pair is not None:
        copy.deepcopy(pair.master, memo)
    elif dtypes.is_low_precision(tensor):
        known = exact.get(tensor)
        fp32_deepcopy(tensor, lambda: rounding.exact_value(tensor, known), memo)


def stand_in(tensor: Tensor) -> Tensor:
    """Returns what pickles hold for a tensor: for a 16-bit one, its master or an fp32 copy.

    The copy is the same one while it lives and neither side changes, so that a pickle has it once.
    """
    pair = pair_of(tensor)
    if pair is not None:
        return pair.master
    if not dtypes.is_low_precision(tensor):
        return tensor
    memo: dict[int, Any] = {}
    copy_to(memo, tensor)
    copied: Tensor = memo[id(tensor)]
    reference = _stand_ins.get(tensor)
    known = None if reference is None else reference()
    if known is not None and _is_same(known, copied):
        return known  # else a spawned process or a shallow copy holds it
    _stand_ins[tensor] = weakref.ref(copied)
    processes.keep(copied)
    return copied


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Returns whether two fp32 copies have the same bits, as far as these can be read."""
    if first.requires_grad is not second.requires_grad:
        return False
    if not is_readable(first):
        return True
    bits = [tensor.detach().view(torch.int32) for tensor in (first, second)]
    return torch.equal(*bits)


@torch.no_grad()
def set_exact_values(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Sets masters to the exact values of parameters that are loaded next."""
    for param, value in values:
        pair = pair_of(param)
        if pair is not None:
            pair.master.copy_(value)
            mark_synced([pair])  # so that what a script writes to the weight after it counts
            mark_exact([pair])
        elif param in exact:
            exact[param].copy_(value)
