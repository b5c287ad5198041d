"""Finds what a 16-bit model writes in vain, in its first forward passes.

Compares the version counters of tensors and reads no values, so it does not wait for the device.
torch does not count writes through ``tensor.data`` in place.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from apex._core import dtypes, tree
from apex._engine.conversion.notes import keeping
from apex._engine.conversion.state_dict import MasterLink
from apex._torch.modules import named_parameters, own_tensors

_log = logging.getLogger("apex")

_FORWARDS = 256
"""Forward passes that are watched, of which one in training counts as 16: what a model writes in
training, it writes from the start."""

_COPIED = " of a deep copy"

Version = tuple[int, int, int]
"""Loads of the model so far, the tensor's version counter and address."""


class Writes:
    """What a model wrote in its forward passes so far.

    A write that replaces a tensor as a whole (a cache, a checkpoint) loses nothing. Sums and
    averages do, so a buffer that is written in two passes in a row is watched in the next by
    :class:`_Sums`. Frozen weights and deep copies are written outside of the forward, by loads or
    as an average.
    """

    def __init__(self) -> None:
        self._left = _FORWARDS
        self._before: dict[str, Version] = {}
        self._changed: set[str] = set()
        self._judged: set[str] = set()
        self._copies: weakref.WeakKeyDictionary[nn.Module, MasterLink]
        self._copies = weakref.WeakKeyDictionary()
        self._told: set[str] = set()
        self._sums: _Sums | None = None

    def note_copy(self, copied: nn.Module, link: MasterLink) -> None:
        """Watches a deep copy of the model, too: it may become an average."""
        self._copies[copied] = link
        self._left = _FORWARDS

    @property
    def watches(self) -> bool:
        """Whether the next forward pass is watched."""
        return self._left > 0

    def begin_forward(self, model: nn.Module, link: MasterLink, until: ExitStack) -> None:
        """Names what is written between forward passes, twice in a row; watches buffers."""
        self._left -= 16 if model.training else 1
        tensors = dict(self._watched(model, link))
        now = {name: version for name, (_, version) in tensors.items()}
        changed = set()
        for name, version in now.items():
            before = self._before.get(name, version)
            if before != version and before[0] == version[0]:  # not loaded
                changed.add(name)
        twice = [name for name in now if name in (changed & self._changed) - self._judged]
        self._before, self._changed = now, changed
        buffers = {n: tensors[n][0] for n in twice if not isinstance(tensors[n][0], nn.Parameter)}
        self._tell_lost(model, [name for name in twice if name not in buffers])
        self._sums = _Sums(buffers) if buffers else None
        if self._sums is not None:
            self._judged |= buffers.keys()
            until.enter_context(self._sums)

    def end_forward(
        self, model: nn.Module, names: Sequence[str], given: tree.Call, cast: tree.Call
    ) -> None:
        """Names the buffers with a sum, and the cast arguments that the forward wrote into.

        Args:
            model: The model whose forward has run.
            names: Names of its positional arguments.
            given: The caller's arguments.
            cast: The arguments that the model got.
        """
        if self._sums is not None:
            sums, self._sums = self._sums, None
            self._tell_lost(model, sums.found(model))
        known = set(map(id, tree.tensors(given)))
        args, kwargs = cast
        labels = [*names, *map(str, range(len(names), len(args)))]
        written = []
        for name, arg in (dict(zip(labels, args, strict=False)) | kwargs).items():
            copies = [tensor for tensor in tree.tensors(arg) if id(tensor) not in known]
            if any(tensor._version > 0 for tensor in copies if not tensor.is_inference()):
                written.append(name)
        if written:
            self.tell(
                "arguments",
                "amp: the forward of %s writes into its argument %s, which was cast: the caller's "
                "own tensor does not change. Pass it in the dtype that the model computes in, or "
                "name it in amp.initialize(..., fp32_inputs=%r).",
                *(type(model).__name__, ", ".join(written), written),
            )

    def _tell_lost(self, model: nn.Module, names: Sequence[str]) -> None:
        if names:
            own = [name for name in names if not name.endswith(_COPIED)]
            self.tell(
                "tensors",
                "amp: 16-bit tensors of %s are written in training, where small changes are lost "
                "(an average stops, a counter stays at 256 in bf16): %s. %s",
                *(type(model).__name__, ", ".join(names[:4]), keeping(model, own)),
            )

    def tell(self, what: str, text: str, *args: object) -> None:
        """Logs a warning, once for each ``what``."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *args)

    def _watched(
        self, model: nn.Module, link: MasterLink
    ) -> Iterator[tuple[str, tuple[Tensor, Version]]]:
        """Yields frozen weights, in training also buffers, and the weights of deep copies.

        Not of those that an optimizer trains, nor the buffers of batch norm.
        """
        watched = [(name, tensor, link) for name, tensor in _frozen(model, link)]
        if model.training:
            watched += [(name, tensor, link) for name, tensor in _buffers(model)]
        for copied, its_link in [*self._copies.items()]:
            for name, param in named_parameters(copied):
                if not its_link.has_master(param):
                    watched.append((name + _COPIED, param, its_link))
        for name, tensor, its_link in watched:
            if dtypes.is_low_precision(tensor) and not tensor.is_inference():
                with contextlib.suppress(RuntimeError):  # torch.func's tensors have no address
                    version = its_link.loads, tensor._version, tensor.data_ptr()
                    yield name, (tensor, version)


def _frozen(model: nn.Module, link: MasterLink) -> Iterator[tuple[str, Tensor]]:
    for name, param in named_parameters(model):
        if not param.requires_grad and not link.has_master(param):
            yield name, param


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            for name, tensor in own_tensors(module, prefix):
                if not isinstance(tensor, nn.Parameter):
                    yield name, tensor


# Operators by which an average or a counter becomes its next value, and by which values move.
_SUMS = frozenset(
    ["add", "sub", "mul", "div", "truediv", "true_divide", "lerp", "addcmul", "addcdiv"]
)
_MOVES = frozenset(["to", "float", "half", "bfloat16", "type", "clone", "detach", "getitem"])
_REPLACES = frozenset(["copy", "zero", "fill"])


class _Sums(TorchFunctionMode):
    """Finds the buffers whose next value is a sum with their value before."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self._before = {name: (t, t._version, t.data_ptr()) for name, t in buffers.items()}
        # Addresses of tensors with values from before the pass, and of sums with such values.
        self._olds = _addresses(buffers)
        self._sums: set[int] = set()
        self._alive: list[Tensor] = []  # so that no other tensor gets their addresses

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
        is_sum = name in _SUMS or name[1:] in _SUMS  # iadd, radd
        if is_sum or name in _MOVES:
            self._note(is_sum, [args, kwargs], result)
        elif name in _REPLACES or name == "setitem":
            if name != "setitem":
                replaced = _addresses(args[0])
                self._olds -= replaced
                self._sums -= replaced
            self._note(False, args[1:], args[0])
        return result

    def _note(self, is_sum: bool, sources: object, target: object) -> None:
        """Records where the values of ``sources`` went."""
        addresses = _addresses(sources)
        from_old = not addresses.isdisjoint(self._olds)
        if not addresses.isdisjoint(self._sums) or (is_sum and from_old):
            self._sums |= _addresses(target)
        elif from_old:
            self._olds |= _addresses(target)
        self._alive += tree.tensors(target)

    def found(self, model: nn.Module) -> list[str]:
        """Returns the buffers with a sum, and the ones written outside of the pass alone."""
        summed = []
        for name, buffer in _buffers(model):
            if name in self._before:
                before, version, address = self._before[name]
                is_same = buffer is before and buffer.data_ptr() == address
                unwritten = is_same and buffer._version == version and buffer.numel() > 1
                if unwritten or buffer.data_ptr() in self._sums:
                    summed.append(name)
        return summed


def _addresses(values: object) -> set[int]:
    addresses = set()
    for tensor in tree.tensors(values):
        with contextlib.suppress(RuntimeError):  # torch.func's tensors have none
            addresses.add(tensor.data_ptr())
    return addresses
