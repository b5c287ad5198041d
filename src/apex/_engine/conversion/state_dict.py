"""Fp32 state dicts of low-precision modules, and lossless loading.

``state_dict`` and ``load_state_dict`` work on any module, so every module with a 16-bit tensor has
hooks of its own, as in apex. They handle its own tensors alone: it does not matter whether the
module, a parent or a wrapper is called.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.rounding import exact_value
from apex._pickle import rebuild
from apex._torch.modules import own_tensors

if TYPE_CHECKING:
    from apex._engine.session import Session

_log = logging.getLogger("apex")

AVERAGE = "Average an fp32 copy, made by amp.restore(copy.deepcopy(model))."
"""The remedy for averages in 16 bits."""

Entries = MutableMapping[str, Any]
"""A state dict."""


class MasterLink:
    """Connects a converted model's modules to the masters of their parameters.

    A deep copy keeps a weak link to the original's session, which has the copy's masters if an
    optimizer was copied with it. A pickle keeps no link.
    """

    def __init__(self, session: Session | None = None) -> None:
        """Connects to the masters of ``session``, kept alive; ``None`` if there are none."""
        self._kept_alive = session
        self._copied_from: weakref.ref[Session] | None = None
        self._made: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self._latest: Tensor | None = None
        self._told = False

    @property
    def session(self) -> Session | None:
        """The session of the modules' masters, or ``None``."""
        return self._kept_alive if self._copied_from is None else self._copied_from()

    def write_back(self) -> None:
        """Rounds written masters into the model."""
        if (session := self.session) is not None:
            session.masters.update_model()

    def has_master(self, tensor: Tensor) -> bool:
        """Returns whether a parameter has a master."""
        session = self.session
        return session is not None and isinstance(session.masters.exact_value(tensor), nn.Parameter)

    def exact(self, tensor: Tensor, entry: Tensor, other: Tensor | None = None) -> Tensor:
        """Returns the fp32 values of a 16-bit tensor, whose own values ``entry`` holds.

        ``other`` is a master that the link may not know.
        """
        known = None if (session := self.session) is None else session.masters.exact_value(tensor)
        return exact_value(entry, [known, other])

    def save(self, destination: Entries, key: str, tensor: Tensor) -> None:
        """Replaces the entry of a tensor by its fp32 values; entries of tied tensors share them."""
        entry = destination[key]
        if entry is tensor or not isinstance(entry, Tensor):  # with ``keep_vars``
            return
        if not dtypes.is_low_precision(entry):
            return
        first, made = self._made.get(id(tensor), (key, None))
        exact = None if made is None else made()
        if exact is None or destination.get(first) is not exact:
            exact = self.exact(tensor, entry)
            self._made[id(tensor)] = key, weakref.ref(exact)
            if self._copied_from is not None:
                self._note_average(exact)
        destination[key] = exact

    def _note_average(self, made: Tensor) -> None:
        """Notes once if an average was written into the latest entry of a copy's state dict."""
        if self._latest is not None and self._latest._version > 0 and not self._told:
            self._told = True
            _log.warning(
                "amp: the state_dict of a deep copy of a 16-bit model is written, but its entries "
                f"are fp32 copies: the model does not change. {AVERAGE}"
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


class Fp32Hooks:
    """The hooks of one module."""

    def __init__(self, link: MasterLink) -> None:
        """Makes hooks that find masters through ``link``."""
        self._link = link

    def attach(self, module: nn.Module, handles: list[RemovableHandle]) -> None:
        """Registers the hooks with ``module``; adds their handles to ``handles`` one by one."""
        hooks: Any = module  # torch does not annotate the methods that register them
        handles.append(hooks.register_state_dict_post_hook(self))
        # Run before the user's hooks, which may rename entries.
        order: Any = handles[-1].hooks_dict_ref()
        order.move_to_end(handles[-1].id, last=False)
        handles.append(hooks.register_load_state_dict_pre_hook(self.before_loading))

    def __call__(self, module: nn.Module, destination: Entries, prefix: str, _: object) -> None:
        """Replaces the module's own entries by the exact fp32 values of its tensors."""
        for key, tensor in own_tensors(module):
            if prefix + key in destination:
                self._link.save(destination, prefix + key, tensor)

    def before_loading(self, module: nn.Module, loaded: Entries, prefix: str, *rest: Any) -> None:
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
        if (session := self._link.session) is not None:
            own = [(tensor, loaded.get(prefix + key)) for key, tensor in own_tensors(module)]
            session.masters.set_exact_values(
                (tensor, entry) for tensor, entry in own if _is_exact(entry, tensor)
            )

    def before_saving(self, *_: Any) -> None:
        """Does nothing; files of earlier releases name it, and :meth:`after_loading`."""

    after_loading = before_saving

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies with the link alone; see :mod:`apex._pickle`."""
        return rebuild, ("fp32_hooks", self._link)


def _is_exact(entry: object, tensor: Tensor) -> TypeGuard[Tensor]:
    """Returns whether an entry holds more bits than the 16-bit tensor that it is for."""
    return (
        isinstance(entry, Tensor)
        and dtypes.is_low_precision(tensor)
        and entry.shape == tensor.shape
        and entry.dtype in dtypes.CASTABLE
        and entry.dtype is not tensor.dtype
    )
