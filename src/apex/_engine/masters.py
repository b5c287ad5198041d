"""One fp32 master per low-precision parameter of a session, whichever optimizer steps it.

Note [Which side is newer]
    A low-precision weight is the rounded view of its master. Both can be written from outside:
    SAM, Lookahead or a WGAN's clipping write masters; ``load_state_dict`` or ``init`` write the
    model. Autograd's version counters tell which side was: the counts are noted whenever both sides
    agree. A master that was written is rounded into the model before the model is next used. A
    weight that was written goes to the master when the next pass or step begins, and only in the
    elements that differ from the rounded master: weights that are swapped for an average during an
    evaluation, and put back, leave the master as it was, to the last bit. Written on both sides,
    the master wins.

    Torch's fused kernels, and kernels of other libraries, step parameters without counting. So
    masters count as written from the moment their optimizer's step begins, until its result is
    rounded into the model; what interrupts the step in between leaves nothing to repair. A hook on
    all optimizers does the same for those that amp has not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from apex._core import master, rounding
from apex._pickle import rebuild
from apex._torch import dtensor, parameters, ranks
from apex._torch.dynamo import untraced

PREPARED = "_apex_binding"
"""Attribute of the optimizers that amp steps."""

_WRITTEN = -1
"""A version that no tensor has: the master counts as written."""


class Master(nn.Parameter):
    """An fp32 parameter whose version counter also counts what is written through ``data``.

    Elsewhere it is a plain parameter: kernels, deep copies and files see no difference.
    """

    @property
    def data(self) -> Tensor:
        """The values, sharing memory and version counter."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        parameters.set_data(self, value)
        increment_version(self)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shows a plain parameter."""
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain parameter, which a process without apex can load."""
        plain: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


parameters.let_foreach_take(Master)


class TrackedPair:
    """A low-precision model parameter and its master, and how both stood when they last agreed.

    Attributes:
        model: The model's parameter.
        master: The fp32 parameter that optimizers step in its place.
        low_bits: Whether the master keeps what rounding hides when the model is written: not where
            other ranks hold other bits.
        new: Whether no pass has used the pair yet: until then writes that autograd does not count
            (``dist.broadcast(p.data)``) are looked for, too.
        shows_grad: Whether the model's gradient is a view of the master's, see
            Note [Gradients of a pair].
    """

    __slots__ = (
        *("__weakref__", "_master_version", "_model_held", "_model_place", "_model_version"),
        *("low_bits", "master", "model", "new", "shows_grad"),
    )

    def __init__(self, model: nn.Parameter, exact: Tensor | None = None) -> None:
        """Makes the master of ``model``, from its value before rounding where that is known."""
        self.model = model
        self.master = master.make_master(model, exact, Master)
        self.low_bits = True
        self.new = True
        self.shows_grad = False
        self.agree()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles both sides, without their gradients."""
        return rebuild, ("tracked_pair", self.model, self.master, self.new, self.low_bits)

    def agree(self) -> None:
        """Notes that the model holds the rounded master."""
        self._master_version = self.master._version
        self._model_version = self.model._version
        self._model_place = self.model.data_ptr()
        # Held, or the address could come again with another storage. A DTensor has none.
        self._model_held = None if dtensor.is_dtensor(self.model) else self.model.detach()

    def expect_write(self) -> None:
        """Counts the master as written from now on, whether or not torch notices."""
        self._master_version = _WRITTEN

    @property
    def master_written(self) -> bool:
        """Whether the master was written since both agreed."""
        return self.master._version != self._master_version

    @property
    def model_written(self) -> bool:
        """Whether the model's parameter was written, or given another storage, since then."""
        model = self.model
        return model._version != self._model_version or model.data_ptr() != self._model_place


def revived(model: nn.Parameter, made: nn.Parameter, new: bool, low_bits: bool) -> TrackedPair:
    """Returns the pair of two parameters that belong together, from a copy or a file."""
    pair = TrackedPair.__new__(TrackedPair)
    pair.model, pair.master = model, made
    pair.new, pair.low_bits, pair.shows_grad = new, low_bits, False
    pair.agree()
    return pair


@untraced
def write_back(pairs: Iterable[TrackedPair]) -> None:
    """Rounds every master that was written into its model parameter."""
    # Read here, not by ``master_written``: this is in every forward pass.
    written = [pair for pair in pairs if pair.master._version != pair._master_version]
    if written:
        round_into_model(written)


@untraced
def round_into_model(pairs: Sequence[TrackedPair]) -> None:
    """Rounds masters into their model parameters, written or not."""
    master.copy_to_model(pairs)
    for pair in pairs:  # as agree() does, but for the place, which no rounding changes
        pair._master_version, pair._model_version = pair.master._version, pair.model._version


