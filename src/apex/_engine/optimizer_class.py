"""The generated subclass of a bound optimizer, which overrides the methods that amp adds to."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch.optim import Optimizer

from apex._core.mixins import mixin_of, plain_class, with_mixin
from apex._engine import closures
from apex._engine import step as stepping
from apex._engine.binding import Binding
from apex._engine.exchange import optimizers_in
from apex._engine.masters import PREPARED
from apex._engine.mistakes import BLOCK
from apex._engine.undo import all_or_nothing
from apex._pickle import rebuild
from apex._torch.dynamo import untraced, untraced_frame
from apex._torch.parameters import without_overrides

ATTRIBUTE = PREPARED

_SCALING = "_step_supports_amp_scaling"


class AmpOptimizer(Optimizer):
    """Overrides for a bound optimizer; without a binding each calls the optimizer's own method.

    Never instantiated: :func:`bind_class` generates a subclass of it and of the optimizer's class.
    """

    _apex_binding: Binding | None

    def __init_subclass__(cls) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""

    @untraced_frame
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps unless a gradient overflowed, then rounds the masters into the model."""
        binding = binding_of(self)
        if binding is None:
            # Made by ``type(optimizer)(...)``, or an LR scheduler from before amp.restore calls.
            own = cast(Callable[..., Any], own_class(type(self)).step)
            return own(self, *(() if closure is None else (closure,)), **kwargs)
        # LR schedulers read this to check that the optimizer stepped before them.
        self._opt_called = True
        own_step = binding.inner_step if binding.optimizer is self else None
        run = own_step or super().step
        if kwargs:
            run = functools.partial(run, **kwargs)
        if binding.stepping:  # an optimizer inside another: the step has begun
            return run() if closure is None else run(closure)
        if closure is None:
            return stepping.step(binding, run)
        return closures.step(binding, run, closure)

    # torch wraps a class's step to run hooks unless it is marked; the inner step runs them.
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What the optimizer's own class says; GradScaler reads it before it steps or unscales."""
        binding = binding_of(self)
        if binding is not None and binding.has_plain_gradients():
            raise RuntimeError(
                "torch's GradScaler got an optimizer with fp32 master weights (O2, O5). It does "
                "not unscale the gradients of a plain backward pass there: they reach the masters "
                "at the step. Remove the GradScaler; amp.scale_loss scales, unscales and skips:\n"
                f"{BLOCK}    optimizer.step()"
            )
        declared: bool = getattr(super(), _SCALING, False)
        return bool(self.__dict__.get(_SCALING, declared))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, declared: bool) -> None:
        self.__dict__[_SCALING] = declared

    @untraced
    def zero_grad(self, *given: Any, **named: Any) -> None:
        """Clears the gradients of masters and model, as the optimizer's own method does.

        Takes that method's arguments: ``set_to_none`` in torch's.
        """
        own, binding = super().zero_grad, binding_of(self)
        if binding is None or getattr(own, "__func__", None) is not Optimizer.zero_grad:
            own(*given, **named)
            if binding is not None and not binding.has_grads():
                binding.tell_cleared()
            return
        set_to_none = _set_to_none(*given, **named)
        with without_overrides():
            if set_to_none:
                # As torch's, but 30 us faster, and also for optimizers that never called torch's
                # constructor (timm's Lookahead).
                for group in self.param_groups:
                    for param in group["params"]:
                        param.grad = None
            else:
                own(set_to_none=False)
            binding.zero(set_to_none=set_to_none)

    zero_grad.__signature__ = inspect.signature(Optimizer.zero_grad)  # type: ignore[attr-defined]

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with fp32 masters where the level keeps them."""
        binding = binding_of(self)
        if binding is None:
            super().add_param_group(param_group)
            return
        with all_or_nothing() as undo:
            undo.push(operator.delitem, self.param_groups, slice(len(self.param_groups), None))
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            if binding.steps_any(group["params"]):
                raise ValueError(
                    "add_param_group got a parameter that is already in a group of this "
                    "optimizer, as its fp32 master. Each parameter may be in one group only."
                )
            if binding.owner is not None:
                binding.owner.convert_late(group["params"])
            binding.adopt([group])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies by the optimizer's own class, so that no generated class is named."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        own = own_class(type(self))
        arguments = tuple(own if item is type(self) else item for item in arguments)
        mixin = mixin_of(type(self))
        named = None if mixin is AmpOptimizer else mixin
        return (rebuild, ("optimizer", named, function, arguments), *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), ATTRIBUTE: binding_of(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        binding = binding_of(self)
        if binding is not None:
            binding.attach(self)


def _set_to_none(set_to_none: bool = True) -> bool:
    """Returns the argument of torch's ``zero_grad``."""
    return set_to_none


def binding_of(optimizer: Optimizer) -> Binding | None:
    """Returns the binding of an optimizer, or ``None`` for a plain one."""
    binding: Binding | None = optimizer.__dict__.get(ATTRIBUTE)
    return binding


def bind_class(optimizer: Optimizer, binding: Binding, mixin: type[AmpOptimizer]) -> None:
    """Gives ``optimizer``, and those that it holds, their generated class and one binding.

    A ``step`` set on the instance (by an LR scheduler made earlier) becomes the inner step.
    """
    inner = optimizer.__dict__.get("step")
    _set_class(optimizer, binding, mixin)
    if inner is not None:
        binding.inner_step = inner
        optimizer.__dict__["step"] = _wrap_step(optimizer, inner)
    for held in optimizers_in(optimizer):
        if ATTRIBUTE not in vars(held) and "step" not in vars(held):
            _set_class(held, binding, mixin)


def _set_class(optimizer: Optimizer, binding: Binding, mixin: type[AmpOptimizer]) -> None:
    # First, because it can fail: a class may forbid subclasses or have an incompatible layout.
    optimizer.__class__ = with_mixin(mixin, own_class(type(optimizer)))
    optimizer.__dict__[ATTRIBUTE] = binding


def unbind_class(optimizer: Optimizer) -> None:
    """Removes both, as far as they are there, and restores the instance's own ``step``."""
    binding = optimizer.__dict__.get(ATTRIBUTE)
    for each in optimizers_in(optimizer):
        if each.__dict__.get(ATTRIBUTE) is binding:
            each.__dict__.pop(ATTRIBUTE, None)
            own = own_class(type(each))
            if type(each) is not own:
                each.__class__ = own
    if binding is not None and binding.inner_step is not None:
        optimizer.__dict__["step"] = binding.inner_step


def own_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Returns the optimizer's own class, given that one or the generated one."""
    return plain_class(kind)


def rebuild_optimizer(
    mixin: type[AmpOptimizer] | None, function: Callable[..., Any], arguments: Any
) -> Any:
    """Rebuilds a pickled bound optimizer; its state, with the binding, is set afterwards."""
    optimizer = function(*arguments)
    # In a fresh process, the own class's step may not be wrapped with hooks yet.
    optimizer._patch_step_function()
    optimizer.__class__ = with_mixin(mixin or AmpOptimizer, type(optimizer))
    return optimizer


def _wrap_step(optimizer: Optimizer, inner: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.ref(optimizer)

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        if target is None:
            raise RuntimeError("optimizer.step() was called after the optimizer was deleted.")
        return AmpOptimizer.step(cast(AmpOptimizer, target), *args, **kwargs)

    return step
