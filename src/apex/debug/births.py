"""Where non-finite values were born, what became of them, and which of them is the fault."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from apex.debug.place import Place
from apex.debug.tracing import Values, operator_name

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


@dataclass(eq=False)
class Birth:
    """The call that first produced a non-finite value, and what has become of it.

    Attributes:
        place, op, kind, dtype: As of its finding.
        time, steps: Numbers of operators traced and of optimizer steps before it, set when it is
            added.
        way: How the model trains: ``"plain"``, ``"autocast"``, or amp's level.
        given: The cause, where it is no matter of the values: where they came from.
        deliberate: Whether the value is intended, as a constant or a mask.
        number: The inf or NaN that the script wrote there; None if it computed it.
        numbers: Python numbers among the arguments.
        inputs: Ranges of the inputs, at most four.
        true: Largest absolute result in float64: ``inf`` if infinite or undefined there, too; None
            if unknown.
        node: In a backward pass, the autograd node, such as ``"Sqrt"``.
        formula: Whether autograd's own formula of a derivative ran, not user code.
        names: The parameters or buffers that held the values.
        unwritten: Whether nothing has written them since ``torch.empty``.
        eps: The optimizer's eps, in its step; inf without one.
        misuse: What is wrong with scaled gradients: ``"step"``, ``"stale"``, or as of
            ``ScaledGradients``.
        heaviest: Largest absolute value of the inputs that are parameters, or their casts.
        grown: Whether the weights have grown manifold since the first step.
        reader: The operator that read the values first, and passed them on.
        reader_module: The module in which it ran; None before.
        feeds_softmax: Whether a softmax has read the values.
        negative: Whether all infinities are negative.
        scale: Multiplier on the loss; 1 without one.
        dynamic: Whether a dynamic loss scale, of amp or a ``GradScaler``, unscaled the gradients.
        stepped: Whether values reached the loss or weights.
        masked: Whether values were masked out.
        masked_again: Whether their derivative was not finite, after they were masked out.
        absorbed: Whether a softmax or exp mapped -inf to 0, as is right.
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
    feeds_softmax: bool = False
    negative: bool = False
    scale: float = 1.0
    dynamic: bool = False
    stepped: bool = False
    masked: bool = False
    masked_again: bool = False
    absorbed: bool = False

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
        return max((values.largest for values in self.inputs), default=0.0)

    @property
    def casts(self) -> bool:
        """Whether it is a cast."""
        return self.name in ("to_copy", "copy")

    @property
    def fits_fp32(self) -> bool:
        """Whether what exceeds fp16 is, as far as known, in the range of fp32 and bf16."""
        return self.dtype is torch.float16 and (self.true or 0.0) <= torch.finfo(torch.float32).max

    @property
    def cause(self) -> str:
        """Why the result was not finite: a section of causes.ini."""
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
            if self.formula:
                return "derivative"
            # A power of 0 is inf at most; NaN is that of a negative number.
            divides = self.name in _DIVIDES and not (self.kind == "nan" and self.name in _POWERS)
            return "division by zero" if divides else "domain"
        unscaled = true / self.scale if math.isfinite(true) else 0.0
        fits = unscaled <= torch.finfo(self.dtype).max
        return "loss scale" if self.backward and self.scale > 1.0 and fits else "range"

    @property
    def heals(self) -> bool:
        """Whether a dynamic loss scale backs off from it, as it does to find its value."""
        return self.cause == "loss scale" and self.dynamic and not self.stepped

    @property
    def is_lost(self) -> bool:
        """Whether fp16 lost a value that no softmax or exp has mapped to the right result."""
        return self.cause == "range" and self.dtype is torch.float16 and not self.absorbed

    @property
    def site(self) -> tuple[str, str]:
        """The operator and its line."""
        return self.op, self.place.location

    def rank(self) -> tuple[bool, bool, bool, int]:
        """Returns what sorts births, the most severe first."""
        stale = self.given == "gradients"  # left by an earlier step
        return self.deliberate, stale, self.masked, self.time


