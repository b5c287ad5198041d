"""The step in one pass: torch's fused kernels take 16-bit gradients, block by block.

Note [The step in one pass]
    torch's fused kernels take fp32 gradients of fp32 masters, which would exist beside the
    16-bit ones: 4 bytes per parameter. Instead, masters give the optimizer a stand-in for their
    deferred gradient (Note [Deferred gradients]) and a dispatch mode runs the optimizer's operator
    itself, on a few hundred thousand elements at a time: it makes their fp32 gradient in a small
    buffer, and rounds their masters into the model while they are in the cache. State, groups and
    hooks are torch's own, and so are the bits: the kernels are elementwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from apex._core import tree
from apex._engine.optimizer import deferred
from apex._engine.tracked_pair import TrackedPair, mark_rounded
from apex._torch import blocks, dispatch_modes, dtensor
from apex._torch.counted import without_counting
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding

enabled = True
"""Whether steps may take one pass, and sums blocks; tests turn it off."""

least_elements = 2**21
"""Elements of masters from which on a step takes one pass.

Time of the end of the backward pass and the step, relative to two passes (O5, AdamW, one thread of
a CPU, torch 2.13, interleaved): 1.0 to 1.5 for 1 M elements in 8 to 32 tensors, 0.5 to 0.8 for 4 M
in 8 to 128, 0.4 for 17 M in 8. Not measured on a GPU.
"""

_DECLARATION = "gradient_methods"
"""Attribute by which an optimizer's class declares the methods of its step that handle gradients.

Only torch's fused kernels read their values in these. A subclass that overrides one of them gets
fp32 gradients.
"""


def takes(binding: Binding) -> bool:
    """Returns whether the next step of an optimizer takes 16-bit gradients."""
    return goes_by_blocks(binding) and _is_fused(binding.optimizer)


def goes_by_blocks(binding: Binding) -> bool:
    """Returns whether masters are many enough for work block by block to pay."""
    return enabled and binding.elements >= least_elements


@untraced
def one_pass_step(binding: Binding, *, compiled: bool) -> OnePassStep | None:
    """Returns the step of an optimizer with deferred gradients; ``None`` if it needs fp32 ones."""
    if compiled:
        binding.gradients.settle()  # dynamo cannot trace a parameter whose gradient is a property
        return None
    if not takes(binding) or all(deferred.of(pair.master) is None for pair in binding.pairs):
        return None
    return OnePassStep(binding.optimizer, binding.pairs)


def fused_kind(optimizer: Optimizer) -> type[Optimizer] | None:
    """Returns torch's class whose fused kernel steps every group; ``None`` if there is none."""
    if not all(group.get("fused") for group in optimizer.param_groups):
        return None
    kinds = SGD, Adagrad, AdamW, Adam
    return next((kind for kind in kinds if isinstance(optimizer, kind)), None)


def _is_fused(optimizer: Optimizer) -> bool:
    """Returns whether only torch's fused kernels read the values of gradients in its own step."""
    base: Any = fused_kind(optimizer)
    methods: tuple[str, ...] = ("step", "_init_group")
    if base is None:
        kinds = type(optimizer).__mro__
        base = next((kind for kind in kinds if _DECLARATION in vars(kind)), None)
        methods = getattr(base, _DECLARATION, ())
    return bool(methods) and all(_inherits(type(optimizer), base, name) for name in methods)


def _inherits(kind: type, base: Any, name: str) -> bool:
    """Returns whether a method is ``base``'s own, apart from what torch and amp wrap around it."""
    found = (getattr(each, name) for each in kind.__mro__ if name in vars(each))
    method = next(each for each in found if not each.__module__.startswith("apex._engine."))
    wanted = getattr(base, name)
    return method is wanted or inspect.unwrap(method) is inspect.unwrap(wanted)


