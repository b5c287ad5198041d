"""Formulas that are known to overflow or to leave a domain, and the form that does not.

A pattern is found from the operator, from what computed its input (names of autograd nodes) and
from what read its result (names of operators), never from the text of the script.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from apex.debug.faults import Fault

_MAX_NODES = 8

DIVISOR = " (divisor)"
"""What follows a division's name in ``Fault.read_by`` where it read its divisor."""

# Nodes that pass values on, or shift them by a small number.
_TRANSPARENT = (
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "T", "Transpose", "Permute", "Expand"),
    *("Squeeze", "Unsqueeze", "Select", "Slice", "Split", "Unbind", "Index", "Gather", "Clone"),
    *("ToCopy", "Cat", "Stack", "Add", "Clamp", "ClampMin", "Flatten", "Detach", "MaskedFill"),
)

_PRODUCTS = {"mm", "bmm", "baddbmm"}  # of two values; a layer adds its bias in an addmm
_LAYERS = {*_PRODUCTS, "addmm", "convolution"}
_SOFTMAX = {"softmax", "safe_softmax"}  # of attention; losses call log_softmax
_LOGS = {"log", "log2", "log10"}
_ROOTS = {"sqrt", "rsqrt"}
_EXPONENTIALS = {"exp", "exp2", "expm1"}
_NORMS = {"LinalgVectorNorm", "Norm", "Sqrt"}
_SQUARES = {"Pow", "Mul", "Square"}
_BOUNDED = {"acos", "asin", "atanh", "erfinv"}


class Pattern(NamedTuple):
    """A formula to avoid, whether a fault has it, and what to write instead."""

    name: str
    matches: Callable[[Fault], bool]
    remedy: str


def pattern_of(fault: Fault) -> Pattern | None:
    """Returns the first pattern that a fault has, if any."""
    return next((pattern for pattern in _PATTERNS if pattern.matches(fault)), None)


def nodes_behind(node: Any) -> tuple[str, ...]:
    """Returns the names of the autograd nodes behind a tensor's ``grad_fn``, the nearest first.

    Follows the first input of each, and leaves out nodes that only pass values on.
    """
    names: list[str] = []
    for _ in range(4 * _MAX_NODES):
        if node is None or len(names) == _MAX_NODES:
            break
        name = node_name(node)
        if name not in _TRANSPARENT:
            names.append(name)
        node = next((inner for inner, _ in node.next_functions if inner is not None), None)
    return tuple(names)


def node_name(node: Any) -> str:
    """Returns the operator of an autograd node: ``"Sqrt"`` for ``SqrtBackward0``."""
    name = str(node.name()).rpartition("::")[2]
    return name.partition("Backward")[0].strip("_")


def operator_name(op: str) -> str:
    """Returns an operator's name without namespace and underscores."""
    return op.rpartition(".")[2].strip("_").removeprefix("foreach_")


# -- what the patterns ask ---------------------------------------------------------------------


def _is(fault: Fault, ops: set[str], *causes: str) -> bool:
    return operator_name(fault.op) in ops and fault.cause in causes


def _fed(fault: Fault, *chain: set[str]) -> bool:
    """Returns whether the input comes from these nodes, the nearest first."""
    behind = fault.fed_by[: len(chain)]
    return len(behind) == len(chain) and all(
        name in names for name, names in zip(behind, chain, strict=True)
    )


def _read(fault: Fault, *ops: str) -> bool:
    """Returns whether the operators read the non-finite values in this order."""
    readers = iter(fault.read_by)
    return all(any(operator_name(op) == wanted for op in readers) for wanted in ops)


def _read_by(fault: Fault, ops: set[str]) -> bool:
    """Returns whether one of these operators read the non-finite values before a product did."""
    readers = [operator_name(op) for op in fault.read_by]
    first = next((name for name in readers if name in ops or name in _LAYERS), "")
    return first in ops


def _lowest(fault: Fault) -> float:
    return min((values.low for values in fault.inputs), default=0.0)


def _divisor(fault: Fault) -> float:
    """Returns the smallest absolute value of the second input; 1 if it is no tensor."""
    return fault.inputs[1].smallest if len(fault.inputs) > 1 else 1.0


def _in_fp16(fault: Fault) -> bool:
    return fault.inputs[0].dtype == "float16" if fault.inputs else False


def _differentiates(fault: Fault, *nodes: str) -> bool:
    return fault.direction == "backward" and fault.cause == "derivative" and fault.node in nodes


# -- the patterns, the most specific first -------------------------------------------------------

