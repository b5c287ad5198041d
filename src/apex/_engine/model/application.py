"""Bring a model's tensors and hooks to what its plan says."""

from __future__ import annotations

from typing import Any

from torch import nn

from apex._engine.model import fp32_hooks, selection, state_dict, tensors
from apex._engine.model.state import ModelState, state_of


def apply_plan(model: nn.Module, state: ModelState) -> None:
    """Casts parameters and buffers and attaches the hooks; all of it or, on failure, nothing.

    May be called again, for a model that was made anew from a copied state.
    """
    plan = state.plan
    with tensors.all_or_nothing() as undo:
        for _, tensor, dtype in selection.castable_tensors(model, plan):
            undo.cast(tensor, dtype)
    remove_hooks(state)
    if plan.param_dtype is not None and plan.casts_down:
        state.handles += fp32_hooks.attach(selection.hooked_modules(model, plan), plan.param_dtype)
        state.handles.append(
            model.register_load_state_dict_post_hook(after_loading)  # type: ignore[no-untyped-call]
        )
    flatten_rnns(model)


def remove_hooks(state: ModelState) -> None:
    """Removes every hook that ``apply_plan`` attached."""
    while state.handles:
        state.handles.pop().remove()


def flatten_rnns(model: nn.Module) -> None:
    """Puts the weights of recurrent layers into one piece again, as cuDNN wants them."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def after_loading(model: nn.Module, incompatible_keys: Any) -> None:
    """A post-hook of ``load_state_dict``; named in this module, so that models with it pickle.

    It runs when the model and all below it are loaded, also where a parent is what is loaded.
    """
    state = state_of(model)
    if state is None or state.loading is None:
        return
    loaded, prefix = state.loading
    state.loading = None
    source = state.source
    if source is not None:
        state_dict.finish_loading(model, loaded, prefix, source)
