"""Recognizes the kinds of state in a checkpoint by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from apex._core.scale import ScaleRule
from apex.amp import scaler_states

Dict = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """The recognized contents of one dict in a checkpoint.

    Attributes:
        path: Keys that lead to the dict.
        kind: Description of the kind, for messages.
        scales: Loss scales.
        rule: The rule of the dynamic ones; defaults where the file has none.
        optimizer: State dict of an optimizer.
        masters: The optimizer's fp32 masters of single parameters.
        flats: The optimizer's fp32 masters of whole groups, one flat tensor each.
        model: State dict of a model.
        other_keys: Keys of an optimizer's dict that belong to none of these.
    """

    path: tuple[str, ...]
    kind: str
    scales: Sequence[scaler_states.State] | None = None
    rule: ScaleRule = field(default_factory=ScaleRule)
    optimizer: Dict | None = None
    masters: Sequence[Tensor] = ()
    flats: Sequence[Tensor] = ()
    model: Dict | None = None
    other_keys: tuple[str, ...] = ()


class Contents:
    """The recognized parts of a checkpoint: the dict itself, or dicts up to two levels below."""

    def __init__(self, checkpoint: Dict) -> None:
        """Reads ``checkpoint``.

        Raises:
            ValueError: If nothing is recognized; the message lists the keys.
            RuntimeError: If a loss scale is invalid; the message names its key.
        """
        self._checkpoint = checkpoint
        self._parts = list(_parts(checkpoint))
        if not self._parts:
            raise ValueError(
                f"amp.checkpoint.convert recognizes nothing in this checkpoint, whose keys are "
                f"{_keys(checkpoint)}. It accepts states of amp, a model, "
                f"{', '.join(kind for kind, _, _ in KINDS)}, and dicts of these."
            )

    def find(self, name: str) -> Part | None:
        """Returns the part with a value in the attribute ``name``; ValueError if several have."""
        having = [part for part in self._parts if getattr(part, name) is not None]
        if len(having) > 1:
            places = " and ".join(repr(".".join(part.path)) for part in having)
            raise ValueError(
                f"amp.checkpoint.convert found several states of one kind: {places}. Pass a dict "
                "of only the parts that belong together."
            )
        return having[0] if having else None

    def require(self, name: str) -> Part:
        """Returns the same; raises ValueError if there is none, too."""
        found = self.find(name)
        if found is None:
            raise ValueError(
                f"amp.checkpoint.convert needs {_NEEDED[name]}; the checkpoint, with the keys "
                f"{_keys(self._checkpoint)}, holds {' and '.join(p.kind for p in self._parts)}. "
                "Pass a dict that contains all required parts."
            )
        return found


_NEEDED = {
    "scales": "a loss scale",
    "optimizer": "an optimizer's state",
    "model": "a model's state dict (for names and shapes)",
}


def _keys(checkpoint: Dict) -> str:
    shown = ", ".join(map(repr, list(checkpoint)[:8]))
    return shown + (f" and {len(checkpoint) - 8} more" if len(checkpoint) > 8 else "")


def _parts(checkpoint: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[Part]:
    for kind, needed, reader in KINDS:
        if needed <= checkpoint.keys():
            yield reader(checkpoint, Part(path, kind))
            return
    if all(scaler_states.is_key(key) for key in checkpoint):
        yield Part(path, "amp", scales=scaler_states.parsed(checkpoint))
    elif _is_model(checkpoint):
        yield Part(path, "a model", model=checkpoint)
    elif len(path) < 2:
        for key, value in checkpoint.items():
            if isinstance(value, Mapping) and value:
                yield from _parts(value, (*path, str(key)))


def _is_model(checkpoint: Mapping[Any, Any]) -> bool:
    kinds = {
        isinstance(value, Tensor)
        for key, value in checkpoint.items()
        if not str(key).endswith("_extra_state")  # any object: ``nn.Module.get_extra_state``
    }
    return kinds == {True}


# -- readers, one per kind --------------------------------------------------------------------


def _grad_scaler(given: Dict, part: Part) -> Part:
    names = ("scale", "_growth_tracker")
    scale, steps = scaler_states.checked(_place(part, "the GradScaler"), given, names)
    rule = ScaleRule(given["growth_factor"], given["backoff_factor"], given["growth_interval"])
    state = scaler_states.State("loss_scaler0", scale, steps, static=False)
    return replace(part, scales=[state], rule=rule)


def _optimizer(given: Dict, part: Part) -> Part:
    state = given["state"]
    order = [index for group in given["param_groups"] for index in group["params"]]
    states = [state[index] for index in order if index in state]
    # This package's fused optimizers store masters of 16-bit parameters here.
    masters = [each["master_param"] for each in states if "master_param" in each]
    return replace(part, optimizer=given, masters=masters)


def _mmengine(given: Dict, part: Part) -> Part:
    own = {key: given[key] for key in ("state", "param_groups")}
    other_keys = tuple(key for key in given if key not in (*own, "apex_amp"))
    scales = scaler_states.parsed(given["apex_amp"])
    return replace(_optimizer(own, part), scales=scales, other_keys=other_keys)


def _fp16_utils(given: Dict, part: Part) -> Part:
    scaler = given["loss_scaler"]
    # A dict in files of this package, an object with these attributes in files of apex.
    values = scaler if isinstance(scaler, Mapping) else getattr(scaler, "__dict__", {})
    masters = [master for group in given["fp32_from_fp16"] for master in group]
    return replace(_old_optimizer(given, part, values, "loss_scaler"), masters=masters)


def _fp16_optimizer(given: Dict, part: Part) -> Part:
    masters = [master for group in given.get("fp32_groups", ()) for master in group]
    flats = given.get("fp32_groups_flat", ())
    known = _old_optimizer(given, part, given, "FP16_Optimizer")
    return replace(known, masters=masters, flats=flats)


def _old_optimizer(given: Dict, part: Part, values: Dict, place: str) -> Part:
    """Reads an ``FP16_Optimizer``'s scale, in the format of any of apex's three scaler classes."""
    default, dynamic = ScaleRule(), given["dynamic_loss_scale"]
    interval = values.get("scale_window", values.get("_scale_seq_len", default.growth_interval))
    factor = values.get("scale_factor", default.growth_factor)
    rule = ScaleRule.symmetric(factor, interval)
    names = (
        "_loss_scale" if "_loss_scale" in values else "cur_scale",
        "cur_iter" if dynamic and "cur_iter" in values else "_unskipped",
    )
    scale, steps = scaler_states.checked(_place(part, place), {"_unskipped": 0, **values}, names)
    if names[1] == "cur_iter":
        steps = (steps - values.get("last_overflow_iter", -1) - 1) % rule.growth_interval
    state = scaler_states.State("loss_scaler0", scale, steps, static=not dynamic)
    return replace(part, scales=[state], rule=rule, optimizer=given["optimizer_state_dict"])


def _place(part: Part, name: str) -> str:
    return f"amp.checkpoint.convert: {'.'.join((*part.path, name))}"


KINDS: tuple[tuple[str, set[str], Callable[[Dict, Part], Part]], ...] = (
    (
        "a torch.amp.GradScaler",
        {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"},
        _grad_scaler,
    ),
    (
        "apex.fp16_utils.FP16_Optimizer",
        {"loss_scaler", "dynamic_loss_scale", "optimizer_state_dict", "fp32_from_fp16"},
        _fp16_utils,
    ),
    (
        "apex.optimizers.FP16_Optimizer",
        {"cur_scale", "dynamic_loss_scale", "optimizer_state_dict", "fp32_groups_flat"},
        _fp16_optimizer,
    ),
    (
        "apex.contrib.optimizers.FP16_Optimizer",
        {"cur_scale", "dynamic_loss_scale", "optimizer_state_dict", "fp32_groups"},
        _fp16_optimizer,
    ),
    ("MMEngine's ApexOptimWrapper", {"state", "param_groups", "apex_amp"}, _mmengine),
    ("an optimizer", {"state", "param_groups"}, _optimizer),
)
"""Description, required keys and reader of each kind; the first match applies."""
