"""Fp32 state dicts of low-precision modules, and lossless loading.

``state_dict`` and ``load_state_dict`` work on any module, so every module with a 16-bit tensor has
hooks of its own, as in apex. They handle its own tensors alone: it does not matter whether the
module, a parent or a wrapper is called.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.rounding import exact_value
from apex._pickle import rebuild
from apex._torch.modules import own_tensors, state_dict_hooks

if TYPE_CHECKING:
    from apex._engine.session import Session

_log = logging.getLogger("apex")

AVERAGE = "Average an fp32 copy, made by amp.restore(copy.deepcopy(model))."
"""The remedy for averages in 16 bits."""

Entries = MutableMapping[str, Any]
"""A state dict."""


Versions = tuple[int | None, ...]


def _versions(*tensors: Tensor | None) -> Versions:
    """Returns the version counters of tensors; None for those without."""
    return tuple(
        None if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors
    )


def _gone() -> None:
    return None


class MasterLink:
    """Connects a converted model's modules to the masters of their parameters.

    A deep copy keeps a weak link to the original's session, which has the copy's masters if an
    optimizer was copied with it. A pickle keeps no link.
    """

    def __init__(self, session: Session | None = None) -> None:
        """Connects to the masters of ``session``, kept alive; ``None`` if there are none."""
        self._kept_alive = session
        self._copied_from: weakref.ref[Session] | None = None
        # The entry that a tensor got last, and the versions of tensor, master and entry then.
        self._saved: dict[int, tuple[str, Callable[[], Tensor | None], Versions]] = {}
        self._latest: Tensor | None = None
        self._told = False
        self.loads = 0

    @property
    def session(self) -> Session | None:
        """The session of the modules' masters, or ``None``."""
        return self._kept_alive if self._copied_from is None else self._copied_from()

    @property
    def is_copy(self) -> bool:
        """Whether it is the link of a deep copy."""
        return self._copied_from is not None

    def write_back(self, model: nn.Module) -> None:
        """Rounds the written masters of a model into it."""
        if (session := self.session) is not None:
            session.masters.update_model(model)

    def has_master(self, param: Tensor) -> bool:
        """Returns whether a parameter has a master."""
        session = self.session
        return session is not None and session.masters.pair_of(param) is not None

    def master_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the fp32 value of a parameter or buffer, or ``None`` if unknown."""
        session = self.session
        return None if session is None else session.masters.exact_value(tensor)

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Registers the hooks of one module; returns their handles. Does nothing if it has them."""
        if any(isinstance(hook, MasterLink) for hook in state_dict_hooks(module).values()):
            return []
        hooks: Any = module  # torch does not annotate the methods that register them
        saving: RemovableHandle = hooks.register_state_dict_post_hook(self)
        # Run before the user's hooks, which may rename entries.
        order: Any = saving.hooks_dict_ref()
        order.move_to_end(saving.id, last=False)
        return [saving, hooks.register_load_state_dict_pre_hook(self.before_loading)]

    def __call__(self, module: nn.Module, entries: Entries, prefix: str, _: object) -> None:
        """Replaces the entries of the module's own 16-bit tensors by their exact fp32 values."""
        for key, tensor in own_tensors(module):
            entry = entries.get(prefix + key)
            if not isinstance(entry, Tensor) or entry is tensor:  # with ``keep_vars``
                continue
            if dtypes.is_low_precision(entry):
                entries[prefix + key] = self._saved_value(entries, prefix + key, tensor)

    def _saved_value(self, entries: Entries, key: str, tensor: Tensor) -> Tensor:
        """Returns the fp32 values of a 16-bit tensor; entries of tied tensors share them."""
        master = self.master_of(tensor)
        known_key, known, versions = self._saved.get(id(tensor), (key, _gone, ()))
        exact = known()
        is_tied = entries.get(known_key) is exact and versions == _versions(tensor, master, exact)
        if exact is None or not is_tied:
            exact = exact_value(entries[key], [master])
            versions = _versions(tensor, master, exact)
            self._saved[id(tensor)] = key, weakref.ref(exact), versions
            if self.is_copy:
                self._note_average(exact)
        return exact

    def before_loading(self, module: nn.Module, entries: Entries, prefix: str, *rest: Any) -> None:
        """Sets the masters of the module's own tensors to the exact values that are loaded.

        Where an entry is not loaded after all, the master follows the weight that stays.

        Raises:
            RuntimeError: For ``load_state_dict(assign=True)``, before anything has changed.
        """
        if isinstance(rest[0], Mapping) and rest[0].get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace parameters of {type(module).__name__} "
                "that amp and the optimizer hold. Drop assign=True, or call amp.restore before "
                "loading and amp.initialize after."
            )
        self.loads += 1
        if self.session is not None:
            own = [(tensor, entries.get(prefix + key)) for key, tensor in own_tensors(module)]
            self.session.masters.set_exact_values(
                (tensor, entry) for tensor, entry in own if _is_exact(entry, tensor)
            )

    def _note_average(self, made: Tensor) -> None:
        """Notes once if an average was written into the latest entry of a copy's state dict."""
        if self._latest is not None and self._latest._version > 0 and not self._told:
            self._told = True
            _log.warning(
                "amp: the script writes into the state_dict() of a deep copy of a 16-bit model. "
                f"Its entries are fp32 copies, so the model does not change. {AVERAGE}"
            )
        self._latest = None if made.is_inference() else made

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterLink:
        """Returns a link to the same session, which the copy does not keep alive."""
        new = memo[id(self)] = MasterLink()
        session = self.session
        new._copied_from = None if session is None else weakref.ref(session)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without a session."""
        return rebuild, ("master_link",)


def _is_exact(entry: object, tensor: Tensor) -> TypeGuard[Tensor]:
    """Returns whether an entry holds more bits than the 16-bit tensor that it is for."""
    return (
        isinstance(entry, Tensor)
        and dtypes.is_low_precision(tensor)
        and entry.shape == tensor.shape
        and entry.dtype in dtypes.CASTABLE
        and entry.dtype is not tensor.dtype
    )
