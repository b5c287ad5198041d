"""The one place that knows the current session; also apex's ``_amp_state`` object."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from apex._engine.autocast.user_functions import UserRegistry
from apex._torch import ranks
from apex.amp import scaler_states
from apex.amp.optimizers import master_params as master_params  # scripts import it from here

if TYPE_CHECKING:
    from apex._engine.scaler import Scaler
    from apex._engine.session import Session
    from apex.amp.handle import AmpHandle, NoOpHandle
    from apex.amp.scaler import LossScaler, LossScalers


class AmpState:
    """What amp remembers between calls: the living sessions and the last options.

    Scripts read and set some of it as ``amp._amp_state``.

    Attributes:
        verbosity: 0 for silence, 1 for the start-up and overflow reports.
        hard_override: Warn about overrides that make no sense instead of refusing them.
        allow_incoming_model_not_fp32: Accept float64 models at O1 and O4, too.
        opt_properties: The options of the last ``initialize``; absent before the first.
        min_loss_scale: As given to the last ``initialize``; scalers have their own.
        max_loss_scale: Likewise.
        functions: What the user registered for casting.
        waiting: Loss scales of a checkpoint that was loaded before there was a session.
    """

    opt_properties: OptProperties

    def __init__(self) -> None:
        """Starts without a session."""
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.functions = UserRegistry()
        self.waiting: list[scaler_states.State] = []
        self._sessions: list[weakref.ref[Session]] = []
        self._disabled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._init_handle: AmpHandle | NoOpHandle | None = None
        self._given_handle: list[Any] = []
        self._own_scalers: list[Scaler] = []
        self._lock = threading.Lock()

    # -- sessions ----------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """Makes ``session`` the current one, and gives it the loss scales that wait for it."""
        with self._lock:
            self._sessions = [ref for ref in self._sessions if ref() is not None]
            self._sessions.append(weakref.ref(session))
            self._given_handle.clear()
            self.waiting = scaler_states.hand_over(session.scalers, self.waiting)

    def discard(self, session: Session) -> None:
        """Forgets ``session``."""
        with self._lock:
            self._sessions = [ref for ref in self._sessions if ref() not in (None, session)]

    def sessions(self) -> list[Session]:
        """Returns the living sessions, oldest first."""
        return [session for ref in self._sessions if (session := ref()) is not None]

    def current(self) -> Session | None:
        """Returns the newest living session."""
        sessions = self.sessions()
        return sessions[-1] if sessions else None

    def mark_disabled(self, given: Iterable[object]) -> None:
        """Remembers models and optimizers that ``initialize(enabled=False)`` left alone."""
        self._disabled.update(given)

    def unmark_disabled(self, given: Iterable[object]) -> None:
        """Forgets that of those which are prepared after all."""
        self._disabled.difference_update(given)

    def is_disabled(self, given: object) -> bool:
        """Returns whether every amp call is to leave ``given`` alone."""
        return given in self._disabled

    @property
    def initialized(self) -> bool:
        """Whether ``amp.initialize`` or ``amp.init`` was ever called."""
        return "opt_properties" in self.__dict__

    @property
    def enabled(self) -> bool:
        """Whether the last ``initialize`` left amp on; true before the first."""
        return not self.initialized or bool(self.opt_properties.enabled)

    def is_on(self, session: Session) -> bool:
        """Whether ``session`` scales losses: until a script sets its ``enabled`` to False."""
        options = session.options
        return not isinstance(options, OptProperties) or bool(options.options["enabled"])

    def hold_handle(self, handle: AmpHandle | NoOpHandle) -> None:
        """Keeps the handle of ``amp.init``, and with it its session."""
        self._init_handle = handle
        self._given_handle.clear()

    def release_handle(self) -> None:
        """Ends the handle of an earlier ``amp.init``."""
        if self._init_handle is not None:
            self._init_handle._deactivate()
            self._init_handle = None

    def retire(self, handle: AmpHandle, session: Session) -> None:
        """Leaves the session of a deactivated ``amp.init`` out of ``state_dict``."""
        if handle is self._init_handle:
            self.discard(session)

    # -- apex's view -------------------------------------------------------------------------

    @property
    def loss_scalers(self) -> LossScalers:
        """The scalers of the current session, as apex's objects; empty without one.

        May be set, and changed as a list, to give losses other scalers.
        """
        from apex.amp.scaler import LossScalers

        session = self.current()
        return LossScalers(self._own_scalers if session is None else session.scalers)

    @loss_scalers.setter
    def loss_scalers(self, scalers: Iterable[LossScaler]) -> None:
        self.loss_scalers[:] = list(scalers)

    @property
    def handle(self) -> Any:
        """apex's handle: that of ``amp.init``, or one over the current session's casts.

        May be set: it is read back until the next ``initialize`` or ``init``, and nothing else.
        """
        from apex.amp.handle import handle_of

        if self._given_handle:
            return self._given_handle[0]
        return self._init_handle or handle_of(self.current())

    @handle.setter
    def handle(self, handle: Any) -> None:
        self._given_handle[:] = [handle]


class OptProperties:
    """The options of the last ``initialize``, readable and settable as attributes.

    Attributes:
        options: Name to value.
    """

    options: dict[str, Any]

    def __init__(self, options: dict[str, Any]) -> None:
        """Holds ``options``."""
        self.__dict__["options"] = options

    def __getattr__(self, name: str) -> Any:
        """Returns the option ``name``."""
        # Asked while a copy is made, too: before it has its options.
        options = self.__dict__.get("options", {})
        if name not in options:
            raise AttributeError(f"amp's options have no {name!r}; they are {', '.join(options)}.")
        return options[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the option ``name``; of these only ``enabled`` has an effect afterwards."""
        self.options[name] = value


_amp_state = AmpState()


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Prints on standard output, unless ``verbosity`` is 0; with ``rank0`` only on rank 0."""
    if _amp_state.verbosity > 0 and not (rank0 and ranks.rank()):
        print(msg)  # noqa: T201 - the report of ``verbosity`` goes to stdout, as in apex


def warn_or_err(msg: str) -> None:
    """Raises RuntimeError; warns instead where ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    warnings.warn(msg, UserWarning, stacklevel=3)
