"""Records where non-finite values first appeared, what became of them, and which is the fault."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from apex._torch.autograd import backward_id
from apex.debug.place import Place
from apex.debug.rules import PRODUCTS, SOFTMAXES
from apex.debug.tracing import Values, operator_name, operators

_DIVIDES = operators(
    """div divide reciprocal rsqrt pow remainder fmod mean var std var_mean std_mean addcdiv
    nll_loss_forward nll_loss2d_forward native_batch_norm native_batch_norm_legit
    batch_norm_with_update cudnn_batch_norm miopen_batch_norm native_layer_norm
    native_group_norm fused_rms_norm weight_norm_interface"""
)
"""Operators that divide by an input, or by a number computed from it."""

_POWERS = operators("pow rsqrt sqrt")

_DEFINED_EVERYWHERE = operators(
    """exp exp2 expm1 sinh cosh mul add sub square mm bmm addmm baddbmm sum cumsum prod cumprod
    convolution i0 special_erfcx linalg_matrix_exp linalg_det"""
)
"""Operators with a true result for all finite inputs."""

_MASKS = operators("nan_to_num masked_fill where nansum")
# These map -inf to 0, the right result.
_MAP_TO_ZERO = operators("softmax safe_softmax exp")
_LIMIT = operators("atan clamp clamp_max erf hardtanh minimum reciprocal sigmoid tanh")
_SMALL = 2.0**-24
"""Numbers below this part of a dtype's greatest one exceed it in no sum of a million terms."""

FATEFUL = _MASKS | SOFTMAXES | _MAP_TO_ZERO | _LIMIT
"""Operators that decide what becomes of the values they read."""