@untraced
def read_model(pairs: Iterable[TrackedPair], *, alike: bool = False) -> None:
    """Brings what was written into the model to the masters; leaves those that were written.

    Writes no model: a forward pass may hold its weights for the backward pass.

    Args:
        pairs: Masters and parameters.
        alike: Whether the caller makes the masters alike on all ranks next.
    """
    for pair in pairs:
        model = pair.model  # not by ``model_written``: this is in every pass and step
        same = model._version == pair._model_version and model.data_ptr() == pair._model_place
        if same and not pair.new:
            continue
        if not pair.master_written:
            _follow_model(pair, low_bits=pair.low_bits and (alike or _alone(pair)))
        pair.new = False


def _follow_model(pair: TrackedPair, *, low_bits: bool) -> None:
    rounding.follow(pair.model, pair.master, keep_low_bits=low_bits)
    pair.agree()


def _alone(pair: TrackedPair) -> bool:
    """Returns whether no other rank may hold other low bits, at a parameter's first use."""
    return not pair.new or ranks.world_size() == 1 or dtensor.is_dtensor(pair.model)


class Masters:
    """Every master of one session, found by its model parameter."""

    def __init__(self) -> None:
        """Starts with none."""
        self._by_param: weakref.WeakValueDictionary[int, TrackedPair] = (
            weakref.WeakValueDictionary()
        )
        # What keeps pairs alive: a model, or an optimizer's binding that has pairs of its own.
        self._of: weakref.WeakKeyDictionary[object, list[TrackedPair]] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[object, dict[int, tuple[Tensor, Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        self._watches = False

    def make(self, param: nn.Parameter, holder: object, exact: Tensor | None = None) -> TrackedPair:
        """Returns the pair of a low-precision parameter; made now if there is none.

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
        pair = TrackedPair(param, exact)
        self.hold([pair], holder)
        return pair

    def _watch_steps(self) -> None:
        handle = register_optimizer_step_post_hook(_count_step)
        weakref.finalize(self, handle.remove).atexit = False
        self._watches = True

    def hold(self, pairs: Iterable[TrackedPair], holder: object) -> None:
        """Takes in pairs that live as long as ``holder``."""
        if not self._watches:
            self._watch_steps()
        for pair in pairs:
            self._by_param[id(pair.model)] = pair
            self._of.setdefault(holder, []).append(pair)

    def release(self, holder: object) -> None:
        """Forgets the pairs and values that ``holder`` keeps alive."""
        for pair in self._of.pop(holder, ()):
            self._by_param.pop(id(pair.model), None)
        self._kept.pop(holder, None)

    def keep(self, values: Iterable[tuple[Tensor, Tensor]], model: nn.Module) -> None:
        """Keeps fp32 values of tensors that no optimizer steps, as long as ``model`` lives."""
        held = self._kept.setdefault(model, {})
        held.update({id(tensor): (tensor, value) for tensor, value in values})

    def pair_of(self, param: Tensor) -> TrackedPair | None:
        """Returns the pair of a model parameter, if it has a master."""
        return self._by_param.get(id(param))

    def master_of(self, param: Tensor) -> Tensor | None:
        """Returns the fp32 value behind a parameter or buffer, as far as it is known."""
        pair = self.pair_of(param)
        if pair is None:
            return self._kept_value(param)
        if pair.model_written and not pair.low_bits:
            read_model([pair])
        return pair.master

    def _kept_value(self, param: Tensor) -> Tensor | None:
        for values in self._kept.values():
            if id(param) in values:
                return values[id(param)][1]
        return None

    def all(self) -> Iterator[TrackedPair]:
        """Yields every pair, each once."""
        for pairs in list(self._of.values()):
            yield from pairs

    def write_back(self) -> None:
        """Brings what was written into masters to the models."""
        for pairs in list(self._of.values()):
            write_back(pairs)

    @torch.no_grad()
    def set_exact(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets the masters of parameters that were just loaded to the values before rounding."""
        try:
            for param, value in values:
                pair = self.pair_of(param)
                if pair is not None:
                    pair.master.copy_(value)
                    pair.agree()
                elif (kept := self._kept_value(param)) is not None:
                    kept.copy_(value)
        except BaseException:
            # Half loaded: what is not in the masters yet leaves the model, too.
            round_into_model([pair for pair in self.all() if pair.model_written])
            raise

    def clear_grads(self, params: Container[int], *, set_to_none: bool) -> None:
        """Clears the gradients of the masters of the parameters with these ids."""
        for pair in self.all():
            if id(pair.model) in params:
                clear_grad(pair.master, set_to_none=set_to_none)
                pair.shows_grad = pair.shows_grad and not set_to_none


def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Counts the masters that an optimizer has stepped as written: fused kernels do not."""
    if PREPARED in optimizer.__dict__:
        return  # what amp steps counts as written anyway
    for group in optimizer.param_groups:
        for param in group["params"]:
            if type(param) is Master:
                increment_version(param)


def clear_grad(param: nn.Parameter, *, set_to_none: bool) -> None:
    """Clears one gradient, as ``torch.optim.Optimizer.zero_grad`` does."""
    if set_to_none:
        param.grad = None
    elif param.grad is not None:
        if param.grad.grad_fn is not None:
            param.grad = param.grad.detach()  # not in place: it may be a view of a bucket
        param.grad.requires_grad_(False).zero_()
