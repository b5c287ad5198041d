"""Validates arguments of the public functions before anything changes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core.arguments import kind
from apex._core.param_groups import params_of
from apex._core.policy import Policy
from apex._engine.conversion import checks
from apex._engine.conversion.plan import ModelPlan
from apex._engine.conversion.state import converted_in
from apex._engine.optimizer.subclass import prepared_state
from apex._engine.wrappers import zero
from apex._torch import parameters
from apex._torch.modules import params_in, tensor_ids, uncompiled
from apex.amp._amp_state import _amp_state

F = TypeVar("F", bound=Callable[..., Any])


def takes_dtype_at(position: int, name: str) -> Callable[[F], F]:
    """Returns a decorator for a function that has one parameter more in the ROCm fork.

    A dtype at ``position`` is the fork's, and becomes the keyword argument ``name``. Calls in
    NVIDIA's order have no dtype there.
    """

    def decorated(fn: F) -> F:
        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            positional = list(args)
            if len(positional) > position and isinstance(positional[position], torch.dtype):
                kwargs[name] = positional.pop(position)
            return fn(*positional, **kwargs)

        # inspect.getfullargspec, which catalyst calls, does not look through wrappers.
        vars(called)["__signature__"] = inspect.signature(fn)
        return cast(F, called)

    return decorated


def model_list(models: object, *, to_16_bits: bool = False) -> list[nn.Module]:
    """Returns the models as a list, and the module inside a proxy or a compiled model in its place.

    A proxy is an object that is a module only by its ``__class__``, such as a model of
    classy_vision. Its own code runs under the op casts, or in fp32.

    Args:
        models: The models.
        to_16_bits: Whether the level casts weights, which proxies do not support.

    Raises:
        TypeError: If ``models`` is not a module, or a list or tuple of modules.
    """
    unwrapped = []
    for model in models if isinstance(models, list | tuple) else (models,):
        is_proxy = not issubclass(type(model), nn.Module)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"amp got {kind(model)} instead of a model. It accepts a torch.nn.Module, or a "
                "list or tuple of them; models come first, optimizers second."
            )
        if to_16_bits and is_proxy:
            raise TypeError(
                f"amp.initialize got a model of type {type(model).__name__}, an object that stands "
                "for a torch.nn.Module. Pass the module inside it, or use opt_level O1 or O4."
            )
        inner = next(iter(model.modules())) if is_proxy else model
        unwrapped.append(uncompiled(inner))
    return unwrapped


def rules(name: str, given: object) -> tuple[Any, ...]:
    """Returns a sequence of names or types as a tuple, empty for None; ``ModelPlan`` checks items.

    Raises:
        TypeError: If it is a string, a single type or not iterable.
    """
    if given is None:
        return ()
    if isinstance(given, Iterable) and not isinstance(given, str | type):
        return tuple(given)
    shown = getattr(given, "__name__", repr(given))
    raise TypeError(f"{name} is {shown}; it accepts a sequence. Pass {name}=[{shown}].")


def check_models(models: Sequence[nn.Module], plan: ModelPlan) -> None:
    """Raises the errors that :func:`apex.amp.initialize` documents for models."""
    _check_distinct(models)
    checks.check(models, plan)


def _check_distinct(models: Sequence[nn.Module]) -> None:
    if len(set(map(id, models))) < len(models):
        raise ValueError(
            "amp got the same model twice. Pass each model once; it may have several optimizers."
        )


def check_wrappers(optimizers: Iterable[Any]) -> None:
    """Raises apex's RuntimeError for an ``FP16_Optimizer``, which divides gradients once more."""
    for optimizer in optimizers:
        if getattr(optimizer, "loss_scaler", None) is not None:
            raise RuntimeError(
                f"amp.initialize got {kind(optimizer)}, which has a loss scale of its own. Pass a "
                "plain optimizer of the model's parameters, and use amp.scale_loss(loss, "
                "optimizer) in place of optimizer.backward(loss)."
            )


def check_optimizers(
    optimizers: Sequence[Optimizer], models: Sequence[nn.Module], policy: Policy
) -> None:
    """Raises the errors that :func:`apex.amp.initialize` documents for optimizers."""
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ValueError("amp.initialize got the same optimizer twice. Pass each one once.")
    params: list[Tensor] = []
    for optimizer in optimizers:
        _check_optimizer(optimizer, policy)
        params += params_of(optimizer)
        if policy.master_weights:
            _check_masters()
            zero.check(optimizer)
    if params and _are_of_another_model(params, models):
        raise ValueError(
            f"amp.initialize got an optimizer ({type(optimizers[0]).__name__}) that holds no "
            "parameter of the given models. Pass the model that it trains, and create the "
            "optimizer after moving or sharding the model."
        )


