"""``scale_loss`` and ``disable_casts``, and the handle of apex's older API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._engine.autocast.region import casts_off
from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.session import Session
from apex._torch.dynamo import untraced
from apex.amp._amp_state import _amp_state
from apex.amp.opt import OptimWrapper
from apex.amp.optimizers import AmpStashOptimizer, unwrap
from apex.amp.scaler import LossScaler as LossScaler  # scripts import it from here

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding
    from apex._engine.scaler import Scaler

Optimizers = Optimizer | Iterable[Any] | Any


@untraced
def scale_loss(
    loss: Tensor,
    optimizers: Optimizers,
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Returns a context with the scaled loss; at its end the gradients are unscaled.

    Inside, call ``backward()`` on the scaled loss. Afterwards the gradients of
    ``amp.master_params(optimizer)`` are fp32 and unscaled, so that clipping and inspection see
    true values, and a dynamic scale has moved. If a gradient held inf or NaN the next
    ``optimizer.step()`` does nothing. Without host sync; op casts are off inside.

    After an exception inside the gradients are those from before (at a scale of exactly 1 what
    autograd had added stays, as without amp), and the next block works.

    Args:
        loss: A floating loss (0-d, or any shape that you call backward on). Fp16 and bf16 losses
            are scaled in fp32.
        optimizers: The optimizer, or several, that this loss trains; an empty list only scales.
        loss_id: Which of ``num_losses`` scalers, from 0.
        model: Accepted for old scripts, not used.
        delay_unscale: Leave gradients scaled, to accumulate further backward passes of the same
            loss; the last pass must not delay. (Passes without it accumulate too: unscaled.)
            Delay under DistributedDataParallel's ``no_sync``, so that the last pass sends all.
        delay_overflow_check: Leave the scale where it is; the next pass moves it for both.

    Raises:
        RuntimeError: Before ``amp.initialize``; for an optimizer that it has not prepared; for
            optimizers of different ``initialize`` calls; inside another block of the same
            optimizer.
        TypeError: For a loss that is not a floating tensor.
        IndexError: For a ``loss_id`` that has no scaler.

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
    del model
    own = _own(optimizers)
    bindings = [binding_of(optimizer) for optimizer in own]
    session = _session_of(own, bindings)
    if session is None:
        return nullcontext(loss)
    _check_loss(loss)
    return session.backward_pass(
        loss,
        [binding for binding in bindings if binding is not None],
        _scaler(session, loss_id),
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    )


def disable_casts() -> AbstractContextManager[None]:
    """Returns a context in which no op casts its inputs, at any level.

    Nestable, and over at its end also after an exception. Models that were converted (O2, O3, O5)
    stay in their dtype.
    """
    return casts_off()


class AmpHandle:
    """What ``amp.init`` returns: op casts in this thread and a scale for each loss."""

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
    ) -> None:
        """Turns on the casts of O1 in this thread, as ``amp.init`` does; they end with the handle.

        Args:
            loss_scale: A number, or ``"dynamic"``.
            enable_caching: What ``has_cache`` says; a weight is cast once a forward in any case.
            verbose: What ``verbose`` says.
        """
        from apex.amp.amp import o1_session

        self._hold(o1_session(loss_scale), enable_caching=enable_caching, verbose=verbose)

    @classmethod
    def over(
        cls, session: Session, *, enable_caching: bool = True, verbose: bool = False
    ) -> AmpHandle:
        """Returns a handle of ``session``, which ends with it."""
        handle = cls.__new__(cls)
        handle._hold(session, enable_caching=enable_caching, verbose=verbose)
        return handle

    def _hold(self, session: Session, *, enable_caching: bool, verbose: bool) -> None:
        self._session = session
        self._enable_caching = enable_caching
        self._verbose = verbose

    def is_active(self) -> bool:
        """Returns whether op casts are on."""
        return self._session.casting

    _is_active = property(is_active)

    @property
    def verbose(self) -> bool:
        """As given to ``amp.init``."""
        return self._verbose

    @property
    def has_cache(self) -> bool:
        """The ``enable_caching`` given."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """An empty dict: torch keeps the casts of weights."""
        return {}

    def remove_cache(self, param: Tensor) -> None:
        """Forgets the casts of all weights, that of ``param`` among them."""
        del param
        self._clear_cache()

    @untraced
    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Returns the context of one backward pass; see :func:`apex.amp.scale_loss`.

        Raises:
            RuntimeError: For an optimizer that ``wrap_optimizer`` wrapped: it scales by itself.
        """
        if isinstance(optimizer, OptimWrapper):
            raise RuntimeError(
                "handle.scale_loss got an optimizer that handle.wrap_optimizer wrapped. Call "
                "optimizer.scale_loss(loss) on the wrapped optimizer."
            )
        _check_loss(loss)
        scaler = _scaler(self._session, 0)
        return self._session.backward_pass(loss, [self._bound(optimizer)], scaler)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Returns the optimizer with ``scale_loss``, and a scale for each loss."""
        return OptimWrapper(optimizer, self, num_loss)

    def _bind(self, optimizer: Any) -> tuple[Session, Binding]:
        return self._session, self._bound(optimizer)

    def _bound(self, optimizer: Any) -> Binding:
        own = unwrap(optimizer)
        if binding_of(own) is None:
            self._session.bind(own, mixin=AmpStashOptimizer)
        binding = binding_of(own)
        if binding is None:
            raise RuntimeError("The optimizer could not be prepared.")
        return binding

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def _deactivate(self) -> None:
        self._session.stop()
        _amp_state.retire(self, self._session)

    def _disable_casts(self) -> AbstractContextManager[None]:
        return casts_off()


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``: everything passes through."""

    _is_active = False
    verbose = False
    has_cache = False

    def is_active(self) -> bool:
        """Returns False."""
        return False

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Returns a context with the loss itself."""
        del optimizer
        return nullcontext(loss)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Returns the optimizer with a ``scale_loss`` that passes the loss through."""
        return OptimWrapper(optimizer, self, num_loss)

    def _bind(self, optimizer: Any) -> tuple[None, None]:
        del optimizer
        return None, None

    def _clear_cache(self) -> None:
        """Does nothing."""

    def _deactivate(self) -> None:
        """Does nothing."""

    def _disable_casts(self) -> AbstractContextManager[None]:
        return casts_off()


