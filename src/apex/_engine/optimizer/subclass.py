"""The generated subclass of a prepared optimizer, which overrides the methods that amp adds to."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from apex._core import tree
from apex._core.arguments import closure_of, replaced
from apex._core.mixins import plain_class, swap_class, with_mixin
from apex._core.param_groups import PREPARED, dtypes_of, match_states, optimizers_in
from apex._engine import master_table, masters
from apex._engine.conversion.casts import convert_late
from apex._engine.conversion.copies import deepcopy_by_class, object_of
from apex._engine.optimizer.prepared import PreparedOptimizer, unscale_grads
from apex._engine.session import Session, forget_cleared, live_optimizers
from apex._torch.dynamo import untraced, untraced_frame

_SCALING = "_step_supports_amp_scaling"


class AmpOptimizer(Optimizer):
    """Overrides for a prepared optimizer; without state each calls the optimizer's own method.

    Never instantiated: :func:`prepare_class` generates a subclass of it and of the
    optimizer's class.
    """

    _apex_prepared: PreparedOptimizer

    _amp_stash: Any
    """apex's view of the state, which :mod:`apex.amp.optimizers` defines."""

    def __init_subclass__(cls) -> None:
        """Keeps generated classes out of registries that a base fills in ``__init_subclass__``."""

    @untraced_frame
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps unless a gradient overflowed, then rounds the masters into the model.

        The optimizer's own step gets the same arguments: a master in place of its parameter, and
        the closure with amp's part.
        """
        prepared = prepared_state(self)
        run: Callable[..., Any]
        if prepared is None:  # a method that a script has kept from before amp.restore
            return plain_class(type(self)).step(self, *args, **kwargs)
        self._opt_called = True  # LR schedulers read this
        run = super().step
        if prepared.inner_step is not None and prepared.optimizer is self:
            run = prepared.inner_step
        if not (args or kwargs):
            return run() if prepared.stepping else prepared.step(self, run, None)
        known = {id(pair.model): pair.master for pair in prepared.pairs}
        args, kwargs = tree.map_tensors(lambda t: known.get(id(t), t), (args, kwargs))
        if prepared.stepping:  # an optimizer inside another: the step has begun
            return run(*args, **kwargs)
        closure = closure_of(args, kwargs)
        own_step: Any = functools.partial(_call, run, args, kwargs, closure)
        own_step.hooked = getattr(run, "hooked", False)
        return prepared.step(self, own_step, closure)

    step.__signature__ = inspect.signature(Optimizer.step)  # type: ignore[attr-defined]
    # torch wraps a class's step to run hooks unless it is marked; the inner step runs them.
    step.hooked = True  # type: ignore[attr-defined]
    # LR schedulers wrap it to record that the optimizer stepped before them, which it does itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The own class's value; GradScaler reads it before it steps or unscales."""
        self._apex_prepared.note_grad_scaler()
        declared: bool = getattr(super(), _SCALING, False)
        return bool(self.__dict__.get(_SCALING, declared))

    @untraced
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, as the optimizer's own method does.

        Takes that method's arguments: ``set_to_none`` in torch's.
        """
        prepared = self._apex_prepared
        cleared = prepared.trained_params()
        own_method: Any = super().zero_grad
        function = getattr(own_method, "__func__", own_method)
        # torch's method takes ``set_to_none`` alone.
        if function is Optimizer.zero_grad and all((*args, *kwargs.values())):
            # Also for optimizers that never called torch's constructor (timm's Lookahead).
            masters.remove_grads(cleared)
        else:
            with masters.shown(prepared.pairs):
                own_method(*args, **kwargs)
            if function.__module__.startswith(("torch.optim.", "apex.optimizers.")):
                masters.mark_zeros(master_table.pairs_of(cleared))
            else:  # it may leave gradients for the next pass to add to
                cleared = masters.without_grad(cleared)
        forget_cleared(cleared)

    zero_grad.__signature__ = inspect.signature(Optimizer.zero_grad)  # type: ignore[attr-defined]

    @untraced
    def add_param_group(self, *args: Any, **kwargs: Any) -> None:
        """Adds a group, with fp32 masters where the level keeps them.

        Takes the arguments of the optimizer's own method: ``param_group`` in torch's.
        """
        prepared = self._apex_prepared
        begun = prepared.unfinished_pass
        if begun is not None and begun.scaled:
            raise RuntimeError(
                "add_param_group was called inside an amp.scale_loss block, which does not unscale "
                "the gradients of the new parameters. Call it before the block, or after."
            )
        count = len(self.param_groups)
        try:
            super().add_param_group(*args, **kwargs)
            old_dtypes = dtypes_of([self])
            for group in self.param_groups[count:]:
                convert_late(self, group["params"])
            prepared.create_missing_masters()
            match_states([self], old_dtypes)
        except BaseException:
            del self.param_groups[count:]
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the state, also what a script has put under a model's parameter."""
        self._apex_prepared.adopt_states()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads the state; a second time if a parameter gets its fp32 master only now.

        torch rounds the state of a frozen 16-bit parameter, but not of its master.
        """
        super().load_state_dict(*args, **kwargs)
        if self._apex_prepared.create_missing_masters():
            super().load_state_dict(*args, **kwargs)

    def __copy__(self) -> Optimizer:
        """Returns a plain optimizer that shares the groups and their state, as torch's copies."""
        with _shown_plain(self):
            return copy.copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a plain optimizer, or a copy of the wrapper; see Note [Plain copies]."""
        copied_object = object_of(sys._getframe(1), self)
        if copied_object is not self:
            return deepcopy_by_class(copied_object, memo)
        prepared = self._apex_prepared
        for param in prepared.params():
            master_table.copy_to(memo, param)
        return _plain_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain optimizer; see Note [Plain copies]."""
        prepared = self._apex_prepared
        memo: dict[int, Any] = {}
        for tensor in tree.tensors([*self.state.values()]):
            memo[id(tensor)] = tensor
        for param in prepared.params():
            memo[id(param)] = master_table.stand_in(param)
        return _plain_copy(self, memo).__reduce_ex__(protocol)

    # -- private names of apex that scripts use ---------------------------------------------------

    def _amp_lazy_init(self) -> None:
        """Does nothing: masters exist from ``initialize`` on."""

    _lazy_init_maybe_master_weights = _amp_lazy_init

    def _master_params_to_model_params(self) -> None:
        """Writes the rounded masters into the model."""
        masters.round_masters(self._apex_prepared.pairs)

    def _prepare_amp_backward(self) -> None:
        """Puts existing gradients aside before a backward pass with a loss scale."""
        self._apex_prepared.create_missing_masters()
        self._apex_prepared.make_room(scaled=True)

    def _post_amp_backward(self, scaler: Any) -> None:
        """Unscales the gradients of the pass by apex's view of a scaler, and adds the earlier."""
        unscale_grads([self._apex_prepared], scaler._scaler, scaler._scaler.factor())
        self._apex_prepared.stash.give_back()
        if scaler.dynamic:
            self._apex_prepared.overflow.add(scaler._scaler.found_inf)


