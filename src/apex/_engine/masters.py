"""Low-precision parameters and their fp32 masters: which is newer, and which has the gradient.

Note [Which side is newer]
    A low-precision weight is its master, rounded. User code can write to either: SAM, Lookahead or
    a WGAN's clipping write to masters; ``load_state_dict`` or ``init`` write to the model.
    Autograd's version counters, compared with those recorded when the two were last in sync, show
    which was written. A written master is rounded into the model before the model is next used. A
    written weight is copied to its master at the step, or where a script asks for masters or reads
    ``grad`` or ``data`` of one, and only in the elements that differ from the rounded master. So
    weights that are swapped or perturbed and put back before the step leave the master
    bit-identical. If both were written, the master wins. Data assigned to a master are rounded into
    the model at once, unless they only move it to another device. Until its first step a weight
    counts as written: ``dist.broadcast(p.data)`` and its like write weights in a way that torch
    does not count.

Note [One gradient in one place]
    The gradient of a master is the ``.grad`` of its model parameter: ``master.grad`` is a property
    over it. ``grad_dtype = None`` lets the 16-bit parameter hold a gradient of any dtype. Autograd
    makes it in 16 bits, and adds to an fp32 one in place. Reading ``master.grad`` makes it fp32, on
    the model. So a clip, a mask, a hook or a ``zero_grad`` over either side is the same thing.
    A gradient that a pass adds to is fp32, unless it is known to be zero.

    ``requires_grad``, hooks and attributes that scripts set are the model parameter's, too: what
    freezes a group freezes the model, and a mask that an optimizer renews is the one a layer reads.

    The master's own slot, which autograd and dynamo see, holds what the property shows while the
    model's gradient has 16 bits and its values are not needed in fp32: see :func:`shown`.
"""

from __future__ import annotations

import copy
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, rounding
from apex._torch import dtensor, foreach, parameters, processes, ranks
from apex._torch.autograd import at_end_of_pass
from apex._torch.copies import capturing
from apex._torch.dynamo import is_compiling, untraced
from apex._torch.parameters import (
    grad_of,
    requires_grad_of,
    set_grad,
    set_requires_grad,
    without_overrides,
)

_ZERO = "_apex_zero"
"""Attribute of a gradient: a mark of its version when it was last known to be zero."""

replaced_views: list[tuple[nn.Parameter, Tensor, Tensor]] = []
"""Parameters, each with its fp32 gradient and the 16-bit view in whose place that is, until a block
or a step ends. A view is of a script's buffer, or a wrapper's."""


_TENSOR_NAMES = frozenset(dir(nn.Parameter))
"""Attributes that each parameter has of its own; others are set by scripts."""

_register_hook: Callable[..., RemovableHandle] = nn.Parameter.register_hook
_register_final_hook: Callable[..., RemovableHandle] = (
    nn.Parameter.register_post_accumulate_grad_hook
)


class Mark(tuple[Any, ...]):
    """Facts of a gradient at one of its versions. Copies and files have an empty set instead."""

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()


