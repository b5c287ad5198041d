"""Fp32 state dicts of low-precision models, and loading them back without loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import exact_value
from apex._engine.model.plan import MasterSource


@dataclass(frozen=True)
class StateDictCall:
    """The arguments of one ``state_dict`` call, as ``torch.nn.Module`` reads them."""

    before: Mapping[str, Any]
    prefix: str
    keep_vars: bool

    @classmethod
    def parse(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StateDictCall:
        """Reads ``destination``, ``prefix`` and ``keep_vars``, positional or by name."""
        given = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
        destination = given.get("destination")
        return cls(
            before={} if destination is None else dict(destination),
            prefix=given.get("prefix", ""),
            keep_vars=bool(given.get("keep_vars", False)),
        )

    def give_fp32(
        self, model: nn.Module, result: MutableMapping[str, Any], masters: MasterSource | None
    ) -> None:
        """Replaces the 16-bit entries that this call added to ``result`` by fp32 ones."""
        params = dict(model.named_parameters(prefix=self.prefix[:-1], remove_duplicate=False))
        exact = {} if masters is None else masters.exact()
        shared: dict[int, Tensor] = {}  # entries of tied parameters share memory, as in torch
        for key, entry in result.items():
            if not key.startswith(self.prefix) or self.before.get(key) is entry:
                continue
            if isinstance(entry, Tensor) and dtypes.is_low_precision(entry):
                source = params.get(key, entry)
                if id(source) not in shared:
                    shared[id(source)] = exact_value(entry, _master(exact, source))
                result[key] = shared[id(source)]


def _master(exact: Mapping[int, Tensor], param: Tensor) -> Iterator[Tensor]:
    master = exact.get(id(param))
    if master is not None:
        yield master


def refuse_assign(model: nn.Module, local_metadata: Any) -> None:
    """Raises for ``load_state_dict(..., assign=True)``.

    Raises:
        RuntimeError: Always then, before the model or anything below it changes.
    """
    if isinstance(local_metadata, Mapping) and local_metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            f"load_state_dict(assign=True) would put other parameters into the model "
            f"{type(model).__name__}, while amp and the optimizer hold the present ones. Leave "
            "assign out, or call amp.restore first and amp.initialize afterwards."
        )


def finish_loading(
    model: nn.Module, loaded: Mapping[str, Any], prefix: str, masters: MasterSource
) -> None:
    """Sets the masters to what was just loaded into the model, before its rounding.

    An element whose loaded value is not known here (a child renamed its entries) takes the value
    of its parameter, unless its master rounds to that already.
    """
    masters.set_exact(_loaded_values(model, loaded, prefix, masters.exact()))


def _loaded_values(
    model: nn.Module, loaded: Mapping[str, Any], prefix: str, exact: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(prefix=prefix[:-1], remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for param in model.parameters():
        master = exact.get(id(param))
        if master is not None and dtypes.is_low_precision(param):
            entries = [loaded.get(name) for name in names[id(param)]]
            tensors = [_shaped(e, param) for e in entries if isinstance(e, Tensor)]
            yield param, exact_value(param, [master, *tensors])


def _shaped(entry: Tensor, param: Tensor) -> Tensor:
    # torch loads an entry of shape [1] into a 0-d parameter.
    return entry.reshape(()) if param.dim() == 0 and entry.shape == (1,) else entry
