"""The state of a converted model: its plan, its masters, and its fp32 state dict.

``state_dict`` and ``load_state_dict`` work on any module, so every module with a 16-bit tensor has
hooks of its own, as in apex. They handle its own tensors alone: it does not matter whether the
module, a parent or a wrapper is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, tree
from apex._core.rounding import exact_value
from apex._engine.autocast.region import LowPrecisionRegion, Region
from apex._engine.conversion.notes import AVERAGE, Writes
from apex._engine.conversion.plan import ModelPlan
from apex._engine.masters import MasterTable
from apex._pickle import rebuild
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import at_tracing, is_tracing, recompile_on_change
from apex._torch.modules import own_tensors

if TYPE_CHECKING:
    from apex._engine.session import Session

STATE = "_apex_state"
"""The attribute's name."""

Entries = MutableMapping[str, Any]
"""A state dict."""


@dataclass(eq=False)
class ModelState:
    """The conversion state of a model.

    Attributes:
        plan: The conversion.
        region: Runs the model's own forward.
        link: Finds the masters of the parameters.
        inner_forward: A ``forward`` that was set on the object, called in place of the class's.
        handles: Hooks to remove at the end.
        uncast: Names of the arguments of ``forward`` that are not cast, and positions of those that
            it takes by position.
    """

    plan: ModelPlan
    region: Region
    link: MasterLink
    inner_forward: Callable[..., Any] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    uncast: tuple[int | str, ...] = ()

    def begin_forward(self, model: nn.Module) -> None:
        """Rounds written masters into the model, and records the active DDP wrapper.

        A pass that is being traced only records the wrapper. Compiled code does neither.
        """
        is_traced = torch.compiler.is_compiling() or is_tracing()
        if self.plan.casts_down and not is_traced:
            session = self.link.session
            if session is not None:
                session.masters.update_model(model)
                if torch.is_grad_enabled():
                    session.begin_forward(model)
        self.record_wrapper(traced=is_traced)

    @at_tracing  # before torch 2.12, not for a function that gets a module
    def record_wrapper(self, *, traced: bool) -> None:
        """Records the active DDP wrapper."""
        session = self.link.session
        wrapper = active_wrapper()
        if traced:
            recompile_on_change(_reference_to_wrapper)
        if session is not None and wrapper is not None:
            session.ddp_tracker.mark_forward(wrapper, session, traced=traced)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without region: no level casts both parameters and operators.

        A model that casts no parameters is pickled as a plain model, without this state.
        """
        if not self.plan.casts_down:
            return type(None), ()
        return rebuild, ("model_state", self.plan, self.link, self.inner_forward, self.handles)


def _reference_to_wrapper() -> weakref.ref[nn.Module] | None:
    """Returns a weak reference to the active DDP wrapper, which compiled code may outlive."""
    wrapper = active_wrapper()
    return None if wrapper is None else weakref.ref(wrapper)


def rebuild_state(plan: ModelPlan, *parts: Any) -> ModelState:
    """Rebuilds a pickled state."""
    return ModelState(plan, LowPrecisionRegion(), *parts)


def state_of(model: nn.Module) -> ModelState | None:
    """Returns the conversion state of ``model``, or ``None`` for a plain one."""
    state: ModelState | None = model.__dict__.get(STATE)
    return state


def is_converted(model: nn.Module) -> bool:
    """Returns whether ``model`` is converted."""
    return state_of(model) is not None


def set_region(model: nn.Module, region: Region) -> None:
    """Sets the region in which a converted model runs its forward."""
    state = state_of(model)
    if state is not None:
        state.region = region


# -- masters and state dicts -----------------------------------------------------------------------


class MasterLink:
    """Connects a converted model's modules to the masters of their parameters.

    A deep copy keeps a weak link to the original's session, which has the copy's masters if an
    optimizer was copied with it. A pickle keeps no link.
    """

    def __init__(self, session: Session | None, dtype: torch.dtype | None) -> None:
        """Connects to masters.

        Args:
            session: Has the masters, and is kept alive; ``None`` if there are none.
            dtype: The dtype in which the model computes.
        """
        # A weak reference in a deep copy.
        self._session: Session | weakref.ref[Session] | None = session
        self._dtype = dtype
        # Deep copies serve as averages of the weights, or are cast to be saved.
        self.is_copy = False
        # Warns of writes that 16 bits lose.
        self.writes = Writes()
        # The entry that a copy's ``state_dict`` got last: was it written to since?
        self._latest: Tensor | None = None

    @property
    def session(self) -> Session | None:
        """The session of the modules' masters, or ``None``."""
        session = self._session
        return session() if isinstance(session, weakref.ref) else session

    @property
    def masters(self) -> MasterTable:
        """The masters of the session; none without one."""
        session = self.session
        return MasterTable() if session is None else session.masters

    def attach(self, module: nn.Module, *, in_fp32: bool) -> list[RemovableHandle]:
        """Registers the hooks of one module; returns their handles. Does nothing if it has them.

        With ``in_fp32``, the module computes in fp32.
        """
        hooks: Any = module  # torch does not annotate the methods that register them
        has_hooks = any(isinstance(hook, MasterLink) for hook in hooks._state_dict_hooks.values())
        if has_hooks:
            return []
        saving: RemovableHandle = hooks.register_state_dict_post_hook(self)
        # Run before the user's hooks, which may rename entries.
        hooks._state_dict_hooks.move_to_end(saving.id, last=False)
        loading = hooks.register_load_state_dict_pre_hook(self.before_loading)
        handles = [saving, loading]
        if in_fp32:
            entering = hooks.register_forward_pre_hook(self.before_fp32, with_kwargs=True)
            leaving = hooks.register_forward_hook(self.after_fp32)
            handles += [entering, leaving]
        return handles

    def before_fp32(self, module: nn.Module, args: tree.Args, kwargs: tree.Kwargs) -> tree.Call:
        """Returns the arguments of a module with every floating tensor in fp32."""
        return tree.cast_arguments(args, kwargs, torch.float32)

    def after_fp32(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the output of an fp32 module with every floating tensor in the model's dtype."""
        return tree.cast_tensors(output, self._dtype or torch.float32)

    def __call__(self, module: nn.Module, entries: Entries, prefix: str, _: object) -> None:
        """Replaces the entries of the module's own 16-bit tensors by their exact fp32 values."""
        for key, tensor in own_tensors(module):
            entry = entries.get(prefix + key)
            if not isinstance(entry, Tensor) or entry is tensor:  # with ``keep_vars``
                continue
            if dtypes.is_low_precision(entry):
                exact = exact_value(entry, [self.masters.exact_value(tensor)])
                entries[prefix + key] = exact
                if not self.is_copy:
                    continue
                if self._latest is not None and self._latest._version > 0:
                    self.writes.tell(
                        "entries",
                        "amp: the script writes into the state_dict() of a deep copy of a 16-bit "
                        "model. Its entries are fp32 copies, so the model does not change. %s",
                        AVERAGE,
                    )
                self._latest = None if exact.is_inference() else exact

    def before_loading(
        self, module: nn.Module, entries: Entries, prefix: str, metadata: Entries, *rest: object
    ) -> None:
        """Sets the masters of the module's own tensors to the exact values that are loaded.

        Where an entry is not loaded after all, the master follows the weight that stays.

        Raises:
            RuntimeError: For ``load_state_dict(assign=True)``, before anything has changed.
        """
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace parameters of {type(module).__name__} "
                "that amp and the optimizer hold. Drop assign=True, or call amp.restore before "
                "loading and amp.initialize after."
            )
        self.writes.note_load()
        loaded: list[tuple[Tensor, Tensor]] = []
        for key, tensor in own_tensors(module):
            entry = entries.get(prefix + key)
            if not isinstance(entry, Tensor) or entry.dtype is tensor.dtype:
                continue
            if entry.shape == tensor.shape:
                loaded.append((tensor, entry))
        self.masters.set_exact_values(loaded)

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterLink:
        """Returns a link to the same session, which the copy does not keep alive."""
        new = MasterLink(None, self._dtype)
        new.is_copy = True
        session = self.session
        if session is not None:
            new._session = weakref.ref(session)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without a session."""
        return rebuild, ("master_link", None, self._dtype)
