"""The step block by block: torch's fused kernels take the model's 16-bit gradients.

Note [The step block by block]
    torch's fused kernels take fp32 gradients of fp32 masters, which would exist beside the 16-bit
    ones: 4 bytes per parameter. At a level without loss scale, large models step without them:
    masters show the optimizer a stand-in without memory as their gradient, and a dispatch mode runs
    the optimizer's operator itself, on a few hundred thousand elements at a time. It makes their
    fp32 gradient in a small buffer, and rounds their masters into the model while they are in the
    cache. State, groups and hooks are torch's own, and so are the bits, as kernels are elementwise.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from apex._core import tree
from apex._core.foreach.scalars import multiply_
from apex._engine import masters
from apex._engine.masters import MasterPair
from apex._torch import dispatch_modes, foreach, parameters
from apex._torch.dynamo import untraced
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import PreparedOptimizer

least_elements = 2**21
"""Elements of masters from which on it pays on a CPU.

Time of the end of the backward pass and the step, relative to a step over fp32 gradients (AdamW,
one thread of a CPU, torch 2.13): 1.0 to 1.5 for 1 M elements in 8 to 32 tensors, 0.5 to 0.8 for
4 M in 8 to 128, 0.4 for 17 M in 8.
"""

_LEAST, _GREATEST = 2**19, 2**24
"""Bounds of the elements in a block on a CPU: caches hold the least, spare memory the most."""

device_elements = 2**25
"""Elements in a block on any other device: 128 MiB of gradients in fp32.

