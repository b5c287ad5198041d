"""Steps of torch's fused kernels: block by block, over the model's 16-bit gradients, or skipped.

Note [The step block by block]
    torch's fused kernels take fp32 gradients of fp32 masters, which would exist beside the 16-bit
    ones: 4 bytes per parameter. Large models step without them. A master whose gradient has 16 bits
    shows the optimizer a stand-in: an alias of itself, fp32 and laid out alike, whose values nobody
    reads. A dispatch mode recognizes it, and runs the optimizer's operator itself, on a few hundred
    thousand elements at a time. It makes the gradient's fp32 values in a small buffer, and rounds
    the masters into the model while they are in the cache. State, groups and hooks are torch's own,
    and so are the bits, as kernels are elementwise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from apex._core import tree
from apex._core.arguments import parameters_of
from apex._core.foreach.layouts import shared_layout
from apex._engine import masters
from apex._engine.masters import MasterPair
from apex._torch import dispatch_modes, foreach
from apex._torch.dynamo import untraced
from apex._torch.parameters import set_grad

least_elements = 2**21
"""Fewest elements of masters for which it pays on a CPU.

Time of the end of the backward pass and the step, relative to a step over fp32 gradients (AdamW,
one thread of a CPU, torch 2.13): 1.0 to 1.5 for 1 M elements in 8 to 32 tensors, 0.5 to 0.8 for
4 M in 8 to 128, 0.4 for 17 M in 8.
"""

_LEAST = 2**19
"""Fewest elements in a block on a CPU, which caches hold."""

_GREATEST = 2**24
"""Most elements in a block on a CPU, to spare memory."""

device_elements = 2**25
"""Elements in a block on any other device: 128 MiB of gradients in fp32.

