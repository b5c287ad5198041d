"""Builds the user's model, optimizer, batches and loss once, and copies them for each level.

Note [Fresh objects]
    Each level needs a model and an optimizer that no other level has touched. The target is built
    once, and both are deep-copied together for each use.
"""

from __future__ import annotations

import ast
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex.debug.common import copy_memo
from apex.integrations import scales
from apex.tools import source
from apex.tools.errors import InputError
from apex.tools.failure import format_error
from apex.tools.script import Script

FUNCTION = "setup"
"""The function that is called if the command names none."""

PARTS: Mapping[str, Any] = {
    "model": nn.Module,
    "optimizer": Optimizer,
    "batches": Iterable,
    "loss": Callable,
}
"""The parts of a target, in the order of a tuple, with their types."""
_NAMES = "model, optimizer, batches and loss"
_HELP = "See apex compare --help."

_MODULE = "apex_compare_target"


@dataclass(frozen=True)
class Experiment:
    """The parts of a target.

    Attributes:
        model: In fp32, not prepared by amp.
        optimizer: Updates the model's parameters.
        batches: Batches of arbitrarily nested tensors.
        loss: Returns the loss of the model on a batch.
        evaluate: Returns a metric of the trained model; ``None`` if there is none.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], Any] | None


Build = Callable[[], Experiment]
"""Returns an experiment with a new model and a new optimizer."""


@contextmanager
def open_target(target: str, *, seed: int = 0) -> Iterator[Build]:
    """Yields a function that returns an experiment of ``target``; see Note [Fresh objects].

    ``apex compare --help`` defines targets. Random numbers are seeded with ``seed`` before the
    build. Inside the block, the file's folder is on ``sys.path``, as when Python runs the file.
    ``sys.argv`` contains no arguments, because the command's arguments are not the target's.

    Raises:
        InputError: If there is no such target, or it lacks a part. A file that does not define
            the parts is not executed.
    """
    path = Path(target)
    name, _, function = target.partition(".py:")
    if function:
        path = Path(f"{name}.py")
    _look_at(path, function or FUNCTION)
    try:
        with Script(str(path)).as_python():
            seed_all(seed)
            first = _made(path, _executed(path), function)
            yield functools.partial(_copied, first)
    finally:
        sys.modules.pop(_MODULE, None)  # which a script may have removed


def seed_all(seed: int) -> None:
    """Seeds torch, Python and, if loaded, NumPy, so that each level draws the same numbers."""
    seed %= 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _copied(first: Experiment) -> Experiment:
    try:
        model, optimizer = copy.deepcopy((first.model, first.optimizer), copy_memo(first.model))
    except Exception as error:
        raise InputError(
            f"The model cannot be deep-copied, as each level needs: {format_error(error)}"
        ) from error
    return replace(first, model=model, optimizer=optimizer)


# -- checks before the file is executed ----------------------------------------------------------


def _look_at(path: Path, function: str) -> None:
    """Raises unless a file defines a target and trains nothing on import; executes nothing."""
    tree = source.parse(source.read(path), path)
    executed = [part for part in tree.body if not ast.unparse(part).startswith("if __name__ ==")]
    top = [*source.of_scope(ast.Module(executed, []))]
    trains = any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in top)
    names = {name for node in top for name, _ in source.bound_by(node)}
    missing: list[str] = []
    if function not in names and "*" not in names:
        missing = [name for name in PARTS if name not in names]
    if missing or trains:
        lacks = f"lacks {', '.join(missing)}" if missing else "calls backward itself"
        raise InputError(
            f"{path} {lacks}. apex compare takes no training script. It needs a file that defines "
            f"{_NAMES}, or a function {function}() that returns them. The file was not run. {_HELP}"
        )


# -- the build -----------------------------------------------------------------------------------


def _executed(path: Path) -> ModuleType:
    module = ModuleType(_MODULE)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # dataclasses and pickles look for it there
    try:
        SourceFileLoader(_MODULE, str(path)).exec_module(module)
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise InputError(f"Executing {path} failed: {format_error(error)}") from error
    return module


def _made(target: Path, module: ModuleType, function: str) -> Experiment:
    names = vars(module)
    if not function and PARTS.keys() <= names.keys():
        return _checked(target, names)
    function = function or FUNCTION
    if not callable(names.get(function)):
        raise InputError(f"{target} has no function {function}(). {_HELP}")
    try:
        parts = names[function]()
    except Exception as error:
        raise InputError(f"{target}: {function}() raised {format_error(error)}") from error
    return _checked(target, parts)


def _checked(target: Path, parts: Any) -> Experiment:
    if isinstance(parts, tuple | list) and len(parts) in (4, 5):
        parts = dict(zip((*PARTS, "evaluate"), parts, strict=False))
    if not isinstance(parts, Mapping) or not PARTS.keys() <= parts.keys():
        raise InputError(
            f"{target} returned {type(parts).__name__}; it must return {_NAMES} in this order, or "
            "a dict with these names."
        )
    for name, accepted in PARTS.items():
        if not isinstance(parts[name], accepted):
            what = type(parts[name]).__name__
            raise InputError(f"{target}: {name} is {what}; it must be {accepted.__name__}.")
    if scales.is_prepared(parts["optimizer"]):
        raise InputError(
            f"{target} calls amp.initialize. apex compare does so itself, once per level: return "
            "the plain model and optimizer in fp32."
        )
    return Experiment(
        parts["model"], parts["optimizer"], parts["batches"], parts["loss"], parts.get("evaluate")
    )