A block costs three launches, each of a thread block for 65,536 elements (torch's
``multi_tensor_apply``). A smaller model steps at once, as no block would save memory. By count, not
measured on a GPU.
"""

_numel = operator.methodcaller("numel")
_place = operator.attrgetter("shape", "device")


@untraced
def begin(prepared: PreparedOptimizer) -> BlockStep | None:
    """Begins a step block by block if the gradients pending on the model are large enough.

    Expects an optimizer whose fused kernels alone read gradients.
    """
    elements = 0
    with without_overrides():
        for pair in prepared.pairs:
            if pair.model.grad is not None:
                elements += pair.model.numel()
    on_cpu = prepared.pairs[0].master.device.type == "cpu"
    if elements < (least_elements if on_cpu else device_elements) or prepared.shared_pairs():
        return None
    return BlockStep(prepared)


class BlockStep(TorchDispatchMode):
    """One step that takes the model's gradients as they are."""

    def __init__(self, prepared: PreparedOptimizer) -> None:
        """Starts as soon as the optimizer's own pre-hooks have run."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._pairs = prepared.pairs
        self._lent: dict[int, tuple[MasterPair, Tensor, Tensor]] = {}  # by id of the stand-in
        self._rounded: set[int] = set()
        self._open = True
        self._hook: RemovableHandle = prepared.optimizer.register_step_pre_hook(
            lambda *_: self._arm()
        )

    @untraced
    def _arm(self) -> None:
        """Gives masters stand-ins for their gradients, until the operator takes them."""
        if not self._open:
            return
        for pair in self._pairs:
            grad = pair.pending_grad
            if grad is None:
                continue
            plain = parameters.grad_of(pair.master) is None and not grad.requires_grad
            if plain and _alike(pair.master, grad, pair.model):
                pair.model.grad = None
                shown = pair.master.detach()  # laid out like a gradient
                parameters.set_grad(pair.master, shown)
                self._lent[id(shown)] = pair, grad, shown
            else:
                masters.move_grads_to_masters([pair])
        self.__enter__()  # type: ignore[no-untyped-call]

    @untraced
    def end(self) -> set[int]:
        """Ends the step, whatever came of it; gradients that no operator took go back.

        Returns the ids of the pairs whose masters are rounded into the model already.
        """
        self._open = False
        self._hook.remove()
        dispatch_modes.exit_mode(self)
        for pair, grad, shown in self._lent.values():
            if parameters.grad_of(pair.master) is shown:
                parameters.set_grad(pair.master, None)
                pair.model.grad = grad
        self._lent = {}
        return self._rounded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the fused operators by blocks, and every other one as it is."""
        kwargs = kwargs or {}
        if func in dispatch_modes.OPERANDS:
            return self._run(func, args, kwargs)
        if func not in _METADATA:
            args = tree.map_tensors(self._real, args)
        return func(*args, **kwargs)

    def _real(self, tensor: Tensor) -> Any:
        """Returns the fp32 gradient in place of a stand-in, and other tensors as they are."""
        lent = self._lent.get(id(tensor))
        if lent is None:
            return tensor
        pair, grad, _ = lent
        if self._is_lent(pair.master, tensor):
            pair.model.grad = grad
            parameters.set_grad(pair.master, None)
            masters.move_grads_to_masters([pair])
        return parameters.grad_of(pair.master)

    def _is_lent(self, master: Tensor, shown: Tensor) -> bool:
        """Returns whether a tensor stands for the gradient of ``master``, which nobody has read."""
        return id(shown) in self._lent and parameters.grad_of(master) is shown

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs a fused operator: by blocks where gradients are lent, as it is on the others."""
        count = dispatch_modes.OPERANDS[func]
        # With a scale, the kernel writes unscaled gradients back.
        takes = kwargs.get("grad_scale") is None
        taken = [
            takes and self._is_lent(param, grad) and _alike(param, *states)
            for param, grad, *states in zip(*filter(None, args[:count]), strict=True)
        ]
        lists = [[t for t, own in zip(each, taken, strict=False) if own] for each in args]
        rest = [[t for t, own in zip(each, taken, strict=False) if not own] for each in args]
        if lists[0]:
            self._run_blocks(func, lists, kwargs)
        if rest[0]:
            rest[1] = [*map(self._real, rest[1])]
            func(*rest, **kwargs)

    def _run_blocks(self, func: Any, lists: list[list[Any]], kwargs: dict[str, Any]) -> None:
        params = lists[0]
        lent = [self._lent.pop(id(shown)) for shown in lists[1]]
        pairs = [pair for pair, _, _ in lent]
        lists[1] = [grad for _, grad, _ in lent]
        factors = [masters.clip_factor(grad) for grad in lists[1]]
        models = [pair.model.detach() for pair in pairs]
        count, kernel = dispatch_modes.OPERANDS[func], dispatch_modes.function_of(func)
        cuts = _cuts(tuple(map(_numel, params)), params[0].device.type)
        size, device = max(map(_elements, cuts), default=0), params[0].device
        buffer = torch.empty(size, dtype=torch.float32, device=device)
        for block in cuts:
            operands = [_pieces(each, block) if each else [] for each in lists[:count]]
            operands[1] = _filled(buffer, operands[1], [factors[i] for i, _, _ in block])
            steps = [[each[i] for i, _, _ in block] if each else [] for each in lists[count:]]
            kernel(*operands, *steps, **kwargs)
            foreach.copy_(_pieces(models, block), operands[0])
        increment_version(models)
        masters.mark_synced(pairs)
        self._rounded.update(map(id, pairs))
        for pair in pairs:
            parameters.set_grad(pair.master, None)


_METADATA = frozenset({torch.ops.aten.empty_like.default, torch.ops.aten.detach.default})
"""Operators that read no values: they take stand-ins."""

_Block = Sequence[tuple[int, int, int]]
"""Pieces of a block: the position of a tensor, the first element, and the number of elements."""


def _elements(block: _Block) -> int:
    return sum(size for _, _, size in block)


@functools.lru_cache(maxsize=32)  # an optimizer cuts the same tensors in each step
def _cuts(sizes: tuple[int, ...], device: str) -> list[_Block]:
    """Returns blocks of a 64th of all elements on a CPU, within the bounds.

    Each kernel ends in a barrier, so a piece is a whole tensor where that fits.
    """
    length = device_elements
    if device == "cpu":
        share = sum(sizes) // 64
        length = max(_LEAST, min(_GREATEST, share // _LEAST * _LEAST))
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
    """Returns the pieces of dense tensors, in the order of memory: a whole one, or a 1-d view."""
    return [
        tensors[i]
        if size == tensors[i].numel()
        else tensors[i].as_strided((size,), (1,), tensors[i].storage_offset() + first)
        for i, first, size in block
    ]


def _filled(
    buffer: Tensor, lows: Sequence[Tensor], factors: Sequence[Tensor | None]
) -> list[Tensor]:
    """Returns fp32 copies of 16-bit gradients in a buffer, times the factors of clipping."""
    values: list[Tensor] = []
    offset = 0
    for low in lows:
        values.append(buffer.as_strided(low.size(), low.stride(), offset))
        offset += low.numel()
    foreach.copy_(values, lows)
    multiply_(values, factors)
    return values


def _alike(first: Tensor, *others: Tensor) -> bool:
    """Returns whether tensors lie in memory alike and without gaps, so that they can be cut."""
    if {each.layout for each in (first, *others)} != {torch.strided}:
        return False
    if any(_place(each) != _place(first) for each in others):
        return False
    if all(each.is_contiguous() for each in (first, *others)):
        return True
    last = torch.channels_last if first.dim() == 4 else torch.channels_last_3d
    dense = first.dim() in (4, 5) and first.is_contiguous(memory_format=last)
    return dense and all(each.stride() == first.stride() for each in others)