A block costs three launches, each of a thread block for 65,536 elements (torch's
``multi_tensor_apply``). A smaller model steps at once, as no block would save memory. By count, not
measured on a GPU.
"""


@untraced
def begin(optimizer: Optimizer, pairs: Sequence[MasterPair]) -> BlockStep | None:
    """Begins a step block by block if the masters are large enough, and kernels can take blocks."""
    elements = 0
    for pair in pairs:
        grad = pair.model.grad
        if grad is not None and grad.dtype is not torch.float32:
            elements += grad.numel()
    least = device_elements
    if pairs[0].master.is_cpu:
        least = least_elements
    if elements < least or not reads_gradients_in_kernels(optimizer):
        return None
    return BlockStep(optimizer, pairs)


class BlockStep(TorchDispatchMode):
    """A dispatch mode around one step, whose kernels take the model's 16-bit gradients."""

    def __init__(self, optimizer: Optimizer, pairs: Sequence[MasterPair]) -> None:
        """Starts as soon as the optimizer's own pre-hooks have run."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._pairs = pairs
        # By ``id`` of the stand-in, which comes with the pair.
        self._shown: dict[int, tuple[Tensor, MasterPair]] = {}
        self._hook = optimizer.register_step_pre_hook(self._show_stand_ins)

    @untraced
    def _show_stand_ins(self, *_: object) -> None:
        """Shows stand-ins for the 16-bit gradients that blocks can take."""
        for pair in self._pairs:
            grad = pair.model.grad
            if grad is None or grad.dtype is torch.float32 or grad.requires_grad:
                continue
            if _alike(pair.master, grad, pair.model):
                stand_in = pair.master.detach()
                set_grad(pair.master, stand_in)
                self._shown[id(stand_in)] = stand_in, pair
        self.__enter__()  # type: ignore[no-untyped-call]

    @untraced
    def end(self) -> None:
        """Ends the step, also after an error, and shows the real gradients again."""
        self._hook.remove()
        dispatch_modes.exit_mode(self)
        for pair in self._pairs:
            set_grad(pair.master, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the fused operators by blocks, and every other one as it is."""
        kwargs = kwargs or {}
        if dispatch_modes.operands(func):
            args = self._run_by_blocks(func, args, kwargs)
            if not args[0]:
                return None
        if func not in _METADATA:
            args = tree.map_tensors(self._real_gradient, args)
        return func(*args, **kwargs)

    def _real_gradient(self, tensor: Tensor) -> Any:
        """Returns the fp32 gradient in place of a stand-in, and other tensors as they are."""
        _, pair = self._shown.get(id(tensor), (None, None))
        if pair is None:
            return tensor
        masters.widen_grads([pair])
        return pair.model.grad

    def _run_by_blocks(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Runs a fused operator on the tensors whose gradients have stand-ins.

        Returns the arguments that remain, with the other tensors.
        """
        pairs: list[MasterPair] = []
        taken: list[int] = []
        rest: list[int] = []
        count = dispatch_modes.operands(func)
        operands = [tensors for tensors in args[:count] if tensors]
        for index, (param, grad, *states) in enumerate(zip(*operands, strict=True)):
            _, pair = self._shown.get(id(grad), (None, None))
            if pair is not None and _alike(param, *states):
                pairs.append(pair)
                taken.append(index)
            else:
                rest.append(index)
        if pairs:
            lists = [_chosen(tensors, taken) for tensors in args]
            _run_blocks(func, pairs, lists, kwargs)
        return tuple(_chosen(tensors, rest) for tensors in args)


def _chosen(tensors: Sequence[Tensor], indices: Iterable[int]) -> list[Tensor]:
    """Returns the tensors at some indices; none of a state that the optimizer does not keep."""
    return [tensors[index] for index in indices] if tensors else []


def _run_blocks(
    func: Any, pairs: Sequence[MasterPair], lists: Sequence[list[Tensor]], kwargs: dict[str, Any]
) -> None:
    """Runs a fused operator block by block, and rounds the masters into the model.

    On a CPU, a block has a 64th of all elements, within the bounds.
    """
    models: list[Tensor] = []
    grads: list[Tensor] = []
    sizes: list[int] = []
    for pair in pairs:
        models.append(pair.model.detach())
        grads.append(cast(Tensor, pair.model.grad))
        sizes.append(pair.model.numel())
    operands = [lists[0], grads, *lists[2:]]
    device = models[0].device
    elements = sum(sizes)
    length = device_elements
    if device.type == "cpu":
        share = elements // 64 // _LEAST * _LEAST
        length = max(_LEAST, min(_GREATEST, share))
    buffer = torch.empty(min(length, elements), dtype=torch.float32, device=device)
    # torch's own function parses some hundred tensors in a third of the operator's time.
    kernel = getattr(torch, func.overloadpacket.__name__)
    for block in _cuts(tuple(sizes), length):
        params, low_grads, *states = [_pieces(tensors, block) for tensors in operands]
        wide_grads = _filled(buffer, low_grads)
        kernel(params, wide_grads, *states, **kwargs)
        foreach.copy_(_pieces(models, block), params)
    # Not of ``models``: in a dispatch mode, detach() makes a counter of its own.
    increment_version([pair.model for pair in pairs])
    masters.mark_synced(pairs)


_METADATA = frozenset({torch.ops.aten.empty_like.default, torch.ops.aten.detach.default})
"""Operators that read no values: they take stand-ins."""

_Block = Sequence[tuple[int, int, int]]
"""Pieces of a block: the position of a tensor, the first element, and the number of elements."""


@functools.lru_cache(maxsize=32)  # an optimizer cuts the same tensors in each step
def _cuts(sizes: tuple[int, ...], length: int) -> list[_Block]:
    """Returns blocks of at most ``length`` elements.

    Each kernel ends in a barrier, so a piece is a whole tensor where that fits.
    """
    blocks: list[list[tuple[int, int, int]]] = []
    left = 0
    for position, size in enumerate(sizes):
        for first in range(0, size, length):
            count = min(length, size - first)
            if count > left:
                blocks.append([])
                left = length
            blocks[-1].append((position, first, count))
            left -= count
    return [tuple(block) for block in blocks]


def _pieces(tensors: Sequence[Tensor], block: _Block) -> list[Tensor]:
    """Returns a block's pieces of dense tensors: a whole tensor, or a 1-d view in memory order.

    A step count is always whole. The list is empty for a state that the optimizer does not keep.
    """
    pieces: list[Tensor] = []
    if not tensors:
        return pieces
    for place, first, size in block:
        piece = tensors[place]
        if size < piece.numel():
            piece = piece.as_strided((size,), (1,), piece.storage_offset() + first)
        pieces.append(piece)
    return pieces


def _filled(buffer: Tensor, lows: Sequence[Tensor]) -> list[Tensor]:
    """Returns fp32 copies of 16-bit gradients in a buffer."""
    values: list[Tensor] = []
    offset = 0
    for low in lows:
        values.append(buffer.as_strided(low.size(), low.stride(), offset))
        offset += low.numel()
    foreach.copy_(values, lows)
    return values


def _alike(first: Tensor, *others: Tensor) -> bool:
    """Returns whether tensors lie in memory alike and without gaps, so that they can be cut."""
    for tensor in (first, *others):
        is_like_first = tensor.shape == first.shape and tensor.device == first.device
        if tensor.layout is not torch.strided or not is_like_first:
            return False
    return shared_layout((first, *others)) is not None


# -- what kernels do by themselves: read the gradients, and skip the step --------------------------

_FUSED_CLASSES = (SGD, Adagrad, AdamW, Adam)


def _fused_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Returns torch's class whose fused kernel steps every group; ``None`` if there is none."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return None
    for fused_class in _FUSED_CLASSES:
        if issubclass(type(optimizer), fused_class):
            return fused_class
    return None


def reads_gradients_in_kernels(optimizer: Optimizer) -> bool:
    """Returns whether only torch's fused kernels read the values of gradients in its step.

    Optimizers of other classes declare it by ``gradients_in_kernels`` in the class itself, as a
    subclass may read them elsewhere.
    """
    own: Any = optimizer.__class__  # not the class that amp generates
    return own is _fused_class(optimizer) or bool(vars(own).get("gradients_in_kernels"))


@untraced
def skips_in_kernel(optimizer: Optimizer, found_inf: Tensor) -> bool:
    """Returns whether the optimizer's step reads ``found_inf`` on the device and skips by itself.

    torch's fused optimizers do if every group is fused. So do other optimizers that declare
    ``_step_supports_amp_scaling``. A step with an argument ``grad_scaler`` does not: it asks the
    scaler.
    """
    # torch's fused optimizers copy it to CPU parameters without synchronizing (torch 2.13).
    if not found_inf.is_cpu:
        for group in optimizer.param_groups:
            if any(param.is_cpu for param in group["params"]):
                return False
    # A copied or unpickled torch optimizer loses the declaration but keeps its fused kernels.
    fused_class = _fused_class(optimizer)
    if fused_class is not None:
        return fused_class is not SGD or not _starts_momentum(optimizer)
    declared = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = declared and all(group.get("fused", True) for group in optimizer.param_groups)
    own: Any = optimizer.__class__
    return fused and "grad_scaler" not in parameters_of(own.step)


def _starts_momentum(optimizer: Optimizer) -> bool:
    # torch's fused SGD kernel leaves the momentum uninitialized if it skips the first step, and the
    # next step uses it (torch 2.13). So the host decides whether a group's first step is skipped.
    state = optimizer.state
    for group in optimizer.param_groups:
        states = [state[param] for param in group["params"] if param in state]
        if group["momentum"] != 0 and not any("momentum_buffer" in kept for kept in states):
            return True
    return False
