"""The state of a converted model: its plan, its masters, and its fp32 state dict.

``state_dict`` and ``load_state_dict`` work on any module, so every module with a 16-bit tensor has
hooks of its own, as in apex. They handle its own tensors alone: it does not matter whether the
module, a parent or a wrapper is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, tree
from apex._core.rounding import exact_value
from apex._engine.autocast.region import Region
from apex._engine.conversion.notes import Writes
from apex._engine.conversion.plan import ModelPlan
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import at_tracing, is_tracing, recompile_on_change
from apex._torch.modules import own_tensors

if TYPE_CHECKING:
    from apex._engine.session import Session

STATE = "_apex_state"
"""The attribute's name."""

Entries = MutableMapping[str, Any]
"""A state dict."""


class Removable(Protocol):
    """What a conversion has added to a module."""

    def remove(self) -> None:
        """Removes it."""


@dataclass(eq=False)
class ModelState:
    """The conversion state of a model.

    Attributes:
        plan: The conversion.
        region: Runs the model's own forward.
        link: Finds the masters of the parameters.
        inner_forward: A ``forward`` that was set on the object, called in place of the class's.
        handles: What to remove at the end.
        uncast: Names of the arguments of ``forward`` that are not cast, and positions of those that
            it takes by position.
    """

    plan: ModelPlan
    region: Region
    link: MasterLink
    inner_forward: Callable[..., Any] | None = None
    handles: list[Removable] = field(default_factory=list)
    uncast: tuple[int | str, ...] = ()

    def begin_forward(self, model: nn.Module) -> None:
        """Rounds written masters into the model, and records the active DDP wrapper.

        A pass that is being traced only records the wrapper. Compiled code does neither.
        """
        is_traced = torch.compiler.is_compiling() or is_tracing()
        if self.plan.casts_down and not is_traced:
            self.link.masters.update_model(model)
            if torch.is_grad_enabled():
                self.link.session.begin_forward(model)
        self.record_wrapper(traced=is_traced)

    @at_tracing  # before torch 2.12, not for a function that gets a module
    def record_wrapper(self, *, traced: bool) -> None:
        """Records the active DDP wrapper."""
        session = self.link.session
        wrapper = active_wrapper()
        if traced:
            recompile_on_change(_reference_to_wrapper)
        if wrapper is not None:
            session.ddp_tracker.mark_forward(wrapper, session, traced=traced)


def _reference_to_wrapper() -> weakref.ref[nn.Module] | None:
    """Returns a weak reference to the active DDP wrapper, which compiled code may outlive."""
    wrapper = active_wrapper()
    return None if wrapper is None else weakref.ref(wrapper)


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
    """Connects a converted model's modules to the masters of their parameters."""

    def __init__(self, session: Session, dtype: torch.dtype | None) -> None:
        """Connects to masters.

        Args:
            session: Has the masters, and is kept alive.
            dtype: The dtype in which the model computes.
        """
        self.session = session
        self.masters = session.masters
        self._dtype = dtype
        # By ``id`` of a tensor: its entry in the state dict that is being made.
        self._saved = weakref.WeakValueDictionary[int, Tensor]()
        # Warns of writes that 16 bits lose.
        self.writes = Writes()

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
            if not dtypes.is_low_precision(entry):
                continue
            # A tied weight is one tensor under all its names in these entries.
            exact = self._saved.get(id(tensor))
            if exact is None or all(exact is not other for other in entries.values()):
                exact = exact_value(entry, [self.masters.exact_value(tensor)])
                self._saved[id(tensor)] = exact
            entries[prefix + key] = exact
        if is_converted(module):  # its parts come first
            self._saved.clear()

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
