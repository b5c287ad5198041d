"""A precision plugin for Lightning's ``Trainer`` and ``Fabric``; needs ``lightning``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from apex import amp
from apex._core.arguments import parameters_of
from apex._core.mixins import plain_class
from apex._core.param_groups import params_of
from apex._engine.conversion.state import state_of
from apex._engine.optimizer.subclass import prepared_state
from apex._torch.errors import mixes_dtypes
from apex.amp import scaler_states
from apex.amp.properties import level_defaults
from apex.integrations import scales
from apex.integrations.submodule_calls import SubmoduleCalls

__all__ = ["ApexPrecision"]

# The packages define separate classes, and a script may use either. Python's method order requires
# subclasses first: the Trainer's plugins inherit from Fabric's.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")

_BASES = {}
"""The precision plugin of each installed package."""

for _name in _PACKAGES:
    with suppress(ImportError, AttributeError):  # Lightning 1 lacks the name
        _BASES[_name] = importlib.import_module(f"{_name}.plugins.precision").Precision
if not _BASES:
    raise ImportError(
        "apex.integrations.lightning needs Lightning 2, which could not be imported. Install it: "
        "pip install lightning."
    )
_PRECISIONS = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}
"""Lightning's names of the 16-bit precisions."""

_FABRIC = _BASES.get("lightning.fabric") or _BASES["lightning_fabric"]
_Precision: Any = type("_Precision", tuple(_BASES.values()), {})


