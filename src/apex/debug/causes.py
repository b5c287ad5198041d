"""Why an operator returned inf or NaN for finite inputs, the formula behind it, and remedies."""

from __future__ import annotations

import configparser
import functools
import importlib.resources
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from apex._core import dtypes
from apex.debug.place import Finding, Place
from apex.debug.tracing import Kind, Values

Cause = Literal[
    "loss scale",
    "range",
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
]


@dataclass(eq=False)
class Birth:
    """The call that first produced a non-finite value, and what has become of it.

    Attributes:
        place, op, kind, dtype: As of its :class:`Finding`.
        time: Number of operators traced before it.
        given: The cause, where it is no matter of the values: where they came from.
        deliberate: Whether the value is intended, as a constant or a mask.
        number: The inf or NaN that the script wrote there; None if it computed it.
        inputs: Ranges of the inputs, at most four.
        true: Largest absolute result in float64: ``inf`` if infinite or undefined there, too; None
            if unknown.
        node: In a backward pass, the autograd node, such as ``"Sqrt"``.
        formula: Whether autograd's own formula of a derivative ran, not user code.
        scale: Multiplier on the loss; None while unknown.
        dynamic: Whether a dynamic loss scale, of amp or a ``GradScaler``, unscaled the gradients.
        stepped: Whether values reached the loss or weights.
        masked: Whether values were masked out.
        absorbed: Whether a softmax or exp mapped -inf to 0, as is right.
        spoils: Whether values reached weights or buffers, but no gradient and no loss.
        passes: Backward passes in which values reached a gradient.
    """

    place: Place
    op: str
    kind: Kind
    dtype: torch.dtype
    time: int = 0
    given: Cause | Literal[""] = ""
    deliberate: bool = False
    number: float | None = None
    inputs: tuple[Values, ...] = ()
    true: float | None = None
    node: str = ""
    formula: bool = False
    scale: float | None = None
    dynamic: bool = False
    stepped: bool = False
    masked: bool = False
    absorbed: bool = False
    spoils: bool = False
    passes: set[int] = field(default_factory=set)

    @property
    def backward(self) -> bool:
        """Whether it happened in a backward pass."""
        return self.place.direction == "backward"

    @property
    def name(self) -> str:
        """The operator without namespace and underscores."""
        return operator_name(self.op)

    @property
    def lowest(self) -> float:
        """The least finite input."""
        return min((values.low for values in self.inputs), default=0.0)

    @property
    def largest(self) -> float:
        """The largest finite absolute value of the inputs."""
        return max((max(abs(each.low), abs(each.high)) for each in self.inputs), default=0.0)

    @property
    def in_fp16(self) -> bool:
        """Whether the first input is in fp16."""
        return bool(self.inputs) and self.inputs[0].dtype == "float16"

    @property
    def fits_fp32(self) -> bool:
        """Whether what exceeds fp16 is, as far as known, in the range of fp32 and bf16."""
        return self.dtype is torch.float16 and (self.true or 0.0) <= torch.finfo(torch.float32).max

    @property
    def cause(self) -> Cause:
        """Why the result was not finite."""
        if self.given:
            return self.given
        # A kernel that does not run in float64 (attention on CUDA) leaves the true result unknown.
        true = 0.0 if self.true is None else self.true
        finite = math.isfinite(true)
        if self.kind == "inf" and self.name in _DEFINED_EVERYWHERE:  # too large for float64, too
            finite = True
        elif self.true is None:  # overflow rarely produces NaN
            finite = self.kind == "inf" and self.name not in _DIVIDES
        if not finite:
            # A power of 0 is inf at most; NaN is that of a negative number.
            divides = self.name in _DIVIDES and not (self.kind == "nan" and self.name in _POWERS)
            elsewhere: Cause = "division by zero" if divides else "domain"
            return "derivative" if self.formula else elsewhere
        scale = self.scale or 1.0
        unscaled = true / scale if math.isfinite(true) else 0.0
        fits = unscaled <= torch.finfo(self.dtype).max
        return "loss scale" if self.backward and scale > 1.0 and fits else "range"

    @property
    def heals(self) -> bool:
        """Whether a dynamic loss scale backs off from it, as it does to find its value."""
        return self.cause == "loss scale" and self.dynamic and not self.stepped

    @property
    def may_heal(self) -> bool:
        """Whether it heals, or may turn out to once a ``GradScaler`` unscales the gradients."""
        unknown = self.scale is None and self.backward and self.cause == "range"
        return self.heals or (unknown and not self.stepped)

    @property
    def is_lost(self) -> bool:
        """Whether fp16 lost a value that no softmax or exp has mapped to the right result."""
        return self.cause == "range" and self.dtype is torch.float16 and not self.absorbed

    def rank(self) -> tuple[bool, bool, bool, bool, int]:
        """Returns what sorts births, the most severe first."""
        stale = self.given == "gradients"  # left by an earlier step
        return self.deliberate, self.spoils, stale, self.masked, self.time


def operator_name(op: str) -> str:
    """Returns an operator's name without namespace and underscores."""
    return op.rpartition(".")[2].strip("_").removeprefix("foreach_")


def finding_of(birth: Birth) -> Finding:
    """Returns a birth's place, cause and remedies."""
    pattern, case = _pattern_of(birth), _case(birth)
    remedies = _remedies(pattern if birth.cause == "range" else pattern or case)
    if birth.cause == "range" and (not pattern or birth.fits_fp32):
        remedies += _for_range(birth)
    text = " ".join(remedies)
    if birth.dtype is torch.float16 and "eps" in text and "fp16" not in text:
        remedies = (*remedies, "in fp16, use 1e-2 as eps: slopes as steep as 1 / eps**2 must fit")
    return Finding(
        place=birth.place,
        op=birth.op,
        kind=birth.kind,
        dtype=dtypes.name(birth.dtype),
        what=_what(birth),
        cause=birth.cause,
        why=_data()[case]["why"].format(
            dtype=dtypes.name(birth.dtype),
            limit=f"{torch.finfo(birth.dtype).max:g}",
            true=_true(birth),
        ),
        remedies=remedies,
        inputs=birth.inputs,
        pattern=pattern,
        heals=birth.heals,
    )


