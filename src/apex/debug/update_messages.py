"""Messages on weights that do not move and gradients that underflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from apex.debug.loops import Loop
from apex.debug.rendering.formatting import listed, percent
from apex.debug.update_watch import EVERY, FROZEN, UNDERFLOW, ModuleUpdates

_MAX_NAMED = 3
_LEAST = 8  # sampled elements, below which a share says little


def frozen_message(modules: Sequence[ModuleUpdates], loop: Loop) -> str:
    """Returns the report on modules of which more than ``FROZEN`` does not move; "" for none."""
    bad = [m for m in modules if m.weights >= _LEAST and m.frozen > FROZEN]
    if not bad:
        return ""
    return (
        f"Weights do not move: over {EVERY} updates, {_shares(bad, lambda m: m.frozen)} of the "
        "16-bit weights with a gradient kept their value. Each update is below half of the "
        "weight's rounding step, and no fp32 weight holds the difference. "
        f"{loop.keeps_fp32}, or raise the learning rate."
    )


def underflow_message(modules: Sequence[ModuleUpdates], loop: Loop) -> str:
    """Returns the report on modules whose gradients underflow in fp16; "" for none.

    Where all gradients are zero, and nothing tells whether fp16 made them, it says so.
    """
    watched = [m for m in modules if m.gradients]
    if watched and all(m.zeros == 1.0 and not m.underflow for m in watched):
        return (
            f"All sampled gradients are 0, again after {EVERY} updates: nothing is learned. If "
            "torch.autocast computes in fp16, they may be below its smallest number, 6e-08. "
            f"{loop.scales}."
        )
    bad = [m for m in modules if m.gradients >= _LEAST and m.underflow > UNDERFLOW]
    if not bad:
        return ""
    return (
        f"Gradients underflow: about {_shares(bad, lambda m: m.underflow)} of the gradients are 0 "
        "only because they are below fp16's smallest number, 6e-08 after scaling. "
        f"{loop.scales}."
    )


def _shares(modules: list[ModuleUpdates], share: Callable[[ModuleUpdates], float]) -> str:
    worst = sorted(modules, key=share, reverse=True)
    named = [f"{percent(share(m))} in {m.module or 'the model'}" for m in worst]
    return listed(named, _MAX_NAMED, " modules")
