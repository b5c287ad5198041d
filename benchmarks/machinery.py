"""The overhead of amp itself: an iteration of many tiny layers, and one without kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apex import amp
from benchmarks.loops import Task, fused_adamw, native, with_amp
from benchmarks.measurement import Goal, Measurement, sampled
from benchmarks.race import Builder, Times, Work, race

NAME = "machinery"
LAYERS = 150
TENSORS = 400
HOST_TIME = {"O1": 1.1, "O2": 1.5, "O4": 1.0, "O5": 1.5}
"""Upper bound of the host time, relative to GradScaler and a fused optimizer."""


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields O1 against autocast and GradScaler in fp16, O4 against autocast in bf16.

    O4 also with a plain ``loss.backward()``, without a goal. Nothing turns casts off in that pass,
    so each product and sum in it calls a kernel in Python (docs/concepts/op_policy.md). Then the
    host time of everything except the passes.
    """
    heats = 2 if quick else 20
    with_scaler = "autocast + GradScaler"
    times = _race_against_native("O1", torch.float16, heats)
    goal = Goal("<=", 1.05)
    yield sampled(NAME, f"O1 / {with_scaler}", times.ratios("amp", "native"), "x", goal=goal)
    yield sampled(NAME, "O1", times.milliseconds("amp"), "ms")
    yield sampled(NAME, with_scaler, times.milliseconds("native"), "ms")
    times = _race_against_native("O4", torch.bfloat16, heats)
    yield sampled(NAME, "O4 / autocast", times.ratios("amp", "native"), "x", goal=goal)
    yield sampled(NAME, "O4", times.milliseconds("amp"), "ms")
    yield sampled(NAME, "autocast", times.milliseconds("native"), "ms")
    times = _race_against_native("O4", torch.bfloat16, heats, scaled=False)
    case = "O4 without scale_loss"
    yield sampled(NAME, f"{case} / autocast", times.ratios("amp", "native"), "x")
    yield sampled(NAME, case, times.milliseconds("amp"), "ms")
    racers: dict[str, Builder] = {"native": around_a_native_pass}
    for level in HOST_TIME:
        racers[level] = partial(around_a_pass, level)
    times = _race(racers, 1 if quick else 8)
    peer = "GradScaler, fused AdamW"
    for level, most in HOST_TIME.items():
        case = f"{TENSORS} tensors without kernels, {level} / {peer}"
        yield sampled(NAME, case, times.ratios(level, "native"), "x", goal=Goal("<=", most))
    case = f"{TENSORS} tensors without kernels, {peer}"
    yield sampled(NAME, case, times.milliseconds("native"), "ms")


def _race_against_native(
    level: str, dtype: torch.dtype, heats: int, *, scaled: bool = True
) -> Times:
    ours = partial(with_amp, TASK, level, scaled=scaled)
    return _race({"amp": ours, "native": partial(native, TASK, dtype)}, heats)


def _race(racers: Mapping[str, Builder], heats: int) -> Times:
    return race(
        racers,
        rounds=5,
        heats=heats,  # the addresses of a process's memory decide its speed
        calls=8,
        warmup=40,  # amp inspects the first blocks for mistakes
        threads=1,
    )


def _model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(*layers)


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8), torch.randint(0, 8, (8,))


TASK = Task(_model, _batch, fused_adamw)


# -- time on the host ----------------------------------------------------------------------------


LIST_OPERATORS = (
    "_foreach_copy_",
    "_foreach_add_.Scalar",
    "_foreach_add_.List",
    "_foreach_add_.Tensor",
    "_foreach_sub_.List",
    "_foreach_mul_.Tensor",
    "_amp_foreach_non_finite_check_and_unscale_",
    "_fused_adamw_",
)
"""Operators over lists, which a GPU runs in the background."""


def without_kernels() -> torch.library.Library:
    """Disables operators over lists in this process while the returned library is alive."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*overriding a previously registered kernel")
        for name in LIST_OPERATORS:
            library.impl(name, lambda *args, **kwargs: None, "CPU")
    return library


class Passes(torch.autograd.Function):
    """A loss of parameters that computes nothing, forward or backward."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        """Returns 0 in fp32."""
        ctx.params = params
        return torch.zeros((), dtype=torch.float32, device=params[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Returns gradients, by one operator, as the passes are not measured."""
        return tuple(torch._foreach_neg(ctx.params))


class Weights(nn.Module):
    """Many parameters of one element."""

    def __init__(self) -> None:
        """Makes them."""
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(TENSORS)])

    def forward(self) -> Tensor:
        """Returns a loss that depends on all."""
        loss: Tensor = Passes.apply(*self.weights)
        return loss


def around_a_pass(level: str) -> Work:
    """Returns an iteration at ``level`` without kernels."""
    library = without_kernels()
    model: nn.Module = Weights()
    optimizer = fused_adamw(list(model.parameters()))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def iteration() -> object:
        with amp.scale_loss(model(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return library

    return iteration


def around_a_native_pass() -> Work:
    """Returns the same iteration with a GradScaler."""
    library = without_kernels()
    model = Weights()
    optimizer = fused_adamw(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu")

    def iteration() -> object:
        scaler.scale(model()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return library

    return iteration
