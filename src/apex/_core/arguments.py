"""Validates single arguments: each error names the argument, its value and what it accepts.

Also names the arguments that a function takes.
"""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn

_ANNOTATIONS: Mapping[str, Any] = {}
if sys.version_info >= (3, 14):  # which evaluates annotations only now: some names may not exist
    import annotationlib

    _ANNOTATIONS = {"annotation_format": annotationlib.Format.FORWARDREF}

_LONGEST = 80
"""Characters of a value that an error shows; longer ones are described by their type."""


def shown(value: object) -> str:
    """Returns ``repr(value)`` if it is short, and a description by type otherwise."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"a {type(value).__name__}"


def kind(value: object) -> str:
    """Returns the name of the value's type; ``"the class X"`` for a class itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def flag(name: str, value: object) -> bool:
    """Returns a bool, of an integer or None by its truth, or of the string "True" or "False".

    Any other object would count as True: a string of argparse, or an argument of another position.

    Args:
        name: The argument.
        value: Its value.

    Raises:
        TypeError: If it is none of these.
    """
    # NumPy's bools are no integers of Python.
    if isinstance(value, numbers.Integral) or value in (None, False, True):
        return bool(value)
    if value in ("True", "False"):
        return value == "True"
    raise TypeError(
        f"{name} is {shown(value)}; it must be a bool, or the string 'True' or 'False'."
    )


def integer(name: str, value: Any, *, least: int) -> int:
    """Returns ``value``; raises ValueError unless it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} is {shown(value)}; it must be an integer of at least {least}.")
    return int(value)


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Returns the closure among the arguments of an optimizer's step, if there is one."""
    named = kwargs.get("closure")
    return named if callable(named) else next(filter(callable, args), None)


def replaced(
    args: Sequence[Any], kwargs: Mapping[str, Any], old: object, new: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with one object in place of another."""
    new_args = tuple(new if value is old else value for value in args)
    return new_args, {name: new if value is old else value for name, value in kwargs.items()}


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether ``value`` is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def in_range(name: str, value: Any, *, below: float | None = None, most: float = math.inf) -> None:
    """Raises unless ``value`` is at least 0, less than ``below``, and at most ``most``.

    Tensors are not checked: reading one may wait for the device.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.
    """
    if isinstance(value, Tensor):
        return
    try:
        within = 0.0 <= value <= most and (below is None or value < below)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; it must be a number.") from None
    if not within:
        limit = "" if below is None else f" and less than {below:g}"
        limit += "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} is {value!r}; it must be at least 0{limit}.")


def clipping(caller: str, max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Returns the arguments of a clipping by norm as floats; parses numeric strings.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is negative, NaN, or no numeric string.
    """
    norm = float(max_norm)
    order = float(norm_type)
    in_range(f"{caller}: max_norm", norm)  # a negative norm would reverse the gradients
    in_range(f"{caller}: norm_type", order)
    return norm, order


def module(caller: str, value: object) -> None:
    """Raises TypeError unless ``value`` is a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{caller} got {kind(value)}; it takes a torch.nn.Module.")


def parameters(caller: str, value: object) -> None:
    """Raises TypeError if ``value``, in place of parameters, is a module."""
    if isinstance(value, nn.Module):
        raise TypeError(
            f"{caller} got the model {kind(value)}; it takes parameters. Pass model.parameters()."
        )


def loss(caller: str, value: object) -> None:
    """Raises TypeError unless ``value`` is a tensor that autograd can differentiate."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller} got a loss of type {kind(value)}; it must be a tensor.")
    if not value.is_floating_point():
        raise TypeError(
            f"{caller} got a loss of dtype {value.dtype}; it must have a real floating-point "
            "dtype, which autograd can differentiate."
        )


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of ``function``, whose annotations may name what only checkers know."""
    return inspect.signature(function, **_ANNOTATIONS)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of ``function`` by name; none if it is written in C."""
    try:
        return signature_of(function).parameters
    except (TypeError, ValueError):
        return {}


def positional_names(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments that ``function`` takes by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = parameters_of(function)
    return [name for name in parameters if parameters[name].kind in by_position]
