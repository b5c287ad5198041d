"""The operator that first produced a non-finite value, the cause, and a remedy."""

from __future__ import annotations

import linecache
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from apex._core import dtypes
from apex.debug.module_tracker import Direction, place_in_words
from apex.debug.patterns import operator_name, pattern_of
from apex.debug.rendering.files import json_types
from apex.debug.tensors import Kind, Values

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
    "another rank",
    "update",
    "uninitialized",
]


@dataclass(frozen=True)
class Fault:
    """The first operator whose output held inf or NaN while its inputs were finite.

    If the non-finite values came from outside (a batch, weights, optimizer state), the first
    operator that read them.

    Attributes:
        module: Qualified name in the model; ``""`` for the model itself and outside it.
        op: Operator, such as ``"aten.exp"``.
        direction: ``"forward"`` or ``"backward"``.
        kind: ``"nan"`` if the output held any NaN, else ``"inf"``.
        dtype: Dtype of the output.
        largest_input: Largest finite absolute value of the inputs.
        location: ``"file:line"`` of user code; in a backward pass, of the forward.
        cause: The cause, in one to three words.
        inside: Whether a model was running, forward or backward.
        largest_true: Largest absolute output in float64; ``inf`` if infinite or undefined in
            float64 too, None if unknown.
        level: What set the dtypes: ``"O0"`` to ``"O5"``, ``"torch.autocast"``, ``"16-bit model"``
            if parameters are in 16 bits without amp, or ``""``.
        dynamic: Whether a dynamic loss scale, of amp or a ``GradScaler``, was in use.
        stepped: Whether the optimizer then stepped on the gradients all the same.
        inputs: Range of each input, at most four.
        node: In a backward pass, the autograd node, such as ``"Sqrt"``.
        fed_by: Autograd nodes that computed the input, the nearest first.
        read_by: Operators that read the non-finite values, in order, at most eight.
        in_fp32: Whether the module is in fp32 where the model is in 16 bits.
        written: Whether the script itself gave the inf or NaN, as a number.
        function: The function to pass to ``amp.register_float_function``, such as
            ``("torch", "exp")``; None if there is none.
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
    level: str = ""
    dynamic: bool = False
    inputs: tuple[Values, ...] = ()
    node: str = ""
    fed_by: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    in_fp32: bool = False
    written: bool = False
    stepped: bool = False

    @property
    def heals(self) -> bool:
        """Whether a dynamic loss scale backs off from it, as it does to find its value."""
        return self.cause == "loss scale" and self.dynamic and not self.stepped

    @property
    def source(self) -> str:
        """The line of code at ``location``; ``""`` if there is none to read."""
        file, _, line = self.location.rpartition(":")
        return linecache.getline(file, int(line)).strip() if line else ""

    @property
    def pattern(self) -> str:
        """The known pattern of the fault, such as ``"log of a softmax"``; ``""`` without one."""
        found = pattern_of(self)
        return "" if found is None else found.name

    @property
    def function(self) -> tuple[str, str] | None:
        """Namespace and name of the function to register; None if the operator has none."""
        if self.direction == "backward":
            return None
        name = operator_name(self.op)
        name = _CALLED_AS.get(name, name)
        if name in _FUNCTIONAL:
            return "torch.nn.functional", name
        if name in _NEVER_CALLED or name.startswith("native_"):
            return None
        return ("torch", name) if callable(getattr(torch, name, None)) else None

    @property
    def remedy(self) -> str:
        """The recommended remedy at the active level, in one or two sentences."""
        text = self._remedy
        small = self.dtype is torch.float16 and "eps" in text and "fp16" not in text
        return f"{text} {_EPS_IN_FP16}" if small else text

    @property
    def _remedy(self) -> str:
        found = pattern_of(self)
        if found is not None:
            wider = self.cause == "range" and _fits_fp32(self)
            return f"{found.remedy}; or {_for_range(self)}" if wider else f"{found.remedy}."
        if self.cause == "loss scale":
            return _for_loss_scale(self)
        if self.cause == "range":
            return _for_range(self)
        undefined = self._case == _UNDEFINED_STEP
        if undefined and operator_name(self.op) in _POWERS:  # of a negative number
            return _REMEDIES["optimizer state"]
        if self.cause == "update" and self.dtype is torch.float16 and not self.written:
            if operator_name(self.op) == "copy":  # of masters, to the model
                return f"{_LOWER_RATE}, or {_BF16[self.level]}."
            eps = _MASTERS if self.level[:1] == "O" else _FP32_WEIGHTS
            return eps if undefined else f"{_LOWER_RATE}, and {eps}"
        return _REMEDIES[self._case]

    @property
    def explanation(self) -> str:
        """What happened, in one sentence."""
        true = self.largest_true
        return _EXPLANATIONS[self._case].format(
            dtype=dtypes.name(self.dtype),
            limit=f"{torch.finfo(self.dtype).max:g}",
            true="more" if true is None or not math.isfinite(true) else f"{true:.5g}",
        )

    @property
    def _case(self) -> str:
        """The cause, divided where what to do depends on more."""
        if self.written:
            return f"{self.cause} by a number"
        undefined = self.largest_true is not None and not math.isfinite(self.largest_true)
        return _UNDEFINED_STEP if self.cause == "update" and undefined else self.cause

    def as_dict(self) -> dict[str, Any]:
        """Returns all attributes in JSON types: the dtype by name, an infinite number as None."""
        found = {"source": self.source, "pattern": self.pattern, "remedy": self.remedy}
        return {**json_types(asdict(self)), **found}

    @property
    def headline(self) -> str:
        """The operator, its module, and what it returned."""
        place = place_in_words(self.module, inside=self.inside)
        if self.cause in _OF_STEPS:
            place = "in an update of the weights"
        return (
            f"{self.op} {place}, {self.direction}, returned {self.kind} in "
            f"{dtypes.name(self.dtype)} (largest finite input {self.largest_input:.4g})"
        )

    def __str__(self) -> str:
        pattern = f" This is {self.pattern}." if self.pattern else ""
        lines = [
            self.headline,
            *([f"  at     {self.location}"] if self.location else []),
            *([f"         {self.source}"] if self.source else []),
            *([f"  in     {', '.join(map(str, self.inputs))}"] if self.inputs else []),
            f"  cause  {self.cause}: {self.explanation}{pattern}",
            f"  remedy {self.remedy}",
        ]
        return "\n".join(lines)


def cause_of(fault: Fault, loss_scale: float, *, formula: bool) -> Cause:
    """Returns why an operator returned inf or NaN for finite inputs, whatever ``fault.cause`` is.

    ``loss_scale`` is the multiplier on the loss; ``formula`` is whether autograd's own formula of a
    derivative ran, not user code in the backward pass.
    """
    name, in_backward = operator_name(fault.op), fault.direction == "backward"
    # A kernel that does not run in float64 (attention on CUDA) leaves the true result unknown.
    true = 0.0 if fault.largest_true is None else fault.largest_true
    finite = math.isfinite(true)
    if fault.kind == "inf" and name in _DEFINED_EVERYWHERE:  # too large for float64, too
        finite = True
    elif fault.largest_true is None:  # overflow rarely produces NaN
        finite = fault.kind == "inf" and name not in _DIVIDES
    if not finite:
        # A power of 0 is inf at most; NaN is that of a negative number.
        divides = name in _DIVIDES and not (fault.kind == "nan" and name in _POWERS)
        elsewhere: Cause = "division by zero" if divides else "domain"
        return "derivative" if formula else elsewhere
    limit = torch.finfo(fault.dtype).max
    unscaled = true / loss_scale if math.isfinite(true) else 0.0
    if in_backward and loss_scale > 1.0 and unscaled <= limit:
        return "loss scale"
    grown = limit > 1e30 and fault.largest_input > 1e9
    is_mask = fault.largest_input == limit  # torch.finfo(dtype).min
    return "divergence" if grown and not is_mask else "range"


_DIVIDES = {"div", "divide", "reciprocal", "rsqrt", "pow", "remainder", "fmod", "mean", "var"}
_DIVIDES |= {"std", "var_mean", "std_mean", "nll_loss_forward", "nll_loss2d_forward"}
_DIVIDES |= {"native_batch_norm", "native_batch_norm_legit", "batch_norm_with_update"}
_DIVIDES |= {"cudnn_batch_norm", "miopen_batch_norm", "addcdiv", "native_layer_norm"}
_DIVIDES |= {"native_group_norm", "fused_rms_norm", "weight_norm_interface"}

_POWERS = {"pow", "rsqrt", "sqrt"}

_DEFINED_EVERYWHERE = {"exp", "exp2", "expm1", "sinh", "cosh", "mul", "add", "sub", "square"}
_DEFINED_EVERYWHERE |= {"mm", "bmm", "addmm", "baddbmm", "sum", "cumsum", "convolution"}

_CALLED_AS = {
    "addmm": "linear",
    "mm": "matmul",
    "native_layer_norm": "layer_norm",
    "linalg_vector_norm": "norm",
    "scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
}
_FUNCTIONAL = {"linear", "layer_norm", "scaled_dot_product_attention"}
_NEVER_CALLED = {"convolution"}  # exists in torch, but modules call conv2d and similar functions
_CASTS = {"aten._to_copy", "aten.copy_"}
_OF_STEPS = {"update", "optimizer state"}

_UNDEFINED_STEP = "undefined update"

_EXPLANATIONS = {
    "loss scale": "the scaled gradient exceeds the range of {dtype} ({limit}); unscaled, it fits.",
    "range": "the true result, {true}, exceeds the range of {dtype} ({limit}).",
    "divergence": "values have grown so large that the next exceed even the range of {dtype} "
    "({limit}).",
    "division by zero": "a divisor is 0, or a mean has no elements.",
    "domain": "an input lies on or beyond the boundary of the function's domain.",
    "derivative": "the function has no finite derivative at this input (a square root or a norm at "
    "0, acos at 1), or 0 is divided by 0.",
    "constant": "an operation turned an infinity that looks deliberate (a mask) into NaN, or "
    "passed it on to a gradient or the loss.",
    "data": "its input was already non-finite and came from outside the model.",
    "weights": "the model's weights or buffers were already non-finite: loaded or initialized so, "
    "or left so by an earlier step.",
    "optimizer state": "the optimizer's state was already non-finite.",
    "gradients": "the gradients were already non-finite when the trace started.",
    "another rank": "the values were finite on this rank and came back non-finite from their "
    "exchange.",
    "constant by a number": "the script itself gives inf or NaN here, as a constant or a number in "
    "the expression, and it reached a gradient or the loss.",
    "update": "the optimizer's step itself exceeded the range of {dtype}.",
    "update by a number": "the optimizer's step computed with a number that is inf or NaN, such as "
    "a learning rate.",
    _UNDEFINED_STEP: "the optimizer's step divided by 0 or left the domain of one of its "
    "functions.",
    "uninitialized": "memory from torch.empty was read before it was written.",
}

_REMEDIES = {
    "divergence": "lower the learning rate or warm it up, and clip the gradients; check the losses "
    "of the preceding steps.",
    "division by zero": "keep the divisor away from 0, a / b.clamp_min(eps), or a norm's eps above "
    "0, or exclude the empty case (a batch of one value, targets that are all ignored); masking "
    "the quotient afterwards does not help, because its derivative is 0 * inf, which is NaN.",
    "domain": "clamp the input to the domain before the call: log(x.clamp_min(eps)).",
    "derivative": "add an epsilon inside the root or norm, or clamp the input away from the "
    "boundary; masking the result afterwards does not help, because 0 * inf is NaN.",
    "constant": "avoid rows whose entries are all masked, and mask with a large finite number of "
    "the tensor's own dtype: torch.finfo(scores.dtype).min, or -1e4 where masks add up.",
    "data": "check inputs, targets and loaded files with torch.isfinite(x).all(); clean the data, "
    "or leave out what is missing before computing with it, because 0 * NaN is NaN.",
    "weights": "check the file that they come from with torch.isfinite(x).all(), and return to a "
    "checkpoint with finite weights. If training made them so, lower the learning rate or clip the "
    "gradients; changing the loss scale does not help.",
    "optimizer state": "return to a checkpoint of model and optimizer, or reset the optimizer's "
    "state; check that states were saved and loaded in fp32.",
    "gradients": "trace the backward pass too: enter trace_overflow before the forward pass, with "
    "the gradients cleared.",
    "another rank": "read the reports of the other ranks: the one that made the values names the "
    "operator. If none does, a sum of finite values exceeded the dtype's range: exchange them in "
    "fp32, or divide them by the number of ranks first.",
    "constant by a number": "correct the number, unless it is meant as a mask. Set a mask with "
    "masked_fill, because 0 * inf is NaN, and leave masked elements out of the loss (a masked "
    "class is no target), or mask with a finite number, such as -1e4.",
    "update": "lower the learning rate or warm it up, and clip the gradients.",
    "update by a number": "check the learning rate and the other settings of the optimizer, and "
    "the scheduler that changes them: print(optimizer.param_groups).",
    _UNDEFINED_STEP: "pass the optimizer an eps above 0, so that a step does not divide by the 0 "
    "that zero gradients leave in its state.",
    "uninitialized": "use torch.zeros, or write the whole tensor before reading it.",
}

_EPS_IN_FP16 = "In fp16, use 1e-2 as eps: slopes as steep as 1 / eps**2 have to fit."

_LOWER_RATE = "lower the learning rate, because weights beyond 65504 do not fit fp16"
_EPS = "because an optimizer's eps of 1e-8 is 0 in fp16."
_MASTERS = f"step fp32 masters (O2, or master_weights=True), {_EPS}"
_FP32_WEIGHTS = f"keep the weights in fp32 (torch.autocast, or amp.initialize at O2), {_EPS}"


def _for_loss_scale(fault: Fault) -> str:
    if fault.stepped:
        amp = "end the scale_loss block, then step the optimizer that amp.initialize returned"
        way = amp if fault.level.startswith("O") else _BY_SCALER
        return f"{way}: the optimizer stepped on gradients that had overflowed."
    if not fault.dynamic:
        dynamic = "scale the loss with torch.amp.GradScaler"
        if fault.level.startswith("O"):
            dynamic = "pass loss_scale='dynamic'"
        return f"with a static scale, lower it or {dynamic}."
    return (
        "none with a dynamic scale, which finds its value this way: it backs off, and the next "
        f"step runs. If it never settles, {_BF16[fault.level]}."
    )


def _fits_fp32(fault: Fault) -> bool:
    """Returns whether what exceeds fp16 is, as far as known, in the range of fp32 and bf16."""
    true = fault.largest_true or 0.0
    return fault.dtype is torch.float16 and true <= torch.finfo(torch.float32).max


def _for_range(fault: Fault) -> str:
    if not _fits_fp32(fault):
        return (
            "use a form that does not overflow (logsumexp instead of log of a sum of exp, or "
            "subtract the maximum), scale or clamp the input, or lower the learning rate."
        )
    ways = [_in_fp32(fault)] if fault.inside and fault.direction == "forward" else []
    if fault.op in _CASTS and fault.direction == "forward":
        ways = ["scale the values down before the cast", *_modules(fault)]
    elif fault.direction == "backward":
        ways = [*_modules(fault), *([] if fault.dynamic else [_SMALLER_LOSS])]
    if not fault.inside:
        ways.append("compute the loss in fp32: loss_fn(output.float(), target)")
    diverges = "; if the loss grew before, lower the learning rate" if fault.inside else ""
    return ", or ".join([*ways, _BF16[fault.level]]) + diverges + "."


def _in_fp32(fault: Fault) -> str:
    """Returns how to run one operator of a model in fp32 at the fault's level."""
    converted = _modules(fault)
    if converted:
        return converted[0]
    if fault.level == "O1" and fault.function is not None and fault.function[0] != "torch":
        namespace, name = fault.function
        return f"amp.register_float_function({namespace}, {name!r}) before it (O1)"
    # The line may call a method or `@`, which registering a function in torch does not cover.
    return f"run that line on .float() inputs{_AROUND_FP32.get(fault.level, '')}"


