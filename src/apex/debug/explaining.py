"""``explain``: the dtypes of each operator of a model, its casts, and its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex._core import dtypes, tree
from apex._torch.devices import accelerator
from apex._torch.modules import named_tensors
from apex.debug import common
from apex.debug.place import Direction
from apex.debug.tracing import Call, Trace, floating

LOW = ("float16", "bfloat16")
_CAST = "aten._to_copy"


def explain(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    backward: bool = True,
    **keywords: Any,
) -> Explanation:
    """Returns the dtypes of each operator of a model, the casts, and the time they take.

    Runs the model forward and backward as a training step would. The model may be prepared by
    ``amp.initialize``, called inside ``torch.autocast``, or plain. For every module and operator,
    the result lists calls, input and output dtypes and share of the time. Each cast has a row, with
    the bytes that it moves, in the module that made it.

    Changes nothing: gradients, buffers (batch norm's statistics), random number generators, inputs,
    mode, hooks, loss scale and weight cache are preserved, also after an error. Parameters that the
    model itself writes, such as a momentum encoder's, are not. Compiled parts run eagerly, and
    data-parallel wrappers are bypassed. Checkpoints need ``use_reentrant=False``.

    Cost: the model runs twice; the first pass warms up kernels. Memory: a step's, plus one set of
    gradients and a copy of the buffers and inputs. The time of an operator is wall time around it
    alone, so the device is synchronized before and after each operator.

    Args:
        model: The model, as called in training.
        *inputs: Positional arguments of the model.
        loss_fn: Computes the loss (a one-element floating-point tensor) from the model's output; by
            default the mean of the squares of the floating-point outputs.
        backward: Whether to run the backward pass too.
        **keywords: Keyword arguments of the model.

    Raises:
        TypeError: If ``model`` is not a module, or the loss not a tensor.
        ValueError: If the model has lazy or meta parameters, or the loss is not one floating-point
            number or does not require gradients.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> from apex.debug import explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(dim=-1))
        >>> model = amp.initialize(model, opt_level="O4", verbosity=0)
        >>> found = explain(model, torch.randn(2, 8), backward=False)
        >>> for row in found.ops:
        ...     print(row.module, row.op, row.dtypes_in, row.dtype_out, row.calls)
        0 aten._to_copy ('float32',) bfloat16 3
        0 aten.addmm ('bfloat16',) bfloat16 1
        1 aten._to_copy ('bfloat16',) float32 1
        1 aten._softmax ('float32',) float32 1
        >>> found.total.casts, found.total.cast_bytes
        (4, 360)
    """
    inner = common.checked_model("explain", model, loss_fn)
    given = inputs, keywords
    for _ in range(2):  # the first run warms up kernels
        costs = _Costs(inner)
        with common.preserve_state(inner, given), torch.set_grad_enabled(backward), costs:
            output = inner(*inputs, **keywords)
            if backward or loss_fn is not None:
                loss = common.loss_of("explain", output, loss_fn, instead=_INSTEAD)
            if backward:
                # Now, not before: FSDP2 gives modules other parameters when they run.
                tensors = [*named_tensors(inner).values(), *tree.tensors(given)]
                targets = [tensor for tensor in tensors if tensor.requires_grad]
                common.gradients(loss, targets, inner)
    return Explanation(type(inner).__name__, tuple(costs.rows.values()))


_INSTEAD = " Pass backward=False to run only the forward pass."


# -- the result ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpRow:
    """One operator in one module and direction, with one set of dtypes.

    Attributes:
        module: Qualified name; ``""`` for the model itself and for code outside it.
        inside: Whether the model ran the operator, rather than the loss.
        direction: ``"forward"`` or ``"backward"``.
        op: Name such as ``"aten.addmm"``; ``"aten._to_copy"`` for a cast.
        dtypes_in: Floating-point dtypes of its inputs, after casts.
        dtype_out: Dtype of its first floating-point result; ``""`` without one.
        calls: Number of calls.
        seconds: Time in the operator.
        cast_bytes: Bytes that a cast read and wrote; 0 for other operators.
    """

    module: str
    inside: bool
    direction: Direction
    op: str
    dtypes_in: tuple[str, ...]
    dtype_out: str
    calls: int = 0
    seconds: float = 0.0
    cast_bytes: int = 0

    @property
    def computed_in(self) -> str:
        """The dtype in which the operator computed, derived from its inputs and result.

        This is the dtype of the result if an input has it too, because auxiliary inputs (batch
        norm's statistics, attention's log-sum) may be wider; otherwise the widest dtype of the
        inputs.
        """
        if not self.dtypes_in or self.dtype_out in self.dtypes_in:
            return self.dtype_out
        return max(self.dtypes_in, key=lambda dtype: torch.finfo(getattr(torch, dtype)).bits)


class Total(NamedTuple):
    """The sums over all operators, the loss included.

    Attributes:
        seconds: Time.
        low_precision_seconds: Time of operators that computed in 16 bits.
        casts: Number of casts.
        cast_bytes: Bytes that these casts read and wrote.
    """

    seconds: float
    low_precision_seconds: float
    casts: int
    cast_bytes: int


@dataclass(frozen=True)
class Explanation:
    """The dtypes of each operator of a model, and their time. ``print`` shows a table.

    Attributes:
        model: Class name of the model.
        ops: One record per operator, module, direction and set of dtypes, in order of first use.
    """

    model: str
    ops: tuple[OpRow, ...]

    @property
    def total(self) -> Total:
        """The sums over all operators, the loss included."""
        casts = [row for row in self.ops if row.cast_bytes]
        low = [row for row in self.ops if row.computed_in in LOW and not row.cast_bytes]
        return Total(
            seconds=math.fsum(row.seconds for row in self.ops),
            low_precision_seconds=math.fsum(row.seconds for row in low),
            casts=sum(row.calls for row in casts),
            cast_bytes=sum(row.cast_bytes for row in casts),
        )

    def to_text(self, *, rows: int | None = 40) -> str:
        """Returns the totals and a table.

        Args:
            rows: Largest number of operators to show, those that took the most time; None for all.
        """
        total = self.total
        seconds = total.seconds or 1.0
        longest = sorted(self.ops, key=lambda row: -row.seconds)[:rows]
        shown = [_cells(row, seconds) for row in self.ops if row in longest]
        hidden = len(self.ops) - len(shown)
        table = common.aligned([_HEAD, *shown], [True] * len(_HEAD))
        lines = [
            f"{self.model}: {common.percent(total.low_precision_seconds / seconds)} of the time in "
            f"16 bits; {common.counted(total.casts, 'cast')}, {total.cast_bytes:,} bytes moved",
            "",
            *table,
        ]
        if hidden:
            lines.append(f"{hidden} faster rows omitted; to_json() has all.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns all data as JSON."""
        return common.to_json({**vars(self), "total": self.total._asdict()})

    __str__ = to_text