def _what(birth: Birth) -> str:
    if birth.number is not None:
        return f"the constant float('{birth.number}') at {birth.place.location}"
    place = str(birth.place)
    if birth.cause in ("update", "optimizer state"):
        place = "in an update of the weights"
    largest = f" (largest finite input {birth.largest:.4g})" if birth.inputs else ""
    name = dtypes.name(birth.dtype)
    return f"{birth.op} {place}, {birth.place.direction}, returned {birth.kind} in {name}{largest}"


def _true(birth: Birth) -> str:
    known = birth.true is not None and math.isfinite(birth.true)
    return f"{birth.true:.5g}" if known else "more"


def _case(birth: Birth) -> str:
    """Returns the cause, divided where what to do depends on more."""
    if birth.number is not None:
        return "a learning rate" if birth.cause == "update" else "a number"
    if birth.cause == "update" and birth.kind == "nan":
        return "an undefined update"
    if birth.cause == "update" and birth.dtype is torch.float16:
        return "an update in fp16"
    if birth.cause == "loss scale" and not birth.heals:
        return "a step on scaled gradients" if birth.stepped else "a static loss scale"
    # Not a mask of torch.finfo(dtype).min.
    grown = 1e9 < birth.largest < torch.finfo(birth.dtype).max
    return "growth" if birth.cause == "range" and grown and not birth.fits_fp32 else birth.cause


_DIVIDES = set(
    """div divide reciprocal rsqrt pow remainder fmod mean var std var_mean std_mean addcdiv
    nll_loss_forward nll_loss2d_forward native_batch_norm native_batch_norm_legit
    batch_norm_with_update cudnn_batch_norm miopen_batch_norm native_layer_norm
    native_group_norm fused_rms_norm weight_norm_interface""".split()  # noqa: SIM905
)
_POWERS = {"pow", "rsqrt", "sqrt"}
_DEFINED_EVERYWHERE = set(
    """exp exp2 expm1 sinh cosh mul add sub square mm bmm addmm baddbmm sum cumsum
    convolution""".split()  # noqa: SIM905
)


@functools.cache
def _data() -> configparser.ConfigParser:
    """Returns what causes.ini says of each cause and formula."""
    found = configparser.ConfigParser(interpolation=None, delimiters="=", default_section="")
    text = importlib.resources.files("apex.debug").joinpath("causes.ini").read_text("utf-8")
    found.read_string(text)
    return found


def _remedies(name: str) -> tuple[str, ...]:
    return tuple(_data().get(name, "remedies", fallback="").split("\n")[1:])


_LOWER_RATE = "lower the learning rate or warm it up, and clip the gradients"
_BY_SCALER = "if scaled, call scaler.step(optimizer) and scaler.update(), not optimizer.step()"
_TO_BF16 = (
    "compute in bf16, whose range is that of fp32: 'O4' instead of 'O1', 'O5' instead of 'O2' and "
    "'O3', dtype=torch.bfloat16 in torch.autocast"
)


def in_fp32(place: Place) -> tuple[str, ...]:
    """Returns how to run a module, or one line, in fp32."""
    name = place.module.rpartition(":")[2]
    module = f"keep the module in fp32, fp32_modules=[{name!r}] (O2, O3, O5)"
    line = "compute it on .float() inputs, `with amp.disable_casts():` at O1 and O4"
    return (module, line) if name else (line,)


def _for_range(birth: Birth) -> tuple[str, ...]:
    if not birth.fits_fp32:
        ways = _remedies("range")
        return (_LOWER_RATE, *ways) if _case(birth) == "growth" else (*ways, _LOWER_RATE)
    found: list[str] = []
    if birth.backward:
        found = ["make the loss smaller: a mean, not a sum, or a lower static scale"]
        found += [_BY_SCALER] * (birth.scale is None)
    elif birth.name in ("to_copy", "copy"):
        found = ["scale the values down before the cast"]
    if birth.place.inside:
        return (*found, *in_fp32(birth.place), _TO_BF16, _LOWER_RATE)
    return (*found, "compute the loss in fp32: loss_fn(output.float(), target)", _TO_BF16)


# -- formulas that are known to overflow or to leave a domain --------------------------------------


def _pattern_of(birth: Birth) -> str:
    """Returns the formula that a birth has, from its operator and inputs; "" if none is known."""
    name = birth.node if birth.cause == "derivative" else birth.name
    for formula, row in _data().items():
        fits = name in row.get("ops", "").split() and birth.cause in row["causes"].split(", ")
        if fits and all(_FLAGS[flag](birth) for flag in row.get("if", "").split()):
            return formula
    return ""


_FLAGS: dict[str, Callable[[Birth], bool]] = {
    "fp16": lambda birth: birth.in_fp16,
    "beyond-fp16": lambda birth: birth.dtype is torch.float16 and birth.lowest < -65504.0,
    "negative": lambda birth: birth.lowest < 0.0 and birth.kind == "nan",
    "below-0": lambda birth: birth.lowest < 0.0,
    "least": lambda birth: birth.lowest == torch.finfo(birth.dtype).min,
    "tiny-divisor": lambda birth: len(birth.inputs) > 1 and 0 < birth.inputs[1].smallest < 1e-3,
}
"""What the formulas of causes.ini ask of the inputs."""
