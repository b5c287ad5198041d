"""One pass compared with fp32: where outputs diverge, and which gradients underflow."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes, tree
from apex._core.param_groups import params_of
from apex.debug.storages import Storages
from apex.tools.results import ModuleError, Probe
from apex.tools.targets import seed_all
from apex.tools.trainers import Trainer
from apex.tools.variants import Variant

DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


Outputs = dict[tuple[str, int], tuple[str, Tensor]]
"""Class and output (fp32, on the CPU), by module name and call number."""


@dataclass(frozen=True)
class Observation:
    """Outputs and gradients of one pass.

    Attributes:
        outputs: Of leaf modules and of the model.
        dtypes: Floating dtypes of the outputs.
        grads: Gradients of the stepped parameters (fp32, on the CPU); ``None`` if missing.
        activation_bytes: Bytes that autograd saved for backward.
    """

    outputs: Outputs
    dtypes: frozenset[torch.dtype]
    grads: list[Tensor | None]
    activation_bytes: int


def observe(trainer: Trainer, batch: Any, *, seed: int) -> Observation:
    """Runs one forward and backward pass of ``trainer`` without a step.

    Dropout is disabled, because masks would differ between dtypes.
    """
    for module in trainer.model.modules():
        if isinstance(module, DROPOUT):
            module.eval()
    outputs: Outputs = {}
    kinds: set[torch.dtype] = set()
    calls: Counter[str] = Counter()

    def keep(name: str, module: nn.Module, output: Any) -> None:
        found = next((t for t in tree.tensors(output) if t.is_floating_point()), None)
        if found is None:
            return
        if name:  # the model's output may have been cast for the caller
            kinds.add(found.dtype)
        outputs[name, calls[name]] = type(module).__name__, _kept(found)
        calls[name] += 1

    handles = [
        module.register_forward_hook(lambda m, _, output, name=name: keep(name, m, output))
        for name, module in trainer.model.named_modules()
        if not name or next(module.children(), None) is None
    ]
    seed_all(seed)
    saved = Storages(trainer.model.parameters())
    try:
        with saved.of_saved_tensors():
            trainer.backward(batch)
    finally:
        for handle in handles:
            handle.remove()
    trainer.unscale()
    grads = [
        None if param.grad is None else _kept(param.grad.to_dense())
        for param in params_of(trainer.optimizer)
    ]
    return Observation(outputs, frozenset(kinds), grads, saved.total)


def compare(variant: Variant, seen: Observation, fp32: Observation) -> Probe:
    """Returns how ``seen`` differs from the same pass in fp32."""
    modules = [
        ModuleError(name, kind, _relative(output, fp32.outputs[name, call][1]))
        for (name, call), (kind, output) in seen.outputs.items()
        if (name, call) in fp32.outputs and output.shape == fp32.outputs[name, call][1].shape
    ]
    lowest = min(seen.dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)), default=variant.dtype)
    return Probe(
        compute_dtype=dtypes.name(lowest),
        modules=tuple(modules),
        eps=torch.finfo(variant.dtype).eps,
        underflow=_underflow(seen.grads, fp32.grads),
        activation_bytes=seen.activation_bytes,
    )


def spread(first: Observation, second: Observation) -> float:
    """Returns the largest relative difference of outputs and gradients of two equal passes."""
    outputs = [
        (output, first.outputs[key][1])
        for key, (_, output) in second.outputs.items()
        if key in first.outputs
    ]
    grads = zip(second.grads, first.grads, strict=True)
    pairs = [*outputs, *((a, b) for a, b in grads if a is not None and b is not None)]
    return max((_relative(a, b) for a, b in pairs if a.shape == b.shape), default=0.0)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _relative(output: Tensor, fp32: Tensor) -> float:
    """Returns the distance relative to fp32; an equal inf, or NaN, in both is no distance."""
    output, fp32 = output.double(), fp32.double()
    alike = (output == fp32) | (output.isnan() & fp32.isnan())
    size = float(fp32[fp32.isfinite()].norm())  # sync: on the CPU already
    difference = float(torch.where(alike, 0.0, output - fp32).norm())  # sync: on the CPU already
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else difference


def _underflow(grads: list[Tensor | None], fp32: list[Tensor | None]) -> float:
    there = zero = 0
    for low, full in zip(grads, fp32, strict=True):
        if low is not None and full is not None:
            there += int(full.count_nonzero())  # sync: on the CPU already
            zero += int(((full != 0) & (low == 0)).count_nonzero())  # sync: on the CPU already
    return zero / there if there else 0.0
