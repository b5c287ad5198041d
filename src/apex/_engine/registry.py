"""The masters of a session, and fp32 values kept beside them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from apex._core import rounding
from apex._engine import masters
from apex._engine.masters import Master, MasterPair
from apex._torch.modules import named_parameters


class MasterTable:
    """Every master of one session, indexed by model parameter."""

    def __init__(self, kind: type[Master] = Master) -> None:
        """Starts without masters, which will be of class ``kind``."""
        self._kind = kind
        self._by_param: weakref.WeakValueDictionary[int, MasterPair] = weakref.WeakValueDictionary()
        # Pairs by the object that keeps them alive: a model, or an optimizer's prepared.
        self._by_holder: weakref.WeakKeyDictionary[object, list[MasterPair]] = (
            weakref.WeakKeyDictionary()
        )
        # The pairs of a model's parameters, with the count of changes at their lookup.
        self._by_model: weakref.WeakKeyDictionary[nn.Module, tuple[int, Sequence[MasterPair]]] = (
            weakref.WeakKeyDictionary()
        )
        self._changes = 0
        self._kept: weakref.WeakKeyDictionary[object, dict[int, tuple[Tensor, Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def make(self, param: nn.Parameter, holder: object, exact: Tensor | None = None) -> MasterPair:
        """Returns the pair of a low-precision parameter; a new one lives as long as ``holder``.

        ``exact`` is the parameter's value before rounding, if known.
        """
        known = self.pair_of(param)
        if known is not None:
            return known
        if exact is None and (kept := self._kept_value(param)) is not None:
            exact = rounding.exact_value(param, [kept])
        pair = MasterPair(param, exact, self._kind)
        self.hold([pair], holder)
        return pair

    def hold(self, pairs: Sequence[MasterPair], holder: object) -> None:
        """Registers pairs that live as long as ``holder``."""
        self._changes += 1
        self._by_holder.setdefault(holder, []).extend(pairs)
        self._by_param.update({id(pair.model): pair for pair in pairs})

    def release(self, holder: object) -> None:
        """Drops the pairs and values that ``holder`` keeps alive."""
        self._changes += 1
        for pair in self._by_holder.pop(holder, ()):
            self._by_param.pop(id(pair.model), None)
        self._kept.pop(holder, None)

    def keep(self, values: Iterable[tuple[Tensor, Tensor]], model: nn.Module) -> None:
        """Keeps the fp32 values of tensors without a master for as long as ``model`` lives."""
        held = self._kept.setdefault(model, {})
        held.update({id(tensor): (tensor, value) for tensor, value in values})

    def pair_of(self, param: Tensor) -> MasterPair | None:
        """Returns the pair of a model parameter, or ``None``."""
        return self._by_param.get(id(param))

    def master_of(self, param: Tensor) -> Tensor | None:
        """Returns the fp32 value of a parameter or buffer, or ``None`` if unknown."""
        pair = self._by_param.get(id(param))
        if pair is None:
            return self._kept_value(param)
        if pair.master_written:
            masters.write_back([pair])
        return pair.master

    def _kept_value(self, param: Tensor) -> Tensor | None:
        for values in self._kept.values():
            if id(param) in values:
                return values[id(param)][1]
        return None

    def all(self) -> Iterator[MasterPair]:
        """Yields every pair once."""
        for pairs in list(self._by_holder.values()):
            yield from pairs

    def write_back(self, model: nn.Module) -> None:
        """Rounds the written masters of a model's parameters into them."""
        changes, pairs = self._by_model.get(model, (None, ()))
        if changes != self._changes:
            known = [self.pair_of(param) for _, param in named_parameters(model)]
            pairs = [pair for pair in known if pair is not None]
            self._by_model[model] = self._changes, pairs
        masters.write_back(pairs)

    @torch.no_grad()
    def expect(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets masters to the exact values of parameters that are loaded next.

        The parameters count as written: where one is not loaded after all, its master follows it.
        """
        for param, value in values:
            pair = self.pair_of(param)
            if pair is not None:
                pair.set_exact(value)
                increment_version(param)
            elif (kept := self._kept_value(param)) is not None:
                kept.copy_(value)

    def clear_grads(self, params: set[int], *, set_to_none: bool) -> set[int]:
        """Clears the gradients of the parameters with these ids and of their masters.

        Returns the ids, with the masters'.
        """
        pairs = [pair for pair in self.all() if id(pair.model) in params]
        for pair in pairs:
            masters.clear_grad(pair, set_to_none=set_to_none)
        return {*params, *(id(pair.master) for pair in pairs)}