class Births:
    """The births of all non-finite values that may be faults.

    Note [When a birth is a fault]
        Infinities can be deliberate (masks), and NaNs can be produced and masked out again: torch's
        own formula for the derivative of a norm divides 0 by 0 and replaces the result. So a birth
        counts as a fault only once its values reach a gradient, the loss or a weight. If a backward
        pass completes with finite gradients, all earlier births were harmless, with one exception:
        a value beyond fp16's range is lost even if a later function (a clamp, a sigmoid) maps the
        infinity to a finite value. Only softmax and exp return the right result for -inf. Where
        several meet, those whose values were masked out come last. When a trace ends,
        births that no backward pass has judged count unless they were masked out, or were harmless
        before at the same operator and line (a metric).

    Note [Loss scales]
        A dynamic scale finds its value by overflows, after which it skips the step: such births
        heal. The scale of an amp session is known, that of a ``GradScaler`` shows itself where it
        multiplies the loss; see Note [Scaled gradients].

    Note [Long traces]
        A trace may last as long as a training. So births are discarded once they are harmless, one
        lost value is kept per line of code, and only the latest autograd nodes are remembered.

    Attributes:
        time: Number of operators traced.
        steps: Number of optimizer steps.
        passes: Number of backward passes that reached a gradient.
        gradients: Names of parameters that a fault reached.
        healed: Backward passes after which a dynamic loss scale backed off.
        certain: Whether values of a fault that no scale heals got that far.
    """

    def __init__(self) -> None:
        self.time = 0
        self.steps = 0
        self.passes = 0
        self.gradients: list[str] = []
        self.certain = False
        self._backward = -1
        self._pending: list[Birth] = []
        self._lost: dict[tuple[str, str], Birth] = {}
        self._reached: dict[Birth, None] = {}
        self._harmless: set[tuple[str, str]] = set()
        self.healed: set[int] = set()

    # -- births ----------------------------------------------------------------------------------

    def add(self, birth: Birth) -> Birth:
        """Adds a birth at the current operator, and returns it."""
        birth.time = self.time
        birth.steps = self.steps
        if not birth.deliberate:
            self._pending.append(birth)
            if birth.is_lost:
                self._lost.setdefault(birth.site, birth)
        return birth

    def reach(self, birth: Birth, *, certain: bool = True) -> None:
        """Records that values reached the loss, a weight or a buffer."""
        self._reached[birth] = None
        birth.stepped = True
        self.certain |= certain

    def reach_gradient(self, name: str, birth: Birth | None, *, backward: int) -> None:
        """Records that backward pass number ``backward`` adds to the gradient of a parameter.

        ``birth`` is that of its non-finite values; None if it is finite, when ``name`` is not read.
        """
        if backward != self._backward:
            self.passes += 1
        self._backward = backward
        if birth is None:
            for judged in self._pending:
                if judged not in self._reached and not judged.heals:
                    self._harmless.add(judged.site)
            self._pending.clear()
            return
        if name not in self.gradients:
            self.gradients.append(name)
        self._reached[birth] = None
        if birth.heals:
            self.healed.add(backward)
        else:
            self.certain = True

    # -- results -----------------------------------------------------------------------------------

    def first(self, *, healing: bool = True) -> Birth | None:
        """Returns the first birth that is a fault; see Note [When a birth is a fault].

        With ``healing``, an overflow from which a dynamic loss scale backs off counts as one, if
        there is no other.
        """
        certain = [birth for birth in self._reached if not birth.heals]
        certain += [birth for birth in self._lost.values() if birth.is_lost]
        if certain:
            return min(certain, key=Birth.rank)
        if healing and self._reached:
            return min(self._reached, key=Birth.rank)
        pending = []
        for birth in self._pending:
            is_harmless = birth.masked or birth.site in self._harmless
            counts = healing or not birth.heals
            if counts and not is_harmless:
                pending.append(birth)
        return min(pending, key=Birth.rank, default=None)
