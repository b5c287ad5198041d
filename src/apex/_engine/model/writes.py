"""Notes what a prepared model writes where 16 bits, or a copy, lose it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex._core import dtypes, tree
from apex._engine.model.messages import keeping
from apex._torch.modules import own_tensors

_log = logging.getLogger("apex")

_FORWARDS = 256
"""Forward passes that are watched, of which one in training counts as 16: what a model writes in
training, it writes from the start."""

HasMaster = Callable[[Tensor], bool]


class Writes:
    """Watches the first forward passes of a 16-bit model by the version counters of its tensors.

    Reads no values, so it does not wait for the device. Writes through ``tensor.data`` in place are
    not counted by torch, and not found.
    """

    def __init__(self) -> None:
        self._left = _FORWARDS
        self._before: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told: set[str] = set()

    def note_copy(self, copied: nn.Module) -> None:
        """Watches a deep copy of the model, too: it may become an average."""
        self._copies.add(copied)
        self._left = _FORWARDS

    @property
    def watches(self) -> bool:
        """Whether the next forward pass is watched."""
        return self._left > 0

    def note_forward(self, model: nn.Module, has_master: HasMaster) -> None:
        """Names 16-bit tensors that are written between forward passes, twice in a row."""
        self._left -= 16 if model.training else 1
        now = _versions(_watched(model, has_master))
        own = set(now)
        is_trained = self._copies and any(map(has_master, model.parameters()))
        for copied in [*self._copies] if is_trained else ():
            if not any(map(has_master, copied.parameters())):  # no optimizer was copied with it
                named = copied.named_parameters()
                now |= _versions((f"copy of {name}", param) for name, param in named)
        changed = {name for name, each in now.items() if self._before.get(name, each) != each}
        again = [name for name in now if name in changed & self._changed]
        self._before, self._changed = now, changed
        if found := [name for name in again if name in own]:
            self.tell(
                "tensors",
                "amp: 16-bit tensors of %s are written in training, where small changes are lost "
                "(an average stops, a counter stays at 256 in bf16): %s. %s",
                *(type(model).__name__, ", ".join(found[:4]), keeping(found)),
            )
        if len(found) < len(again):
            self.tell(
                "copy",
                "amp: a deep copy of %s is written in training, but its 16-bit weights lose small "
                "changes: an average stops. Average an fp32 copy, made by "
                "amp.restore(copy.deepcopy(model)), that loads model.state_dict().",
                type(model).__name__,
            )

    def note_arguments(
        self, model: nn.Module, names: Sequence[str], given: tree.Call, cast: tree.Call
    ) -> None:
        """Names the arguments of a forward pass that it wrote into, if they were cast copies.

        Args:
            model: The model whose forward has run.
            names: Names of its positional arguments.
            given: The caller's arguments.
            cast: The arguments that the model got.
        """
        known = set(map(id, tree.tensors(given)))
        made = [t for t in tree.tensors(cast) if id(t) not in known and not t.is_inference()]
        written = {id(tensor) for tensor in made if tensor._version > 0}
        args, kwargs = cast
        labelled = {names[i] if i < len(names) else str(i): arg for i, arg in enumerate(args)}
        found = [
            name
            for name, arg in (labelled | kwargs if written else {}).items()
            if not written.isdisjoint(map(id, tree.tensors(arg)))
        ]
        if found:
            self.tell(
                "arguments",
                "amp: the forward of %s writes into its argument %s, which was cast: the caller's "
                "own tensor does not change. Pass it in the dtype that the model computes in, or "
                "name it in amp.initialize(..., fp32_inputs=%r).",
                *(type(model).__name__, ", ".join(found), found),
            )

    def tell(self, what: str, text: str, *args: object) -> None:
        """Logs a warning, once for each ``what``."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *args)


def _watched(model: nn.Module, has_master: HasMaster) -> Iterator[tuple[str, Tensor]]:
    """Yields the frozen weights, and in training the buffers but for batch norm's own."""
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module, prefix):
            if isinstance(tensor, nn.Parameter):
                watched = not tensor.requires_grad and not has_master(tensor)
            else:
                watched = model.training and not isinstance(module, _BatchNorm)
            if watched:
                yield name, tensor


def _versions(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, int]]:
    found = {}
    for name, tensor in tensors:
        if dtypes.is_low_precision(tensor) and not tensor.is_inference():
            with contextlib.suppress(RuntimeError):  # torch.func's tensors have no address
                found[name] = tensor._version, tensor.data_ptr()
    return found
