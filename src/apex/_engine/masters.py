"""One fp32 master per low-precision parameter of a session, whichever optimizer steps it.

Note [Which side is newer]
    A low-precision weight is its master, rounded. User code can write to either: SAM, Lookahead or
    a WGAN's clipping write to masters; ``load_state_dict`` or ``init`` write to the model.
    Comparing autograd's version counters with those recorded when the two were last in sync shows
    which was written. A written master is rounded into the model before the model is next used. A
    written weight is copied to its master when the next pass or step begins, and only in the
    elements that differ from the rounded master, so swapping averaged weights in for an evaluation
    and back out leaves the master bit-identical. If both were written, the master wins.

    Torch's fused kernels, and those of other libraries, do not increment the counters. So masters
    count as written from the start of their optimizer's step until they are rounded at its end, and
    an interrupted step leaves nothing to repair. A hook on all optimizers rounds the masters that
    those not prepared by amp have stepped.

    Compiled code does not run a model's forward in Python. A guard, which dynamo evaluates before
    it runs the code, rounds the masters instead.

    The upper half of a packed master (Note [Upper halves]) is the model's weight itself, so there
    is nothing to copy: a write to either side is one to both, and one to the weight leaves the
    lower half. If the weight is given other storage, the master keeps the old one until the two are
    in sync again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from apex._core import master, rounding
from apex._core.packing import Kind
from apex._pickle import rebuild
from apex._torch import dtensor, parameters, ranks
from apex._torch.dynamo import untraced
from apex._torch.overrides import without_overrides
from apex._torch.packed import Packed, Packing

PREPARED = "_apex_binding"
"""Attribute that marks the optimizers prepared by amp."""

_WRITTEN, _STEPPED = -1, -2
"""Versions that no tensor has, so the master counts as written.

A stepped one does until the step ends: code in the step (a hook that runs the model) may have it
rounded before the kernel writes it.
"""


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
        increment_version(self)  # first: a Ctrl-C before this line loses nothing
        parameters.set_data(self, value)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain parameter, so that it loads without apex."""
        plain: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


parameters.allow_foreach(Master)


class TrackedPair:
    """A low-precision model parameter and its master, with their versions when last in sync.

    Attributes:
        model: The model's parameter.
        master: The fp32 parameter that optimizers step in its place.
        low_bits: Whether the master keeps its low bits where a write to the model leaves the
            rounded value unchanged; False if those bits may differ between ranks.
        new: Whether no pass has used the pair yet. Until then, writes that autograd does not count
            (``dist.broadcast(p.data)``) are found by comparing values.
        mirrors_grad: Whether the model's gradient mirrors the master's; see
            Note [Gradients of a pair].
        mirror_id: The ``id`` of the gradient that does.
        kind: How the master is packed; ``None`` for a plain one.
        packing: The packed master's values.
    """

    __slots__ = (
        *("__weakref__", "_master_version", "_model_alias", "_model_address", "_model_version"),
        *("low_bits", "master", "model", "new", "mirror_id", "mirrors_grad", "kind", "packing"),
    )

    def __init__(
        self, model: nn.Parameter, exact: Tensor | None = None, kind: Kind | None = None
    ) -> None:
        """Makes the master of ``model``, from its value before rounding if known."""
        self.model = model
        self.kind = kind
        if kind is None:
            self.master = master.make_master(model, exact, Master)
        else:
            self.master = master.make_packed(model, exact, kind)
        self.packing = _packing_of(self.master)
        self.low_bits = True
        self.new = True
        self.mirrors_grad = False
        self.mirror_id = 0
        self.mark_synced()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles both sides, without their gradients."""
        parts = self.model, self.master, self.new, self.low_bits, self.kind
        return rebuild, ("tracked_pair", *parts)

    def mark_synced(self) -> None:
        """Records that the model holds the rounded master."""
        self._master_version = self.master._version
        self._model_version = self.model._version
        self._model_address = self.model.data_ptr()
        # Held so that the address is not reused by another storage. A DTensor has no address.
        self._model_alias = None if dtensor.is_dtensor(self.model) else self.model.detach()
        if self.packing is not None:
            self.packing.note()

    def mark_master_written(self) -> None:
        """Marks the master as written, whether or not its version changes."""
        self._master_version = _WRITTEN

    def mark_stepped(self) -> None:
        """Marks the master as written until its optimizer's step ends; see :func:`write_back`."""
        self._master_version = _STEPPED

    @property
    def is_shared(self) -> bool:
        """Whether the model's weight is the upper half of the packed master."""
        packing = self.packing
        if packing is None:
            return False
        weight = dtensor.local(self.model)
        return weight.dtype is packing.high.dtype and weight.data_ptr() == packing.high.data_ptr()

    def share(self, *, write: bool) -> bool:
        """Makes the model's weight the upper half of a packed master, where it can be.

        Args:
            write: Whether to write the upper half to the weight; otherwise, they are equal.

        Returns:
            Whether the model now holds the rounded master.
        """
        packing = self.packing
        if packing is None or self.is_shared:
            return packing is not None
        weight, high = dtensor.local(self.model), packing.high
        if weight.dtype is not high.dtype or weight.device != high.device:
            return False
        if write:
            with torch.no_grad():
                weight.copy_(high)
        packing.high = weight.detach()
        return True

    def set_exact(self, value: Tensor) -> None:
        """Sets the master of a model's parameter that was set to ``value``, rounded."""
        if self.packing is None:
            self.master.copy_(value)
        else:
            self.share(write=False)
            self.packing.load(dtensor.local(value))
        self.mark_synced()

    @property
    def is_current(self) -> bool:
        """Whether the master's values are those of its parameter, where both are one memory."""
        return self.packing is None or not (self.new or self.model_written)

    @property
    def master_written(self) -> bool:
        """Whether the master was written since the two were in sync."""
        return self.master._version != self._master_version

    @property
    def model_written(self) -> bool:
        """Whether the model's parameter was written, or given other storage, since then."""
        model = self.model
        return model._version != self._model_version or model.data_ptr() != self._model_address