class Master(nn.Parameter):
    """An fp32 parameter whose version counter also counts writes through ``data``.

    To kernels, deep copies and files it is a plain parameter.
    """

    _apex_pair: Callable[[], MasterPair | None] = staticmethod(lambda: None)
    """Returns the master's pair; :class:`MasterPair` sets it."""

    _apex_model: nn.Parameter
    """The model's parameter; :class:`MasterPair` sets it."""

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that a script has set on either side."""
        attributes = vars(self._apex_model)
        if name in attributes:
            return attributes[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; one of a script on the model's parameter, where its layers read it."""
        if _is_of_script(name):
            setattr(self._apex_model, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Deletes an attribute where :meth:`__setattr__` puts it."""
        if _is_of_script(name):
            delattr(self._apex_model, name)
        else:
            super().__delattr__(name)

    @property
    @untraced
    def grad(self) -> Tensor | None:
        """The gradient of the model parameter, which becomes fp32 there.

        Who reads it is about to step, so the master takes in what was written to its weight.
        """
        model = self._apex_model
        pair = self._apex_pair()
        # What ``take_in_writes`` asks, too, but in less time: clips read hundreds of gradients.
        if pair is not None and pair._master_version >= 0:
            is_counted = model._version != pair._model_version
            if is_counted or model.data_ptr() != pair._storage.data_ptr():
                pair.take_in_writes()
        grad = model.grad
        if grad is None or grad.dtype is torch.float32:
            return grad
        shown = grad_of(self)
        if shown is not None:
            return shown
        if pair is not None:
            widen_grads([pair])
        return model.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        set_grad(self._apex_model, value)

    @grad.deleter
    def grad(self) -> None:
        set_grad(self._apex_model, None)

    _grad = grad  # torch's second name for it, which asynchronous actor-critic programs assign

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes the gradient of the model parameter."""
        return requires_grad_of(self._apex_model)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        set_requires_grad(self, value)
        set_requires_grad(self._apex_model, value)

    def requires_grad_(self, requires_grad: bool = True) -> Master:
        """Sets it, and returns the master."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Registers a hook on the gradient of the model parameter."""
        return _register_hook(self._apex_model, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Registers a hook that runs when the model parameter has its gradient."""
        return _register_final_hook(self._apex_model, hook)

    def __hash__(self) -> int:
        """The hash of the model parameter: in dicts and sets, the two are one key.

        So what maps parameters to names or states, such as torch's ``get_state_dict``, finds both.
        """
        return id(self._apex_model)

    def __eq__(self, other: object) -> Any:
        """Returns True for the model parameter itself; compares elements with other tensors."""
        if other is self._apex_model:
            return True
        return super().__eq__(other)

    @property
    def data(self) -> Tensor:
        """The values, with what was written to the weight, sharing memory and version counter."""
        pair = None if is_compiling() else self._apex_pair()
        if pair is not None:
            pair.take_in_writes()
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype is not self.dtype:
            raise TypeError(
                f"An fp32 master got data of {value.dtype}, which would lose the low bits that it "
                "is for. Assign fp32, or write master.data.copy_(value), which converts."
            )
        pair = self._apex_pair()
        is_move = value.device != self.device and value.shape == self.shape
        if pair is not None and is_move:  # first, as the copy may still be on its way
            update_model_from_masters([pair])
        increment_version(self)
        parameters.set_data(self, value)
        if pair is not None and is_move:
            pair._master_version = self._version
        elif pair is not None:  # an averager's write may be the last before the model is read
            if value.shape != pair.model.shape:
                parameters.set_data(pair.model, value.to(pair.model.dtype))
            round_masters([pair])

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copies as a plain parameter, which is the copy of the model's parameter, too."""
        pair = self._apex_pair()
        if pair is None:
            plain = nn.Parameter(self.detach().clone(), self.requires_grad)
        else:
            plain = fp32_deepcopy(pair.model, pair.exact_value, memo)
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain parameter with the attributes of the model's parameter."""
        pair = self._apex_pair()
        value = self.detach()
        if pair is not None and processes.is_starting_one():
            update_masters_from_model([pair])
            mark_trained([pair])
            pair.is_shared = True  # with that process, as torch shares a tensor's memory
        elif pair is not None and not pair.counts_as_synced:
            value = pair.exact_value()
        plain: Any = nn.Parameter(value, self.requires_grad)
        vars(plain).update(vars(self._apex_model))
        return plain.__reduce_ex__(protocol)


parameters.allow_foreach(Master)


@functools.cache
def master_class_of(param_class: type) -> type[Master]:
    """Returns the class of the masters of parameters of a class.

    It derives from that class, too: optimizers ask for it, and call its methods.
    """
    if param_class is nn.Parameter or not issubclass(param_class, nn.Parameter):
        return Master
    return type(param_class.__name__, (Master, param_class), {})


def _is_of_script(attribute: str) -> bool:
    return attribute not in _TENSOR_NAMES and not attribute.startswith("_apex_")


def pair_of_master(tensor: Tensor) -> MasterPair | None:
    """Returns the pair of a master; ``None`` for other tensors."""
    return tensor._apex_pair() if isinstance(tensor, Master) else None


class MasterState(enum.Enum):
    """Whether the low bits of a master, which its 16-bit parameter lacks, are valid."""

    FRESH = enum.auto()
    """From before the conversion. They may differ between ranks; with several ranks, the first step
    drops them."""
    EXACT = enum.auto()
    """Loaded, sent by a wrapper, or written by a script; kept where the weight still is the rounded
    master."""
    TRAINED = enum.auto()
    """Stepped; from now on, version counters tell whether the weight was written."""


class MasterPair:
    """A low-precision model parameter and its master, with their versions when last in sync.

    Attributes:
        model: The model's parameter.
        master: The fp32 parameter that optimizers step in its place.
        state: Whether the master's low bits are valid.
        is_hooked: Whether a hook of the model's parameter prepares its gradient.
        is_shared: Whether another process has the master's memory. Its writes are not counted here,
            so the master counts as written, unless the weight was.
        made: The number of all pairs that were ever made.
    """

    made: ClassVar[int] = 0

    def __init__(self, model: nn.Parameter, master: Master) -> None:
        """Joins a parameter and its master, which have the same values."""
        self.model = model
        self.master = master
        self.state = MasterState.FRESH
        self.is_hooked = False
        self.is_shared = False
        self._model_version = model._version
        # While an optimizer steps the master, minus the number of its thread.
        self._master_version = master._version
        self._storage = model.detach()  # held so that no other storage takes its address
        master._apex_pair = weakref.ref(self)
        master._apex_model = master  # torch refuses the hook where the model's is frozen
        _register_final_hook(master, _give_to_model)  # of a loss that uses the master itself
        master._apex_model = model
        for side in (model, master):
            side.grad_dtype = None

    def exact_value(self) -> Tensor:
        """Returns the fp32 value in memory of its own."""
        update_model_from_masters([self])
        return rounding.exact_value(self.model, self.master)

    def count(self) -> None:
        """Counts the pair, which others find from now on."""
        MasterPair.made += 1

    def hook(self, register: Callable[[Tensor], RemovableHandle]) -> None:
        """Has ``register`` hook the model's parameter, if that requires a gradient."""
        if self.model.requires_grad:
            self.is_hooked = True
            weakref.finalize(self, register(self.model).remove)

    @property
    def model_writes(self) -> int:
        """The number of counted writes to the model's parameter since the last sync."""
        return self.model._version - self._model_version

    def take_in_writes(self) -> None:
        """Copies the model's parameter to the master if a script has written it outside of a step.

        Not if it has moved, too: a step also moves the optimizer's state.
        """
        is_written = self.model_writes > 0 or self.model.data_ptr() != self._storage.data_ptr()
        is_stepped = self._master_version < 0
        if is_written and not is_stepped and self.model.device == self.master.device:
            update_masters_from_model([self])

    @property
    def counts_as_synced(self) -> bool:
        """Whether neither side was written since the last step, as far as torch counts writes."""
        return (
            self.state is MasterState.TRAINED
            and self.model._version == self._model_version
            and self.model.data_ptr() == self._storage.data_ptr()
            and self.master._version == self._master_version
            and not self.is_shared
        )


@untraced
def _give_to_model(master: Tensor) -> None:
    """Adds what autograd has put on a master to the model's gradient."""
    pair = pair_of_master(master)
    grad = grad_of(master)
    if pair is not None and grad is not None:
        set_grad(master, None)
        widen_grads([pair])
        add_grads([pair.model], [grad])


def fp32_deepcopy(tensor: Any, exact_value: Callable[[], Tensor], memo: dict[int, Any]) -> Any:
    """Returns the deep copy of a 16-bit tensor in fp32; the memo may hold it already."""
    copied = copy.deepcopy(tensor, memo)
    if dtypes.is_low_precision(copied):
        copied.data = exact_value()
    return copied


def make_master(exact: Tensor, master_class: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    """Returns an fp32 parameter with a value.

    Args:
        exact: The value; used without a copy if it is fp32 and has no gaps in memory, over which
            torch's fused kernels on a CPU would write.
        master_class: Class of the result.
    """
    # Not detach(), which shares autograd's version counter: a write to the master would count as a
    # write to this tensor.
    value = exact.data.to(torch.float32)
    without_gaps = torch.empty_like(value)
    if value.stride() != without_gaps.stride():
        value = value.clone()
    # Not a call: a subclass may take other arguments.
    master: nn.Parameter = nn.Parameter.__new__(master_class, value)
    return master


# -- values -----------------------------------------------------------------------------------


@untraced
def update_model_from_masters(pairs: Iterable[MasterPair], *, ends_step: bool = False) -> None:
    """Rounds every written master into its model parameter, or leaves that to a step elsewhere.

    Until a step ends, its masters count as written: a fused kernel may yet write them.
    """
    written: list[MasterPair] = []
    this_step = -threading.get_ident()
    with without_overrides():
        for pair in pairs:
            before = pair._master_version
            is_written = pair.master._version != before
            if pair.is_shared and pair.model_writes == 0:
                is_written = True
            # Not while another thread steps the master, of which it may have written a half.
            if is_written and (before >= 0 or before == this_step):
                written.append(pair)
    if not written:
        return
    stepped: list[MasterPair] = []
    if not ends_step:
        stepped = [pair for pair in written if pair._master_version == this_step]
        mark_exact([pair for pair in written if pair.state is MasterState.FRESH])
    round_masters(written)
    for pair in stepped:
        pair._master_version = this_step


@untraced
@torch.no_grad()
def round_masters(pairs: Sequence[MasterPair]) -> None:
    """Rounds masters into their model parameters, whether or not they count as written.

    For masters that were written by code that torch does not count, such as fused kernels.
    """
    with without_overrides():
        models: list[Tensor] = []
        masters: list[Tensor] = []
        for pair in pairs:
            models.append(pair.model)
            masters.append(pair.master)
        foreach.copy_(models, masters)
        mark_synced(pairs)


def mark_synced(pairs: Iterable[MasterPair]) -> None:
    """Records that model parameters hold their rounded masters."""
    for pair in pairs:
        pair._master_version = pair.master._version
        pair._model_version = pair.model._version


@untraced
def mark_trained(pairs: Iterable[MasterPair]) -> None:
    """Records that an optimizer has stepped the masters."""
    trained = MasterState.TRAINED  # each look-up of an Enum's member takes 0.1 us
    for pair in pairs:
        pair.state = trained


def mark_exact(pairs: Iterable[MasterPair]) -> None:
    """Records that masters were loaded or sent: their low bits are valid."""
    for pair in pairs:
        pair.state = MasterState.EXACT


@untraced
def update_masters_from_model(pairs: Iterable[MasterPair]) -> bool:
    """Copies written model parameters to their masters, except to masters written as well.

    Masters move to the devices of their model parameters. Returns whether one has moved.

    An element that rounds to the model's keeps its low bits. Reads nothing on the host, and never
    writes to the model: autograd may have saved its weights for the backward pass.
    """
    any_moved = False
    trained = MasterState.TRAINED  # each look-up of an Enum's member takes 0.1 us
    with without_overrides():
        for pair in pairs:
            model = pair.model
            if (
                pair.state is not trained
                or model._version != pair._model_version
                or model.data_ptr() != pair._storage.data_ptr()
            ):
                if model.shape != pair.master.shape:
                    _reshape(pair)
                if model.device != pair.master.device:
                    moved = pair.master.detach().to(model.device)
                    parameters.set_data(pair.master, moved)
                    any_moved = True
                pair._storage = model.detach()
                if pair.master._version == pair._master_version:
                    _update_master(pair)
    return any_moved


def _reshape(pair: MasterPair) -> None:
    """Gives a master the shape of its weight, whose ``data`` a script has replaced."""
    parameters.set_data(pair.master, make_master(pair.model.detach()))


def _update_master(pair: MasterPair) -> None:
    weight = pair.model.detach()
    exact = pair.master.detach()
    rounded = exact.to(weight.dtype)
    # Not counted by autograd: a loss that uses masters may have saved them for backward.
    parameters.uncounted(pair.master).copy_(torch.where(rounded == weight, exact, weight))
    mark_synced([pair])


@untraced
def expect_step(pairs: Iterable[MasterPair]) -> None:
    """Lets masters, which have followed their weights, count as written by the step that follows.

    torch's fused kernels count no writes; they write where there is a gradient. Before the first
    step of several ranks, masters lose the low bits from before conversion, as in apex: a script
    that broadcasts weights sends none.
    """
    fresh = MasterState.FRESH  # each look-up of an Enum's member takes 0.1 us
    this_step = -threading.get_ident()
    for pair in pairs:
        is_first = pair.state is fresh and ranks.world_size() > 1
        if is_first and pair.master._version == pair._master_version:
            parameters.uncounted(pair.master).copy_(pair.model.detach())
        if pair.model.grad is not None:
            pair._master_version = this_step


# -- gradients --------------------------------------------------------------------------------


@untraced
def widen_grads(pairs: Iterable[MasterPair]) -> None:
    """Makes the gradients of model parameters fp32, laid out as the masters."""
    with without_overrides():
        models: list[nn.Parameter] = []
        masters: list[Tensor] = []
        grads: list[Tensor] = []
        for pair in pairs:
            grad = pair.model.grad
            if grad is not None and grad.dtype is not torch.float32:
                if pair.model.shape != pair.master.shape:
                    _reshape(pair)
                models.append(pair.model)
                masters.append(pair.master)
                grads.append(grad)
        if not models:
            return
        for model, grad, wide in zip(models, grads, fp32_copies(grads, masters), strict=True):
            model.grad_dtype = None  # torch.utils.swap_tensors drops it
            _replace_grad(model, grad, wide)


def _replace_grad(param: nn.Parameter, grad: Tensor, value: Tensor) -> None:
    """Replaces a gradient in its tensor, which a script may keep.

    Not in one with a graph, nor in a view.
    """
    is_view = grad._is_view()
    if value.requires_grad or value.is_sparse or is_view:
        param.grad = value
        if is_view and 0 not in grad.stride():  # torch writes to no expanded tensor
            replaced_views.append((param, value, grad))
    else:
        grad.data = value


@untraced
def widen_nonzero_grads(pairs: Iterable[MasterPair], *, views: bool) -> None:
    """Makes gradients fp32 that a pass adds to, but for those that are zero: that sum is exact.

    ``views`` tells whether also those that are views.
    """
    added_to: list[MasterPair] = []
    for pair in pairs:
        grad = pair.model.grad
        if grad is None:
            continue
        if is_zero(grad):
            if capturing(grad.device):  # replays would add to what this pass leaves
                _replace_grad(pair.model, grad, torch.zeros_like(pair.model))
        elif views or not grad._is_view():
            added_to.append(pair)
    widen_grads(added_to)


def narrow_grads(pairs: Iterable[MasterPair]) -> None:
    """Rounds fp32 gradients to 16 bits, as DistributedDataParallel sends only such."""
    with without_overrides():
        for pair in pairs:
            grad = pair.model.grad
            if grad is not None and grad.dtype is torch.float32:
                _replace_grad(pair.model, grad, grad.to(pair.model.dtype))


def keep_narrow(pairs: Sequence[MasterPair]) -> None:
    """Has autograd round gradients to 16 bits, until the end of the pass that runs."""
    for pair in pairs:
        pair.model.grad_dtype = pair.model.dtype
    at_end_of_pass(functools.partial(_allow_wide, pairs))


def _allow_wide(pairs: Iterable[MasterPair]) -> None:
    for pair in pairs:
        pair.model.grad_dtype = None


def mark_zeros(pairs: Iterable[MasterPair]) -> None:
    """Records that the gradients that are left are zero; makes dense ones 16-bit."""
    for pair in pairs:
        grad = pair.model.grad
        if grad is not None and capturing(grad.device):  # it is zero after a replay, not before
            pair.model.grad = None
            continue
        if grad is not None and grad.dtype is torch.float32 and not grad.is_sparse:
            _replace_grad(pair.model, grad, torch.zeros_like(pair.model))
            grad = pair.model.grad
        if grad is not None:
            vars(grad)[_ZERO] = Mark([grad._version])


def is_zero(grad: Tensor) -> bool:
    """Returns whether a gradient is known to be zero."""
    return vars(grad).get(_ZERO) == (grad._version,)


def remove_grads(params: Iterable[nn.Parameter]) -> None:
    """Removes the gradients of model parameters."""
    with without_overrides():
        for param in params:
            param.grad = None


def without_grad(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters that have no gradient."""
    return [param for param in params if param.grad is None]


@contextmanager
def shown(pairs: Sequence[MasterPair]) -> Iterator[None]:
    """Shows the models' gradients as the masters', as they are.

    For compiled code, as dynamo's guards read the master's own slot, and for code that reads no
    values.
    """
    for pair in pairs:
        if pair.model.device == pair.master.device:  # else the model has moved
            set_grad(pair.master, pair.model.grad)
    try:
        yield
    finally:
        for pair in pairs:
            set_grad(pair.master, None)


def add_grads(params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Adds gradients, which are not needed again, to the parameters' own."""
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for param, grad in zip(params, grads, strict=True):
        total = param.grad
        if total is None:
            param.grad = grad
            continue
        is_dense = total.layout is torch.strided and grad.layout is torch.strided
        if is_dense and not (total.requires_grad or grad.requires_grad):
            totals.append(total)
            added.append(grad)
        else:
            # torch adds sparse to dense, not dense to sparse.
            param.grad = total + grad if grad.is_sparse else grad + total
    foreach.add_(dtensor.dense_values(totals), dtensor.dense_values(added))


def fp32_copies(grads: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Returns fp32 copies of gradients, with the device and memory layout of fp32 ``like``.

    Sparse ones stay sparse, with duplicate rows summed, in fp32: the 16-bit sum could overflow.
    Strides equal those in ``like``, as torch's fused CPU kernels assume.
    """
    if dtensor.are_plain(grads) and not any(map(foreach.has_graph, grads)):
        copies = [torch.empty_like(p, device=g.device) for p, g in zip(like, grads, strict=True)]
        foreach.copy_(copies, grads)
        return copies
    copies = []
    for grad, param in zip(grads, like, strict=True):
        if grad.is_sparse:
            copies.append(grad.to(dtype=torch.float32).coalesce())
        else:
            copies.append(
                torch.empty_like(param, device=grad.device).copy_(grad)
            )  # also in the gradient's graph
    return copies
