"""Process-wide state: the live sessions, and apex's ``_amp_state`` object."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from apex._engine.autocast.user_functions import UserRegistry
from apex._engine.session import Session
from apex._torch import ranks
from apex.amp.optimizers import master_params as master_params  # scripts import it from here
from apex.amp.properties import Properties
from apex.amp.scaler import LossScaler


class AmpState:
    """State that amp keeps between calls: the live sessions and the latest options.

    Scripts read and set parts of it through ``amp._amp_state``.

    Attributes:
        verbosity: 0 for no output, 1 for the start-up and overflow reports.
        hard_override: Whether invalid overrides cause a warning instead of an error.
        allow_incoming_model_not_fp32: Whether O0, O1 and O4 leave 16-bit parameters unchanged, and
            O1 and O4 accept float64 models.
        opt_properties: Options of the latest ``initialize`` or ``init``; absent before the first.
        min_loss_scale: Argument of the latest ``initialize``; each scaler has its own.
        max_loss_scale: Argument of the latest ``initialize``; each scaler has its own.
        functions: Functions that the user registered for casting.
        options: The options of each session of ``initialize``.
    """

    opt_properties: Properties

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.functions = UserRegistry()
        self.options = weakref.WeakKeyDictionary[Session, Properties]()
        self._sessions = weakref.WeakKeyDictionary[Session, None]()
        self._init_handle: Any = None

    # -- sessions ----------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """Makes ``session`` current."""
        self._sessions[session] = None

    def discard(self, session: Session) -> None:
        """Removes ``session``."""
        self._sessions.pop(session, None)

    def end_unused(self) -> None:
        """Ends sessions of ``initialize``: casts with the last model, the rest with all optimizers.

        Other references may keep them: tracebacks hold the frames of a forward or a step that
        failed, and other threads those that run.
        """
        for session in self.sessions():
            if session in self.options and not session.models:
                session.close()
                if not session.prepared_optimizers:
                    self.discard(session)

    def sessions(self) -> list[Session]:
        """Returns the live sessions, oldest first."""
        # A list, which another thread's ``initialize`` does not change.
        sessions = [ref() for ref in self._sessions.keyrefs()]
        return [session for session in sessions if session is not None]

    def current(self) -> Session | None:
        """Returns the newest session of ``initialize``, or else of ``init``, if any."""
        sessions = self.sessions()
        sessions = [session for session in sessions if session in self.options] or sessions
        return sessions[-1] if sessions else None

    @property
    def initialized(self) -> bool:
        """Whether ``amp.initialize`` or ``amp.init`` has been called."""
        return "opt_properties" in self.__dict__

    @property
    def enabled(self) -> bool:
        """Whether the latest ``initialize`` or ``init`` enabled amp; True before the first."""
        return not self.initialized or bool(self.opt_properties.enabled)

    def hold_handle(self, handle: Any) -> None:
        """Keeps the handle of ``amp.init`` and its session, and deactivates an earlier one."""
        if self._init_handle is not None:
            self._init_handle._deactivate()
        self._init_handle = handle

    # -- apex's view -------------------------------------------------------------------------

    @property
    def loss_scalers(self) -> tuple[LossScaler, ...]:
        """The current session's scalers, as apex's objects. Assign others to exchange them."""
        session = self.current()
        if session is None:
            return ()
        return tuple(map(LossScaler.over, session.scalers))

    @loss_scalers.setter
    def loss_scalers(self, scalers: Iterable[LossScaler]) -> None:
        session = self.current()
        if session is None:
            raise RuntimeError("amp._amp_state.loss_scalers was set before amp.initialize.")
        session.scalers[:] = [scaler._scaler for scaler in scalers]

    @property
    def handle(self) -> Any:
        """apex's handle: the one of ``amp.init``, or a view of the current session."""
        from apex.amp.handle import handle_of

        return self._init_handle or handle_of(self.current())


_amp_state = AmpState()


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Prints ``msg`` unless ``verbosity`` is 0; with ``rank0``, only on rank 0."""
    if _amp_state.verbosity > 0 and not (rank0 and ranks.rank()):
        print(msg)  # noqa: T201 - the report of ``verbosity`` goes to stdout, as in apex


def warn_or_err(msg: str) -> None:
    """Raises RuntimeError, or warns if ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    warnings.warn(msg, stacklevel=3)
