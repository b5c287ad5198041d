"""apex's ``DistributedDataParallel``: torch's class with apex's all-reduce options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parallel

from apex import _unavailable
from apex._core import arguments
from apex._core.flat import flatten, unflatten
from apex._torch.ddp import SENDS_LATER, sent_params
from apex.parallel.delayed_reduction import DelayedReduction
from apex.parallel.flat_calls import (
    Reducer,
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    split_by_type,
    split_half_float_double,
)
from apex.parallel.gradient_reduction import GradientReduction, reduce_gradients

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "reduce_in_fp32",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]

__getattr__ = _unavailable.names_instead(
    __name__,
    dict.fromkeys(("import_flatten_impl", "imported_flatten_impl"), "apex_C.flatten"),
)

_MESSAGE_SIZE = 10_000_000

# torch checks the annotations of hooks and rejects strings; a lambda has none.
_in_background: Any = lambda state, bucket: state.in_background(bucket)  # noqa: E731


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Averages gradients over processes during the backward pass.

    A thin subclass of ``torch.nn.parallel.DistributedDataParallel``: with default options, the
    communication is torch's own. As in apex, buffers (batch norm's statistics) are not broadcast
    between iterations; torch's ``broadcast_buffers=True`` enables that.

    Args:
        module: The module, on its device; the CPU works with gloo.
        message_size: Gradient elements per message, rounded to MiB; by default, torch chooses.
        delay_allreduce: Whether to communicate once, at the end of the backward pass. Parameters
            may then be unused in any iteration; otherwise, this needs
            ``find_unused_parameters=True``.
        shared_param: Not supported, as in apex.
        allreduce_trigger_params: Ignored; torch decides when to send a message.
        retain_allreduce_buffers: Whether ``allreduce_buffers`` holds the reduced gradients.
        allreduce_always_fp32: Whether to send and sum 16-bit gradients in fp32.
        num_allreduce_streams: Ignored; torch overlaps messages itself.
        allreduce_communicators: Ignored.
        gradient_average: Whether to divide the sum by the number of processes.
        gradient_predivide_factor: Divisor before the sum; after it, the sum is divided by the
            remaining factor, or not at all without ``gradient_average``. At 1, torch divides by the
            number of processes before the sum, except with ``delay_allreduce``.
        gradient_average_split_factor: Ignored, as in apex.
        prof: Ignored; ``torch.profiler`` shows these calls.
        **torch_options: Keyword arguments of torch's class.

    Raises:
        ValueError: If ``shared_param`` is given, options are incompatible, or a number is out of
            range.
        TypeError: If ``module`` is not a module, an argument has the wrong type, a keyword is
            unknown, or a subclass overrides ``allreduce_bucket``.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = _MESSAGE_SIZE,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Sequence[Any] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        **torch_options: Any,
    ) -> None:
        """Broadcasts rank 0's parameters and registers the gradient hooks."""
        if type(self).allreduce_bucket is not DistributedDataParallel.allreduce_bucket:
            raise TypeError(
                f"{type(self).__name__} overrides allreduce_bucket, which no backward pass calls: "
                "torch sends the gradients. Pass a hook to register_comm_hook instead."
            )
        arguments.module("apex.parallel.DistributedDataParallel", module)
        if not arguments.is_number(message_size) or message_size <= 0:
            raise TypeError(
                f"message_size is {message_size!r}; it takes a number of gradient elements above "
                "0. Pass torch's arguments by keyword: "
                "DistributedDataParallel(module, device_ids=[...])."
            )
        if shared_param is not None:
            raise ValueError(
                "shared_param is not supported: shared parameters need no option. To communicate "
                "once, at the end of the backward pass, pass delay_allreduce=True."
            )
        self.delay_allreduce = arguments.flag("delay_allreduce", delay_allreduce)
        if self.delay_allreduce:
            _check_delay({**torch_options, "allreduce_trigger_params": allreduce_trigger_params})
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = arguments.flag("allreduce_always_fp32", allreduce_always_fp32)
        self.gradient_average = arguments.flag("gradient_average", gradient_average)
        self.gradient_predivide_factor = gradient_predivide_factor
        # Raises for a bad factor before any communication.
        GradientReduction(predivide_factor=gradient_predivide_factor)
        if message_size != _MESSAGE_SIZE:
            sizes = [param.element_size() for param in module.parameters()]
            largest = max(sizes, default=4)
            mebibytes = max(1, round(message_size * largest / 2**20))
            torch_options.setdefault("bucket_cap_mb", mebibytes)
        super().__init__(module, **torch_options)
        if not {"broadcast_buffers", "forward_sync_buffers"} & torch_options.keys():
            self.broadcast_buffers = False  # not by the keyword, about which torch warns
        self.create_hooks()

    def create_hooks(self) -> None:
        """Registers the hooks that reduce gradients; the constructor calls it once."""
        self._delayed: DelayedReduction | None = None
        reduction = self._reduction()
        if self.delay_allreduce:
            self._delayed = DelayedReduction(self._reduced_params(), reduction)
        elif not reduction.is_plain:
            super().register_comm_hook(reduction, _in_background)

    def _reduction(self) -> GradientReduction:
        return GradientReduction(
            self.process_group,
            self.allreduce_always_fp32,
            self.gradient_average,
            self.gradient_predivide_factor,
        )

    def _reduced_params(self) -> list[nn.Parameter]:
        return [param for param in sent_params(self) if param.requires_grad]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if self._delayed is None:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        syncs = self.require_backward_grad_sync
        self.__dict__[SENDS_LATER] = syncs
        with self.no_sync():  # keeps torch's reducer idle
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self.__dict__[SENDS_LATER] = False
        self.require_forward_param_sync = syncs
        if torch.is_grad_enabled():
            self._delayed.enable(output, on=syncs)
        return output

    def disable_allreduce(self) -> None:
        """Accumulates gradients without communication, starting with the next forward pass."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Ends ``disable_allreduce``; reduces new and accumulated gradients."""
        self.require_backward_grad_sync = True

    def allreduce_fallback(self) -> None:
        """Reduces all gradients now, in one call per dtype and device.

        A gradient missing in some processes counts as zero there.
        """
        reduce_gradients(self._reduced_params(), self._reduction())

    @torch.no_grad()
    def allreduce_bucket(
        self, bucket: Sequence[Tensor], bucket_idx: int, force_default_stream: bool
    ) -> Tensor:
        """Reduces tensors of one dtype and device in one call; returns them as one flat tensor.

        Args:
            bucket: Tensors to reduce in place, such as gradients.
            bucket_idx: Ignored.
            force_default_stream: Ignored: the call runs on the current stream.
        """
        reduced = self._reduction().blocking(flatten(bucket))
        results = unflatten(reduced, bucket)
        torch._foreach_copy_([*bucket], results)
        return reduced

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """Flat copies of the gradients in the order of the parameters, one per dtype and device.

        Empty without ``retain_allreduce_buffers``.
        """
        if not self.retain_allreduce_buffers:
            return []
        grads = [param.grad for param in self._reduced_params() if param.grad is not None]
        return [flatten(bucket) for bucket in split_by_type(grads).values()]

    def allreduce_maybe_retain(
        self, bucket: Sequence[Tensor], bucket_idx: int, force_default_stream: bool = False
    ) -> None:
        """Calls `allreduce_bucket`; retains no buffer."""
        self.allreduce_bucket(bucket, bucket_idx, force_default_stream)

    def comm_ready_buckets(self, param: nn.Parameter) -> None:
        """Does nothing: torch sends each bucket when its last gradient is ready."""

    def sync_bucket_structure(self) -> None:
        """Does nothing: torch keeps the same buckets in all processes."""

    def join_hook(self, **kwargs: Any) -> Any:
        """Supports torch's ``join`` for processes with different numbers of batches.

        Raises:
            ValueError: If ``delay_allreduce=True``.
        """
        self._refuse_delay("join()")
        return super().join_hook(**kwargs)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Registers a custom communication hook; there can be only one.

        Raises:
            ValueError: If ``delay_allreduce=True``.
        """
        self._refuse_delay("register_comm_hook()")
        super().register_comm_hook(state, hook)

    def _refuse_delay(self, what: str) -> None:
        if self.delay_allreduce:
            raise ValueError(
                f"{what} needs the communication of torch's DistributedDataParallel, which "
                "delay_allreduce=True replaces. Create the wrapper with delay_allreduce=False."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without this process's hooks and communication."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_delayed": None, "_comm_hooks": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the wrapper and restarts its communication."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.create_hooks()


def reduce_in_fp32(model: parallel.DistributedDataParallel) -> None:
    """Makes torch's DistributedDataParallel send and average 16-bit gradients in fp32.

    Otherwise, at O2, O3 and O5, the wrapper adds gradients in 16 bits and rounds after each
    addition. This function converts each rank's gradient to fp32, averages in fp32 and rounds only
    the average. 16-bit gradients then take 4 bytes per element to send instead of 2. Nothing
    changes for fp32 gradients. Call it once, after wrapping the model and before the first backward
    pass. It registers a communication hook; a wrapper can have only one.

    Args:
        model: A model in ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        TypeError: If ``model`` is anything else.
        RuntimeError: If the wrapper already has a communication hook.

    Example:
        Each process of a script::

            model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
            model = torch.nn.parallel.DistributedDataParallel(model)
            apex.parallel.reduce_in_fp32(model)
    """
    wrapped = isinstance(model, parallel.DistributedDataParallel)
    if not wrapped or isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"reduce_in_fp32 got {type(model).__module__}.{type(model).__name__}; it takes a model "
            "in torch.nn.parallel.DistributedDataParallel. Call amp.initialize, wrap the model, "
            "and pass the wrapper. In apex.parallel.DistributedDataParallel pass "
            "allreduce_always_fp32=True, for fully_shard "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)."
        )
    reduction = GradientReduction(model.process_group, always_fp32=True)
    model.register_comm_hook(reduction, _in_background)


def _check_delay(options: dict[str, Any]) -> None:
    names = ("allreduce_trigger_params", "find_unused_parameters", "static_graph")
    refused = [name for name in names if options.get(name)]
    if refused:
        raise ValueError(
            f"{', '.join(refused)} needs delay_allreduce=False: with delay_allreduce=True one "
            "message at the end of the backward pass supports any graph. Omit it."
        )
