"""The state of a converted model: its plan, its masters, and its fp32 state dict.

``state_dict`` and ``load_state_dict`` work on any module, so every module with a 16-bit tensor has
hooks of its own, as in apex. They handle its own tensors alone: it does not matter whether the
module, a parent or a wrapper is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, tree
from apex._core.rounding import exact_value
from apex._engine import master_table
from apex._engine.autocast.region import Region
from apex._engine.autocast.weights import Weights
from apex._engine.conversion.copies import PlainCopies
from apex._engine.conversion.plan import ModelPlan, modules_in_fp32
from apex._engine.masters import MasterPair, update_model_from_masters
from apex._engine.passes import hook, hook_pairs, prepare_grads
from apex._engine.session import STATE, Session
from apex._engine.wrappers.ddp import wrappers
from apex._torch import ranks
from apex._torch.autograd import backward_id, unrecorded
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import (
    at_tracing,
    is_tracing,
    recompile_on_change,
    untraced,
)
from apex._torch.modules import modules_in, named_parameters, own_tensors, params_in

Entries = MutableMapping[str, Any]
"""A state dict."""


_COPIED_ATTRIBUTES = (
    "The attributes of a prepared model, or of a part of one, were copied or pickled without it, "
    "as by copy.deepcopy(model.__dict__). They hold amp's state. Copy or pickle the model itself: "
    "copy.deepcopy(model) is a plain fp32 model."
)


class ModelState:
    """The conversion state of a model, and the hooks of its modules."""

    def __init__(self, model: nn.Module, plan: ModelPlan, session: Session) -> None:
        """Starts with the class's own ``forward``.

        Args:
            model: The model, which keeps this object alive.
            plan: The conversion.
            session: Has the masters of the parameters, and is kept alive.
        """
        self._model = weakref.ref(model)
        self.plan = plan
        self.session = session
        # A ``forward`` that was set on the object, called in place of the class's.
        self.inner_forward: Callable[..., Any] | None = None
        # Names of the arguments of ``forward`` that are not cast, and positions of those that it
        # takes by position.
        self.uncast: tuple[int | str, ...] = ()
        # Whether the model was deep-copied, perhaps for an average.
        self.was_copied = False
        # What conversion has added to modules; they alone keep it alive, as scripts replace them.
        self._added = weakref.WeakSet[PlainCopies]()
        # The pairs of all parameters of the model, and of each part's own: the hooks of a part keep
        # this object, and so the part's masters, alive for longer than the model.
        self._pairs = weakref.WeakKeyDictionary[nn.Module, list[MasterPair]]()
        # The number of pairs that had been made when these were found.
        self._found_among = -1
        # Whether hooks of its parameters prepare their gradients, as they have no masters.
        self._is_hooked = False
        # A region in place of the session's.
        self._region: Region | None = None
        # Those whose casts its forward passes share.
        self.weights = Weights(model=model)
        # The wrappers of parts of the model, searched for in its first forward with gradients.
        self._parts: list[weakref.ref[DistributedDataParallel]] | None = None
        # By ``id`` and version of a tensor: its entry in the state dict that is being made.
        self._saved = weakref.WeakValueDictionary[tuple[int, int], Tensor]()

    @property
    def model(self) -> nn.Module:
        """The model, also in a forward pass of a replica."""
        return cast(nn.Module, self._model())

    @property
    def region(self) -> Region:
        """Runs the model's own forward."""
        return self._region or self.session.region

    def __reduce__(self) -> Any:
        """Raises TypeError where a script copies or pickles the attributes of a module."""
        raise TypeError(_COPIED_ATTRIBUTES)

    def set_forward(self, inner: Callable[..., Any] | None, uncast: tuple[int | str, ...]) -> None:
        """Sets what the model's call runs, and the arguments that it does not cast."""
        self.inner_forward = inner
        self.uncast = uncast

    @property
    def pairs(self) -> Sequence[MasterPair]:
        """The pairs of the model's parameters."""
        if self._model() is None:  # a clone that shares this state is left
            return ()
        if self._found_among != MasterPair.made:
            self.find_pairs()
        return self._pairs[self.model]

    def find_pairs(self) -> None:
        """Finds the pairs of the model's parameters, and keeps them alive."""
        made = MasterPair.made
        model = self.model
        for part in modules_in(model):
            own = [tensor for _, tensor in own_tensors(part)]
            self._pairs[part] = master_table.pairs_of(own)
        self._pairs[model] = master_table.pairs_of(param for _, param in named_parameters(model))
        self._found_among = made  # last, for other threads

    @property
    def follows_passes(self) -> bool:
        """Whether a backward pass concerns masters, or what ranks share of scaled gradients."""
        return bool(self.pairs or (wrappers.states and self.session.has_scale))

    def run_in(self, region: Region | None) -> None:
        """Runs the model's own forward in a region in place of the session's."""
        self._region = region

    def note_copy(self) -> None:
        """Records that the model is deep-copied."""
        self.was_copied = True

    def begin_forward(self, *, traced: bool) -> None:
        """Rounds written masters into the model, and records the DDP wrappers around and in it.

        In compiled code, guards do so before each run. Where wrappers in the model break its graph,
        a call that is not traced does so, as the rest of the graph may have no guards.
        """
        traced = traced or is_tracing()
        if traced:
            self.begin_trace()
        if self._parts or not traced:
            self.begin_untraced(traced=traced)

    def await_backward(self, output: Any) -> None:
        """Prepares the gradients, when a backward pass reaches the output, for what it adds."""
        if not self.follows_passes:
            return
        if tree.before_backward(output, _PassBegins(self)):
            for wrapper in self._wrappers():
                wrappers.watch(wrapper)
        elif torch.is_grad_enabled():  # the script may find the loss elsewhere
            hook_pairs(self.pairs)

    def begin_pass(self) -> None:
        """Prepares the gradients: a backward pass has reached an output."""
        model = self._model()
        if model is not None:
            pairs = self.pairs
            params = [pair.model for pair in pairs] or params_in(model)
            prepare_grads(pairs, params)

    @at_tracing  # before torch 2.12, not for a function that gets a module
    def begin_trace(self) -> None:
        """Records the DDP wrappers, and what comes before each run of the code."""
        self.record_wrappers(traced=True)
        recompile_on_change(_reference_to_wrapper)
        self.follow_masters()

    @at_tracing
    def follow_masters(self) -> None:
        """Has written masters rounded before each run of the code that is traced."""
        recompile_on_change(_before_compiled_code)

    @untraced
    def begin_untraced(self, *, traced: bool) -> None:
        """Rounds written masters, and records wrappers."""
        if self.plan.casts_down:
            self.use()
        if ranks.is_running():
            self.record_wrappers(traced=traced)

    def record_wrappers(self, *, traced: bool) -> None:
        """Records that a forward pass begins under the wrappers.

        A traced one has no hook of its output: hooks of the parameters tell of its backward pass.
        """
        session = self.session
        around = self._wrappers()
        for wrapper in around:
            watched = traced and self.follows_passes
            wrappers.mark_forward(
                wrapper, watched=watched, drifts=session.drifts, scaled=session.has_scale
            )
        if not (traced and around):
            return
        hook_pairs(self.pairs)
        if session.has_scale and not (self.pairs or self._is_hooked):
            self._is_hooked = True
            for param in params_in(self.model):
                if param.requires_grad:
                    weakref.finalize(self, hook(param).remove)

    def _wrappers(self) -> list[DistributedDataParallel]:
        """Returns the DDP wrappers in the model, and the active one."""
        if not ranks.is_running():
            return []
        found = [part() for part in self._wrapped_parts()]
        found.append(active_wrapper())
        return [wrapper for wrapper in found if wrapper is not None]

    def _wrapped_parts(self) -> list[weakref.ref[DistributedDataParallel]]:
        if self._parts is None and torch.is_grad_enabled():
            modules = modules_in(self.model)
            wrapped = [part for part in modules if isinstance(part, DistributedDataParallel)]
            self._parts = [*map(weakref.ref, wrapped)]
        return self._parts or []

    def use(self, reader: FrameType | None = None) -> None:
        """Rounds written masters into a 16-bit model, whose forward or method is used."""
        with unrecorded():
            update_model_from_masters(self.pairs)
            self.session.observer.model_used(self, reader)

    # -- hooks of modules --------------------------------------------------------------------

    def attach(self) -> None:
        """Registers the hooks of a 16-bit model's modules that have none."""
        if not self.plan.casts_down:
            return
        outermost = modules_in_fp32(self.model, self.plan)
        for module in modules_in(self.model):
            if not _has_hooks(module):
                # Modules inside an fp32 module get its fp32 tensors, so it alone casts.
                self._attach(module, in_fp32=outermost.get(module, False))

    def _attach(self, module: nn.Module, *, in_fp32: bool) -> None:
        hooks: Any = module  # torch does not annotate the methods that register them
        saving: RemovableHandle = hooks.register_state_dict_post_hook(self)
        # Run before the user's hooks, which may rename entries.
        hooks._state_dict_hooks.move_to_end(saving.id, last=False)
        before_saving = hooks.register_state_dict_pre_hook(self.take_in)
        loading = hooks.register_load_state_dict_pre_hook(self.before_loading)
        handles = [saving, before_saving, loading]
        if in_fp32:
            entering = hooks.register_forward_pre_hook(self.before_fp32, with_kwargs=True)
            leaving = hooks.register_forward_hook(self.after_fp32)
            handles += [entering, leaving]
        take_in = weakref.WeakMethod(self.take_in)
        self._added.add(PlainCopies(module, handles, take_in))

    def detach(self) -> None:
        """Removes what conversion has added to modules."""
        for added in [*self._added]:
            added.remove()

    def take_in(self, module: nn.Module, *_: object) -> None:
        """Registers the hooks of parts that a script has put into a module since.

        They may hold the module's own parameters, as parametrizations do.
        """
        is_known = all(map(_has_hooks, module.children()))
        if not is_known and self._model() is not None:
            self.attach()

    def before_fp32(self, module: nn.Module, args: tree.Args, kwargs: tree.Kwargs) -> tree.Call:
        """Returns the arguments of a module with every floating tensor in fp32."""
        return tree.cast_arguments(args, kwargs, torch.float32)

    def after_fp32(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the output of an fp32 module with every floating tensor in the model's dtype."""
        return tree.cast_tensors(output, self.plan.param_dtype or torch.float32)

    def __call__(self, module: nn.Module, entries: Entries, prefix: str, _: object) -> None:
        """Replaces the entries of the module's own 16-bit tensors by their exact fp32 values."""
        for key, tensor in own_tensors(module):
            entry = entries.get(prefix + key)
            if not isinstance(entry, Tensor) or entry is tensor:  # with ``keep_vars``
                continue
            if not dtypes.is_low_precision(entry):
                continue
            # A tied weight is one tensor under all its names in these entries.
            version = 0 if tensor.is_inference() else tensor._version
            saved = id(tensor), version
            exact = self._saved.get(saved)
            if exact is None or all(exact is not other for other in entries.values()):
                exact = exact_value(entry, master_table.exact_value(tensor))
                self._saved[saved] = exact
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
                "that amp and the optimizer hold. Drop assign=True, or call amp.restore, load, "
                "create an optimizer of the new parameters, and call amp.initialize."
            )
        self.take_in(module)
        self.session.observer.loading(self)
        own = dict(own_tensors(module))
        # A master that was written before would win over a 16-bit entry.
        update_model_from_masters(master_table.pairs_of(own.values()))
        loaded: list[tuple[Tensor, Tensor]] = []
        for key, tensor in own.items():
            entry = entries.get(prefix + key)
            if not isinstance(entry, Tensor) or entry.dtype is tensor.dtype:
                continue
            if entry.shape == tensor.shape:
                loaded.append((tensor, entry))
        master_table.set_exact_values(loaded)