def _packing_of(tensor: Tensor) -> Packing | None:
    own = dtensor.local(tensor)
    return own.packing if isinstance(own, Packed) else None


def rebuild_pair(
    model: nn.Parameter,
    made: nn.Parameter,
    new: bool,
    low_bits: bool,
    kind: Kind | None = None,
) -> TrackedPair:
    """Rebuilds a pair from a copy or a file."""
    if model.is_inference() or made.is_inference():
        raise RuntimeError(
            "A model and its optimizer with fp32 masters were copied or loaded under "
            "torch.inference_mode, where torch counts no writes. Do so outside it, or under "
            "torch.no_grad."
        )
    if kind is not None and _packing_of(made) is None:  # files hold plain masters
        parameters.swap(made, master.make_packed(model, made.detach(), kind))
    pair = TrackedPair.__new__(TrackedPair)
    pair.model, pair.master, pair.kind, pair.packing = model, made, kind, _packing_of(made)
    pair.new, pair.low_bits, pair.mirrors_grad, pair.mirror_id = new, low_bits, False, 0
    pair.share(write=True)
    pair.mark_synced()
    return pair


@untraced
def write_back(pairs: Iterable[TrackedPair], *, ends_step: bool = False) -> None:
    """Rounds every written master into its model parameter.

    Args:
        pairs: The pairs.
        ends_step: Whether their optimizer's step has ended, or waits for a closure.
    """
    # Inlines ``master_written``: this runs in every forward pass.
    with without_overrides():
        written = [pair for pair in pairs if pair.master._version != pair._master_version]
        if written:
            round_into_model(written, ends_step=ends_step)


@untraced
def round_into_model(pairs: Sequence[TrackedPair], *, ends_step: bool = False) -> None:
    """Rounds masters into their model parameters, written or not; see :func:`write_back`."""
    apart = [pair for pair in pairs if pair.packing is None or not pair.share(write=True)]
    master.copy_to_model([pair.master for pair in apart], [pair.model for pair in apart])
    stepped = [] if ends_step else [p for p in pairs if p._master_version == _STEPPED]
    mark_rounded(pairs)
    for pair in stepped:
        pair.mark_stepped()


def mark_rounded(pairs: Iterable[TrackedPair]) -> None:
    """Records that masters were rounded into their model parameters, where these were."""
    for pair in pairs:
        pair._master_version, pair._model_version = pair.master._version, pair.model._version
        if pair.packing is not None:
            pair.packing.note()


@untraced
def read_model(pairs: Iterable[TrackedPair], *, alike: bool = False) -> None:
    """Copies written model parameters to their masters, except to masters written as well.

    Never writes to the model: autograd may have saved its weights for the backward pass.

    Args:
        pairs: Masters and parameters.
        alike: Whether the caller synchronizes the masters across ranks next.
    """
    for pair in pairs:
        model = pair.model  # inlines ``model_written``: this runs in every pass and step
        same = model._version == pair._model_version and model.data_ptr() == pair._model_address
        if same and not pair.new:
            continue
        if not pair.master_written:
            _follow_model(pair, low_bits=pair.low_bits and (alike or _alone(pair)))
        pair.new = False