_PATTERNS = (
    Pattern(
        "a mask beyond fp16's range before a softmax",
        lambda f: (
            _is(f, {"to_copy", "copy", "add", "sub", "mul"}, "range")
            and f.dtype is torch.float16
            and _read_by(f, {*_SOFTMAX, "log_softmax"})
            and _lowest(f) < -65504.0
        ),
        "mask with the least number of the scores' own dtype, torch.finfo(scores.dtype).min, or "
        "with masked_fill(mask, -inf) where no row is masked as a whole",
    ),
    Pattern(
        "an addition to a mask of the least number",
        lambda f: _is(f, {"add", "sub"}, "range") and _lowest(f) == torch.finfo(f.dtype).min,
        "set masks with scores.masked_fill(mask, torch.finfo(scores.dtype).min), several of them "
        "combined by |, or add a smaller number, such as -1e4: the least number plus a negative "
        "score, or plus another mask, is -inf",
    ),
    Pattern(
        "a product before a softmax",
        lambda f: _is(f, _PRODUCTS, "range") and _read_by(f, _SOFTMAX),
        "scale `q` before the product, (q * scale) @ k.transpose(-2, -1), not the scores after it, "
        "or call torch.nn.functional.scaled_dot_product_attention(q, k, v)",
    ),
    Pattern(
        "log of a softmax",
        lambda f: (
            _is(f, _LOGS, "domain")
            and (_fed(f, {"Softmax", "SafeSoftmax"}) or _fed(f, {"Div"}, {"Exp"}))
        ),
        "call x.log_softmax(dim) instead of x.softmax(dim).log(), or give the logits to "
        "torch.nn.functional.cross_entropy: small probabilities round to 0",
    ),
    Pattern(
        "log of a sigmoid",
        lambda f: (
            _is(f, _LOGS, "domain")
            and (_fed(f, {"Sigmoid"}) or _fed(f, {"Rsub", "Sub"}, {"Sigmoid", "Softmax"}))
        ),
        "call torch.nn.functional.logsigmoid(x), and logsigmoid(-x) for log(1 - sigmoid(x)), or "
        "give the logits to binary_cross_entropy_with_logits: probabilities round to 0 and 1",
    ),
    Pattern(
        "log of a sum of exp",
        lambda f: _is(f, _LOGS, "domain") and _fed(f, {"Sum", "Mean"}, {"Exp"}),
        "call torch.logsumexp(x, dim) instead of x.exp().sum(dim).log()",
    ),
    Pattern(
        "exp of a large number in a log of a sum",
        lambda f: _is(f, _EXPONENTIALS, "range") and _read(f, "sum", "log"),
        "call torch.logsumexp(x, dim) instead of x.exp().sum(dim).log()",
    ),
    Pattern(
        "exp of a large number in a softplus",
        lambda f: _is(f, _EXPONENTIALS, "range") and (_read(f, "log1p") or _read(f, "add", "log")),
        "call torch.nn.functional.softplus(x) instead of log(1 + exp(x))",
    ),
    Pattern(
        "exp of a large number in a softmax",
        lambda f: (
            _is(f, _EXPONENTIALS, "range")
            and (_read(f, "sum", "div") or f.read_by[:1] == ("aten.div",))
        ),
        "call x.softmax(dim) instead of x.exp() / x.exp().sum(dim), and torch.logsumexp(x, dim) "
        "for the logarithm of the sum",
    ),
    Pattern(
        "exp of a large number in a sigmoid",
        lambda f: (
            _is(f, _EXPONENTIALS, "range")
            and (_read(f, "add", "reciprocal") or _read(f, "add", f"div{DIVISOR}"))
        ),
        "call torch.sigmoid(x) instead of 1 / (1 + exp(-x))",
    ),
    Pattern(
        "exp of a large number",
        lambda f: _is(f, _EXPONENTIALS, "range"),
        "use a form that does not overflow: torch.logsumexp(x, dim) for the log of a sum of exp, "
        "x.softmax(dim) for exp over its sum; or subtract the maximum, or clamp the input",
    ),
    Pattern(
        "a negative variance",
        lambda f: (
            _is(f, {*_ROOTS, "pow"}, "domain")
            and f.kind == "nan"
            and _lowest(f) < 0.0
            and _fed(f, {"Sub", "Rsub"}, {"Mean", "Div"})
        ),
        "compute a variance as x.var(dim, correction=0), not as x.square().mean() - "
        "x.mean().square(), which rounding makes negative, or call clamp_min(eps) before the root",
    ),
    Pattern(
        "a root of a negative number",
        lambda f: _is(f, _ROOTS, "domain") and f.kind == "nan" and _lowest(f) < 0.0,
        "call clamp_min(eps) before the root; rounding makes a small difference negative, such as "
        "a squared distance a*a + b*b - 2*a*b (torch.cdist has none), or a variance computed as a "
        "difference of means, where x.var(dim, correction=0) is not",
    ),
    Pattern(
        "a power of a negative number",
        lambda f: _is(f, {"pow"}, "domain") and _lowest(f) < 0.0,
        "clamp the base to 0 or take its absolute value: a negative number has no real power with "
        "a fractional exponent",
    ),
    Pattern(
        "log of a negative number",
        lambda f: _is(f, _LOGS | {"log1p"}, "domain") and f.kind == "nan" and _lowest(f) < 0.0,
        "clamp the input: log(x.clamp_min(eps)), or find out why it is negative",
    ),
    Pattern(
        "a CTC loss of a target that does not fit its input",
        lambda f: _is(f, {"ctc_loss", "cudnn_ctc_loss"}, "domain"),
        "leave out targets that are longer than their inputs, a repeated label counted twice, or "
        "call torch.nn.functional.ctc_loss(..., zero_infinity=True)",
    ),
    Pattern(
        "log of 0",
        lambda f: _is(f, _LOGS, "domain") and _in_fp16(f),
        "compute it in fp32 and clamp the input, log(x.float().clamp_min(1e-12)): in fp16, numbers "
        "below 6e-8, and so a smaller eps, round to 0",
    ),
    Pattern(
        "an inverse function at the end of its domain",
        lambda f: (
            _is(f, _BOUNDED, "domain") or _differentiates(f, "Acos", "Asin", "Atanh", "Erfinv")
        ),
        "clamp the input into the open interval, x.clamp(-1 + eps, 1 - eps) with an eps of 1e-6 in "
        "fp32, 1e-3 in fp16 and 1e-2 in bf16: a cosine of unit vectors exceeds 1 by rounding, and "
        "the derivative is infinite at 1",
    ),
    Pattern(
        "a norm by hand at 0",
        lambda f: _differentiates(f, "Sqrt", "Pow") and _fed(f, {"Sum", "Mean"}, _SQUARES),
        "call torch.linalg.vector_norm(x, dim=dim), whose derivative at 0 is 0, or add an epsilon "
        "inside the root: (x.square().sum(dim) + eps).sqrt()",
    ),
    Pattern(
        "the derivative of a root at 0",
        lambda f: _differentiates(f, "Sqrt", "Rsqrt", "Std", "Pow"),
        "add an epsilon inside the root, (x + eps).sqrt(), where the slope is infinite at 0; "
        "masking the result afterwards does not help, because 0 * inf is NaN",
    ),
    Pattern(
        "the derivative of a quotient",
        lambda f: _differentiates(f, "Div", "Reciprocal"),
        "keep the divisor away from 0 before the division, a / b.clamp_min(eps); masking the "
        "quotient afterwards does not help, because its derivative is 0 * inf, which is NaN",
    ),
    Pattern(
        "the derivative of eigenvectors or singular vectors of equal values",
        lambda f: _differentiates(f, "LinalgEigh", "LinalgEig", "LinalgSvd"),
        "use the values alone (torch.linalg.eigvalsh, svdvals), whose derivative exists, or make "
        "them distinct: A + torch.diag(1e-3 * torch.rand(n)); adding a multiple of the identity "
        "keeps them equal",
    ),
    Pattern(
        "a singular matrix",
        lambda f: operator_name(f.op).startswith("linalg_") and f.cause in ("domain", "derivative"),
        "add a small multiple of the identity, A + eps * torch.eye(n), or find out why rows or "
        "columns of it are 0 or equal",
    ),
    Pattern(
        "exp over a sum that is 0",
        lambda f: _is(f, {"div"}, "division by zero") and _fed(f, {"Sum"}, {"Exp"}),
        "call x.softmax(dim) instead of x.exp() / x.exp().sum(dim): for small x every exp is 0",
    ),
    Pattern(
        "division by 0 in fp16",
        lambda f: _is(f, {"div", "reciprocal", "rsqrt"}, "division by zero") and _in_fp16(f),
        "add an epsilon of 1e-4 to the divisor (inside its root, if it is one), or clamp it where "
        "the dividend is not 0, a / b.clamp_min(1e-2), or compute it in fp32 with a smaller one: "
        "in fp16, numbers below 6e-8, and so a smaller epsilon, round to 0",
    ),
    Pattern(
        "division by a norm that is 0",
        lambda f: _is(f, {"div"}, "division by zero") and _fed(f, _NORMS),
        "call torch.nn.functional.normalize(x, dim=dim, eps=1e-6), or divide by "
        "norm.clamp_min(eps)",
    ),
    Pattern(
        "division by a tiny number",
        lambda f: _is(f, {"div"}, "range") and 0.0 < _divisor(f) < 1e-3,
        "add an epsilon to the divisor, or clamp it: a / b.clamp_min(eps)",
    ),
    Pattern(
        "a square in fp16",
        lambda f: (
            _is(f, {"pow", "square", "linalg_vector_norm", "var", "std"}, "range") and _in_fp16(f)
        ),
        "compute squares, norms and variances in fp32, x.float(): in fp16 the square of 256 is inf",
    ),
    Pattern(
        "a sum in fp16",
        lambda f: _is(f, {"sum", "cumsum"}, "range") and _in_fp16(f),
        "sum in fp32, x.sum(dtype=torch.float32), or take the mean of x.float()",
    ),
)
