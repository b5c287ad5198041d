"""An ``ApexOptimWrapper`` for MMEngine; needs ``mmengine``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from apex import amp
from apex.amp import scaler_states
from apex.integrations import scales

try:
    # Import the model package first: mmengine's optim and model packages import each other.
    from mmengine.model import is_model_wrapper
    from mmengine.optim import ApexOptimWrapper as MMEngineApexOptimWrapper
    from mmengine.optim import OptimWrapper
    from mmengine.registry import OPTIM_WRAPPERS, Registry
except ImportError as error:
    raise ImportError(
        "apex.integrations.mmengine needs MMEngine, which could not be imported: "
        f"{error}. Install it: pip install mmengine."
    ) from error

__all__ = ["APEX_OPTIM_WRAPPERS", "ApexOptimWrapper"]

SCOPE = "apex"


# MMEngine's root registry has its own class of this name; a child registry keeps both reachable.
APEX_OPTIM_WRAPPERS = Registry("optim_wrapper", parent=OPTIM_WRAPPERS, scope=SCOPE)


@APEX_OPTIM_WRAPPERS.register_module()
class ApexOptimWrapper(MMEngineApexOptimWrapper):
    """Trains with ``apex.amp`` in MMEngine, with its configs, Runner and checkpoints.

    It has the same arguments as MMEngine's class of this name and adds the levels O4 and O5.
    Configs select it as ``type="apex.ApexOptimWrapper"`` after importing this module
    (``custom_imports = dict(imports=["apex.integrations.mmengine"])``), or by its full path without
    the import. ``ApexOptimWrapper`` without a scope means MMEngine's own class.

    The first :meth:`optim_context` prepares the model. Differences from MMEngine's class:

    - Each of several wrappers (``OptimWrapperDict``) saves its own loss scales in a checkpoint.
    - ``load_state_dict`` does not modify the given dictionary, and validates it before changing
      anything. It keeps the base learning rate of optimizers with several parameter groups.

    The arguments have the same defaults as in MMEngine's class. Therefore ``loss_scale`` is dynamic
    even at levels whose default is 1.0; None selects the level's default. :meth:`backward` uses the
    first loss scale.
    """

    optimizer: Any
    # Loss scales of a checkpoint that was loaded before amp prepared the optimizer.
    _loaded_scales: Mapping[str, Any] | None = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backpropagates the scaled loss, or if amp is disabled the loss, and counts the iteration.

        Args:
            loss: The loss of this iteration, 0-d.
            **kwargs: Arguments of ``torch.Tensor.backward``.

        Raises:
            RuntimeError: If called before the first :meth:`optim_context`.
        """
        base = MMEngineApexOptimWrapper if self.enabled else OptimWrapper
        base.backward(self, loss, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state, with this wrapper's loss scales under ``apex_amp``."""
        state: dict[str, Any] = OptimWrapper.state_dict(self)
        state["apex_amp"] = dict(self._loaded_scales or scales.state_dict(self.optimizer))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state from :meth:`state_dict` of this class or of MMEngine's wrapper.

        If no scaler exists yet, the first :meth:`optim_context` sets the scales. A checkpoint
        without ``apex_amp`` leaves the scales unchanged.

        Raises:
            RuntimeError: If the scales are invalid; nothing changes in this case.
        """
        state = dict(state_dict)
        loaded = state.pop("apex_amp", {})
        scaler_states.parsed(loaded)  # raises unless these are scales
        OptimWrapper.load_state_dict(self, state)
        if scales.is_prepared(self.optimizer):
            scales.load_state_dict(self.optimizer, loaded)
        else:
            self._loaded_scales = loaded

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Prepares model and optimizer on first use; suspends gradient synchronization if needed.

        Run the forward pass inside. Iterations that only accumulate do not synchronize gradients
        (for a model with ``no_sync``).

        Args:
            model: The model that this wrapper's optimizer trains, possibly in a model wrapper.

        Raises:
            RuntimeError: If another wrapper has already prepared the model.
        """
        is_first_use = self.enabled and not scales.is_prepared(self.optimizer)
        with OptimWrapper.optim_context(self, model):
            if is_first_use:
                module: Any = model
                if is_model_wrapper(model):
                    module = model.module
                options = {name: getattr(self, name) for name in _OPTIONS}
                amp.initialize(module, self.optimizer, **options)
                if self._loaded_scales is not None:
                    scales.load_state_dict(self.optimizer, self._loaded_scales)
                    self._loaded_scales = None
            yield


# All arguments except the last one, **kwargs, which OptimWrapper receives.
_OPTIONS = [*inspect.signature(ApexOptimWrapper).parameters][:-1]
