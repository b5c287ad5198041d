"""Runs copies of a model at a level, with some modules in fp32, and compares their gradients."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex._core import dtypes, tree
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._engine.autocast.region import CastRegion
from apex._engine.session import Session
from apex._torch import ranks
from apex.amp import frontend, inputs
from apex.amp.properties import level_defaults, to_policy
from apex.amp.sessions import new_session
from apex.debug import tensors
from apex.debug.preserve_state import casts_off, preserve_state
from apex.debug.rounding import RoundingTrace
from apex.debug.rounding_records import RoundingRow, Skipped
from apex.debug.storages import Storages

Loss = Callable[[nn.Module], Tensor]
"""Computes the loss of a model."""

Gradients = dict[str, Tensor]

_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""Loss scales (multipliers) to try in fp16, until no gradient overflows."""

_NEGLIGIBLE = 1e-3
"""Gradients below this share of the largest do not count."""


@dataclass(frozen=True)
class Outcome:
    """One run of a copy of the model.

    Attributes:
        error: Error of the gradients, see ``Suggestion``.
        bytes: Memory of weights, masters, gradients and activations saved for backward.
        lost, skipped: As of the rounding trace of the run; empty without one.
    """

    error: float
    bytes: int
    lost: tuple[RoundingRow, ...]
    skipped: tuple[Skipped, ...]


class Trials:
    """Runs a plain fp32 model at a level; leaves the model and the random state as they are.

    Attributes:
        noise: Error of the gradients between two runs in fp32.
    """

    def __init__(self, model: nn.Module, loss: Loss, arguments: object, opt_level: str) -> None:
        """Runs the model twice in fp32.

        ``arguments`` is what the loss reads; its tensors are restored after each run.

        Raises:
            ValueError: If other processes take part in a run.
        """
        self._model, self._loss, self._arguments = model, loss, arguments
        self._policy: Policy = to_policy(level_defaults(opt_level))
        self._known: dict[tuple[str, ...], Outcome] = {}
        alone = _Alone() if ranks.world_size() > 1 else nullcontext()  # type: ignore[no-untyped-call]
        with alone:
            self._reference = self._in_fp32()
        self.noise = self._error(self._in_fp32())

    @property
    def is_finite(self) -> bool:
        """Whether all gradients in fp32 are finite."""
        norms = [float(grad.norm()) for grad in self._reference.values()]  # sync: a tool
        return all(map(math.isfinite, norms))

    @property
    def has_op_casts(self) -> bool:
        """Whether the level casts by operator and leaves the model in fp32."""
        return self._policy.compute_dtype is not None

    def run(self, fp32: Sequence[str], *, trace: bool = False) -> Outcome:
        """Runs the model at the level with the modules ``fp32`` in fp32; once without a trace."""
        key = tuple(fp32)
        if trace or key not in self._known:
            scales = _SCALES if self._policy.low_precision is torch.float16 else (1.0,)
            for scale in scales:
                self._known[key] = self._run(fp32, scale, trace=trace)
                if math.isfinite(self._known[key].error):
                    break
        return self._known[key]

    def _run(self, fp32: Sequence[str], scale: float, *, trace: bool) -> Outcome:
        model = self._copy()
        with self._prepared(model, fp32) as session:
            found = RoundingTrace(model)

            def forward() -> Tensor:
                with nullcontext() if self.has_op_casts else casts_off():
                    return session.region.run(self._loss, model)

            with found if trace else nullcontext():
                grads, saved = self._gradients(model, forward, scale)
            size = saved + self._stored(model)
        return Outcome(self._error(grads), size, found.lost, found.skipped)

    def _in_fp32(self) -> Gradients:
        model = self._copy()
        with casts_off():
            return self._gradients(model, lambda: self._loss(model), 1.0)[0]

    def _gradients(
        self, model: nn.Module, forward: Callable[[], Tensor], scale: float
    ) -> tuple[Gradients, int]:
        """Returns unscaled gradients in fp32, and the bytes that were saved for backward."""
        saved = Storages(model.parameters())
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with preserve_state(model, self._arguments), torch.enable_grad():
            with saved.of_saved_tensors():
                loss = forward()
            with casts_off():
                grads = torch.autograd.grad(
                    loss.float() * scale, list(params.values()), allow_unused=True
                )
        # torch declares the gradients of unused parameters, None, as tensors.
        found: list[tuple[str, Tensor | None]] = list(zip(params, grads, strict=True))
        held = {name: grad.to_dense().float() / scale for name, grad in found if grad is not None}
        return held, saved.total

    def _error(self, grads: Gradients) -> float:
        sizes = {name: float(grad.norm()) for name, grad in self._reference.items()}  # sync: a tool
        least = _NEGLIGIBLE * max(sizes.values(), default=0.0)
        errors = [
            float((grads[name] - exact).norm()) / sizes[name]  # sync: as above
            for name, exact in self._reference.items()
            if name in grads and sizes[name] > least
        ]
        return math.sqrt(sum(error**2 for error in errors) / max(1, len(errors)))

    def _stored(self, model: nn.Module) -> int:
        """Returns the bytes of a model's weights, masters and gradients."""
        total = sum(buffer.nbytes for buffer in model.buffers())
        for param in model.parameters():
            total += param.nbytes
            if param.requires_grad:
                has_master = self._policy.master_weights and dtypes.is_low_precision(param)
                total += param.nbytes + (4 * param.numel() if has_master else 0)
        return total

    def _copy(self) -> nn.Module:
        try:
            return copy.deepcopy(self._model)
        except Exception as error:
            raise TypeError(
                f"suggest_fp32 got {type(self._model).__name__}, which cannot be copied "
                f"({type(error).__name__}: {error}); it runs copies of the model. Pass a model "
                "that copy.deepcopy accepts."
            ) from error

    @contextmanager
    def _prepared(self, model: nn.Module, fp32: Sequence[str]) -> Iterator[Session]:
        """Prepares a model in a session of its own, which no other model notices."""
        rules = () if self.has_op_casts else tuple(fp32)
        plan = frontend._plan(self._policy, rules)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fp16 is emulated")
            inputs.check_models([model], plan, op_casts=self.has_op_casts)
            session = new_session(self._policy, ScaleRule(), models=[model])
        with ExitStack() as stack:
            stack.callback(session.close)
            session.prepare([model], [], plan)
            if isinstance(session.region, CastRegion):
                session.region.leave_ambient()
                for name in fp32:
                    _run_without_casts(model.get_submodule(name))
            yield session


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives: ranks that decide by their own errors differ in what they run."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload) and tensors.traits(func).exchanges:
            raise ValueError(
                "suggest_fp32 got a model that exchanges values with other processes "
                f"({tensors.traits(func).name}), and each would run it another number of times. "
                "Call it in a single process, before torch.distributed.init_process_group: there, "
                "SyncBatchNorm is a plain batch norm."
            )
        return func(*args, **kwargs or {})


def _run_without_casts(module: nn.Module) -> None:
    """Makes a module compute in fp32, as under ``disable_casts`` on fp32 inputs."""
    forward = module.forward

    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree.cast_arguments(args, kwargs, torch.float32)
        with casts_off():
            return forward(*args, **kwargs)

    module.forward = in_fp32