def _has_hooks(module: nn.Module) -> bool:
    return any(isinstance(hook, ModelState) for hook in module._state_dict_hooks.values())


class _PassBegins:
    """A hook of the outputs of one forward pass, by which their model's gradients are prepared."""

    def __init__(self, state: ModelState) -> None:
        self._state = weakref.ref(state)  # whose model may keep its output
        # The last pass, as it reaches several outputs.
        self._pass_id = -1

    @untraced
    def __call__(self, gradients: object) -> None:
        state = self._state()
        pass_id = backward_id()
        if state is not None and pass_id != self._pass_id:
            self._pass_id = pass_id
            state.begin_pass()


def _before_compiled_code() -> None:
    """Prepares all models, as a guard, which dynamo calls before each run of compiled code.

    One code serves all models of a class. It rounds no masters, and runs no hooks of outputs.
    """
    pairs = master_table.all_pairs()
    update_model_from_masters(pairs)
    hook_pairs(pairs)
    has_scale = any(session.has_scale for session in Session.live)
    wrappers.mark_compiled_forward(watched=has_scale or bool(pairs))


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


def converted_in(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the models that are converted, and their parts that are, each once."""
    parts = dict.fromkeys(part for model in models for part in modules_in(model))
    return [*filter(is_converted, parts)]
