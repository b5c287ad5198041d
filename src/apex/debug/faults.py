"""The operator where a non-finite value began, why, and what to do about it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from apex.debug.module_tracker import Direction
from apex.debug.tensors import Kind

Cause = Literal[
    "loss scale",
    "range",
    "divergence",
    "division by zero",
    "domain",
    "derivative",
    "constant",
    "data",
    "weights",
    "optimizer state",
    "gradients",
    "update",
    "uninitialized",
]


@dataclass(frozen=True)
class Fault:
    """The first operator whose output held inf or NaN while its inputs were finite.

    Or, where the non-finite values came from outside (a batch, weights, optimizer state), the first
    operator that read them.

    Attributes:
        module: Qualified name in the model; ``""`` for the model itself and outside of it.
        op: Operator, such as ``"aten.exp"``.
        direction: ``"forward"`` or ``"backward"``.
        kind: ``"nan"`` if the output held any NaN, else ``"inf"``.
        dtype: Of the output.
        largest_input: Largest finite absolute value of the inputs.
        location: ``"file:line"`` of user code; in a backward pass that of the forward.
        cause: What made it, in a word or two.
        inside: Whether a model was running, forward or backward.
        largest_true: Largest absolute output in float64; ``inf`` if infinite or undefined there,
            None if not known.
        function: The name by which ``amp.register_float_function`` knows the operator, as
            ``("torch", "exp")``; None if it has none.
    """

    module: str
    op: str
    direction: Direction
    kind: Kind
    dtype: torch.dtype
    largest_input: float
    location: str
    cause: Cause
    inside: bool
    largest_true: float | None

    @property
    def function(self) -> tuple[str, str] | None:
        """Namespace and name of the function to register, where the forward operator has one."""
        if self.direction == "backward":
            return None
        name = self.op.rpartition(".")[2].strip("_")
        name = _CALLED_AS.get(name, name)
        if name in _FUNCTIONAL:
            return "torch.nn.functional", name
        if name in _NEVER_CALLED or name.startswith("native_"):
            return None
        return ("torch", name) if callable(getattr(torch, name, None)) else None

    @property
    def remedy(self) -> str:
        """What to do, in a sentence or two."""
        if self.cause == "range":
            return _for_range(self)
        if self.cause == "update" and self.dtype is torch.float16:
            return _REMEDY_FOR_FP16_STEP
        return _REMEDY_FOR_UNDEFINED_STEP if self._undefined_step else _REMEDIES[self.cause]

    @property
    def explanation(self) -> str:
        """What happened, in a sentence."""
        if self._undefined_step:
            return "the optimizer's step divided by 0, or left what its functions are defined for."
        return _EXPLANATIONS[self.cause].format(
            dtype=name_of(self.dtype),
            limit=f"{torch.finfo(self.dtype).max:g}",
            true="more" if self.largest_true is None else f"{self.largest_true:.3g}",
        )

    @property
    def _undefined_step(self) -> bool:
        true = self.largest_true
        return self.cause == "update" and true is not None and not math.isfinite(true)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON has it: the dtype by name, an infinite number as None."""
        data = asdict(self) | {"dtype": name_of(self.dtype), "remedy": self.remedy}
        true = data["largest_true"]
        data["largest_true"] = true if true is not None and math.isfinite(true) else None
        return data

    def __str__(self) -> str:
        """Says where, what, why and the remedy, in a few lines."""
        line = f"\n  at     {self.location}" if self.location else ""
        return (
            f"{self.op} {self._place}, {self.direction}, gave {self.kind} in {name_of(self.dtype)}"
            f" (largest finite input {self.largest_input:.4g}){line}\n"
            f"  why    {self.cause}: {self.explanation}\n"
            f"  remedy {self.remedy}"
        )

    @property
    def _place(self) -> str:
        if self.cause in _OF_STEPS:
            return "in an update of the weights"
        if self.module:
            return f"in {self.module}"
        return "in the model" if self.inside else "outside of the model"


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def cause_of(
    op: str,
    direction: Direction,
    kind: Kind,
    dtype: torch.dtype,
    *,
    largest_input: float,
    largest_true: float | None,
    loss_scale: float,
) -> Cause:
    """Returns why an operator gave inf or NaN from finite inputs.

    Args:
        op: Operator, such as ``"aten.exp"``.
        direction: ``"forward"`` or ``"backward"``.
        kind: What it gave.
        dtype: Of the output.
        largest_input: Largest absolute input.
        largest_true: Largest absolute output in float64, see :class:`Fault`.
        loss_scale: By which the loss was multiplied.
    """
    name = op.rpartition(".")[2].strip("_")
    finite = largest_true is not None and math.isfinite(largest_true)
    if largest_true is None:  # it could not be run again: NaN is rarely a matter of range
        finite = kind == "inf" and name not in _DIVIDES
    if finite:
        return _range_or(direction, dtype, largest_input, largest_true, loss_scale)
    if direction == "backward":
        return "derivative"
    return "division by zero" if name in _DIVIDES else "domain"


def _range_or(
    direction: Direction,
    dtype: torch.dtype,
    largest_input: float,
    largest_true: float | None,
    loss_scale: float,
) -> Cause:
    limit = torch.finfo(dtype).max
    unscaled = math.inf if largest_true is None else largest_true / loss_scale
    if direction == "backward" and loss_scale > 1.0 and unscaled <= limit:
        return "loss scale"
    return "divergence" if limit > 1e30 and largest_input > 1e9 else "range"


