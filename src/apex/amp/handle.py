"""``scale_loss`` and ``disable_casts``, and the handle of apex's older API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from apex._core import arguments
from apex._core.scale import ScaleRule
from apex._core.undo import Undo
from apex._engine.autocast.region import AmbientRegion, casts_off
from apex._engine.autocast.weights import shared
from apex._engine.backward import BackwardPass
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._engine.optimizer.subclass import prepare_optimizer, prepared_state
from apex._engine.scaler import Scaler, scaler_for
from apex._engine.session import Session
from apex._torch.dynamo import untraced, untraced_frame
from apex.amp._amp_state import AmpState, _amp_state
from apex.amp.optimizers import unwrap, unwrapped
from apex.amp.scaler import LossScaler as LossScaler  # scripts import it from here
from apex.amp.scaler import own_update
from apex.amp.sessions import start_init_session


@untraced
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Returns a context that yields the scaled loss and unscales the gradients on exit.

    Call ``backward()`` on the scaled loss inside it. On exit, the gradients of
    ``amp.master_params(optimizer)`` are unscaled and, except at O3, fp32, so clipping and
    inspection see true values. A dynamic scale is updated, and if a gradient held inf or NaN, the
    next ``optimizer.step()`` does nothing. No host sync; ops inside are cast as around it.

    If the block raises, the gradients from before it are restored, and later blocks work as usual.
    With a scale of exactly 1, gradients that autograd has already added stay, as without amp. They
    also stay in a block that follows one with ``delay_unscale=True``; amp warns to clear them.

    Args:
        loss: A floating-point loss (0-d, or any shape that ``backward`` accepts). Fp16 and bf16
            losses are scaled in fp32.
        optimizers: One optimizer or several that this loss trains; with an empty list, the loss is
            only scaled. If they were prepared by several ``initialize`` calls, the newest
            call's loss scale is used, as in apex.
        loss_id: Index of the loss scaler, below ``num_losses`` of that call.
        model: Ignored; accepted for old scripts.
        delay_unscale: Whether further backward passes follow before the step: the last of them
            checks the sum, and updates the scale once for all. The gradients are unscaled all the
            same.
        delay_overflow_check: Whether to leave the scale unchanged; the next pass updates it for
            both.

    Raises:
        RuntimeError: If called before ``amp.initialize``, with an optimizer that it did not
            prepare, or (on entry) inside another block of the same optimizer.
        TypeError: If ``loss`` is not a floating-point tensor.
        IndexError: If ``loss_id`` has no scaler.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
        >>> loss = model(torch.randn(8, 4)).float().pow(2).mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """
    # Duplicates would unscale twice. `session_of` rejects unprepared optimizers.
    prepared: Any = map(prepared_state, unwrapped(optimizers))
    prepared_optimizers = list(dict.fromkeys(prepared))
    session = session_of(prepared_optimizers, caller="amp.scale_loss")
    if session is None:
        return nullcontext(loss)
    arguments.loss("amp.scale_loss", loss)
    scaler = _scaler(session, loss_id)
    return BackwardPass(
        session,
        loss,
        prepared_optimizers,
        scaler,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    )


def disable_casts() -> AbstractContextManager[None]:
    """Turns op casts off, as a context manager or a decorator; works at any level.

    Contexts may be nested. Converted models (O2, O3, O5) keep their dtype.
    """
    return casts_off()


class AmpHandle:
    """The handle of ``amp.init``: op casts in this thread, and loss scaling.

    Attributes:
        verbose: The argument of this name.
        has_cache: The argument ``enable_caching``; weights share casts in any case.
    """

    verbose = False
    has_cache = True
    _session: Session | None = None

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        *,
        session: Session | None = None,
    ) -> None:
        """Turns on O1's casts in this thread, for the lifetime of the handle.

        Args:
            loss_scale: A number, or ``"dynamic"``.
            enable_caching: Value of ``has_cache``; weights share casts in any case.
            verbose: Value of ``verbose``.
            session: A session with casts, which the handle keeps alive instead of starting one.
        """
        self._session = session or start_init_session(loss_scale)
        self.verbose = verbose
        self.has_cache = enable_caching

    def is_active(self) -> bool:
        """Returns whether op casts are on."""
        return self._session is not None and self._session.spec is not None

    _is_active = property(is_active)
    cache = property(lambda self: {})  # the handle holds no casts

    def remove_cache(self, param: Tensor) -> None:
        """Ends the sharing of casts, for all weights."""
        self._clear_cache()

    _clear_cache = staticmethod(shared.drop)

    @untraced
    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Returns the context of one backward pass; see :func:`apex.amp.scale_loss`.

        Raises:
            RuntimeError: If ``wrap_optimizer`` returned ``optimizer``, which has its own
                ``scale_loss``.
        """
        if isinstance(optimizer, OptimWrapper):
            raise RuntimeError(
                "handle.scale_loss got an optimizer that handle.wrap_optimizer wrapped. Call "
                "optimizer.scale_loss(loss) on the wrapped optimizer."
            )
        return self._backward_pass("amp.scale_loss", loss, optimizer)

    def _backward_pass(
        self, caller: str, loss: Tensor, optimizer: Any, scaler: Scaler | None = None
    ) -> AbstractContextManager[Tensor]:
        if self._session is None:
            return nullcontext(loss)
        arguments.loss(caller, loss)
        inner = unwrap(optimizer)
        if prepared_state(inner) is None:
            with Undo() as undo:
                prepare_optimizer(self._session, inner, undo)
                undo.pop_all()
        prepared: Any = prepared_state(inner)
        scaler = scaler or _scaler(self._session, 0)
        return BackwardPass(self._session, loss, [prepared], scaler)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wraps an optimizer to add ``scale_loss``, with one scale per loss."""
        return OptimWrapper(optimizer, self, num_loss)

    def _deactivate(self) -> None:
        """Ends the casts, and the place of a session of ``init`` in ``amp.state_dict()``."""
        if self._session is not None:
            self._session.close()

    _disable_casts = staticmethod(casts_off)