def _check_masters() -> None:
    """Raises RuntimeError before torch 2.10, which masters need."""
    if not parameters.keeps_any_grad:
        raise RuntimeError(
            f"fp32 masters (O2, O5, master_weights=True) need torch 2.10 or newer; this is torch "
            f"{torch.__version__}. Upgrade torch, or use a level without masters: opt_level 'O1', "
            "or 'O4' for bf16."
        )


def _check_optimizer(optimizer: Optimizer, policy: Policy) -> None:
    name = type(optimizer).__name__
    has_groups = getattr(optimizer, "param_groups", None) is not None
    takes_over = policy.master_weights or policy.loss_scale != 1.0
    if takes_over and not has_groups:
        raise TypeError(
            f"amp.initialize got an optimizer ({name}) without param_groups, so amp finds no "
            "parameters to unscale or to give masters. Pass the optimizer inside it, or use "
            "opt_level 'O4'."
        )
    if prepared_state(optimizer) is not None:
        raise RuntimeError(
            f"amp.initialize got an optimizer ({name}) that it has already prepared. Call "
            "amp.initialize once, before the training loop, with each optimizer once, or call "
            "amp.restore(model, optimizer) first."
        )
    if has_groups and not params_of(optimizer):
        raise ValueError(
            f"amp.initialize got an optimizer ({name}) without parameters. Create it with the "
            "model's parameters, or leave it out."
        )
    if takes_over and _steps_in_hooks(optimizer):
        raise RuntimeError(
            f"amp.initialize got {name}, which updates the weights in hooks of the backward pass. "
            "There, gradients are not unscaled yet, and hooks see no fp32 masters. Use opt_level "
            "'O4', which has neither a loss scale nor masters."
        )
    checks.check_optimizer(optimizer)


def _steps_in_hooks(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's own module has put hooks on its parameters."""
    for param in params_of(optimizer):
        for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
            for hook in (hooks or {}).values():
                if hook.__module__ == type(optimizer).__module__:
                    held = inspect.getclosurevars(inspect.unwrap(hook)).nonlocals.values()
                    if any(value is optimizer for value in held):
                        return True
    return False


def _are_of_another_model(params: Sequence[Tensor], models: Sequence[nn.Module]) -> bool:
    """Returns whether optimizers can only be meant for a model that is not among ``models``.

    They may also train an input of a model: a plain tensor, or any tensor if the models are frozen
    or have no parameters. Beside a model's own optimizer, another one may train the centers of a
    loss. A script may pass such a model in place of one from an earlier call.
    """
    if not all(isinstance(param, nn.Parameter) for param in params):
        return False
    of_models: list[Tensor] = []
    for model in models:
        of_models += params_in(model)
    if not any(param.requires_grad for param in of_models):
        return False
    return set(map(id, params)).isdisjoint(map(id, of_models))


def check_prepared(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raises ValueError if an object is not prepared, or if a master's model is missing.

    A plain model is accepted after ``model.float()``, with the optimizer that has its masters.
    """
    _check_distinct(models)
    mastered: set[int] = set()
    for optimizer in optimizers:
        prepared = prepared_state(optimizer)
        if prepared is None:
            raise ValueError(
                f"amp.restore got an optimizer ({type(optimizer).__name__}) that amp has not "
                "prepared. Pass the optimizer that amp.initialize returned, or none if it is gone."
            )
        mastered.update(id(pair.model) for pair in prepared.pairs)
    for model in models:
        if not converted_in([model]) and mastered.isdisjoint(tensor_ids([model])):
            raise ValueError(
                f"amp.restore got a model ({type(model).__name__}) that amp has not prepared. "
                "Pass the model that amp.initialize returned."
            )
    # Parameters that no prepared model holds any more (a replaced head) do not count.
    held: set[int] = set()
    for session in _amp_state.sessions():
        held |= tensor_ids(session.models)
    if mastered & held - tensor_ids(models):
        raise ValueError(
            "amp.restore got an optimizer with masters of a model that was not passed. Restore "
            "model and optimizer together: amp.restore(model, optimizer)."
        )