def _of_library(name: str) -> Callable[..., Any]:
    """Returns a method that calls the method ``name`` of the library's own plugin class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._library, name)(self, *args, **kwargs)

    return call


class ApexPrecision(_Precision):
    """Trains with ``apex.amp`` in Lightning: ``Trainer(plugins=ApexPrecision("O5"))``.

    The ``Trainer`` clips, accumulates, saves and resumes as with its own plugins. The
    LightningModule is prepared when ``fit``, ``validate``, ``test`` or ``predict`` begins, and is a
    plain fp32 module again when it ends. The plugin casts the inputs of the module's forward, and
    of its children when ``training_step`` calls them directly. It does not cast batches, so targets
    keep their precision. Checkpoints contain fp32 weights, and the loss scales under
    ``"ApexPrecision"``.

    In manual optimization, ``self.manual_backward(loss, loss_id=1)`` selects a loss scale.

    With Fabric, pass the optimizers: ``ApexPrecision("O5", optimizers=[optimizer])``. The first
    forward pass prepares them and every module that ``fabric.setup`` received. To save the loss
    scales, pass the plugin to ``fabric.save`` and ``fabric.load``, as in
    ``{"model": model, "optimizer": optimizer, "precision": plugin}``.

    Args:
        opt_level: ``"O0"`` to ``"O5"``.
        optimizers: Fabric's optimizers, plain or as ``fabric.setup`` returned them.
        **options: Options of :func:`apex.amp.initialize`. ``keep_fp32_values`` is True by default,
            so that frozen weights and models that are only evaluated keep their full precision.

    Raises:
        RuntimeError: If the level is unknown.
        TypeError: If ``amp.initialize`` has no such option.
    """

    def __init__(
        self, opt_level: str = "O1", *, optimizers: Iterable[Optimizer] = (), **options: Any
    ) -> None:
        super().__init__()
        defaults = level_defaults(opt_level)
        inspect.signature(amp.initialize).bind_partial(opt_level=opt_level, **options)
        # Arguments of amp.initialize.
        self.options = {"opt_level": opt_level, "keep_fp32_values": True, **options}
        # Lightning's name of the precision, which its loggers record.
        dtype: Any = defaults.cast_model_type or defaults.patch_torch_functions_type
        self.precision = _PRECISIONS.get(dtype, "32-true")
        # Fabric's optimizers without their wrappers.
        self._fabric_optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in optimizers]
        # Fabric's modules that are not prepared yet.
        self._unprepared: list[nn.Module] = []
        # Loss scales that were loaded before an optimizer was prepared.
        self._scales: Mapping[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        # The library's own plugin class, whose methods run the Trainer's hooks.
        self._library = _FABRIC
        # Prepared modules without wrappers.
        self._models: list[nn.Module] = []
        # Prepared optimizers.
        self._optimizers: list[Optimizer] = []
        # Hooks on the children of modules, to remove at the end.
        self._calls: list[SubmoduleCalls] = []

    # -- preparing ---------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Returns the module, which is prepared later, together with its optimizers."""
        self._unprepared.append(module)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepares the Trainer's module and optimizers; called by the Trainer."""
        self._unprepared.clear()
        module = _unwrapped(model)
        for name, base in _BASES.items():
            package: Any = importlib.import_module(name)
            if "fabric" not in name and isinstance(module, package.LightningModule):
                self._library = base
        trainable = []
        for optimizer in optimizers:
            # Without configure_optimizers, the Trainer's optimizer contains one constant tensor.
            params = params_of(optimizer)
            if any(param.requires_grad for param in params):
                trainable.append(optimizer)
        self._prepare([model], trainable)
        return model, optimizers, lr_schedulers

    def _prepare(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        modules = [_unwrapped(model) for model in models]
        amp.initialize(modules, optimizers or None, **self.options)
        self._models += modules
        self._optimizers += optimizers
        for module, model in zip(modules, models, strict=True):
            state = state_of(module)
            if state:  # None with enabled=False
                calls = SubmoduleCalls(module, state, wrapped=module is not model)
                self._calls.append(calls)
        if self._scales and optimizers:
            scales.load_state_dict(optimizers[0], self._scales)

    def teardown(self) -> None:
        """Makes the modules and optimizers plain again, with their fp32 values."""
        self._scales = self.state_dict()
        for calls in self._calls:
            calls.remove()
        models = self._models
        optimizers = self._optimizers
        self._forget()  # also if restoring fails
        amp.restore(models, optimizers)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Surrounds each step; first prepares modules that Fabric has set up since the last step.

        Raises:
            RuntimeError: If the step fails because dtypes differ; the message includes the fix.
        """
        if self._unprepared:
            self._prepare(self._unprepared, self._fabric_optimizers)
            self._unprepared.clear()
        try:
            yield
        except RuntimeError as error:
            casts_down = any(calls.casts_down for calls in self._calls)
            if casts_down and type(error) is RuntimeError and mixes_dtypes(error):
                raise RuntimeError(f"{error}\n{_REMEDY}") from error
            raise

    # -- training ----------------------------------------------------------------------------

    # The library's own: they run the Trainer's hooks, on the unscaled loss, and clip.
    pre_backward = _of_library("pre_backward")
    post_backward = _of_library("post_backward")
    _after_closure = _of_library("_after_closure")
    _clip_gradients = _of_library("_clip_gradients")

    def backward(
        self, tensor: Tensor, model: nn.Module | None, *args: Any, loss_id: int = 0, **kwargs: Any
    ) -> None:
        """Backpropagates the scaled loss; leaves unscaled gradients, in 16 bits at O3 and O5.

        Args:
            tensor: The loss.
            model: The module.
            *args: Arguments of Lightning's own method.
            loss_id: Index of the loss scale, below the option ``num_losses``.
            **kwargs: Keyword arguments of Lightning's own method.

        Raises:
            RuntimeError: If Fabric's modules were prepared without optimizers.
        """
        if not self._optimizers:
            if self._library is _FABRIC:
                raise RuntimeError(
                    "ApexPrecision has no optimizers for the modules that Fabric has set up. Pass "
                    "them, ApexPrecision(..., optimizers=[optimizer]), and call the modules that "
                    "fabric.setup returns."
                )
            self._library.backward(self, tensor, model, *args, **kwargs)
            return
        with amp.scale_loss(tensor, self._optimizers, loss_id) as scaled_loss:
            self._library.backward(self, scaled_loss, model, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Any,
        model: nn.Module | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure and steps, unless a gradient overflowed.

        Only optimizers that may evaluate the closure several times receive it, which a dynamic
        loss scale refuses.
        """
        if self._library is _FABRIC:
            if closure is not None:
                kwargs["closure"] = closure
            return optimizer.step(**kwargs)
        if closure is None or _may_evaluate_again(optimizer):
            return self._library.optimizer_step(self, optimizer, model, closure, **kwargs)
        result = closure()
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return result

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scales, in the format of ``amp.state_dict()``."""
        if self._optimizers:
            return scales.state_dict(self._optimizers[0])
        return dict(self._scales)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the loss scales, or stores them until the first optimizer is prepared.

        Raises:
            RuntimeError: If a value is invalid; nothing changes in this case.
        """
        if self._optimizers:
            scales.load_state_dict(self._optimizers[0], state_dict)
        else:
            scaler_states.parsed(state_dict)  # raises unless these are scales
            self._scales = dict(state_dict)


_REMEDY = (
    "ApexPrecision casts the inputs of the module's own forward and of its children. A module "
    "further down, a method or a parameter that the step uses directly computes in 16 bits. Call "
    "it from forward or from a child's forward, or cast its input, as in "
    "self.model.encoder(x.to(self.dtype))."
)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _may_evaluate_again(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's step may evaluate its closure more than once."""
    original = plain_class(type(optimizer))
    if original.__module__.startswith(("torch.optim.", "apex.")):
        return issubclass(original, LBFGS)
    closure = parameters_of(original.step).get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return True
    prepared = prepared_state(optimizer)
    return prepared is None or not prepared.session.can_skip