@dataclass(eq=False)
class Birth:
    """The call that first produced a non-finite value, and what has become of it.

    Attributes:
        place, op, kind, dtype: As in :class:`~apex.debug.place.Finding`.
        time: Number of operators traced before the call.
        steps: Number of optimizer steps before the call.
        way: How the model trains: ``"plain"``, ``"autocast"``, or amp's level.
        given: The cause, if it follows from the origin of the values (data, weights, another
            rank), not from the operator; else ``""``.
        deliberate: Whether the value is intended, as a constant or a mask.
        number: The inf or NaN that the script wrote there; None if the script computed it.
        numbers: Python numbers among the arguments.
        writes: Whether the call wrote the values to an argument, as to a running variance.
        inputs: Ranges of the inputs, at most four.
        true: Largest absolute result in float64. ``inf`` if the result is infinite or undefined
            there, too; None if unknown.
        node: The autograd node of a backward pass, such as ``"Sqrt"``; else ``""``.
        formula: Whether autograd's own formula of a derivative ran, not user code.
        names: The parameters or buffers that contained the values.
        unwritten: Whether nothing has written these since ``torch.empty``.
        eps: The eps of the optimizer that steps; inf without one.
        misuse: What is wrong with scaled gradients: ``"step"``, ``"stale"``, or a result of
            ``ScaledGradients.misuse``.
        heaviest: Largest absolute value of the inputs that are parameters, or their casts.
        grown: Whether the weights have grown manifold since the first step.
        reader: The first operator that read the values and passed them on.
        reader_module: The module in which the reader ran; None before.
        multiplied: Whether a product of matrices read the values before a softmax did, as it reads
            data but no mask.
        feeds_softmax: Whether a softmax has read the values.
        negative: Whether all infinities are negative.
        scale: Multiplier on the loss; 1 without one.
        dynamic: Whether a dynamic loss scale, of amp or a ``GradScaler``, unscaled the gradients.
        stepped: Whether values reached the loss or weights.
        masked: Whether values were masked out.
        absorbed: Whether a softmax or exp mapped -inf to 0, its right result.
        limited: Whether an operator such as clamp mapped them to their finite limit.
    """

    place: Place
    op: str
    kind: str
    dtype: torch.dtype
    time: int = 0
    steps: int = 0
    way: str = "plain"
    given: str = ""
    deliberate: bool = False
    number: float | None = None
    numbers: tuple[float, ...] = ()
    writes: bool = False
    inputs: tuple[Values, ...] = ()
    true: float | None = None
    node: str = ""
    formula: bool = False
    names: str = ""
    unwritten: bool = False
    eps: float = math.inf
    misuse: str = ""
    heaviest: float = 0.0
    grown: bool = False
    reader: str = ""
    reader_module: str | None = None
    multiplied: bool = False
    feeds_softmax: bool = False
    negative: bool = False
    scale: float = 1.0
    dynamic: bool = False
    stepped: bool = False
    masked: bool = False
    absorbed: bool = False
    limited: bool = False

    @property
    def backward(self) -> bool:
        """Whether the call ran in a backward pass."""
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
        return max((values.largest for values in self.inputs), default=0.0)

    @property
    def casts(self) -> bool:
        """Whether the call is a cast."""
        return self.name in ("to_copy", "copy")

    @property
    def fits_fp32(self) -> bool:
        """Whether the value exceeds fp16's range but, as far as known, not fp32's or bf16's."""
        true = self.true or 0.0
        limit = torch.finfo(torch.bfloat16).max
        return self.dtype is torch.float16 and true <= limit

    @property
    def cause(self) -> str:
        """Why the result was not finite: a section of causes.ini."""
        if self.given:
            return self.given
        if self._is_defined:
            if self._fits:
                return "kernel"
            if self._fits_unscaled:
                return "loss scale"
            return "range"
        if self.formula:
            return "derivative"
        # A power of 0 may be inf. NaN is a power of a negative number.
        is_power = self.kind == "nan" and self.name in _POWERS
        if self.name in _DIVIDES and not is_power:
            return "division by zero"
        return "domain"

    @property
    def _is_defined(self) -> bool:
        """Whether the inputs have a true result, which exceeds the dtype."""
        # A power of a positive number, or with a positive exponent: it divides by no 0.
        is_power = self.name == "pow" and min(self.numbers, default=0.0) > 0.0
        is_defined = is_power or self.name in _DEFINED_EVERYWHERE
        if self.kind == "inf" and is_defined:  # beyond float64, too
            return True
        if self.true is not None:
            return math.isfinite(self.true)
        # The kernel does not run in float64 (attention on CUDA). Overflow rarely produces NaN.
        return self.kind == "inf" and self.name not in _DIVIDES

    @property
    def _fits(self) -> bool:
        """Whether result and inputs are so small that no sum of products exceeds the dtype."""
        if self.true is None:
            return False
        return max(self.true, self.largest**2) < torch.finfo(self.dtype).max * _SMALL

    @property
    def _fits_unscaled(self) -> bool:
        """Whether a gradient fits into the dtype without the loss scale, as far as known."""
        if self.scale <= 1.0:  # as in every forward pass
            return False
        true = self.true or 0.0
        return true / self.scale <= torch.finfo(self.dtype).max

    @property
    def heals(self) -> bool:
        """Whether a dynamic loss scale backs off from this overflow, as it should."""
        return self.cause == "loss scale" and self.dynamic and not self.stepped

    @property
    def is_lost(self) -> bool:
        """Whether fp16 lost a value that no softmax or exp has mapped to the right result."""
        return self.cause == "range" and self.dtype is torch.float16 and not self.absorbed

    @property
    def site(self) -> tuple[str, str]:
        """The operator and its line."""
        return self.op, self.place.location

    def meet(self, operator: str, *, is_finite: bool) -> None:
        """Records that an operator read the values; ``is_finite`` tells of its results."""
        if operator in SOFTMAXES:
            self.feeds_softmax = True
        if is_finite and operator in _MAP_TO_ZERO:
            self.absorbed = True
        if is_finite and operator in _LIMIT:
            self.limited = True
        if is_finite and operator in _MASKS:
            self.masked = True

    def pass_on(self, operator: str, module: str) -> None:
        """Records an operator that read the values and passed them on."""
        if operator in PRODUCTS and not self.feeds_softmax:
            self.multiplied = True
        if not self.reader:
            self.reader = operator
            self.reader_module = module

    def reach(self) -> None:
        """Records that the values reached the loss or weights."""
        self.stepped = True

    def rank(self) -> tuple[bool, bool, bool, int]:
        """Returns the key that sorts births, the most severe first."""
        is_stale = self.given == "gradients"  # left by an earlier step
        return self.deliberate, is_stale, self.masked or self.limited, self.time


