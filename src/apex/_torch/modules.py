"""What a module knows of its own tensors, where torch has no public way to ask."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

_NAMING = "torch.distributed.checkpoint.state_dict", "_get_optim_state_dict"
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def has_global_hooks() -> bool:
    """Returns whether hooks run at the calls of all modules; False where torch does not tell."""
    return any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of ``model``, then its buffers, each once, by qualified name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def own_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the module's own parameters and buffers, with ``prefix`` before their names.

    As ``named_parameters`` and ``named_buffers`` without recursion, in a sixth of their time.
    """
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def state_dict_hooks(module: nn.Module) -> Mapping[int, object]:
    """Returns the ``state_dict`` post-hooks of a module."""
    hooks: Mapping[int, object] = module._state_dict_hooks
    return hooks


def that_names_parameters() -> nn.Module | None:
    """Returns the model in which ``torch.distributed.checkpoint`` will look up parameters.

    None if the caller of the calling function is not its ``get_state_dict`` for an optimizer.
    """
    frame = sys._getframe(2)
    if (frame.f_globals.get("__name__"), frame.f_code.co_name) != _NAMING:
        return None
    model = frame.f_locals.get("model")
    return model if isinstance(model, nn.Module) else None