def _call(
    step: Callable[..., Any], args: Any, kwargs: Any, closure: object, evaluation: object = None
) -> Any:
    """Calls a step, with an evaluation in place of the closure if there is one."""
    if evaluation is not None:
        args, kwargs = replaced(args, kwargs, closure, evaluation)
    return step(*args, **kwargs)


def prepared_state(optimizer: Optimizer) -> PreparedOptimizer | None:
    """Returns the state of a prepared optimizer, or ``None`` for a plain one."""
    prepared: PreparedOptimizer | None = optimizer.__dict__.get(PREPARED)
    return prepared


def prepare_optimizer(session: Session, optimizer: Optimizer, undo: ExitStack) -> None:
    """Prepares one more optimizer of a session; ``undo`` receives the inverse."""
    prepared = PreparedOptimizer(session, optimizer)
    prepared.create_missing_masters()
    live_optimizers.add(prepared)
    undo.callback(prepared.close)
    undo.callback(unprepare_class, optimizer)
    _set_class(optimizer, prepared)
    vars(optimizer).pop("step", None)
    for held in optimizers_in(optimizer):
        if PREPARED not in vars(held) and "step" not in vars(held):
            _set_class(held, prepared)
    session.observer.optimizer_prepared(prepared)


def _set_class(optimizer: Optimizer, prepared: PreparedOptimizer) -> None:
    # First, because it can fail: a class may forbid subclasses or have an incompatible layout.
    optimizer.__class__ = with_mixin(AmpOptimizer, plain_class(type(optimizer)))
    optimizer.__dict__[PREPARED] = prepared


def unprepare_class(optimizer: Optimizer) -> None:
    """Removes both, if they are there, and restores the instance's own ``step``."""
    prepared = prepared_state(optimizer)
    if prepared is None:
        return
    for part in optimizers_in(optimizer):
        if prepared_state(part) is prepared:
            del part.__dict__[PREPARED]
            swap_class(part, plain_class(type(part)))
    if prepared.inner_step is not None:
        optimizer.__dict__["step"] = prepared.inner_step


def _plain_copy(optimizer: AmpOptimizer, memo: dict[int, Any]) -> Optimizer:
    """Returns a copy of the optimizer's own class, with state in the dtypes of its parameters."""
    optimizer._apex_prepared.adopt_states()
    old_dtypes = dtypes_of([optimizer])
    with _shown_plain(optimizer):
        copied: Optimizer = copy.deepcopy(optimizer, memo)
    match_states([copied], old_dtypes)
    return copied


@contextmanager
def _shown_plain(optimizer: AmpOptimizer) -> Iterator[None]:
    """A block in which an optimizer is of its own class, without amp's state."""
    prepared = vars(optimizer).pop(PREPARED)
    generated = type(optimizer)
    swap_class(optimizer, plain_class(generated))
    try:
        yield
    finally:
        swap_class(optimizer, generated)
        vars(optimizer)[PREPARED] = prepared