class NoOpHandle(AmpHandle):
    """The handle of ``amp.init(enabled=False)``: casts and scales nothing."""

    has_cache = False

    def __init__(self) -> None:
        """Starts no session."""


class OptimWrapper:
    """An optimizer with ``scale_loss``; delegates everything else to the optimizer.

    With several losses, the n-th ``scale_loss`` block after a step uses the n-th loss scale; an
    overflow in any of them skips the step.
    """

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int) -> None:
        """Wraps ``optimizer``; under a ``NoOpHandle``, losses are not scaled."""
        num_loss = arguments.integer("num_loss", num_loss, least=1)
        self._optimizer = optimizer
        self._handle = amp_handle
        self._loss_index = 0  # number of blocks since the last step
        session = amp_handle._session
        scale = 1.0 if session is None else session.policy.loss_scale
        self._loss_scaler = [scaler_for(scale, ScaleRule()) for _ in range(num_loss)]

    @untraced
    def scale_loss(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """Returns the context of the next loss's backward pass.

        Raises:
            RuntimeError: If there are more blocks between two steps than ``num_loss``.
        """
        if self._handle._session is None:
            return nullcontext(loss)
        count = len(self._loss_scaler)
        if self._loss_index == count:
            raise RuntimeError(
                f"optimizer.scale_loss was called more than {count} times without a step. Pass "
                "num_loss=... to handle.wrap_optimizer, one for each loss."
            )
        scaler = self._loss_scaler[self._loss_index]
        scaler.use_for(self._loss_index)
        block = self._handle._backward_pass("optimizer.scale_loss", loss, self._optimizer, scaler)
        self._loss_index += 1
        return block

    @untraced_frame
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, unless a gradient of any loss overflowed."""
        self._loss_index = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def _handle(state: AmpState) -> AmpHandle:
    """Returns the handle of ``amp.init``, or else one of the current session, if any."""
    session = state.current()
    if state.init_handle is None and session is not None:
        return AmpHandle(session=session)
    return state.init_handle or NoOpHandle()


AmpState.handle = property(_handle)


def session_of(
    prepared_optimizers: Sequence[PreparedOptimizer | None], *, caller: str
) -> Session | None:
    """Returns the newest session of these optimizers, or of all without one; None if amp is off.

    Raises:
        RuntimeError: If ``caller``, a public function, got an optimizer without a session.
    """
    session: Session | None = None
    if None not in prepared_optimizers:
        owners = [prepared.session for prepared in prepared_optimizers if prepared is not None]
        for candidate in Session.live:  # oldest first
            if candidate in owners:
                session = candidate
        # As in apex, a deactivated handle uses the scalers of the latest call.
        if session is None or isinstance(session.region, AmbientRegion):
            session = _amp_state.current() or session
    if session is not None:
        options = session.options
        is_on = options is None or options.options["enabled"]  # which scripts may unset
        return session if is_on else None
    if not (any(prepared_optimizers) or _amp_state.enabled):
        return None
    level = "O1"
    why = "was called before amp.initialize. First call"
    if _amp_state.initialized:
        level = _amp_state.opt_properties.opt_level or level
        why = (
            "takes optimizers that amp has prepared; copies of these are plain. Pass yours to "
            "amp.initialize and use the result:"
        )
    raise RuntimeError(
        f"{caller} {why}\n    "
        f"model, optimizer = amp.initialize(model, optimizer, opt_level={level!r})"
    )


def _scaler(session: Session, loss_id: int) -> Scaler:
    count = len(session.scalers)
    if not -count <= loss_id < count:
        raise IndexError(
            f"loss_id is {loss_id}, but amp.initialize was called with num_losses={count}. Count "
            f"losses from 0, and pass num_losses={max(loss_id + 1, -loss_id)} to amp.initialize."
        )
    scaler = session.scalers[loss_id]
    # Scripts may have exchanged scalers.
    scaler.use_for(loss_id % count, own_update(scaler) if scaler.dynamic else None)
    return scaler
