"""apex's ``_amp_state`` object: the latest options, and the sessions in use."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any

from apex._core.user_files import warn_at_caller
from apex._engine.autocast.user_functions import UserRegistry
from apex._engine.optimizer.prepared import optimizers_of
from apex._engine.scaler import Scaler
from apex._engine.session import Session
from apex._torch import ranks
from apex.amp.optimizers import master_params as master_params  # scripts import it from here
from apex.amp.properties import Properties
from apex.amp.scaler import LossScaler


class LossScalers(MutableSequence[LossScaler]):
    """The scalers of a session, as apex's objects. Changes of the sequence change the session."""

    def __init__(self, scalers: list[Scaler]) -> None:
        self._scalers = scalers

    def __len__(self) -> int:
        return len(self._scalers)

    def __getitem__(self, index: Any) -> Any:
        return [*map(LossScaler.over, self._scalers)][index]

    def __setitem__(self, index: Any, value: Any) -> None:
        views = [*self]
        views[index] = value
        self._scalers[:] = [view._scaler for view in views]

    def __delitem__(self, index: Any) -> None:
        del self._scalers[index]

    def insert(self, index: int, value: LossScaler) -> None:
        """Adds a scaler before the one at an index."""
        self._scalers.insert(index, value._scaler)


class AmpState:
    """State that amp keeps between calls: the latest options, and the handle of ``amp.init``.

    Scripts read and set parts of it through ``amp._amp_state``.

    Attributes:
        verbosity: 0 for no output, 1 for the start-up and overflow reports.
        hard_override: Whether invalid overrides cause a warning instead of an error.
        allow_incoming_model_not_fp32: Whether O0, O1 and O4 leave 16-bit parameters unchanged, and
            O1 and O4 accept float64 models.
        opt_properties: Options of the latest ``initialize``; absent before the first.
        min_loss_scale: Argument of the latest ``initialize``; each scaler has its own.
        max_loss_scale: Argument of the latest ``initialize``; each scaler has its own.
        functions: Functions that the user registered for casting.
        init_handle: The handle of the latest ``amp.init``, if any.
    """

    opt_properties: Properties

    handle: Any
    """apex's handle, which :mod:`apex.amp.handle` defines."""

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.functions = UserRegistry()
        self.init_handle: Any = None
        # A script's own scalers, set while there is no session; it alone uses them.
        self._own_scalers: list[Scaler] = []

    # -- sessions ----------------------------------------------------------------------------

    def sessions(self) -> list[Session]:
        """Returns the sessions in use, oldest first.

        One of ``initialize`` is in use while it has models or optimizers, one of ``init`` while it
        casts. Others may still be referred to: tracebacks hold the frames of a forward that failed.
        """
        in_use: list[Session] = []
        for session in Session.live:
            if session.made_by == "initialize":
                is_used = bool(session.models or optimizers_of(session))
            else:
                is_used = session.made_by == "init" and session.spec is not None
            if is_used:
                in_use.append(session)
        return in_use

    def current(self) -> Session | None:
        """Returns the newest session of ``initialize``, or else of ``init``, if any."""
        sessions = self.sessions()
        initialized = [session for session in sessions if session.made_by == "initialize"]
        preferred = initialized or sessions
        return preferred[-1] if preferred else None

    @property
    def scalers(self) -> list[Scaler]:
        """The current session's scalers; without a session, the script's own."""
        session = self.current()
        return self._own_scalers if session is None else session.scalers

    @property
    def initialized(self) -> bool:
        """Whether ``amp.initialize`` has been called."""
        return "opt_properties" in self.__dict__

    @property
    def enabled(self) -> bool:
        """Whether the latest ``initialize`` enabled amp; True before the first."""
        return not self.initialized or bool(self.opt_properties.enabled)

    def hold_handle(self, handle: Any) -> None:
        """Keeps the handle of ``amp.init`` and its session, and deactivates an earlier one."""
        if self.init_handle is not None:
            self.init_handle._deactivate()
        self.init_handle = handle

    # -- apex's view -------------------------------------------------------------------------

    @property
    def loss_scalers(self) -> LossScalers:
        """The scalers as apex's objects."""
        return LossScalers(self.scalers)

    @loss_scalers.setter
    def loss_scalers(self, scalers: Iterable[LossScaler]) -> None:
        self.loss_scalers[:] = scalers


_amp_state = AmpState()


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Prints ``msg`` unless ``verbosity`` is 0; with ``rank0``, only on rank 0."""
    if _amp_state.verbosity > 0 and not (rank0 and ranks.rank()):
        print(msg)  # noqa: T201 - the report of ``verbosity`` goes to stdout, as in apex


def warn_or_err(msg: str) -> None:
    """Raises RuntimeError, or warns if ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    warn_at_caller(msg)
