"""Reads and parses Python source without executing it, and explains errors in it."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from apex.tools.errors import InputError

_PYTHON_2 = re.compile(
    r"""^\s*print\s+[^\s(=.,\[:]   # print "text"
    |^\s*exec\s+["'\w]             # exec "code"
    |^\s*raise\s+\w+\s*,           # raise ValueError, "text"
    |\bexcept\b[^:]*\w\s*,\s*\w+\s*:   # except IOError, error:
    |<>|`|\b0\d+\b|\b\d+[lL]\b|\bur["']
    """,
    re.VERBOSE,
)
"""Matches lines that are valid only in Python 2."""


def read(path: Path) -> str:
    """Returns the source, decoded as the file declares.

    Raises:
        InputError: If it is a notebook, or cannot be read or decoded.
    """
    check_no_notebook(str(path))
    try:
        return importlib.util.decode_source(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    # LookupError: a codec such as rot13, which does not decode bytes to text.
    except (SyntaxError, LookupError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be decoded: {reason}.") from error


def parse(text: str, path: Path) -> ast.Module:
    """Returns the syntax tree of a file's source.

    Raises:
        InputError: If it is not valid in the running version of Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the script's concern
            return ast.parse(text, path.name)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, in Python before 3.11.4
        text = f"{path} is not valid Python 3: {error}. {old_syntax(error)}"
        raise InputError(text.strip()) from error


def check_no_notebook(path: str) -> None:
    """Raises InputError for a notebook, whose JSON the parser may accept as Python."""
    if path.endswith(".ipynb"):
        raise InputError(
            f"{path} is a notebook. Convert it to a script first: jupyter nbconvert --to script "
            f"{path}"
        )


def old_syntax(error: BaseException) -> str:
    """Returns what to do about a syntax error in old code; empty for any other error."""
    if not isinstance(error, SyntaxError):
        return ""
    line = error.text or ""
    if re.search(r"\basync\s*=", line):
        return "async is a keyword since Python 3.7. Write .cuda(non_blocking=True)."
    if _PYTHON_2.search(line):
        return (
            "This is Python 2. Convert it first: 2to3 -w FILE (2to3 comes with Python up to 3.12)."
        )
    return ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a question that suggests the most similar public name; empty if none is similar."""
    by_lower_case = {public.lower(): public for public in names if not public.startswith("_")}
    similar = difflib.get_close_matches(name.lower(), by_lower_case, cutoff=0.75)
    if not similar:
        return ""
    return f" Did you mean {by_lower_case[similar[0]]}?"


def of_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes in the scope of a module, a class or a function, without inner scopes."""
    waiting = [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


class Imported(NamedTuple):
    """The object that an import binds a name to: a module, or a name in it."""

    module: str
    name: str = ""

    def __str__(self) -> str:
        """Returns the full name."""
        return ".".join(filter(None, self))


def bound_by(node: ast.AST) -> Iterator[tuple[str, ast.AST | Imported]]:
    """Yields each name that a node binds, with the node; in an import, with the imported object.

    A relative import's module is empty.
    """
    match node:
        case ast.Import():
            for alias in node.names:
                package = alias.name.partition(".")[0]
                if alias.asname:
                    yield alias.asname, Imported(alias.name)
                else:
                    yield package, Imported(package)
        case ast.ImportFrom():
            module = ""
            if not node.level:
                module = node.module or ""
            for alias in node.names:
                yield alias.asname or alias.name, Imported(module, alias.name)
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name, node
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
            yield node.name or "", node
