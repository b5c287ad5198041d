"""The session of one ``initialize`` call: its policy, scalers, casts and models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn

from apex._core.op_table import AutocastSpec
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._engine import registry
from apex._engine.autocast.ambient import (
    begin_casts,
    end_casts,
    follow_sessions,
    tag_caches,
    this_thread,
)
from apex._engine.autocast.region import AmbientRegion, AutocastRegion, Region
from apex._engine.autocast.user_functions import UserRegistry
from apex._engine.observer import Observer
from apex._engine.registry import WeakList
from apex._engine.scaler import scaler_for
from apex._engine.wrappers import fsdp
from apex._torch.autograd import autocast_depth
from apex._torch.dynamo import untraced

STATE = "_apex_state"
"""Attribute of a converted model: the state of its conversion, which holds the session."""


Maker = Literal["initialize", "init", "suggest"]
"""The public function that makes a session; one for ``suggest`` is known to no other."""


live_optimizers: WeakList[Any] = WeakList()
"""The states of the prepared optimizers, which keep them alive, in the same order on all ranks:
they communicate for each in turn."""


class Session:
    """One ``initialize`` call and everything it created.

    Models and optimizers hold strong references to their session; it holds only weak references to
    them. It is collected with the last of them, and its thread's op casts end.

    Attributes:
        live: All sessions, oldest first.
    """

    # The registry lies below, where it knows sessions as casts do.
    live: ClassVar[WeakList[Session]] = cast(Any, registry.live)

    def __init__(
        self,
        policy: Policy,
        *,
        num_losses: int,
        rule: ScaleRule,
        spec: AutocastSpec | None,
        functions: UserRegistry,
        keep_fp32: bool,
        made_by: Maker,
        report: Callable[..., None],
        observer: Observer,
        options: Any = None,
    ) -> None:
        """Makes the scalers and registers the kernels for op casts.

        Args:
            policy: What the level means.
            num_losses: Number of scalers.
            rule: The rule of dynamic scales.
            spec: The op casts; ``None`` for none.
            functions: User-registered functions, cast while the session lives.
            keep_fp32: Whether 16-bit parameters without a master keep their fp32 values.
            made_by: The public function that made it.
            report: Called with each pass whose updates of the scale are complete, or that failed.
            observer: Hears what happens.
            options: What ``initialize`` was called with.
        """
        follow_sessions()
        # What the level means: dtypes, op casts, masters and loss scale.
        self.policy = policy
        # ``amp.state_dict`` and its like prefer sessions of ``initialize``.
        self.made_by = made_by
        # amp's report of overflows, which the engine knows nothing of.
        self.report = report
        # Warns of mistakes in the training loop, which the engine does not look for.
        self.observer = observer
        # apex's view of the policy, in which scripts may unset ``enabled``.
        self.options = options
        # One per loss.
        self.scalers = [scaler_for(policy.loss_scale, rule) for _ in range(num_losses)]
        # Turns op casts on in forward passes of the models.
        self.region: Region = Region()
        if spec is not None:
            self.region = AutocastRegion(spec)
        # The op casts, until they end.
        self.spec = spec
        self._casts = ExitStack()  # ends them
        # Replaced while a session casts, in the modules that hold them.
        self._functions = functions
        # Costs 4 bytes per element: only where a script asks for it.
        self.keep_fp32 = keep_fp32
        self._models = WeakList[nn.Module]()
        # Another thread may be about to step what a pass in this one could reach.
        self.thread = this_thread()
        # Whether its casts are on in that thread, outside of forward passes.
        self.is_ambient = False
        self.live.add(self)
        tag_caches()

    # -- models ------------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """The live models that are still prepared."""
        return [model for model in self._models if STATE in vars(model)]

    def add_models(self, models: Iterable[nn.Module]) -> None:
        """Adds converted models."""
        for model in models:
            self._models.add(model)
            fsdp.add(model)

    # -- casts -------------------------------------------------------------------------------

    def begin_casts(self) -> None:
        """Turns op casts on in this thread, until the session ends."""
        if self.spec is None:
            return
        weakref.finalize(self, self._casts.close).atexit = False
        self._casts.callback(end_casts)
        self._casts.callback(self._functions.undo)
        self._functions.apply()
        # Inside a ``torch.autocast`` block, the block decides.
        self.is_ambient = autocast_depth() == 0
        if self.is_ambient:
            begin_casts()

    def cast_by(self, other: Session) -> None:
        """Runs the models' forward passes with the op casts of another session."""
        self.region = other.region

    def close(self) -> None:
        """Turns op casts off, in this thread and in the models' forward passes; idempotent.

        As in apex, the models run under the casts of a later session.
        """
        self.spec = None
        self._casts.close()
        region = self.region
        for session in self.live:
            if session.region is region:
                session.region = AmbientRegion()

    # -- what its parts ask ------------------------------------------------------------------

    @property
    def has_scale(self) -> bool:
        """Whether a loss has a scale."""
        return not all(scaler.is_identity for scaler in self.scalers)

    @property
    def can_skip(self) -> bool:
        """Whether an overflow skips steps."""
        return any(scaler.dynamic for scaler in self.scalers)

    @property
    def drifts(self) -> bool:
        """Whether there is state that a join, or ranks with flat parameters, do not share."""
        return self.policy.master_weights or self.can_skip

    @property
    def follows_other_steps(self) -> bool:
        """Whether steps of optimizers that amp has not prepared concern the session."""
        return self.policy.master_weights or self.spec is not None

    @untraced
    def check_shards(self) -> None:
        """Raises RuntimeError if a model was sharded after it was prepared with an optimizer."""
        if any(prepared.session is self for prepared in live_optimizers):
            fsdp.check(self.models, drifts=self.drifts)


@untraced  # dynamo of torch 2.10 cannot trace the weak table
def forget_cleared(cleared: Sequence[Tensor]) -> None:
    """Forgets what unfinished passes hold for parameters whose gradients were cleared."""
    for prepared in live_optimizers:  # of any session, as it may train these parameters
        prepared.forget_cleared(cleared)
