"""Views of models with fp32 masters as parameters, for ``torch.distributed.checkpoint``."""

from __future__ import annotations

from typing import Any

from torch import nn

from apex._core import arguments
from apex._engine.optimizer.optimizer_class import binding_of
from apex.amp.optimizers import unwrap


def with_masters(model: nn.Module, *optimizers: Any) -> nn.Module:
    """Returns a view of ``model`` that holds the parameters that ``optimizers`` step.

    The functions in ``torch.distributed.checkpoint.state_dict`` look up an optimizer's parameters
    in the model to name them. At O2 and O5, the optimizer steps fp32 masters, which the model does
    not hold, so pass this view instead. Its ``state_dict`` and ``load_state_dict`` are the model's
    own: in fp32, with the masters' exact values.

    Use the view for checkpoints only, and create a new one each time: it does not track parameters
    that are added later.

    Args:
        model: A prepared model, without a wrapper such as DistributedDataParallel.
        optimizers: Its optimizers; ones without masters (O1, O4) have no effect.

    Raises:
        TypeError: If ``model`` is not a module, or an optimizer not an optimizer.
        ValueError: If an optimizer has masters of another model only.

    Example::

        view = with_masters(model, optimizer)
        model_state, optimizer_state = get_state_dict(view, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}, ...)
        ...
        dcp.load(states, ...)
        set_state_dict(
            view,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
        amp.load_state_dict(states["amp"])
    """
    arguments.module("with_masters", model)
    bindings = (binding_of(unwrap(optimizer)) for optimizer in optimizers)
    pairs = [pair for binding in bindings if binding is not None for pair in binding.pairs]
    view = _view(model, {id(pair.model): pair.master for pair in pairs}, {})
    held = set(map(id, view.parameters()))
    if pairs and not any(id(pair.master) in held for pair in pairs):
        raise ValueError(
            "with_masters got optimizers with masters of a model that was not passed. Pass the "
            "model that amp.initialize returned with them."
        )
    view.__dict__["state_dict"] = model.state_dict
    view.__dict__["load_state_dict"] = model.load_state_dict
    return view


def _view(
    module: nn.Module, masters: dict[int, nn.Parameter], views: dict[int, nn.Module]
) -> nn.Module:
    """Returns a copy of ``module`` that shares everything but parameters and children."""
    if id(module) not in views:
        view = views[id(module)] = object.__new__(type(module))
        children = {
            name: child if child is None else _view(child, masters, views)
            for name, child in module._modules.items()
        }
        params = {
            name: param if param is None else masters.get(id(param), param)
            for name, param in module._parameters.items()
        }
        view.__dict__.update(module.__dict__, _modules=children, _parameters=params)
    return views[id(module)]
