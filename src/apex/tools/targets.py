"""The user's model, optimizer, batches and loss, built anew for each level.

Note [Fresh objects]
    Each level needs a model and an optimizer that no other level has touched, so a file is executed
    again, or a function called again, for each of them. If that returns the same objects (names of
    an imported module, a function with a cache), model and optimizer are deep-copied together
    before any training.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex import amp
from apex._engine.session import Session
from apex.debug.arguments import missing_values
from apex.tools.errors import TargetError, format_error, place_of
from apex.tools.migrate.sources import UnreadableError, read
from apex.tools.migrate.uses import uses

FUNCTION = "setup"
"""Default function in a file or module."""

PARTS: Mapping[str, tuple[Any, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "optimizer": (Optimizer, "a torch.optim.Optimizer"),
    "batches": (Iterable, "an iterable"),
    "loss": (Callable, "a function loss(model, batch)"),
}
"""What a target provides, in the order of a tuple: names, types, and how errors call them."""

# One name for every execution: a module that stayed in sys.modules would keep its model alive.
_MODULE = "apex_compare_target"


@dataclass(frozen=True)
class Experiment:
    """What a target provides.

    Attributes:
        model: In fp32, not prepared by amp.
        optimizer: Over the model's parameters.
        batches: Batches of arbitrarily nested tensors.
        loss: Returns the loss of the model on a batch; raises if it is not one number with a
            gradient.
        evaluate: Returns a metric of the trained model; ``None`` if there is none.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], Any] | None = None


Build = Callable[[], Experiment]
"""Returns an experiment with a model and an optimizer of its own."""


@contextmanager
def open_target(target: str, *, seed: int = 0) -> Iterator[Build]:
    """Yields a function that builds the experiment of ``target``.

    ``apex compare --help`` defines targets. Random numbers are seeded with ``seed`` before each
    build. Inside the block, a file's folder is on ``sys.path``, as when Python runs the file, and
    ``sys.argv`` holds no arguments: those of the command are not the target's.

    Raises:
        TargetError: If there is no such target, or it lacks a part.
    """
    place, function = _split(target)
    path, argv = list(sys.path), sys.argv
    try:
        sys.argv = [place]
        sys.path.insert(0, str(Path(place).resolve().parent) if _is_file(place) else "")

        def make() -> Experiment:
            seed_all(seed)
            before = amp._amp_state.sessions()
            module = _executed(Path(place)) if _is_file(place) else _imported(place)
            experiment = _made(target, module, function)
            _refuse_prepared(target, module, before)
            return experiment

        yield _repeatable(target, make)
    finally:
        sys.path[:], sys.argv = path, argv
        sys.modules.pop(_MODULE, None)


def seed_all(seed: int) -> None:
    """Seeds torch, Python and, if it is loaded, NumPy: each level draws the same numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _split(target: str) -> tuple[str, str]:
    # The colon of a drive letter is not a separator.
    place, colon, function = target.rpartition(":")
    if colon and function.isidentifier() and len(place) > 1:
        return place, function
    return target, ""


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
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise TargetError(f"Executing {path} failed: {format_error(error)}") from error
    return module


def _imported(name: str) -> ModuleType:
    if not all(map(str.isidentifier, name.split("."))):
        raise TargetError(f"{name} is neither a .py file nor the name of a module.")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"Importing {name} failed: {format_error(error)}. A file name needs its suffix .py."
        ) from error


def _made(target: str, module: ModuleType, function: str) -> Experiment:
    names = vars(module)
    if not function and all(name in names for name in PARTS):
        return _checked(target, names)
    maker = names.get(function or FUNCTION)
    if not callable(maker):
        missing = [name for name in PARTS if name not in names]
        raise TargetError(
            f"{target} has no function {function or FUNCTION}()"
            + ("." if function else f", and at module level no {', '.join(missing)}.")
            + " apex compare --help defines targets."
        )
    try:
        given = maker()
    except Exception as error:
        raise TargetError(
            f"{target}: {function or FUNCTION}() raised {format_error(error)}"
        ) from error
    return _checked(target, given)


def _checked(target: str, given: Any) -> Experiment:
    if isinstance(given, tuple | list) and len(given) in (4, 5):
        given = dict(zip((*PARTS, "evaluate"), given, strict=False))
    if not isinstance(given, Mapping) or any(name not in given for name in PARTS):
        raise TargetError(
            f"{target} returned {type(given).__name__}; it must return model, optimizer, "
            "batches and loss in this order, or a dict with these names."
        )
    wrong = [
        f"{name} is {type(given[name]).__name__}, not {what}"
        for name, (kind, what) in PARTS.items()
        if not isinstance(given[name], kind)
    ]
    if wrong:
        raise TargetError(f"{target}: {'; '.join(wrong)}.")
    if missing := missing_values(given["model"]):
        raise TargetError(f"{target}: the model's {missing}")
    return Experiment(
        given["model"],
        given["optimizer"],
        given["batches"],
        _checked_loss(given["loss"]),
        given.get("evaluate"),
    )


def _checked_loss(loss: Callable[..., Any]) -> Callable[[nn.Module, Any], Tensor]:
    """Returns ``loss`` with a ``TargetError`` for a result without a single number or gradient."""

    @functools.wraps(loss, assigned=(), updated=())
    def checked(model: nn.Module, batch: Any) -> Tensor:
        found = loss(model, batch)
        if not isinstance(found, Tensor):
            fault = f"{type(found).__name__}; it must return the 0-d loss tensor"
        elif found.numel() != 1:
            fault = (
                f"a tensor of shape {list(found.shape)}; it must return a 0-d tensor, such as the "
                "mean() of this one"
            )
        elif not found.requires_grad:
            fault = (
                "a tensor without a gradient; compute it from the model's parameters, without "
                "detach(), item() or torch.no_grad()"
            )
        else:
            return found
        place = place_of(loss)
        raise TargetError(f"loss(model, batch) returned {fault}{place and f' ({place})'}.")

    return checked


def _refuse_prepared(target: str, module: ModuleType, before: Sequence[Session]) -> None:
    """Raises if the target called ``amp.initialize``."""
    new = [session for session in amp._amp_state.sessions() if session not in before]
    if not new:
        return
    place = _line_of_initialize(module)
    raise TargetError(
        f"{target} calls amp.initialize{place and f' ({place})'}. apex compare does so itself, "
        "once per level: return the plain model and optimizer in fp32."
    )


def _line_of_initialize(module: ModuleType) -> str:
    """Returns ``"file:line"`` of the call; empty if it is in another file."""
    path = Path(module.__file__ or "")
    try:
        found = [u for u in uses(read(path)) if u.name == "apex.amp.initialize"]
    except (UnreadableError, SyntaxError, ValueError, RecursionError):
        return ""
    return f"{path}:{found[-1].line}" if found else ""


def _repeatable(target: str, make: Build) -> Build:
    """Returns ``make``, or a function that copies if ``make`` returns the same objects again."""
    first, second = make(), make()
    if second.model is first.model:
        _copied(target, first)  # to fail now rather than after the first level
        return lambda: _copied(target, first)
    made = [second, first]
    return lambda: made.pop() if made else make()


def _copied(target: str, first: Experiment) -> Experiment:
    try:
        model, optimizer = copy.deepcopy((first.model, first.optimizer))
    except Exception as error:
        raise TargetError(
            f"{target} returns the same model each time, and it cannot be deep-copied: "
            f"{format_error(error)}. Make TARGET a function that builds a new one at every call."
        ) from error
    return Experiment(model, optimizer, first.batches, first.loss, first.evaluate)
