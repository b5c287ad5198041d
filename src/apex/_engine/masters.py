"""Low-precision parameters and their fp32 masters: which of the two is newer, and whose gradient.

Note [Which side is newer]
    A low-precision weight is its master, rounded. User code can write to either: SAM, Lookahead or
    a WGAN's clipping write to masters; ``load_state_dict`` or ``init`` write to the model.
    Autograd's version counters, compared with those recorded when the two were last in sync, show
    which was written. A written master is rounded into the model before the model is next used. A
    written weight is copied to its master at the step, or where a script asks for masters, and only
    in the elements that differ from the rounded master. So weights that are swapped or perturbed
    and put back before the step leave the master bit-identical. If both were written, the master
    wins. Until its first step a weight counts as written: ``dist.broadcast(p.data)`` and its like
    write weights in a way that torch does not count.

Note [One gradient in one place]
    A pass with a loss scale ends with unscaled fp32 gradients on the masters; the model keeps its
    scaled ones, read by nobody. Without a scale the model's 16-bit gradient is the gradient, until
    :func:`take` moves it to the master: for somebody who reads ``master.grad``, at the next pass,
    or for the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from apex._core import rounding
from apex._core.foreach.scalars import multiply_
from apex._pickle import rebuild
from apex._torch import foreach, parameters, ranks
from apex._torch.dynamo import untraced
from apex._torch.parameters import without_overrides

_WRITTEN = -1
"""A version that no tensor has, so the master counts as written."""

PREPARED = "_apex_prepared"
"""Attribute that marks the optimizers prepared by amp."""

_PAIR = "_apex_pair"
"""Attribute of a master: a weak reference to its pair."""


class Master(nn.Parameter):
    """An fp32 parameter whose version counter also counts writes through ``data``.

    To kernels, deep copies and files it is a plain parameter.
    """

    @property
    def data(self) -> Tensor:
        """The values, sharing memory and version counter."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype is not self.dtype:
            raise TypeError(
                f"An fp32 master got data of {value.dtype}, which would lose the low bits that it "
                "is for. Assign fp32, or write master.data.copy_(value), which converts."
            )
        increment_version(self)
        parameters.set_data(self, value)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain parameter, so that it loads without apex."""
        plain: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


class LazyMaster(Master):
    """A master of a level without loss scale, whose gradient may still be the model's."""

    @property
    def grad(self) -> Tensor | None:
        """The fp32 gradient, made of the model's now."""
        return _grad_now(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        parameters.set_grad(self, value)
        pair: MasterPair | None = self.__dict__.get(_PAIR, _nothing)()
        if pair is not None and not pair.scaled:
            pair.model.grad = None


def _nothing() -> None:
    return None


@untraced
def _grad_now(master: LazyMaster) -> Tensor | None:
    pair: MasterPair | None = master.__dict__.get(_PAIR, _nothing)()
    if pair is not None and pair.waiting is not None:
        take([pair])
    return parameters.grad_of(master)


for kind in (Master, LazyMaster):
    parameters.allow_foreach(kind)


class MasterPair:
    """A low-precision model parameter and its master, with their versions when last in sync.

    Attributes:
        model: The model's parameter.
        master: The fp32 parameter that optimizers step in its place.
        scaled: Whether the model's gradient is scaled, and so not the master's.
        factor: What clipping multiplies the gradient by that waits on the model, 0-d.
        new: Whether no step has used the pair yet, so that the model's parameter counts as written.
    """

    __slots__ = (
        *("__weakref__", "_master_version", "_model_version", "_seen"),
        *("factor", "master", "model", "new", "scaled"),
    )

    def __init__(
        self, model: nn.Parameter, exact: Tensor | None = None, kind: type[Master] = Master
    ) -> None:
        """Makes the master of ``model``, from its value before rounding if known."""
        self._join(model, make_master(model, exact, kind))

    def _join(self, model: nn.Parameter, made: nn.Parameter) -> None:
        self.model, self.master, self.new = model, made, True
        own = vars(made)  # scripts set attributes on parameters, which their optimizers may read
        own.update({name: value for name, value in vars(model).items() if name not in own})
        own[_PAIR] = weakref.ref(self)
        self.scaled = False
        self.factor: Tensor | None = None
        self.mark_synced()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles both sides, without their gradients."""
        lazy = isinstance(self.master, LazyMaster)
        return rebuild, ("tracked_pair", self.model, self.master, True, True, lazy)

    def mark_synced(self) -> None:
        """Records that the model holds the rounded master."""
        self._master_version, self._model_version = self.master._version, self.model._version
        # Held so that its address is not reused by another storage.
        self._seen = self.model.detach()

    def mark_shared(self) -> None:
        """Records that all ranks have the same master; the step still compares the weights."""
        self.new, self._model_version = False, _WRITTEN

    def mark_written(self) -> None:
        """Marks the master as written, whether or not its version changes."""
        self._master_version = _WRITTEN

    def set_exact(self, value: Tensor) -> None:
        """Sets the master of a model's parameter that was set to ``value``, rounded."""
        self.master.copy_(value)
        self.mark_synced()

    @property
    def master_written(self) -> bool:
        """Whether the master was written since the two were in sync."""
        return self.master._version != self._master_version

    @property
    def model_written(self) -> bool:
        """Whether the model's parameter was written, or given other storage, since then."""
        moved = self.model.data_ptr() != self._seen.data_ptr()
        return self.new or moved or self.model._version != self._model_version

    @property
    def waiting(self) -> Tensor | None:
        """The gradient that the model has for the master, if any."""
        return None if self.scaled else self.model.grad

    def drop_grads(self) -> None:
        """Drops the gradients of both sides."""
        parameters.set_grad(self.master, None)
        self.model.grad, self.factor, self.scaled = None, None, False

    def end_step(self, *, shared: bool) -> None:
        """Drops the master's gradient, unless other optimizers step it, too."""
        self.new = False
        if not shared:
            parameters.set_grad(self.master, None)


def make_master(
    param: nn.Parameter, exact: Tensor | None = None, kind: type[nn.Parameter] = nn.Parameter
) -> nn.Parameter:
    """Returns an fp32 parameter with the value of ``param``.

    Args:
        param: A low-precision parameter.
        exact: Its value before rounding, if known; used without a copy if it is fp32 and has no
            gaps in memory, over which torch's fused kernels on a CPU would write.
        kind: Class of the result.
    """
    # Not detach(), which shares autograd's version counter: a write to the master would count as a
    # write to the model's parameter.
    value = (param.data if exact is None else exact.data).to(torch.float32)
    if not value.is_contiguous() and torch.empty_like(value).stride() != value.stride():
        value = value.clone()
    return kind(value)


def rebuild_pair(
    model: nn.Parameter,
    made: nn.Parameter,
    _new: bool = True,
    _low_bits: bool = True,
    lazy: object = False,
    followed: Tensor | None = None,
) -> MasterPair:
    """Rebuilds a pair from a copy or a file.

    Files of earlier releases say how they stored the master, and which newer values its weight had.
    """
    if model.is_inference() or made.is_inference():
        raise RuntimeError(
            "A model and its optimizer with fp32 masters were copied or loaded under "
            "torch.inference_mode, where torch counts no writes. Do so outside it, or under "
            "torch.no_grad."
        )
    if type(made) is nn.Parameter:
        made.__class__ = LazyMaster if lazy is True else Master
    pair = MasterPair.__new__(MasterPair)
    pair._join(model, made)
    if followed is not None:
        with torch.no_grad():
            pair.set_exact(followed)
    return pair


# -- values -----------------------------------------------------------------------------------


@untraced
def write_back(pairs: Iterable[MasterPair]) -> None:
    """Rounds every written master into its model parameter."""
    # Inlines ``master_written``: this runs in every forward pass.
    with without_overrides():
        written = [pair for pair in pairs if pair.master._version != pair._master_version]
        if written:
            round_into_model(written)


@untraced
def round_into_model(pairs: Sequence[MasterPair]) -> None:
    """Rounds masters into their model parameters, written or not."""
    if pairs:
        with torch.no_grad():
            foreach.copy_([pair.model for pair in pairs], [pair.master for pair in pairs])
        mark_rounded(pairs)


def mark_rounded(pairs: Iterable[MasterPair]) -> None:
    """Records that masters were rounded into their model parameters."""
    for pair in pairs:
        if pair._seen.data_ptr() == pair.model.data_ptr():
            pair._master_version, pair._model_version = pair.master._version, pair.model._version
        else:
            pair.mark_synced()


@untraced
def follow(pairs: Iterable[MasterPair]) -> bool:
    """Copies written model parameters to their masters, except to masters written as well.

    Masters move to the devices of their model parameters. Returns whether one has moved.

    Elements stay whose rounded values are the model's. Reads nothing on the host, and never writes
    to the model: autograd may have saved its weights for the backward pass.
    """
    any_moved = False
    for pair in pairs:
        if not pair.model_written:
            continue
        if pair.model.device != pair.master.device:
            _move_master(pair)
            any_moved = True
        if not pair.master_written:
            low, exact = pair.model.detach(), pair.master.detach()
            value = torch.where(exact.to(low.dtype) == low, exact, low)
            # Not counted by autograd: a loss that uses masters may have saved them for backward.
            parameters.uncounted(pair.master).copy_(value)
            pair.mark_synced()
    return any_moved


def _move_master(pair: MasterPair) -> None:
    """Moves a master to the device of its model parameter, with its gradient."""
    device = pair.model.device
    grad = parameters.grad_of(pair.master)
    parameters.set_data(pair.master, pair.master.detach().to(device))
    if grad is not None:
        parameters.set_grad(pair.master, grad.to(device))


@untraced
def drop_unsent_bits(pairs: Iterable[MasterPair]) -> None:
    """Before a first step on several ranks, has masters take the weights, which the ranks share.

    As in apex: a script that broadcasts weights by itself sends no low bits. A wrapper's masters
    are equal by then, and not ``new``.
    """
    if ranks.world_size() > 1:
        for pair in pairs:
            if pair.new and not pair.master_written:
                parameters.uncounted(pair.master).copy_(pair.model.detach())


# -- gradients --------------------------------------------------------------------------------


@untraced
def take(pairs: Iterable[MasterPair]) -> None:
    """Moves gradients that wait on models to their masters, in fp32, or adds them there."""
    fresh: list[tuple[MasterPair, Tensor]] = []
    with without_overrides():
        for pair in pairs:
            grad = pair.waiting
            if grad is None:
                continue
            total = parameters.grad_of(pair.master)
            if total is None:
                fresh.append((pair, grad))
            else:
                parameters.set_grad(pair.master, _sum(pair, total, grad))
                pair.model.grad = pair.factor = None
        if fresh:
            _move(fresh)


def _sum(pair: MasterPair, total: Tensor, grad: Tensor) -> Tensor:
    if pair.factor is not None:
        grad = grad.float() * pair.factor.to(grad.device)
    recorded = total.requires_grad or grad.requires_grad
    if total.is_sparse or grad.is_sparse or recorded:
        return total + grad.to(total.device, total.dtype)
    return total.add_(grad.to(total.device))  # of other dtypes: without a copy in fp32


def _move(fresh: Sequence[tuple[MasterPair, Tensor]]) -> None:
    copies = fp32_copies([grad for _, grad in fresh], [pair.master for pair, _ in fresh])
    multiply_(copies, [pair.factor for pair, _ in fresh])
    for (pair, _), copy in zip(fresh, copies, strict=True):
        pair.model.grad = pair.factor = None
        parameters.set_grad(pair.master, copy)


def clear_grad(pair: MasterPair, *, set_to_none: bool) -> None:
    """Clears both gradients of a pair, as ``torch.optim.Optimizer.zero_grad`` does."""
    if set_to_none:
        pair.drop_grads()
        return
    for grad in (parameters.grad_of(pair.master), pair.model.grad):
        if grad is not None:
            grad.detach().zero_()
    pair.scaled, pair.factor = False, None


def fp32_copies(grads: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Returns fp32 copies of gradients, with the device and memory layout of ``like``.

    Sparse ones stay sparse, with duplicate rows summed, in fp32: the 16-bit sum could overflow.
    Strides are those of ``like``, which torch's fused CPU kernels assume.
    """
    copies = [
        grad.to(device=each.device, dtype=torch.float32).coalesce()
        if grad.is_sparse
        else torch.empty_like(each, dtype=torch.float32, requires_grad=False)
        for grad, each in zip(grads, like, strict=True)
    ]
    dense = [i for i, grad in enumerate(grads) if not grad.is_sparse]
    if dense:
        foreach.assign_([copies[i] for i in dense], [grads[i] for i in dense])
    return copies


# -- all masters of a session ------------------------------------------------------------------


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
        self._by_holder.setdefault(holder, []).extend(pairs)
        self._by_param.update({id(pair.model): pair for pair in pairs})

    def release(self, holder: object) -> None:
        """Drops the pairs and values that ``holder`` keeps alive."""
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
            write_back([pair])
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

    def write_back(self) -> None:
        """Rounds every written master into its model parameter."""
        for pairs in list(self._by_holder.values()):
            write_back(pairs)

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
            clear_grad(pair, set_to_none=set_to_none)
        return {*params, *(id(pair.master) for pair in pairs)}