def _modules(fault: Fault) -> list[str]:
    if fault.level not in ("O2", "O3", "16-bit model") or not fault.module:
        return []
    if fault.in_fp32:
        return ["keep the modules next to it in fp32, too"]
    name = fault.module.rpartition(":")[2]
    if fault.level == "16-bit model":
        return [
            f"keep the module in fp32 (model.get_submodule({name!r}).float()) and call it on "
            ".float() inputs"
        ]
    return [f"keep the module in fp32 with amp.initialize(..., fp32_modules=[{name!r}])"]


_AROUND_FP32 = {
    **dict.fromkeys(("O2", "O3", "16-bit model"), ", and cast its result back, .to(x.dtype)"),
    "O1": " `with amp.disable_casts():` (O1)",
    "torch.autocast": " `with torch.autocast(device_type, enabled=False):`",
}

_SMALLER_LOSS = "make the loss smaller (a mean, not a sum; a lower static loss scale)"

_BY_SCALER = "call scaler.step(optimizer) and scaler.update(), not optimizer.step()"

_TO_BF16 = "compute in bf16 (torch.bfloat16), whose range is that of fp32"

_BF16 = {
    "O1": "use the bf16 level 'O4'",
    "O2": "use the bf16 level 'O5'",
    "O3": "use the bf16 level 'O5'",
    "torch.autocast": "use torch.autocast(device_type, dtype=torch.bfloat16), without a GradScaler",
    "16-bit model": "use bf16 (model.bfloat16())",
    **dict.fromkeys(("", "O0", "O4", "O5"), _TO_BF16),
}
"""What computes in bf16, by level."""
