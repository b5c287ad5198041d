"""Runs a script or a module inside this process, as ``python script.py`` and ``-m`` do."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, TracebackType

from apex.tools.errors import InputError, format_error, is_relative_import
from apex.tools.source import check_no_notebook, python_2


@dataclass(frozen=True)
class Ending:
    """How a script ended.

    Attributes:
        status: The exit status that Python would have returned.
        error: The uncaught error, with the line of the script and what to do; ``""`` without one.
        interrupted: Whether it was interrupted from the keyboard.
        stopped: Whether the exception given as ``stop`` ended it.
    """

    status: int = 0
    error: str = ""
    interrupted: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Script:
    """What to run.

    Attributes:
        name: Path of a file, a folder or zip file with a ``__main__.py``; or a module's name.
        arguments: Its arguments, ``sys.argv[1:]``.
        is_module: Whether ``name`` is a module's name.
    """

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raises ``InputError`` if there is nothing to run; imports parent packages."""
        check_no_notebook(self.name)
        with self._as_arguments():
            why = _why_no_module(self.name) if self.is_module else _why_no_file(self.name)
        if why:
            raise InputError(why)

    def run(self, *, stop: type[BaseException]) -> Ending:
        """Runs the script as ``__main__``; an uncaught error is printed as Python prints it.

        The exception ``stop`` ends the script without an error.
        """
        try:
            with self._as_arguments():
                if self.is_module:
                    runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                elif _is_source(self.name):
                    _run_source(os.path.abspath(self.name))
                else:
                    runpy.run_path(self.name, run_name="__main__")
        except stop:
            return Ending(stopped=True)
        except SystemExit as left:
            return Ending(_status(left.code))
        except KeyboardInterrupt:
            return Ending(130, interrupted=True)
        except BaseException as error:  # noqa: BLE001 - Python's own last handler
            shown = _own_frames_removed(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(shown), shown)
            return Ending(1, format_error(error) + self._remedy(error))
        return Ending()

    def _remedy(self, error: BaseException) -> str:
        """Returns what to do about an error that is due to how the script is run, on a new line."""
        if is_relative_import(error) and not self.is_module:
            folder, name = _as_module(self.name)
            where = "" if folder == os.getcwd() else f"cd {folder}; "
            return f"\n  The file belongs to a package. Run {where}apex trace -m {name}"
        hint = python_2(error)
        return f"\n  {hint}" if hint else ""

    @contextmanager
    def _as_arguments(self) -> Iterator[None]:
        """Sets ``sys.argv``, and the entry of ``sys.path`` that Python derives from the script."""
        argv, path = sys.argv, list(sys.path)
        sys.argv = [self.name, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11
            sys.path[:1] = [os.getcwd() if self.is_module else _folder(self.name)]
        try:
            yield
        finally:
            sys.argv = argv
            sys.path[:] = path


def _run_source(path: str) -> None:
    # Unlike runpy.run_path, this keeps a relative sys.argv[0] beside an absolute __file__.
    module = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names = {"__file__": path, "__loader__": loader, "__builtins__": builtins, "__cached__": None}
    vars(module).update(names)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module  # where pickles and spawned processes look for it
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = before


def _is_source(path: str) -> bool:
    return not (os.path.isdir(path) or path.endswith(".pyc") or zipfile.is_zipfile(path))


def _folder(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))


def _as_module(path: str) -> tuple[str, str]:
    """Returns the folder from which a file of a package is run with ``-m``, and its name there."""
    folder, name = os.path.split(os.path.realpath(path))
    name = name.removesuffix(".py")
    is_package = True  # a relative import asks for one, be it without an __init__.py
    while is_package:
        folder, package = os.path.split(folder)
        name = f"{package}.{name}"
        is_package = os.path.exists(os.path.join(folder, "__init__.py"))
    return folder, name


def _why_no_file(path: str) -> str:
    if not os.path.exists(path):
        return f"there is no file {path}."
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        return f"{path} is a folder without a __main__.py. Name the script itself."
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read: permission denied."
    return ""


def _why_no_module(name: str) -> str:
    hint = " A file is named without -m." if name.endswith(".py") else ""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"  # a package
            spec = importlib.util.find_spec(name)
    except Exception as error:  # noqa: BLE001 - importing a parent package runs its code
        return f"the module {name} was not found: {format_error(error)}.{hint}"
    return "" if spec is not None else f"there is no module {name}.{hint}"


def _status(code: object) -> int:
    """Returns the exit status of ``sys.exit(code)``; prints a code that is a message."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the script's own first frame on; all of it if there is none."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    return inner