def _follow_model(pair: TrackedPair, *, low_bits: bool) -> None:
    packing = pair.packing
    if packing is not None and pair.is_shared:
        packing.follow(keep_low=low_bits)
    else:
        if packing is not None:
            packing.high = packing.high.clone()  # another weight may have got the old memory
        rounding.update_master(pair.model, pair.master, keep_low_bits=low_bits)
        pair.share(write=False)
    pair.mark_synced()


def _alone(pair: TrackedPair) -> bool:
    """Returns whether no other rank can hold different low bits at a parameter's first use."""
    return not pair.new or ranks.world_size() == 1 or dtensor.is_dtensor(pair.model)


class Masters:
    """Every master of one session, indexed by model parameter.

    Attributes:
        kind: How masters are packed; ``None`` for plain fp32.
    """

    def __init__(self, kind: Kind | None = None) -> None:
        self.kind = kind
        self._by_param: weakref.WeakValueDictionary[int, TrackedPair] = (
            weakref.WeakValueDictionary()
        )
        # Pairs by the object that keeps them alive: a model, or an optimizer's binding.
        self._by_holder: weakref.WeakKeyDictionary[object, list[TrackedPair]] = (
            weakref.WeakKeyDictionary()
        )
        self._kept: weakref.WeakKeyDictionary[object, dict[int, tuple[Tensor, Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        self._has_step_hook = False

    def make(self, param: nn.Parameter, holder: object, exact: Tensor | None = None) -> TrackedPair:
        """Returns the pair of a low-precision parameter, making one if needed.

        Args:
            param: A parameter of a model.
            holder: Keeps a new pair alive: the model, or the binding that steps it.
            exact: The parameter's value before rounding, if known.
        """
        known = self.pair_of(param)
        if known is not None:
            return known
        if exact is None and (kept := self._kept_value(param)) is not None:
            exact = rounding.exact_value(param, [kept])
        pair = TrackedPair(param, exact, self.kind)
        self.hold([pair], holder)
        return pair

    def make_all(self, params: Iterable[tuple[nn.Parameter, Tensor]], holder: object) -> None:
        """Makes the pairs of parameters that have none, from their values before rounding."""
        unknown = ((param, exact) for param, exact in params if self.pair_of(param) is None)
        self.hold([TrackedPair(param, exact, self.kind) for param, exact in unknown], holder)

    def hold(self, pairs: Sequence[TrackedPair], holder: object) -> None:
        """Registers pairs that live as long as ``holder``."""
        if pairs and not self._has_step_hook:
            hook = functools.partial(_round_after_step, weakref.ref(self))
            handle = register_optimizer_step_post_hook(hook)
            weakref.finalize(self, handle.remove).atexit = False
            self._has_step_hook = True
            _live.add(self)
        held = self._by_holder.setdefault(holder, [])
        for pair in pairs:
            self._by_param[id(pair.model)] = pair
            held.append(pair)

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
        if pair.packing is not None and pair.is_shared and not pair.master_written:
            return dtensor.with_local(param, Packed(pair.packing.followed()))
        return pair.master

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
        Packed masters, whose memory is that of their parameters, are not set.
        """
        for param, value in values:
            pair = self.pair_of(param)
            if pair is None and (kept := self._kept_value(param)) is not None:
                kept.copy_(value)
            elif pair is not None and pair.packing is None:
                pair.set_exact(value)
                increment_version(param)

    def clear_grads(self, params: Container[int], *, set_to_none: bool) -> None:
        """Clears the master gradients of the parameters with these ids."""
        for pair in self.all():
            if id(pair.model) in params:
                clear_grad(pair.master, set_to_none=set_to_none)
                pair.mirrors_grad = pair.mirrors_grad and not set_to_none


_live: weakref.WeakSet[Masters] = weakref.WeakSet()
"""Those of every session. Compiled code may run for models of other sessions than it traced."""


@untraced
def write_back_all() -> None:
    """Rounds every written master of every session into its model parameter."""
    for masters in list(_live):
        masters.write_back()


def _round_after_step(
    reference: weakref.ref[Masters], optimizer: Optimizer, args: object, kwargs: object
) -> None:
    """Rounds masters into the model that an optimizer not prepared by amp has stepped."""
    if PREPARED in optimizer.__dict__:
        return  # amp rounds these masters itself
    stepped = False
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, Master) or _packing_of(param) is not None:
                increment_version(param)  # fused kernels do not
                stepped = True
    masters = reference() if stepped else None
    if masters is not None:
        masters.write_back()


def clear_grad(param: nn.Parameter, *, set_to_none: bool) -> None:
    """Clears one gradient, as ``torch.optim.Optimizer.zero_grad`` does."""
    if set_to_none:
        param.grad = None
    elif param.grad is not None:
        if param.grad.grad_fn is not None:
            param.grad = param.grad.detach()  # not detach_(): it may be a view of a DDP bucket
        param.grad.requires_grad_(False).zero_()