def handle_of(session: Session | None) -> AmpHandle | NoOpHandle:
    """Returns apex's handle over the casts of ``session``."""
    if session is None or session.policy.compute_dtype is None:
        return NoOpHandle()
    return AmpHandle.over(session)


def _own(optimizers: Optimizers) -> list[Optimizer]:
    several: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    return [unwrap(optimizer) for optimizer in several]


def _session_of(
    optimizers: Sequence[Optimizer], bindings: Sequence[Binding | None]
) -> Session | None:
    """Returns the one session of these optimizers; None when amp is switched off for them."""
    if len(bindings) == 1 and bindings[0] is not None and bindings[0].owner is not None:
        session = cast(Session, bindings[0].owner)
        return session if _amp_state.is_on(session) else None
    if not bindings and (current := _amp_state.current()) is not None:
        return current if _amp_state.is_on(current) else None
    owners = {binding and binding.owner for binding in bindings}
    if None in owners or not owners:
        if not any(bindings) and (not _amp_state.enabled or _disabled(optimizers)):
            return None
        raise RuntimeError(_not_prepared(bindings))
    if len(owners) > 1:
        raise RuntimeError(
            "amp.scale_loss got optimizers of different amp.initialize calls, which have "
            "different loss scales. Pass them to one amp.initialize call, or use one scale_loss "
            "block each."
        )
    session = cast(Session, owners.pop())
    return session if _amp_state.is_on(session) else None


def _disabled(optimizers: Sequence[Optimizer]) -> bool:
    return bool(optimizers) and all(map(_amp_state.is_disabled, optimizers))


def _not_prepared(bindings: Sequence[Binding | None]) -> str:
    call = "    model, optimizer = amp.initialize(model, optimizer, opt_level='O1')"
    if any(binding is not None and binding.owner is None for binding in bindings):
        return (
            "amp.scale_loss got an optimizer that was unpickled: its session stayed behind. Call "
            f"amp.restore(model, optimizer) with the model that came with it, and then\n{call}"
        )
    if not _amp_state.initialized:
        return f"amp.scale_loss was called before amp.initialize. First call\n{call}"
    if not bindings:
        return f"amp.scale_loss got no optimizer, and no amp session is alive. Call\n{call}"
    return (
        "amp.scale_loss got an optimizer that amp has not prepared. Pass it to amp.initialize and "
        f"use the one returned:\n{call}"
    )


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"amp.scale_loss got a loss of type {type(loss).__name__}; it must be a tensor."
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"amp.scale_loss got a loss of dtype {loss.dtype}; it must be a real floating type "
            "that gradients can flow through."
        )


def _scaler(session: Session, loss_id: int) -> Scaler:
    count = len(session.scalers)
    if not -count <= loss_id < count:
        raise IndexError(
            f"loss_id is {loss_id}, but this amp.initialize made {count} loss scaler"
            f"{'s' if count > 1 else ''}. Pass num_losses={loss_id + 1} to amp.initialize."
        )
    return session.scalers[loss_id]