class OnePassStep(TorchDispatchMode):
    """One step that takes deferred gradients as they are."""

    def __init__(self, optimizer: Optimizer, pairs: Sequence[TrackedPair]) -> None:
        """Takes the optimizer's pairs; :meth:`begin` starts the step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer
        self._pairs = pairs
        self._lent: dict[int, _Lent] = {}
        self._rounded: list[tuple[Tensor, TrackedPair]] = []
        self._hook: RemovableHandle | None = None
        self._open = True

    def begin(self) -> None:
        """Arms the step as soon as the optimizer's own pre-hooks have run."""
        self._hook = self._optimizer.register_step_pre_hook(lambda *_: self.arm())

    @untraced
    def arm(self) -> None:
        """Gives torch stand-ins for the gradients, until its operator takes them."""
        if not self._open:
            return
        for pair in self._pairs:
            lent = deferred.lend(pair.master)
            if lent is not None:
                self._lent[id(lent.stand_in)] = _Lent(lent.stand_in, pair, lent)
        self.__enter__()  # type: ignore[no-untyped-call]

    @untraced
    def end(self) -> None:
        """Ends the step, whatever came of it; idempotent."""
        self._open = False
        if self._hook is not None:
            self._hook.remove()
        dispatch_modes.exit_mode(self)
        for lent in self._lent.values():
            lent.gradient.stand_in = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the fused operators by blocks, and every other one as it is."""
        kwargs = kwargs or {}
        if func in dispatch_modes.OPERANDS:
            with without_counting():
                return self._run(func, args, kwargs)
        if self._rounded:
            self._mark_written(dispatch_modes.listed_writes(func, args))
        if func not in _METADATA and self._takes_stand_ins(args, kwargs):
            args, kwargs = tree.map_arguments(self._real, args, kwargs)
        return func(*args, **kwargs)

    def _takes_stand_ins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether an operator gets stand-ins, alone or in lists."""
        for value in (*args, *kwargs.values()):
            for each in value if isinstance(value, list | tuple) else (value,):
                if id(each) in self._lent:
                    return True
        return False

    def _mark_written(self, tensors: Iterable[Tensor]) -> None:
        """Marks masters that are written after they were rounded: by a hook, in a list."""
        written = {dtensor.local(tensor).data_ptr() for tensor in tensors}
        for param, pair in self._rounded if written else ():
            if param.data_ptr() in written:
                pair.mark_stepped()

    def _real(self, tensor: Tensor) -> Any:
        lent = self._lent.get(id(tensor))
        if lent is None:
            return tensor
        lent.gradient.stand_in = None
        return lent.pair.master.grad

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs a fused operator: by blocks where gradients are deferred, as it is on the others."""
        lent = self._lent_for_blocks(func, args, kwargs)
        taken, rest = blocks.divide(args, [each is not None for each in lent])
        own = [self._real(grad) for grad in rest[1]]
        if taken[0]:
            lists = [dtensor.locals_of(each) for each in taken]
            self._run_blocks(func, lists, [each for each in lent if each is not None], kwargs)
        if rest[0]:
            func(rest[0], own, *rest[2:], **kwargs)

    def _lent_for_blocks(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[_Lent | None]:
        """Returns for each parameter the gradient that the operator can take by blocks, if any."""
        if kwargs.get("grad_scale") is not None:  # the kernel writes unscaled gradients back
            return [None for _ in args[0]]
        lent = [self._lent.get(id(grad)) for grad in args[1]]
        values, models = list(args[1]), list(args[1])
        for i, each in enumerate(lent):
            if each is not None:
                values[i], models[i] = each.gradient.values, each.pair.model
        states = [each for each in args[2 : dispatch_modes.OPERANDS[func]] if each]
        alike = blocks.alike(*map(dtensor.locals_of, (args[0], values, models, *states)))
        return [
            each if same and each is not None and each.gradient.stand_in is not None else None
            for same, each in zip(alike, lent, strict=True)
        ]

    def _run_blocks(
        self, func: Any, lists: blocks.Lists, lent: Sequence[_Lent], kwargs: dict[str, Any]
    ) -> None:
        params = lists[0]
        cuts = blocks.cuts(params)
        pairs = [each.pair for each in lent]
        models = [pair.model for pair in pairs]
        masters = _Rounding(cuts, params, models)
        grads = deferred.gradients(cuts, [each.gradient for each in lent], masters.pieces)
        blocks.run(func, lists, kwargs, cuts, masters, grads)
        for each in lent:
            each.gradient.stand_in = None
        increment_version(models)
        mark_rounded(pairs)
        self._rounded += zip(params, pairs, strict=True)


class _Lent(NamedTuple):
    """A deferred gradient whose stand-in torch reads.

    Attributes:
        stand_in: Held, so that no other tensor has the same id.
        pair: Model and master.
        gradient: The gradient.
    """

    stand_in: Tensor | None
    pair: TrackedPair
    gradient: deferred.Deferred


class _Rounding(blocks.InPlace):
    """Masters that are rounded into the model after the kernel."""

    def __init__(
        self, cuts: blocks.Cuts, masters: Sequence[Tensor], models: Sequence[Tensor]
    ) -> None:
        super().__init__(cuts.of_all(masters))
        self._models = cuts.of_all(dtensor.locals_of(models))

    def store(self, block: slice, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._models[block], values)


_METADATA = frozenset({torch.ops.aten.empty_like.default, torch.ops.aten.detach.default})
"""Operators that read no values: they take stand-ins."""
