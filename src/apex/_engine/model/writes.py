"""Notes what a prepared model writes where 16 bits, or a copy, lose it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex._core import dtypes, tree
from apex._engine.model.messages import keeping

_log = logging.getLogger("apex")

_FORWARDS = 256
"""Forward passes that are watched, of which one in training counts as 16: what a model writes in
training, it writes from the start."""

Versions = dict[str, tuple[int, int]]


class Writes:
    """Watches the first forward passes of a 16-bit model by the version counters of its tensors.

    Reads no values, so it does not wait for the device. Writes through ``tensor.data`` in place are
    not counted by torch, and not found.
    """

    def __init__(self) -> None:
        self._left = _FORWARDS
        self._before: Versions = {}
        self._weights: set[str] = set()
        self._buffers: set[str] = set()
        self._copies: list[weakref.ref[nn.Module]] = []
        self._told: set[str] = set()

    def note_copy(self, copied: nn.Module) -> None:
        """Watches a deep copy of the model, too: it may become an average."""
        self._copies.append(weakref.ref(copied))
        self._left = _FORWARDS

    @property
    def watches(self) -> bool:
        """Whether the next forward pass is watched."""
        return self._left > 0

    def begin(self, model: nn.Module, has_master: Callable[[Tensor], bool]) -> Versions:
        """Begins a forward pass; returns the versions of the 16-bit buffers.

        Frozen weights, and those of copies, count as averages once they were written between two
        passes in a row, twice.
        """
        self._left -= 16 if model.training else 1
        frozen = {
            name: param
            for name, param in model.named_parameters()
            if not param.requires_grad and not has_master(param)
        }
        held = _versions(frozen)
        copies = [copied for ref in self._copies if (copied := ref()) is not None]
        if copies and any(map(has_master, model.parameters())):
            for copied in copies:
                params = dict(copied.named_parameters())
                if not any(map(has_master, params.values())):  # no optimizer was copied with it
                    held |= {f" {name}": each for name, each in _versions(params).items()}
        changed = _changed(self._before, held)
        again, self._weights, self._before = self._weights & changed, changed, held
        self._tell_weights(model, [name for name in held if name in again])
        return _versions(_own_buffers(model))

    def end(self, model: nn.Module, before: Versions) -> None:
        """Ends a forward pass; names the 16-bit buffers that it and an earlier one wrote."""
        if not model.training:
            return
        after = _versions(_own_buffers(model))
        changed = _changed(before, after)
        written = [name for name in after if name in self._buffers & changed]
        self._buffers |= changed
        if written:
            self._tell(
                "buffers",
                "amp: the forward of %s writes the 16-bit buffers %s, where small changes are lost "
                "(an average stops, a counter stays at 256 in bf16). %s",
                *(type(model).__name__, ", ".join(written), keeping(written)),
            )

    def _tell_weights(self, model: nn.Module, names: Sequence[str]) -> None:
        own = [name for name in names if name[0] != " "]
        if own:
            self._tell(
                "weights",
                "amp: the frozen weights %s of %s are written in training, but 16 bits lose small "
                "changes: an average of them stops. %s",
                *(", ".join(own[:4]), type(model).__name__, keeping(own)),
            )
        if len(own) < len(names):
            self._tell(
                "copy",
                "amp: a deep copy of %s is written in training, but its 16-bit weights lose small "
                "changes: an average stops. Average an fp32 copy, made by "
                "amp.restore(copy.deepcopy(model)), that loads model.state_dict().",
                type(model).__name__,
            )

    def check_arguments(
        self,
        model: nn.Module,
        names: Sequence[str],
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
        made: Iterable[Tensor],
    ) -> None:
        """Names an argument of ``forward`` that was written, if it was a cast copy.

        Args:
            model: The model whose forward has run.
            names: Names of its positional arguments.
            call: The positional and keyword arguments that it got.
            made: The tensors among them that casts made.
        """
        written = {id(tensor) for tensor in made if not tensor.is_inference() and tensor._version}
        if not written or "arguments" in self._told:
            return
        args, kwargs = call
        given = {(names[at] if at < len(names) else str(at)): arg for at, arg in enumerate(args)}
        found = [
            name
            for name, arg in {**given, **kwargs}.items()
            if not written.isdisjoint(map(id, tree.tensors(arg)))
        ]
        self._tell(
            "arguments",
            "amp: the forward of %s writes into its argument %s, which was cast: the caller's own "
            "tensor does not change. Pass it in the dtype that the model computes in, or name it "
            "in amp.initialize(..., fp32_inputs=%r).",
            *(type(model).__name__, ", ".join(found), found),
        )

    def _tell(self, what: str, text: str, *args: object) -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *args)


def _own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a model but for batch norm's own statistics."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        if not isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }


def _versions(tensors: Mapping[str, Tensor]) -> Versions:
    found: Versions = {}
    for name, tensor in tensors.items():
        if dtypes.is_low_precision(tensor) and not tensor.is_inference():
            with contextlib.suppress(RuntimeError):  # torch.func's tensors have no address
                found[name] = tensor._version, tensor.data_ptr()
    return found


def _changed(before: Versions, after: Versions) -> set[str]:
    return {name for name, each in after.items() if before.get(name, each) != each}
