"""Steps of prepared optimizers, which an overflow skips, and hooks on the steps of others."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.param_groups import params_of
from apex._engine import masters
from apex._engine.autocast import ambient
from apex._engine.mistakes import Mistake, Origin, inspect_step, inspect_weights, origins_of
from apex._engine.optimizer import block_step
from apex._engine.optimizer.prepared import PREPARED, PreparedOptimizer
from apex._torch.dynamo import is_compiling_here, untraced, untraced_frame
from apex._torch.modules import named_tensors
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._engine.session import Session

Run = Callable[..., Any]
Closure = Callable[[], Any]

_SECOND_ORDER = (
    "amp.initialize put fp32 masters into the optimizer's groups, but the graph of the loss has "
    "the model's own parameters. An optimizer that differentiates gradients needs opt_level 'O4'."
)
"""The fix for optimizers such as AdaHessian and Sophia."""

_FUSED_CLASSES = (SGD, Adagrad, AdamW, Adam)


@untraced_frame
def run_step(prepared: PreparedOptimizer, run: Run, closure: Closure | None) -> Any:
    """Runs the optimizer's own step ``run`` unless a gradient overflows; then updates the model.

    Returns its result, ``None`` for a skipped step. After an exception, gradients and overflow are
    there for another try.

    Raises:
        RuntimeError: If there is a closure, and the loss scale is dynamic.
    """
    if closure is None:
        inspect_step(prepared)
    else:
        _check_closure(prepared.session)
    inspect_weights(prepared)
    prepared.begin_step(has_closure=closure is not None)
    uncast = ambient.UncastBlock()
    failed = True
    try:
        with uncast:
            if closure is None:
                result = _run_without_closure(prepared, run)
            else:
                result = _run_with_closure(prepared, run, uncast.with_casts(closure))
        failed = False
        return result
    except RuntimeError as error:
        if prepared.pairs and "been used in the graph" in str(error):
            error.args = (f"{error}\n{_SECOND_ORDER}",)
        raise
    finally:
        prepared.end_step(failed=failed)


@untraced_frame
def _run_without_closure(prepared: PreparedOptimizer, run: Run) -> Any:
    """Runs a step over the gradients in fp32, by blocks where that saves memory."""
    overrides: AbstractContextManager[Any] = nullcontext()
    blocks: block_step.BlockStep | None = None
    if prepared.pairs:
        if not is_compiling_here() and _reads_gradients_in_kernels(prepared.optimizer):
            blocks = block_step.begin(prepared)
        if blocks is None:
            masters.widen_grads(prepared.pairs)
        module = prepared.optimizer.__class__.__module__
        # Others may keep state in subclasses of tensors.
        if is_compiling_here():
            overrides = masters.shown(prepared.pairs)
        elif module.startswith(("torch.optim.", "apex.optimizers.")):
            overrides = without_overrides()
    try:
        with overrides:
            return _run_unless_overflow(prepared, run)
    finally:
        # Not only before the step: a hook may have run the model meanwhile.
        masters.round_masters(prepared.pairs if blocks is None else blocks.end())


@untraced_frame
def _run_unless_overflow(prepared: PreparedOptimizer, run: Run) -> Any:
    optimizer: Any = prepared.optimizer
    flag = prepared.overflow.pending
    skipped: Tensor | bool = False
    if flag is None:
        result = run()
    elif _skips_in_kernel(optimizer, flag):
        skipped = flag
        optimizer.found_inf = flag
        try:
            result = run()
        finally:
            optimizer.found_inf = None  # not deleted: a GradScaler around amp deletes its own
    else:
        skipped = prepared.must_skip()
        result = None if skipped else run()
    prepared.overflow.consume(skipped)
    return result


# -- fused kernels -------------------------------------------------------------------------------


def _fused_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Returns torch's class whose fused kernel steps every group; ``None`` if there is none."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return None
    for fused_class in _FUSED_CLASSES:
        if issubclass(type(optimizer), fused_class):
            return fused_class
    return None


def _reads_gradients_in_kernels(optimizer: Optimizer) -> bool:
    """Returns whether only torch's fused kernels read the values of gradients in its step.

    Optimizers of other classes declare it by ``gradients_in_kernels`` in the class itself, as a
    subclass may read them elsewhere.
    """
    own: Any = optimizer.__class__  # not the class that amp generates
    return own is _fused_class(optimizer) or bool(vars(own).get("gradients_in_kernels"))


@untraced
def _skips_in_kernel(optimizer: Optimizer, found_inf: Tensor) -> bool:
    """Returns whether the optimizer's step reads ``found_inf`` on the device and skips by itself.

    torch's fused optimizers do if every group is fused. So do other optimizers that declare
    ``_step_supports_amp_scaling``. A step with an argument ``grad_scaler`` does not: it asks the
    scaler.
    """
    # torch's fused optimizers copy it to CPU parameters without synchronizing (torch 2.13).
    if found_inf.device.type != "cpu":
        for param in params_of(optimizer):
            if param.device.type == "cpu":
                return False
    # A copied or unpickled torch optimizer loses the declaration but keeps its fused kernels.
    fused_class = _fused_class(optimizer)
    if fused_class is not None:
        return fused_class is not SGD or not _starts_momentum(optimizer)
    declared = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = declared and all(group.get("fused", True) for group in optimizer.param_groups)
    own: Any = optimizer.__class__
    return fused and "grad_scaler" not in inspect.signature(own.step).parameters


def _starts_momentum(optimizer: Optimizer) -> bool:
    # torch's fused SGD kernel leaves the momentum uninitialized if it skips the first step, and the
    # next step uses it (torch 2.13). So the host decides whether a group's first step is skipped.
    state = optimizer.state
    for group in optimizer.param_groups:
        states = [state[param] for param in group["params"] if param in state]
        if group["momentum"] != 0 and not any("momentum_buffer" in kept for kept in states):
            return True
    return False


# -- with a closure ------------------------------------------------------------------------------


@untraced
def _check_closure(session: Session | None) -> None:
    """Raises RuntimeError if an overflow may end an evaluation of a closure."""
    if session is not None and session.can_skip:
        raise RuntimeError(
            "optimizer.step got a closure, but the loss scale is dynamic: an overflow in an "
            "evaluation could not skip the step. Pass a static scale to amp.initialize, such as "
            'loss_scale=128.0, or use bf16, which needs none: opt_level="O4" or "O5". If the '
            "optimizer calls the closure once, call it before optimizer.step() instead."
        )


@untraced_frame
def _run_with_closure(prepared: PreparedOptimizer, run: Run, closure: Closure) -> Any:
    """Runs a step whose closure computes the gradients, perhaps several times."""

    @untraced_frame
    def evaluate() -> Any:
        masters.round_masters(prepared.pairs)
        loss = closure()
        prepared.update_masters_with_grads()
        inspect_step(prepared)
        return loss

    try:
        result = run(evaluate)
    finally:
        masters.round_masters(prepared.pairs)
    prepared.overflow.consume(skipped=False)
    return result


# -- optimizers that amp has not prepared --------------------------------------------------------


def _inspect(session: Session, optimizer: Optimizer, versions: Mapping[int, int]) -> None:
    """Warns if an optimizer has stepped with scaled gradients, or 16-bit weights of a model itself.

    ``versions`` are from before the step, by ``id`` of the parameter.
    """
    if Origin.OTHER in origins_of(params_of(optimizer)):
        session.mistakes.warn(Mistake.FORGOTTEN_OPTIMIZER)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)  # counts no writes
    weights: set[int] = set()
    for model in session.models:
        weights.update(map(id, named_tensors(model).values()))
    for param in params_of(optimizer):
        if id(param) not in weights or not dtypes.is_low_precision(param):
            continue
        if is_fused or versions.get(id(param)) != param._version:
            session.mistakes.warn(Mistake.UNPREPARED_OPTIMIZER)
        increment_version(param)


class _Hooks:
    """Hooks on the steps of all optimizers, while a session with masters or casts lives.

    The end of the last session removes them, unless other code has registered hooks, too. Python
    may collect a session while torch iterates over these. The hooks then stay, idle, for the next
    session.
    """

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        # Versions of each optimizer's parameters before its step, which may run other steps.
        self._versions = weakref.WeakKeyDictionary[Optimizer, Mapping[int, int]]()

    def add(self, session: Session) -> None:
        """Watches other optimizers' steps over the parameters of ``session``, while it lives."""
        self._sessions.add(session)
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))
        weakref.finalize(session, self._end).atexit = False

    @untraced
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if PREPARED in vars(optimizer):
            return None
        self._versions[optimizer] = {id(param): param._version for param in params_of(optimizer)}
        return ambient.begin_step(optimizer, args, kwargs)

    @untraced
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if PREPARED in vars(optimizer):
            return
        ambient.end_step(optimizer)
        stepped = [*filter(None, map(masters.pair_of_master, params_of(optimizer)))]
        masters.round_masters(stepped)
        for session in [*self._sessions]:
            _inspect(session, optimizer, self._versions.get(optimizer, {}))

    def _end(self) -> None:
        if [*self._sessions]:
            return
        for handle in self._handles:
            hooks: Any = handle.hooks_dict_ref()
            if len(hooks) > 1:
                return
        while self._handles:
            self._handles.pop().remove()


hooks = _Hooks()
