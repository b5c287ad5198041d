"""One fp32 master per low-precision parameter of a session, whichever optimizer steps it."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from apex._core import rounding
from apex._core.living import Living
from apex._engine.tracked_pair import TrackedPair, read_model, round_into_model, write_back
from apex._torch.dynamo import untraced

PREPARED = "_apex_binding"
"""Attribute that marks the optimizers prepared by amp."""


class Masters:
    """Every master of one session, indexed by model parameter."""

    def __init__(self) -> None:
        self._by_param: weakref.WeakValueDictionary[int, TrackedPair] = (
            weakref.WeakValueDictionary()
        )
        self._param_at: dict[int, int] = {}  # ids by address
        # Pairs by the object that keeps them alive: a model, or an optimizer's binding.
        self._by_holder: weakref.WeakKeyDictionary[object, list[TrackedPair]] = (
            weakref.WeakKeyDictionary()
        )
        self._kept: weakref.WeakKeyDictionary[object, dict[int, tuple[Tensor, Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def make(self, param: nn.Parameter, holder: object, exact: Tensor | None = None) -> TrackedPair:
        """Returns the pair of a low-precision parameter; a new one lives as long as ``holder``.

        ``exact`` is the parameter's value before rounding, if known.
        """
        known = self.pair_of(param)
        if known is not None:
            return known
        if exact is None and (kept := self._kept_value(param)) is not None:
            exact = rounding.exact_value(param, [kept])
        pair = TrackedPair(param, exact)
        self.hold([pair], holder)
        return pair

    def make_all(self, params: Iterable[tuple[nn.Parameter, Tensor]], holder: object) -> None:
        """Makes the pairs of parameters that have none, from their values before rounding."""
        unknown = ((param, exact) for param, exact in params if self.pair_of(param) is None)
        self.hold([TrackedPair(param, exact) for param, exact in unknown], holder)

    def hold(self, pairs: Sequence[TrackedPair], holder: object) -> None:
        """Registers pairs that live as long as ``holder``."""
        if pairs:
            _living.add(self)
        held = self._by_holder.setdefault(holder, [])
        for pair in pairs:
            which = id(pair.model)
            if pair.model_address in self._param_at:
                self._part_memory(pair)
            self._by_param[which] = pair
            self._param_at[pair.model_address] = which
            held.append(pair)

    def _part_memory(self, pair: TrackedPair) -> None:
        """Gives another weight in the memory of the pair's, if it has a master, memory of its own.

        ``weight_norm`` and ``nn.Parameter(weight)`` make parameters that share a weight's memory,
        into which two masters would be rounded.
        """
        address = pair.model_address
        other = self._by_param.get(self._param_at[address])
        if other is None or other.model is pair.model or not address:
            return
        if other.model.data_ptr() == address:
            other.model.data = other.model.detach().clone()

    def release(self, holder: object) -> None:
        """Drops the pairs and values that ``holder`` keeps alive."""
        for pair in self._by_holder.pop(holder, ()):
            self._by_param.pop(id(pair.model), None)
        self._kept.pop(holder, None)

    def keep(self, values: Iterable[tuple[Tensor, Tensor]], model: nn.Module) -> None:
        """Keeps the fp32 values of tensors without a master for as long as ``model`` lives."""
        held = self._kept.setdefault(model, {})
        held.update({id(tensor): (tensor, value) for tensor, value in values})

    def pair_of(self, param: Tensor) -> TrackedPair | None:
        """Returns the pair of a model parameter, or ``None``."""
        return self._by_param.get(id(param))

    def masters_of(self, params: Iterable[Tensor]) -> list[Tensor | None]:
        """Returns :meth:`master_of` of each parameter or buffer."""
        pair_of = self._by_param.get
        return [
            pair.master
            if (pair := pair_of(id(param))) is not None and pair.low_bits and pair.is_current
            else self.master_of(param)
            for param in params
        ]

    def master_of(self, param: Tensor) -> Tensor | None:
        """Returns the fp32 value of a parameter or buffer, or ``None`` if unknown."""
        pair = self.pair_of(param)
        if pair is None:
            return self._kept_value(param)
        if not pair.low_bits and pair.model_written:
            read_model([pair])
        return pair.known

    def _kept_value(self, param: Tensor) -> Tensor | None:
        for values in self._kept.values():
            if id(param) in values:
                return values[id(param)][1]
        return None

    def all(self) -> Iterator[TrackedPair]:
        """Yields every pair once."""
        for pairs in list(self._by_holder.values()):
            yield from pairs

    def write_back(self) -> None:
        """Rounds every written master into its model parameter."""
        for pairs in list(self._by_holder.values()):
            write_back(pairs)

    @torch.no_grad()
    def set_exact(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets the masters of newly loaded parameters to their values before rounding."""
        try:
            for param, value in values:
                pair = self.pair_of(param)
                if pair is not None:
                    pair.set_exact(value)
                elif (kept := self._kept_value(param)) is not None:
                    kept.copy_(value)
        except BaseException:
            # Loaded in part: parameters whose masters were not set go back to the old masters.
            round_into_model([pair for pair in self.all() if pair.model_written])
            raise

    @torch.no_grad()
    def expect(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets masters to the exact values of parameters that are loaded next.

        The parameters count as written: where one is not loaded after all, its master follows it.
        """
        for param, value in values:
            pair = self.pair_of(param)
            if pair is None and (kept := self._kept_value(param)) is not None:
                kept.copy_(value)
            elif pair is not None:
                pair.set_exact(value)
                increment_version(param)

    def keep_alike(
        self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], model: nn.Module
    ) -> None:
        """Keeps the values of tensors without a master for their copies of the same name, too."""
        found = ((t, copies.get(name), self._kept_value(t)) for name, t in tensors.items())
        kept = [
            (copied, value.clone())
            for tensor, copied, value in found
            if value is not None and copied is not None and copied.shape == tensor.shape
        ]
        if kept:
            self.keep(kept, model)

    def clear_grads(self, params: Container[int], *, set_to_none: bool) -> None:
        """Clears the master gradients of the parameters with these ids."""
        for pair in self.all():
            if id(pair.model) in params:
                clear_grad(pair.master, set_to_none=set_to_none)
                pair.mirrors_grad = pair.mirrors_grad and not set_to_none


_living: Living[Masters] = Living()
"""Those of every session. Compiled code may run for models of other sessions than it traced."""


@untraced
def write_back_all() -> None:
    """Rounds every written master of every session into its model parameter."""
    for masters in _living:
        masters.write_back()


def clear_grad(param: nn.Parameter, *, set_to_none: bool) -> None:
    """Clears one gradient, as ``torch.optim.Optimizer.zero_grad`` does."""
    if set_to_none:
        param.grad = None
    elif param.grad is not None:
        if param.grad.grad_fn is not None:
            param.grad = param.grad.detach()  # not detach_(): it may be a view of a DDP bucket
        param.grad.requires_grad_(False).zero_()
