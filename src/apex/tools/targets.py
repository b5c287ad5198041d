"""What is to be compared: a user's model, optimizer, batches and loss, made anew as often as asked.

Note [Fresh objects]
    Each level needs a model and an optimizer that no other level has touched. A file is executed
    anew for each of them, and a function called anew. Where that gives the same objects again (the
    names of an imported module, a function that keeps what it made) model and optimizer are
    deep-copied together, before anything has trained.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from apex.tools.errors import said
from apex.tools.seeds import seed_all

FUNCTION = "setup"
"""The function looked for in a file or module that is named without one."""

NAMES = ("model", "optimizer", "batches", "loss")

# One name for every execution: a module that stayed in sys.modules would keep its model alive.
_MODULE = "apex_compare_target"


class TargetError(Exception):
    """A target that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Experiment:
    """What a target gives.

    Attributes:
        model: In fp32, not prepared by amp.
        optimizer: Over the model's parameters.
        batches: Of any nesting of tensors.
        loss: Returns the loss of the model on a batch (0-d).
        evaluate: Returns a figure of the trained model; ``None`` for none.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], Any] | None = None


Build = Callable[[], Experiment]
"""Returns an experiment whose model and optimizer nobody else has."""


@contextmanager
def opened(target: str, *, seed: int = 0) -> Iterator[Build]:
    """Gives the function that makes the experiment of ``target``.

    ``apex compare --help`` tells what a target is. Random numbers start from ``seed`` before each.
    A file's folder is on ``sys.path`` inside, as when Python runs the file.

    Raises:
        TargetError: If there is no such target, or it does not give what it should.
    """
    place, _, function = _split(target)
    path = list(sys.path)
    try:
        sys.path.insert(0, str(Path(place).resolve().parent) if _is_file(place) else "")

        def make() -> Experiment:
            seed_all(seed)
            module = _executed(Path(place)) if _is_file(place) else _imported(place)
            return _made(target, module, function)

        yield _repeatable(target, make)
    finally:
        sys.path[:] = path
        sys.modules.pop(_MODULE, None)


def _split(target: str) -> tuple[str, str, str]:
    # A drive letter's colon is no separator.
    place, colon, function = target.rpartition(":")
    if colon and function.isidentifier() and len(place) > 1:
        return place, colon, function
    return target, "", ""


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _executed(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file that can be executed.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickles look for it there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may end itself
        raise TargetError(f"Executing {path} failed: {said(error)}") from error
    return module


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"Importing {name} failed: {said(error)}. A file is named by its path, with .py."
        ) from error


def _made(target: str, module: ModuleType, function: str) -> Experiment:
    names = vars(module)
    if not function and all(name in names for name in NAMES):
        return _checked(target, names)
    maker = names.get(function or FUNCTION)
    if not callable(maker):
        missing = [name for name in NAMES if name not in names]
        raise TargetError(
            f"{target} has no function {function or FUNCTION}()"
            + ("." if function else f", and at module level no {', '.join(missing)}.")
            + " See apex compare --help for what a target is."
        )
    try:
        given = maker()
    except Exception as error:
        raise TargetError(f"{target}: {maker.__name__}() raised {said(error)}") from error
    return _checked(target, given)


def _checked(target: str, given: Any) -> Experiment:
    if isinstance(given, tuple | list) and len(given) in (4, 5):
        given = dict(zip((*NAMES, "evaluate"), given, strict=False))
    if not isinstance(given, Mapping) or any(name not in given for name in NAMES):
        raise TargetError(
            f"{target} gave {type(given).__name__}; it must give model, optimizer, batches, loss "
            "in this order, or a dict with these names."
        )
    wrong = [
        f"{name} is {type(given[name]).__name__}, not {kind}"
        for name, kind, right in (
            ("model", "a torch.nn.Module", isinstance(given["model"], nn.Module)),
            ("optimizer", "a torch.optim.Optimizer", isinstance(given["optimizer"], Optimizer)),
            ("batches", "an iterable", isinstance(given["batches"], Iterable)),
            ("loss", "a function loss(model, batch)", callable(given["loss"])),
        )
        if not right
    ]
    if wrong:
        raise TargetError(f"{target}: {'; '.join(wrong)}.")
    return Experiment(
        given["model"], given["optimizer"], given["batches"], given["loss"], given.get("evaluate")
    )


def _repeatable(target: str, make: Build) -> Build:
    """Returns ``make``, or a function that copies where ``make`` gives the same objects again."""
    first, second = make(), make()
    if second.model is first.model:
        _copied(target, first)  # fails now rather than after the first level
        return lambda: _copied(target, first)
    made = [second, first]
    return lambda: made.pop() if made else make()


def _copied(target: str, first: Experiment) -> Experiment:
    try:
        model, optimizer = copy.deepcopy((first.model, first.optimizer))
    except Exception as error:
        raise TargetError(
            f"{target} gives the same model each time, and it cannot be deep-copied: "
            f"{said(error)}. Make TARGET a function that builds a new one at every call."
        ) from error
    return Experiment(model, optimizer, first.batches, first.loss, first.evaluate)
