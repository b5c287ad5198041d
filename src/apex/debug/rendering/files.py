"""Reports in files: pages from templates, the format that a suffix names, data for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from apex._core import dtypes


def save(path: str | Path, what: str, formats: Mapping[str, Callable[[], str]]) -> None:
    """Writes a report (``what``, with its article) by the function of the path's suffix.

    Raises:
        ValueError: If the suffix is none of ``formats``; nothing is written.
    """
    target = Path(path)
    if target.suffix not in formats:
        raise ValueError(
            f"Cannot save {what} as {target.name!r}: the suffix must be one of "
            f"{', '.join(formats)}."
        )
    target.write_text(formats[target.suffix](), encoding="utf-8")


def json_types(value: Any) -> Any:
    """Returns nested data in JSON types: None for NaN and infinity, dtypes by name."""
    if isinstance(value, Mapping):
        return {key: json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_types(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return dtypes.name(value) if isinstance(value, torch.dtype) else value
