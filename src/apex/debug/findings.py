"""What an explained model could save, ranked by the time that it takes now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from apex.amp import lists
from apex.debug.records import OF_FORWARD, RoundTrip, WeightCasts, share
from apex.debug.rendering.formatting import short


@dataclass(frozen=True)
class Finding:
    """Casts that a change would save.

    Attributes:
        title: What happens, such as ``"softmax runs in fp32"``.
        count: Number of round trips, or of casts of weights.
        casts: Number of casts.
        bytes: Bytes that these casts read and wrote.
        seconds: Time that they took.
        share: Their share of all measured time.
        modules: Modules in which they are made, in order of first use.
        remedy: How to avoid them.
    """

    title: str
    count: int
    casts: int
    bytes: int
    seconds: float
    share: float
    modules: tuple[str, ...]
    remedy: str


def findings_of(
    trips: Sequence[RoundTrip], casts: Iterable[WeightCasts], whole: float
) -> tuple[Finding, ...]:
    """Returns what an explained model could save of the ``whole`` time, the most first."""
    found = [
        *_through_operators([trip for trip in trips if trip.op], whole),
        *_undone([trip for trip in trips if not trip.op], whole),
        *_weights(casts, whole),
    ]
    return tuple(sorted(found, key=lambda finding: -finding.seconds))


def _through_operators(trips: list[RoundTrip], whole: float) -> Iterator[Finding]:
    """Yields a finding per operator and reason; a backward joins the forward of its module."""
    reasons = {
        (_forward_name(t.op), t.module): t.decided_by for t in trips if t.direction == "forward"
    }
    groups: dict[tuple[str, str, tuple[str, str, str]], list[RoundTrip]] = {}
    for trip in trips:
        name = _forward_name(trip.op)
        reason = reasons.get((name, trip.module), trip.decided_by)
        groups.setdefault((name, reason, trip.path), []).append(trip)
    for (name, reason, path), group in groups.items():
        _, wide, low = map(short, path)
        title = f"{_function(reason) or name} runs in {wide}"
        change = _to_keep_low(reason, name, low) or f"remove the {_cast_to(wide)} before it"
        remedy = f"to keep it in {low}: {change}"
        yield _finding(title, group, whole, remedy)


def _undone(trips: list[RoundTrip], whole: float) -> Iterator[Finding]:
    for path in dict.fromkeys(trip.path for trip in trips):
        low, wide, _ = steps = [short(dtype) for dtype in path]
        group = [trip for trip in trips if trip.path == path]
        if any(trip.direction == "forward" for trip in group):
            cast = f"usually a {_cast_to(wide)} in the model's code"
            remedy = f"remove the first of the two casts, {cast}"
        else:  # a sum or product of both dtypes is in the wider one
            remedy = f"cast the {wide} tensor that meets a {low} one in the forward pass to {low}"
        yield _finding(f"casts from {' to '.join(steps)} undo one another", group, whole, remedy)


def _weights(casts: Iterable[WeightCasts], whole: float) -> Iterator[Finding]:
    for made in casts:
        dtype = short(made.target)
        yield Finding(
            f"weights are cast to {dtype} in every pass",
            made.count,
            made.count,
            made.bytes,
            made.seconds,
            share(made.seconds, whole) or 0.0,
            made.modules,
            f"level {_CONVERTS[dtype]!r} keeps them in {dtype}, with fp32 masters",
        )


def _finding(title: str, trips: list[RoundTrip], whole: float, remedy: str) -> Finding:
    seconds = sum(trip.seconds for trip in trips)
    return Finding(
        title,
        sum(trip.count for trip in trips),
        sum(trip.casts for trip in trips),
        sum(trip.bytes for trip in trips),
        seconds,
        share(seconds, whole) or 0.0,
        tuple(dict.fromkeys(trip.module for trip in trips)),
        remedy,
    )


def _cast_to(dtype: str) -> str:
    return {"fp32": ".float()", "fp64": ".double()"}.get(dtype, f"cast to {dtype}")


def _forward_name(op: str) -> str:
    """Returns the forward's name of an operator, without underscores."""
    name = op.rpartition(".")[2].strip("_")
    return name.removesuffix("_data").removesuffix("_backward").removeprefix("native_")


def _function(reason: str) -> str:
    """Returns the function that a reason names, such as ``"softmax"``."""
    return reason.rpartition(" (")[2].removesuffix(")") if reason.endswith(")") else ""


def _to_keep_low(reason: str, op: str, low: str) -> str:
    """Returns what keeps an operator in 16 bits; ``""`` if only the model's code does."""
    in_backward = reason == OF_FORWARD  # a forward without a round trip: its input is fp32
    name = op if in_backward else _function(reason)
    if name in _WITH_WEIGHTS:
        return f"level {_CONVERTS[low]!r}, which converts its weights, too"
    if in_backward:
        return f"level {_CONVERTS[low]!r}, in which its input is {low}, too"
    if reason.startswith(("fp32 list", "banned list")):
        modules = (lists.functional_overrides, lists.torch_overrides, lists.tensor_overrides)
        place = next((each for each in modules if name in each.FP32_FUNCS), None)
        lines = "run its line `with amp.disable_casts():`"
        if place is None:
            return lines
        own = place.__name__.removeprefix("apex.")
        return f"{own}.FP32_FUNCS.remove({name!r}) before amp.initialize, or {lines}"
    if reason.startswith("torch.autocast"):
        return "run its line `with torch.autocast(device_type, enabled=False):`"
    for start, remedy in _REMEDIES.items():
        if reason.startswith(start):
            return remedy
    return ""


_CONVERTS = {"fp16": "O2", "bf16": "O5"}
"""The level that converts weights, by dtype."""

# Their fp32 weights and 16-bit inputs do not go together on every device.
_WITH_WEIGHTS = {"layer_norm", "group_norm", "instance_norm", "batch_norm", "rms_norm", "prelu"}

_REMEDIES = {
    "registered by you": "do not register it with amp.register_float_function",
    "fp32_modules": "take its module out of fp32_modules",
    "batch norm kept": "pass keep_batchnorm_fp32=False to amp.initialize",
}
