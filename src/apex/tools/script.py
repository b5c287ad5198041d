"""Runs a script or a module inside this process, as ``python script.py`` and ``-m`` do."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from apex._core.user_files import is_user_file
from apex.tools.errors import InputError
from apex.tools.failure import format_error
from apex.tools.source import check_no_notebook


@dataclass(frozen=True)
class Ending:
    """How a script ended.

    Attributes:
        status: The exit status that Python would have returned.
        error: The uncaught error, with the line of the script and a fix; ``""`` without one.
        interrupted: Whether it was interrupted from the keyboard.
        stopped: Whether ``FaultFound`` ended it.
    """

    status: int = 0
    error: str = ""
    interrupted: bool = False
    stopped: bool = False


class FaultFound(BaseException):
    """Ends a traced script: ``except Exception`` does not catch it, and each ``finally`` runs."""


@dataclass(frozen=True)
class Script:
    """A script or a module to run.

    Attributes:
        name: Path of a file, a folder or zip file with a ``__main__.py``; or a module's name.
        arguments: Its arguments, ``sys.argv[1:]``.
        is_module: Whether ``name`` is a module's name.
    """

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raises ``InputError`` if there is no such file, or if it is a notebook."""
        check_no_notebook(self.name)
        if not self.is_module and not os.path.exists(self.name):
            raise InputError(f"there is no file {self.name}.")

    def run(self) -> Ending:
        """Runs the script as ``__main__``; prints an uncaught error as Python does.

        ``FaultFound`` ends the script without an error. A process that the script forks also ends
        here, with the script's exit status.
        """
        process = os.getpid()
        ending = self._run()
        if os.getpid() != process:
            sys.exit(ending.status)
        return ending

    def _run(self) -> Ending:
        try:
            with self.as_python():
                if self.is_module:
                    runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                else:
                    # Absolute, as __file__ is under Python, for scripts that change the folder.
                    runpy.run_path(os.path.abspath(self.name), run_name="__main__")
        except FaultFound:
            return Ending(stopped=True)
        except SystemExit as left:
            return Ending(_status(left.code))
        except KeyboardInterrupt:
            return Ending(130, interrupted=True)
        except BaseException as error:  # noqa: BLE001 - Python's own last handler
            shown = _own_frames_removed(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(shown), shown)
            return Ending(1, format_error(error))
        return Ending()

    @contextmanager
    def as_python(self) -> Iterator[None]:
        """Sets ``sys.argv`` and the script's entry of ``sys.path``; undoes changes of ``sys``."""
        argv = sys.argv
        path = list(sys.path)
        out = sys.stdout
        err = sys.stderr
        sys.argv = [self.name, *self.arguments]
        # A module's name has no folder: the current one.
        sys.path.insert(0, os.path.dirname(os.path.realpath(self.name)))
        try:
            yield
        finally:
            sys.argv = argv
            sys.path[:] = path
            sys.stdout = out
            sys.stderr = err


def _status(code: object) -> int:
    """Returns the exit status of ``sys.exit(code)``; prints ``code`` if it is a message."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback that begins with the script's first frame; None without such a frame."""
    while trace is not None and not is_user_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
