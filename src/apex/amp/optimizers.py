"""apex's interface to a prepared optimizer: ``master_params`` and ``_amp_stash``."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core.arguments import kind
from apex._core.param_groups import is_from
from apex._engine import masters
from apex._engine.masters import MasterPair, pair_of_master
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._engine.optimizer.subclass import AmpOptimizer, prepared_state

_HELD_AS = ("optim", "_optimizer", "optimizer", "base")
"""Attributes in which wrappers hold their optimizer; the last one is schedulefree's."""


def unwrap(optimizer: Any) -> Optimizer:
    """Returns the optimizer itself, or the one inside a wrapper such as LARC.

    Raises:
        TypeError: If it is neither.
    """
    inner = _inside(optimizer)
    if inner is None:
        raise TypeError(
            f"amp got {kind(optimizer)} instead of an optimizer. It accepts a "
            "torch.optim.Optimizer, apex.parallel.LARC around one, or (in initialize, restore and "
            "scale_loss) a list of these."
        )
    return inner


def unwrapped(optimizers: Any) -> list[Optimizer]:
    """Returns one optimizer, or a collection of them, as a list without wrappers.

    Raises:
        TypeError: If one is not an optimizer.
    """
    return [*map(unwrap, listed(optimizers))]


def listed(optimizers: Any) -> Collection[Any]:
    """Returns the collection that is given, or a list of the one optimizer."""
    # First, as the other question asks a prepared optimizer for the class that it shows.
    is_one = getattr(optimizers, "zero_grad", None) is not None
    if is_one or isinstance(optimizers, Mapping | Tensor) or not isinstance(optimizers, Collection):
        return [optimizers]
    return optimizers


def _inside(optimizer: Any) -> Optimizer | None:
    """Returns the prepared optimizer behind wrappers, or else the outermost ``Optimizer``.

    accelerate's wrapper is itself an ``Optimizer``. The inner one counts if amp has prepared it.
    What cannot clear gradients, such as a scheduler, is no wrapper.
    """
    outermost = None
    layer = optimizer if getattr(optimizer, "zero_grad", None) is not None else None
    while layer is not None:
        if isinstance(layer, Optimizer):
            if prepared_state(layer) is not None:
                return layer
            if outermost is None:
                outermost = layer
        held = [getattr(layer, name, None) for name in _HELD_AS]
        layer = next((inner for inner in held if isinstance(inner, Optimizer)), None)
    return outermost


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yields the parameters that the optimizer steps, which include any fp32 masters.

    For clipping: ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)``. The
    gradient of a master is its model parameter's, made fp32. Also accepts optimizers that amp has
    not prepared.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer.
    """
    if getattr(optimizer, "param_groups", None) is None:
        model = "the model " if isinstance(optimizer, nn.Module) else ""
        raise TypeError(
            f"amp.master_params got {model}{type(optimizer).__name__}; it takes an optimizer."
        )
    inner = _inside(optimizer)
    prepared = None if inner is None else prepared_state(inner)
    if prepared is not None:
        prepared.session.observer.masters_read(prepared)
        prepared.create_missing_masters()
        prepared.update_masters()
        if prepared.is_used_here:  # another thread may follow the weights while this one trains
            masters.widen_nonzero_grads(prepared.pairs, views=True)
    for group in optimizer.param_groups:
        yield from group["params"]


class AmpStash:
    """apex's ``optimizer._amp_stash``: lists of the optimizer's parameters, built on access.

    Attributes:
        lazy_init_called: For scripts that set it; has no effect.
        already_patched: For scripts that set it; has no effect.
        params_have_scaled_gradients: For scripts that set it; has no effect. Gradients are scaled
            inside a block only.
    """

    lazy_init_called = True
    already_patched = True
    params_have_scaled_gradients = False

    def __init__(self, prepared: PreparedOptimizer) -> None:
        self._prepared: PreparedOptimizer = weakref.proxy(prepared)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Low-precision model parameters with masters."""
        return [pair.model for pair in self._prepared.pairs]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters, in the order of ``all_fp16_params``."""
        return [pair.master for pair in self._prepared.pairs]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """Parameters that the optimizer steps directly, without masters."""
        return [param for param in self._prepared.params() if pair_of_master(param) is None]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """All parameters that the optimizer steps."""
        return [*self.all_fp32_from_fp16_params, *self.all_fp32_from_fp32_params]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """Low-precision model parameters with masters, by group."""
        return [[pair.model for pair in pairs] for pairs in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters, by group."""
        return [[pair.master for pair in pairs] for pairs in self._groups()]

    def _groups(self) -> list[list[MasterPair]]:
        optimizer = self._prepared.optimizer
        if is_from(optimizer, "apex.optimizers.fused_sgd"):
            # NVIDIA's would step the groups that it finds here with kernels for fp16.
            raise AttributeError("The _amp_stash of NVIDIA's FusedSGD has no groups.")
        groups = []
        for group in optimizer.param_groups:
            pairs = map(pair_of_master, group["params"])
            groups.append([pair for pair in pairs if pair is not None])
        return groups


def _stash_of(optimizer: Any) -> Any:
    prepared: Any = prepared_state(optimizer)
    return vars(prepared).setdefault("_apex_stash", AmpStash(prepared))


AmpOptimizer._amp_stash = property(_stash_of)
