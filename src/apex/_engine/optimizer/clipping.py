"""Clipping by the global norm of everything that an optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from apex._core.finite import group
from apex._core.foreach import norms
from apex._engine.optimizer import deferred, mirror_gradients
from apex._torch import blocks, dtensor
from apex._torch.copies import moved
from apex._torch.counted import without_counting
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding


@untraced
@torch.no_grad()
def clip_grad_norm_(
    binding: Binding, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    """Scales an optimizer's gradients so that their norm is at most ``max_norm``; returns the norm.

    Deferred gradients stay deferred: the factor is one more of theirs.
    """
    if binding.gradients.unfinished:
        raise RuntimeError(
            "amp.clip_grad_norm_ was called while the gradients are still scaled. Call it after "
            "the amp.scale_loss block; with delay_unscale=True, after the last block of the step."
        )
    binding.settle()
    params = list({id(param): param for param in binding.params()}.values())
    _settle_unlike(params)
    waiting = [each for param in params if (each := deferred.of(param)) is not None]
    own = [param for param in params if deferred.of(param) is None and param.grad is not None]
    if any(param.grad.layout is not torch.strided for param in own):  # type: ignore[union-attr]
        raise TypeError(
            "amp.clip_grad_norm_ got a sparse gradient, which has no norm that torch can compute. "
            "Use an embedding with sparse=False, or give it an optimizer of its own."
        )
    if not (waiting or own):
        return torch.tensor(0.0)
    with without_counting():
        norm = _norm([param for param in params if deferred.has_grad(param)], norm_type)
        # sync: the caller requests an error, which the host must raise
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is not finite, so they cannot be "
                "clipped. Pass error_if_nonfinite=False to scale them by it anyway: a dynamic loss "
                "scale then skips the step."
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for each in waiting:
            each.factors = (*each.factors, factor)
        _scale(own, factor)
        _mirror(binding, own)
    return norm


def _settle_unlike(params: Iterable[nn.Parameter]) -> None:
    """Computes deferred gradients that are laid out in another way than their master.

    In the order of their memory, the squares add up to another sum than those of the fp32 gradient.
    """
    found = [(param, each) for param in params if (each := deferred.of(param)) is not None]
    masters = dtensor.locals_of([param for param, _ in found])
    alike = blocks.alike(masters, [each.values for _, each in found])
    for (_, each), same in zip(found, alike, strict=True):
        if not same:
            each.settle()


def _norm(params: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    """Returns the norm of the gradients of parameters, over all ranks' shards."""
    layouts: dict[object, list[nn.Parameter]] = {}
    for param in params:
        layouts.setdefault(dtensor.layout(param), []).append(param)
    shared = [_norm_of_layout(same, norm_type) for same in layouts.values()]
    return shared[0] if len(shared) == 1 else _total(shared, norm_type, shared[0].device)


def _norm_of_layout(params: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    """Returns the norm of gradients with one layout; the same bits whichever are deferred."""
    found: list[Tensor] = []
    waiting = [each for param in params if (each := deferred.of(param)) is not None]
    deferred.in_fp32(waiting, lambda values: found.extend(_norms(values, norm_type)))
    in_order = iter(found)
    norms_of = {
        id(each): list(islice(in_order, len(_parts(each.values))))
        for same in deferred.by_device(waiting)
        for each in same
    }
    parts: list[Tensor] = []
    for param in params:
        each = deferred.of(param)
        parts += _norms_of_grad(param, norm_type) if each is None else norms_of[id(each)]
    total = _total(parts, norm_type, parts[0].device if parts else params[0].device)
    return _reduced(total, params[0], norm_type)


def _norms_of_grad(param: nn.Parameter, norm_type: float) -> list[Tensor]:
    if param.grad is None:
        return []
    grad = dtensor.local(param.grad)
    if grad.is_complex() or grad.dtype is torch.float64 or not blocks.is_dense(grad):
        return [torch.linalg.vector_norm(grad, norm_type)] if grad.numel() else []
    return _norms([grad], norm_type)


def _norms(values: Iterable[Tensor], norm_type: float) -> list[Tensor]:
    parts = [part for value in values for part in _parts(value)]
    return list(torch._foreach_norm(parts, norm_type, dtype=torch.float32)) if parts else []


def _parts(values: Tensor) -> list[Tensor]:
    """Returns the parts of a tensor whose norms are taken; the same if it comes in pieces."""
    return [piece for part in blocks.parts(values) for piece in norms.pieces(part)]


def _total(parts: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the norm of the norms of parts; 0 for none."""
    stacked = norms.stacked(parts, device)
    if not parts or norm_type == 0.0:
        return stacked.sum()
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total


def _reduced(norm: Tensor, like: Tensor, norm_type: float) -> Tensor:
    """Returns the norm over all shards of tensors like ``like``, from that of this rank's."""
    over = dtensor.groups([like])
    if not over:
        return norm
    if math.isinf(norm_type):
        dtensor.all_reduce_(norm, over, "MAX" if norm_type > 0 else "MIN")
        return norm
    power = norm if norm_type == 0.0 else norm**norm_type
    dtensor.all_reduce_(power, over, "SUM")
    return power if norm_type == 0.0 else power ** (1.0 / norm_type)


def _scale(params: Sequence[nn.Parameter], factor: Tensor) -> None:
    grads = [grad for param in params if (grad := param.grad) is not None]
    for same in group(dtensor.locals_of(grads)) if grads else ():
        torch._foreach_mul_(same, moved(factor, same[0].device, same[0].dtype))


def _mirror(binding: Binding, params: Sequence[nn.Parameter]) -> None:
    """Shows the clipped gradients in the model's."""
    clipped = {id(param) for param in params}
    pairs = [p for p in binding.pairs if p.mirrors_grad and id(p.master) in clipped]
    mirror_gradients.write(pairs, [grad for p in pairs if (grad := p.master.grad) is not None])
    mirror_gradients.mark(pairs)
