"""What rebuilds saved models and optimizers: the one private module that their files name.

A file names a kind, never a class or function of the engine: it outlives moves inside the package.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

_PLACES = {
    "binding": "apex._engine.optimizer.binding:Binding",
    "cast": "apex.amp._initialize:AppliedCast",
    "fp32_hooks": "apex._engine.model.state_dict:Fp32Hooks",
    "input_cast": "apex._engine.model.state:InputCast",
    "master_link": "apex._engine.model.state_dict:MasterLink",
    "model": "apex._engine.model.module_class:rebuild_model",
    "model_state": "apex._engine.model.state:ModelState",
    "optimizer": "apex._engine.optimizer.optimizer_class:rebuild_optimizer",
    "output_cast": "apex._engine.model.state:OutputCast",
    "tracked_pair": "apex._engine.masters:rebuild_pair",
    "plan": "apex._engine.model.plan:ModelPlan",
}
"""Where each kind is made. Kinds stay: files hold them."""


def rebuild(kind: str, *parts: Any) -> Any:
    """Returns the object that a file describes by its kind and parts.

    Raises:
        ValueError: If the file was written by a newer release, which knows more kinds.
    """
    return _place(kind)(*parts)


def empty(kind: str) -> Any:
    """Returns an object of this kind without attributes, which follow in the file.

    Raises:
        ValueError: If the file was written by a newer release, which knows more kinds.
    """
    made = _place(kind)
    return made.__new__(made)


@functools.cache
def _place(kind: str) -> Any:
    if kind not in _PLACES:
        raise ValueError(
            f"The file holds an object of kind {kind!r}; this release of apex knows "
            f"{', '.join(_PLACES)}. Load the file with the release that wrote it, or a newer one."
        )
    module, name = _PLACES[kind].split(":")
    return getattr(import_module(module), name)