_HEAD = ("where", "operator", "pass", "calls", "dtypes", "time", "bytes cast")


def _cells(row: OpRow, seconds: float) -> tuple[str, ...]:
    """Returns the cells of an operator; its time is a share of ``seconds``."""
    unnamed = "(model)" if row.inside else "(outside)"
    module = row.module or unnamed
    dtypes_in = " + ".join(map(common.short, row.dtypes_in or [""]))
    cast_bytes = f"{row.cast_bytes:,}" if row.cast_bytes else ""
    return (
        module,
        row.op.removeprefix("aten.")[:26],
        row.direction,
        str(row.calls),
        f"{dtypes_in} → {common.short(row.dtype_out)}",
        common.percent(row.seconds / seconds),
        cast_bytes,
    )


# -- what was measured -----------------------------------------------------------------------------


class _Costs(Trace):
    """Times every operator on floating-point tensors, except views, which compute nothing.

    Attributes:
        rows: The record of all calls so far, by the record of one call without its costs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.rows: dict[OpRow, OpRow] = {}

    def _now(self) -> float:
        if accelerator() is not None:
            torch.accelerator.synchronize()  # sync: to time the operator alone
        return time.perf_counter()

    def _before(self, call: Call) -> float:
        """Returns the time at which the call began."""
        return self._now()

    def _after(self, call: Call, before: float, result: Any) -> None:
        """Records the call."""
        seconds = self._now() - before
        if call.traits.view:
            return
        inputs = list(floating(call.arguments))
        outputs = list(floating(result))
        if not inputs and not outputs:
            return
        dtypes_in = tuple(dict.fromkeys(dtypes.name(tensor.dtype) for tensor in inputs))
        dtype_out = dtypes.name(outputs[0].dtype) if outputs else ""
        moved = 0
        if call.name == _CAST and inputs and outputs and dtypes_in != (dtype_out,):
            moved = inputs[0].nbytes + outputs[0].nbytes
        row = OpRow(
            *self._tracker.module,
            self._tracker.direction,
            call.name,
            dtypes_in,
            dtype_out,
        )
        total = self.rows.get(row, row)
        self.rows[row] = replace(
            row,
            calls=total.calls + 1,
            seconds=total.seconds + seconds,
            cast_bytes=total.cast_bytes + moved,
        )