class Births:
    """The births of all non-finite values that may be faults.

    Note [When a birth is a fault]
        Infinities can be deliberate (masks), and NaNs can be produced and masked out again: torch's
        formula for the derivative of a norm divides 0 by 0 and then replaces the result. Therefore
        a birth counts as a fault only once its values reach a gradient, the loss or a weight.

        If a backward pass completes with finite gradients, all earlier births were harmless, with
        one exception. A value beyond fp16's range is lost even if a later clamp or sigmoid maps
        the infinity to a finite value. Only softmax and exp return the right result for -inf. This
        exception does not hold under ``no_grad``, as in an evaluation. If there are several faults,
        those whose values were masked out or limited come last.

        When a trace ends, births that no backward pass has judged count as faults. Births whose
        values were masked out do not, nor do births at an operator and line (a metric) that were
        harmless before.

    Note [Loss scales]
        Overflows make a dynamic scale back off and skip the step: such births heal. The scale of
        an amp session is known. The trace sees the scale of a ``GradScaler`` where it multiplies
        the loss; see Note [Scaled gradients].

    Note [Long traces]
        A trace may last as long as a training. Therefore births are discarded once they are
        harmless. One lost value is kept per line of code, and only the latest autograd nodes are
        remembered.

    Attributes:
        time: Number of operators traced.
        steps: Number of optimizer steps.
        passes: Number of backward passes that reached a gradient.
        gradients: Names of parameters that a fault reached.
        healed: Backward passes after which a dynamic loss scale backed off.
        aside: The first birth that reached nothing although no operator masked its values, as in
            an evaluation; None without one.
        certain: Whether values reached a gradient, the loss or a weight, and no scale heals them.
        reached: Births whose values reached a gradient, the loss, a weight or a buffer.
    """

    def __init__(self) -> None:
        self.time = 0
        self.steps = 0
        self.passes = 0
        self.gradients: list[str] = []
        self.healed: set[int] = set()
        self.aside: Birth | None = None
        self.certain = False
        # The backward pass that reached a gradient last.
        self._backward = -1
        # Births since the last backward pass with finite gradients.
        self._pending: list[Birth] = []
        # Values that fp16 lost, the first of each site.
        self._lost: dict[tuple[str, str], Birth] = {}
        self.reached: dict[Birth, None] = {}  # a set in order of time
        # Sites at which a birth was harmless.
        self._harmless: set[tuple[str, str]] = set()

    # -- births ----------------------------------------------------------------------------------

    def count_operator(self) -> None:
        """Counts an operator."""
        self.time += 1

    def count_step(self) -> None:
        """Counts an optimizer step."""
        self.steps += 1

    def add(self, birth: Birth) -> Birth:
        """Returns a birth with the time of the current operator, and records it."""
        birth = replace(birth, time=self.time, steps=self.steps)
        if not birth.deliberate:
            self._pending.append(birth)
            trains = birth.backward or torch.is_grad_enabled()
            if trains and birth.is_lost:
                self._lost.setdefault(birth.site, birth)
        return birth

    def reach(self, birth: Birth, *, certain: bool = True) -> None:
        """Records that values reached the loss, a weight or a buffer."""
        self.reached[birth] = None
        birth.reach()
        self.certain |= certain

    def reach_gradient(self, name: str, birth: Birth | None) -> None:
        """Records that the running backward pass adds to the gradient of a parameter.

        ``birth`` is None if the gradient is finite; then ``name`` is not used.
        """
        backward = backward_id()
        if backward != self._backward:
            self.passes += 1
        self._backward = backward
        if birth is None:
            for judged in self._pending:
                if judged not in self.reached and not judged.heals:
                    self._harmless.add(judged.site)
                    if not (judged.masked or judged.absorbed or judged.limited):
                        self.aside = self.aside or judged
            self._pending.clear()
            return
        if name not in self.gradients:
            self.gradients.append(name)
        self.reached[birth] = None
        if birth.heals:
            self.healed.add(backward)
        else:
            self.certain = True

    # -- results -----------------------------------------------------------------------------------

    def first(self, *, healing: bool = True) -> Birth | None:
        """Returns the first birth that is a fault; see Note [When a birth is a fault].

        With ``healing``, overflows from which a dynamic loss scale backs off also count, if there
        are no other faults.
        """
        lost = [birth for birth in self._lost.values() if birth.is_lost]
        certain = [birth for birth in self.reached if not birth.heals]
        faults = certain + lost
        if healing:
            faults = faults or list(self.reached)
        if not faults:  # those that no backward pass has judged may be faults
            for birth in self._pending:
                is_harmless = birth.masked or birth.site in self._harmless
                counts = healing or not birth.heals
                if counts and not is_harmless:
                    faults.append(birth)
        return min(faults, key=Birth.rank, default=None)
