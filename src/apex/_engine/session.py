"""The session of one ``initialize`` call: its policy, scalers, masters and members."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, cast

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

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
from apex._engine.masters import (
    MasterPair,
    MasterTable,
    keep_narrow,
    narrow_grads,
    widen_nonzero_grads,
)
from apex._engine.observer import Observer
from apex._engine.registry import Registry, WeakList
from apex._engine.scaler import scaler_for
from apex._engine.wrappers.ddp import DDPWrappers
from apex._engine.wrappers.fsdp import Shards
from apex._torch.autograd import (
    adds_to_any,
    at_end_of_pass,
    autocast_depth,
    backward_id,
    is_transformed,
)
from apex._torch.dynamo import inlined, is_compiling, untraced
from apex._torch.modules import params_in

STATE = "_apex_state"
"""Attribute of a converted model: the state of its conversion, which holds the session."""


Maker = Literal["initialize", "init", "suggest"]
"""The public function that makes a session; one for ``suggest`` is known to no other."""


class Member(Protocol):
    """The state of an optimizer, as its session and models know it."""

    def forget_cleared(self, cleared: Sequence[Tensor]) -> None:
        """Forgets what unfinished passes hold for parameters whose gradients were cleared."""
        ...


class Session:
    """One ``initialize`` call and everything it created.

    Models and optimizers hold strong references to their session; it holds only weak references to
    them. It is collected with the last of them, and its thread's op casts end.

    Attributes:
        live: All sessions, oldest first.
    """

    # The registry lies below, where it knows sessions as casts do.
    live: ClassVar[Registry[Session]] = cast(Any, registry.live)

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
        # All masters of the models' parameters.
        self.masters = MasterTable()
        # The states of prepared optimizers, which keep them alive, in the same order on all ranks:
        # they communicate for each in turn.
        self.members = WeakList[Member]()
        # Parameters with a hook that prepares their gradient alone.
        self._hooked: MutableMapping[Tensor, object] = WeakTensorKeyDictionary()
        self._models = WeakList[nn.Module]()
        # What shares gradients among ranks.
        self.ddp = DDPWrappers()
        self.shards = Shards()
        # Another thread may be about to step what a pass in this one could reach.
        self.thread = this_thread()
        # Whether its casts are on in that thread, outside of forward passes.
        self.is_ambient = False
        self.live.add(self)
        tag_caches()

    # -- members -----------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """The live models that are still prepared."""
        return [model for model in self._models if STATE in vars(model)]

    def add_models(self, models: Iterable[nn.Module]) -> None:
        """Adds converted models."""
        for model in models:
            self._models.add(model)
            self.shards.add(model)

    # -- gradients ---------------------------------------------------------------------------

    @untraced  # dynamo of torch 2.10 cannot trace the weak table
    def forget_cleared(self, cleared: Sequence[Tensor]) -> None:
        """Forgets what unfinished passes hold for parameters whose gradients were cleared."""
        for member in live_members():  # also others, which may train these models
            member.forget_cleared(cleared)

    def prepare_grads(self, pairs: Sequence[MasterPair], params: Sequence[Tensor]) -> None:
        """Makes gradients fp32 for a pass that adds to them; of 16 bits, if ranks send them.

        Args:
            pairs: Those of the parameters.
            params: Parameters that the pass, which may run already, reaches together.
        """
        if is_transformed():
            return
        if self.ddp.states:
            sent = self.ddp.sent(params)
            narrowed = [pair for pair in pairs if id(pair.model) in sent]
            pairs = [pair for pair in pairs if id(pair.model) not in sent]
            narrow_grads(narrowed)
            if backward_id() != -1 and adds_to_any(params):
                keep_narrow(narrowed)
                at_end_of_pass(partial(self.ddp.end_pass, params, sent=sent))
        widen_nonzero_grads(pairs)

    def adopt(self, pairs: Iterable[MasterPair], user: object) -> None:
        """Adds the masters of another session's optimizer, ``user``, that are of its models."""
        own: set[int] = set()
        for model in self.models:
            own.update(map(id, params_in(model)))
        self.masters.add([pair for pair in pairs if id(pair.model) in own], user)

    def hook_pairs(self, pairs: Iterable[MasterPair]) -> None:
        """Hooks parameters with masters, as :meth:`hook_params`, if some have no hook yet."""
        if len(self._hooked) != len(self.masters):
            self.hook_params(pair.model for pair in pairs)

    def hook_params(self, params: Iterable[Tensor]) -> None:
        """Prepares each gradient by a hook of its own, where no hook of an output runs."""
        for param in params:
            if param.requires_grad and param not in self._hooked:
                hook = _PassReaches(self, param)
                handle = param.register_hook(hook)  # type: ignore[no-untyped-call]
                # Without a master, it is the session that the hook serves.
                owner = self.masters.pair_of(param) or self
                self._hooked[param] = weakref.finalize(owner, handle.remove)

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
    def follows_passes(self) -> bool:
        """Whether a backward pass concerns masters, or what ranks share of scaled gradients."""
        return bool(self.masters or (self.ddp.states and self.has_scale))

    @property
    def can_skip(self) -> bool:
        """Whether an overflow skips steps."""
        return any(scaler.dynamic for scaler in self.scalers)

    @property
    def drifts(self) -> bool:
        """Whether there is state that a join, or ranks with flat parameters, do not share."""
        return bool(self.masters) or self.can_skip

    @property
    def follows_other_steps(self) -> bool:
        """Whether steps of optimizers that amp has not prepared concern the session."""
        return self.policy.master_weights or self.spec is not None

    @untraced
    def check_shards(self) -> None:
        """Raises RuntimeError if a model was sharded after it was prepared with an optimizer."""
        if any(self.members):
            self.shards.check(self.models, drifts=self.drifts)

    def shares_grads(self, params: Sequence[Tensor]) -> bool:
        """Returns whether ranks share the gradients of a pass that begins now, or need not."""
        return self.shards.reduces() and self.ddp.shares(params)


def live_members() -> list[Any]:
    """Returns the states of the live optimizers of all sessions."""
    members: list[Any] = []
    for session in Session.live:
        members += session.members
    return members


class _PassReaches:
    """A hook of a parameter, by which its gradient is prepared."""

    __torch_unserializable__ = True
    """torch sends the parameter to other processes without the hook, and without a warning."""

    def __init__(self, session: Session, param: Tensor) -> None:
        self._session = weakref.ref(session)
        self._param = weakref.ref(param)

    @inlined  # a pass in a compiled function calls it as a frame of its own
    def __call__(self, gradient: object) -> None:
        session = self._session()
        param = self._param()
        is_traced = is_compiling()  # by compiled autograd
        if session is not None and param is not None and not is_traced:
            pair = session.masters.pair_of(param)
            session.prepare_grads([] if pair is None else [pair], [param])
