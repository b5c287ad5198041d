"""Reports in files: pages from templates, the format that a suffix names, data for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from apex._core import dtypes


def render(package: str, template: str, **values: object) -> str:
    """Returns the page rendered from a Jinja template; in HTML, every value is escaped.

    Args:
        package: The package whose folder ``page`` holds the template.
        template: File name of the template.
        values: Names that the template uses; a missing one raises ``jinja2.UndefinedError``.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(package, "page"),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


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
