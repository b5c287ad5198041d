"""Finds what a 16-bit model writes in vain, in its first forward passes.

Compares the version counters of tensors, so it does not wait for the device. torch does not count
writes through ``tensor.data`` in place.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex._core import dtypes, tree
from apex._core.sums import Sums
from apex._engine.conversion.notes import keeping
from apex._engine.conversion.state_dict import MasterLink
from apex._engine.conversion.whole_numbers import WholeNumbers
from apex._torch.modules import named_parameters, own_tensors

_log = logging.getLogger("apex")

_FORWARDS = 256
"""Forward passes that are watched, of which one in training counts as 16: what a model writes in
training, it writes from the start."""

_COPIED = " of a deep copy"


class Writes:
    """What a model wrote in its forward passes so far; ``left`` of them are watched.

    A write that replaces a tensor as a whole (a cache, a checkpoint) loses nothing; averages and
    counters do. So buffers that two passes in a row have written are watched in the next one, by
    :class:`Sums`. Frozen weights and deep copies are written between the passes, by loads or as an
    average.
    """

    def __init__(self) -> None:
        self.left = _FORWARDS
        self._versions: dict[str, tuple[int, int, int]] = {}
        self._changed: set[str] = set()
        self._judged: set[str] = set()
        self._sums: Sums | None = None
        self._copies = weakref.WeakKeyDictionary[nn.Module, MasterLink]()
        self._told: set[str] = set()
        self._whole_numbers = WholeNumbers()

    def note_copy(self, copied: nn.Module, link: MasterLink) -> None:
        """Watches a deep copy of the model, too: it may become an average."""
        self._copies[copied] = link
        self.left = _FORWARDS

    def begin_forward(self, model: nn.Module, link: MasterLink, until: ExitStack) -> None:
        """Names what is written between forward passes, twice in a row; watches buffers."""
        self.left -= 16 if model.training else 1
        changed: set[str] = set()
        averages: list[str] = []
        buffers: dict[str, Tensor] = {}
        for name, tensor, its_link in self._watched(model, link):
            version = its_link.loads, tensor._version, _address(tensor)
            before = self._versions.get(name, version)
            self._versions[name] = version
            is_loaded = before[0] != version[0]
            if before == version or is_loaded:
                continue
            changed.add(name)
            if name not in self._changed:
                continue
            if isinstance(tensor, nn.Parameter):
                averages.append(name)
            elif name not in self._judged:
                buffers[name] = tensor
        self._changed = changed
        self._tell_lost(model, averages)
        if buffers:
            self._judged |= buffers.keys()
            self._sums = until.enter_context(Sums(buffers))

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
            self._tell_lost(model, sums.found(dict(_buffers(model))))
        known = set(map(id, tree.tensors(given)))
        args, kwargs = cast
        labels = [*names, *map(str, range(len(names), len(args)))]
        uncast_args, uncast_kwargs = given
        uncast = dict(zip(labels, uncast_args, strict=False)) | uncast_kwargs
        written = []
        for name, arg in (dict(zip(labels, args, strict=False)) | kwargs).items():
            self._whole_numbers.search(name, uncast.get(name), arg)
            copies = [tensor for tensor in tree.tensors(arg) if id(tensor) not in known]
            if any(tensor._version > 0 for tensor in copies if not tensor.is_inference()):
                written.append(name)
        for name, number in self._whole_numbers.found():
            self.tell(
                f"whole numbers of {name}",
                "amp: the argument %s of %s holds whole numbers that 16 bits do not, such as %g. "
                "If they are codes, positions or time steps, keep them in fp32: "
                "amp.initialize(..., fp32_inputs=%r).",
                *(name, type(model).__name__, number, [name]),
            )
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
                "amp: %s updates 16-bit tensors during training, so small changes are lost (a "
                "running average stops moving, a bf16 counter sticks at 256): %s. %s",
                *(type(model).__name__, ", ".join(names[:4]), keeping(model, own)),
            )

    def tell(self, what: str, text: str, *args: object) -> None:
        """Logs a warning, once for each ``what``."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *args)

    def _watched(
        self, model: nn.Module, link: MasterLink
    ) -> Iterator[tuple[str, Tensor, MasterLink]]:
        """Yields frozen weights, in training also buffers, and the weights of deep copies.

        Those that an optimizer trains are left out.
        """
        tensors: list[tuple[str, Tensor]] = [*_buffers(model)] if model.training else []
        tensors += [(n, param) for n, param in named_parameters(model) if not param.requires_grad]
        watched = [(name, tensor, link) for name, tensor in tensors]
        for copied, its_link in [*self._copies.items()]:
            copies = named_parameters(copied)
            watched += [(name + _COPIED, param, its_link) for name, param in copies]
        for name, tensor, its_link in watched:
            is_counted = dtypes.is_low_precision(tensor) and not tensor.is_inference()
            if is_counted and not its_link.has_master(tensor):
                yield name, tensor, its_link


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # torch.func's tensors have none
        return 0


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers of all modules but batch norm's."""
    for prefix, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            for name, tensor in own_tensors(module, prefix):
                if not isinstance(tensor, nn.Parameter):
                    yield name, tensor