_DIVIDES = {"div", "divide", "reciprocal", "rsqrt", "pow", "remainder", "fmod", "mean", "var"}
_DIVIDES |= {"std", "var_mean", "std_mean", "nll_loss_forward", "nll_loss2d_forward"}
_DIVIDES |= {"native_batch_norm", "native_batch_norm_legit", "batch_norm_with_update"}
_DIVIDES |= {"cudnn_batch_norm", "miopen_batch_norm", "foreach_div", "foreach_addcdiv", "addcdiv"}

_CALLED_AS = {
    "addmm": "linear",
    "mm": "matmul",
    "native_layer_norm": "layer_norm",
    "linalg_vector_norm": "norm",
    "scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
}
_FUNCTIONAL = {"linear", "layer_norm", "scaled_dot_product_attention"}
_NEVER_CALLED = {"convolution"}  # in torch, but conv2d and its kin are what modules call
_CASTS = {"aten._to_copy", "aten.copy_"}
_OF_STEPS = {"update", "optimizer state"}

_EXPLANATIONS: dict[Cause, str] = {
    "loss scale": "the scaled gradient exceeds what {dtype} can hold ({limit}); unscaled it fits.",
    "range": "the true result, {true}, exceeds what {dtype} can hold ({limit}).",
    "divergence": "values have grown so large that even {dtype} cannot hold the next ({limit}).",
    "division by zero": "a divisor is 0, or a mean is taken over no element.",
    "domain": "an input lies at the edge of what the function is defined for, or beyond it.",
    "derivative": "the function has no finite derivative at this input (a square root or a norm at "
    "0, acos at 1), or a 0 is divided by a 0.",
    "constant": "an infinity or NaN that was put there on purpose (a mask) met an operation that "
    "makes NaN of it or carries it to a gradient.",
    "data": "its input was not finite already, and came from outside of the model.",
    "weights": "the model's weights or buffers were not finite already, since an earlier step.",
    "optimizer state": "the optimizer's state was not finite already.",
    "gradients": "the gradients were not finite already when the watch began.",
    "update": "the optimizer's step itself left what {dtype} can hold.",
    "uninitialized": "memory of torch.empty was read before anything was written there.",
}

_REMEDIES: dict[Cause, str] = {
    "loss scale": "none for a dynamic scale: this is how it finds its level; it backs off and the "
    "next step runs. If it never settles, use a bf16 level ('O4', 'O5'). Lower a static scale, or "
    "pass loss_scale='dynamic'.",
    "divergence": "lower the learning rate or warm it up, and clip the gradients; look at the "
    "losses of the steps before.",
    "division by zero": "add an epsilon to the divisor, or leave the empty case out (a batch of "
    "one value, targets that are all ignored).",
    "domain": "clamp the input into the domain before the call: log(x.clamp_min(eps)). In fp16 "
    "small numbers round to 0: compute it in fp32.",
    "derivative": "add an epsilon inside the root or norm, or clamp the input away from the edge; "
    "masking the result afterwards does not help, for 0 * inf is NaN.",
    "constant": "leave no row with all entries masked, and use a large finite number of the "
    "tensor's own dtype for masks: torch.finfo(scores.dtype).min.",
    "data": "check the batch: torch.isfinite(x).all() for inputs and targets; clean the data.",
    "weights": "go back to a checkpoint with finite weights; then lower the learning rate or clip "
    "the gradients. No loss scale mends this.",
    "optimizer state": "go back to a checkpoint of model and optimizer, or start the optimizer's "
    "state anew; check that states were saved and loaded in fp32.",
    "gradients": "watch the backward pass too: enter trace_overflow before the forward, with the "
    "gradients cleared.",
    "update": "lower the learning rate or warm it up, and clip the gradients.",
    "uninitialized": "use torch.zeros, or write all of it before reading.",
}


_REMEDY_FOR_FP16_STEP = (
    "lower the learning rate, for weights beyond 65504 do not fit fp16; and step fp32 masters (O2, "
    "or master_weights=True), for in fp16 an optimizer's eps of 1e-8 is 0."
)

_REMEDY_FOR_UNDEFINED_STEP = (
    "give the optimizer an eps above 0: it keeps a step from dividing by the 0 that gradients of 0 "
    "leave in its state."
)


def _for_range(fault: Fault) -> str:
    if fault.dtype is not torch.float16:
        return (
            "compute it in a form that does not overflow (logsumexp for log of a sum of exp, "
            "subtract the maximum), scale or clamp the input, or lower the learning rate."
        )
    ways = []
    if fault.module:
        name = fault.module.rpartition(":")[2]
        ways.append(
            f"keep the module in fp32 with amp.initialize(..., fp32_modules=[{name!r}]) (O2, O3)"
        )
    if fault.function is not None and fault.function[0] != "torch":
        namespace, name = fault.function
        ways.append(f"amp.register_float_function({namespace}, {name!r}) before it (O1)")
    elif fault.op in _CASTS:
        ways.append("scale the values down before they are cast")
    elif fault.direction == "forward" and fault.inside:
        # A function registered in torch would not be the method or the `@` that the line may call.
        ways.append("run that line on .float() inputs `with amp.disable_casts():` (O1)")
    if not fault.inside:
        ways.append("compute the loss in fp32: loss_fn(output.float(), target)")
    if fault.direction == "backward":
        ways.append("lower the loss scale, if it is your own")
    ways.append("use a bf16 level ('O4', 'O5')")
    return ", or ".join(ways) + "."
