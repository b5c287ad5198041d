"""What tools accept: an optimizer, a ``GradScaler``, and to run a model, one batch and a loss.

``caller`` is the name of the public function, for error messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import arguments, tree
from apex.amp.optimizers import unwrap
from apex.debug.place import unwrapped


def inner(optimizer: Any) -> Optimizer:
    """Returns the optimizer inside wrappers such as LARC, accelerate's and Lightning's.

    Raises:
        TypeError: If it is neither an optimizer nor a wrapper of one.
    """
    wrapped = getattr(optimizer, "optimizer", None)
    return inner(wrapped) if isinstance(wrapped, Optimizer) else unwrap(optimizer)


def check_scaler(caller: str, scaler: Any) -> None:
    """Raises TypeError if ``scaler`` is neither None nor a ``GradScaler``."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"amp.debug.{caller} got {type(scaler).__name__} as the scaler; it takes the "
            "torch.amp.GradScaler that scales the losses."
        )


def checked_models(caller: str, models: Any) -> list[nn.Module]:
    """Returns one model or several as a list; raises TypeError if any is no module."""
    single = isinstance(models, nn.Module) or not isinstance(models, Iterable)
    found = [models] if single else list(models)
    for model in found:
        arguments.module(f"amp.debug.{caller}", model)
    return found


def checked_model(caller: str, model: Any, given: object) -> nn.Module:
    """Returns the model inside wrappers; raises unless it and the arguments given can be run."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller} got {type(model).__name__} as the model; it takes a torch.nn.Module, "
            f"followed by its inputs: {caller}(model, x, loss_fn=...)."
        )
    inner = unwrapped(model)
    if missing := missing_values(inner):
        raise ValueError(f"{caller} got a model whose {missing}")
    if not tree.tensors(given):
        raise ValueError(
            f"{caller} got no tensor among the inputs of {type(inner).__name__}. Pass the model's "
            f"arguments: {caller}(model, x) or {caller}(model, input_ids=...)."
        )
    return inner


def missing_values(model: nn.Module) -> str:
    """Returns which parameter of a model has no values, and what to do; empty if all have."""
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter) or param.is_meta:
            return (
                f"parameter {name!r} has no values yet (lazy, or on the meta device). Run the "
                "model once or initialize it first."
            )
    return ""


def floating_outputs(caller: str, output: object, *, instead: str = "") -> list[Tensor]:
    """Returns the tensors to derive a loss from; raises, with a second remedy, if there is none."""
    floating = [tensor for tensor in tree.tensors(output) if tensor.is_floating_point()]
    if not floating:
        raise ValueError(
            f"{caller} got a model whose output ({type(output).__name__}) holds no floating-point "
            f"tensor, so it cannot derive a loss. Pass loss_fn=...{instead}."
        )
    return floating


def check_loss_fn(caller: str, loss_fn: object) -> None:
    """Raises TypeError if ``loss_fn`` is neither None nor a function; a class is none."""
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise TypeError(
            f"{caller} got {arguments.kind(loss_fn)} as loss_fn; it takes a function of the "
            "model's output that returns the loss."
        )


def check_loss(caller: str, loss: object, *, instead: str = "") -> None:
    """Raises unless ``loss`` is one number with a gradient, for which there may be a remedy."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{caller}'s loss_fn returned {type(loss).__name__}; it must take the model's output "
            "and return the loss, a tensor with one element."
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"{caller} got a loss of shape {tuple(loss.shape)} and {loss.dtype}; it takes one "
            "floating-point number. Reduce it in loss_fn, for example with .mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{caller} got a loss that does not require gradients: either no parameter does, or "
            f"the loss was detached or computed under no_grad.{instead}"
        )
