"""``apex migrate``: every use of apex in scripts, and whether it works here."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import io
import os
import symtable
import textwrap
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from apex._unavailable import INSTEAD
from apex.debug.common import counted
from apex.tools.errors import InputError

ROOTS = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""The top-level modules of this distribution."""

OPTIMIZER = "optimizer."
"""Prefix for the attributes that amp and apex's wrappers add to optimizers."""

SKIPPED = frozenset({"site-packages", "dist-packages", "build", "__pycache__"})
"""Folders skipped as copies or third-party code; hidden folders are skipped too."""

_DATA = configparser.ConfigParser(delimiters=("=",), interpolation=None)
_DATA.optionxform = str  # type: ignore[assignment, method-assign] # names keep their case
_DATA.read_string(resources.files("apex.tools.migrate").joinpath("notes.ini").read_text("utf-8"))
NOTES, ATTRIBUTES = dict(_DATA["notes"]), dict(_DATA["optimizer"])
IDLE = {name: words.split() for name, words in _DATA["idle"].items()}
"""Notes on names and on attributes of optimizers; arguments without effect."""

NOT_IMPORTED = ("apex.integrations",)
"""Packages whose modules import another library; their names are assumed to exist."""

MOST_LINES = 10
"""Lines named for each use; the JSON has all."""

Kind = Literal["works", "note", "not supported"]


@dataclass(frozen=True)
class Name:
    """A full name of apex in a script, such as ``apex.amp.initialize`` or ``optimizer._amp_stash``.

    Attributes:
        name: The name.
        line: From 1.
        keywords: Keyword arguments of the call.
    """

    name: str
    line: int
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Use:
    """A use of apex with its verdict; the remedy is empty if it works unchanged."""

    file: str
    line: int
    name: str
    verdict: Kind
    remedy: str


@dataclass(frozen=True)
class Migration:
    """The uses of apex found at a path.

    Attributes:
        uses: In order, file by file.
        unread: Files and folders that could not be read or parsed, with the reason.
        files: Number of files searched.
    """

    uses: tuple[Use, ...]
    unread: tuple[tuple[str, str], ...]
    files: int

    @property
    def failed(self) -> bool:
        """Whether any use is unsupported or any file could not be read."""
        return bool(self.unread) or any(use.verdict == "not supported" for use in self.uses)

    @property
    def counts(self) -> dict[str, int]:
        """The number of uses by verdict."""
        found = Counter(use.verdict for use in self.uses)
        return {kind: found[kind] for kind in ("works", "note", "not supported")}

    def to_dict(self) -> dict[str, Any]:
        """Returns every use, the unread files, and the counts, as ``--json`` writes them."""
        return {
            "uses": [asdict(use) for use in self.uses],
            "not_read": [{"file": file, "reason": reason} for file, reason in self.unread],
            "files": self.files,
            "counts": self.counts,
        }

    def __str__(self) -> str:
        """Returns a paragraph per file, the unread files, and the counts."""
        by_file: dict[str, list[Use]] = defaultdict(list)
        for use in self.uses:
            by_file[use.file].append(use)
        works, note, fails = self.counts.values()
        parts = ["\n".join([file, *_rows(uses)]) for file, uses in by_file.items()]
        parts += ["\n".join(f"{file}: {reason}" for file, reason in self.unread)]
        parts += [
            f"{counted(self.files, 'file')}: {works} uses work unchanged, {note} with a note, "
            f"{fails} unsupported."
            if self.uses
            else f"{counted(self.files, 'file')}: no use of apex."
        ]
        return "\n\n".join(filter(None, parts))


def _rows(uses: Sequence[Use]) -> Iterator[str]:
    """Yields the names with the lines of their uses; those with the same remedy stand together."""
    groups: dict[tuple[str, str], dict[str, list[int]]] = {}
    for use in uses:
        # Without a remedy, each name is a group of its own.
        group = groups.setdefault((use.verdict, use.remedy or f"\0{use.name}"), {})
        group.setdefault(use.name, []).append(use.line)
    for (verdict, remedy), names in groups.items():
        for at, (name, lines) in enumerate(names.items()):
            distinct = [*dict.fromkeys(lines)]
            shown = ", ".join(map(str, distinct[:MOST_LINES]))
            more = len(distinct) - MOST_LINES
            shown += f" and {more:,} more" if more > 0 else ""
            yield f"  {verdict if not at else '':<13}  {name}  (line {shown})"
        if not remedy.startswith("\0"):
            yield textwrap.fill(remedy, 100, initial_indent=" " * 17, subsequent_indent=" " * 17)


def migration_of(path: Path) -> Migration:
    """Returns the uses of apex in a file, or in all Python files under a folder.

    Raises:
        InputError: If the path itself cannot be read.
    """
    if not path.exists():
        raise InputError(f"There is no file or folder {path}.")
    unread: list[tuple[str, str]] = []
    files = [path] if not path.is_dir() else [*_python_files(path, unread)]
    found: list[Use] = []
    for file in files:
        try:
            own = names(_read(file))
            found += [Use(str(file), each.line, each.name, *verdict_of(each)) for each in own]
        except InputError as error:  # noqa: PERF203 - one bad file must not end the search
            if file == path:
                raise
            unread.append((str(file), str(error).removeprefix(f"{file} ")))
        except (RecursionError, MemoryError):  # the parser raises the second, too
            unread.append((str(file), "nested too deeply to be read."))
        except (SyntaxError, ValueError) as error:  # ValueError: null bytes, before Python 3.12
            line = error.lineno if isinstance(error, SyntaxError) else None
            unread.append((str(file), f"line {line or 1}: not valid Python 3 syntax."))
    return Migration(tuple(found), tuple(unread), len(files))


# -- files -----------------------------------------------------------------------------------------


def _python_files(path: Path, unread: list[tuple[str, str]]) -> Iterator[Path]:
    def note(error: OSError) -> None:
        unread.append((str(error.filename), f"cannot be read: {error.strerror}."))

    for folder, inside, files in os.walk(path, onerror=note):
        # A virtual environment may have any name, but always this file.
        inside[:] = sorted(
            name
            for name in inside
            if name not in SKIPPED
            and not name.startswith(".")
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        )
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _read(path: Path) -> str:
    """Returns the source, decoded as the file declares.

    Raises:
        InputError: If it is a notebook, a pipe or a device, or cannot be read or decoded.
    """
    if path.suffix == ".ipynb":  # JSON, most of which is a Python expression, too
        raise InputError(
            f"{path} is a notebook. Convert it to a script first: jupyter nbconvert --to script "
            f"{path}"
        )
    if path.exists() and not path.is_file():  # reading a pipe waits for its writer
        raise InputError(f"{path} cannot be read: it is neither a file nor a folder.")
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    # LookupError: a codec such as rot13, which does not decode bytes to text.
    except (SyntaxError, LookupError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be decoded: {reason}.") from error


# -- names -----------------------------------------------------------------------------------------


def names(text: str) -> list[Name]:
    """Returns the names of apex in a script, imports included, in the order of its lines.

    Raises:
        SyntaxError: If it is not valid in the running version of Python.
    """
    if not any(word in text for word in (*ROOTS, *ATTRIBUTES)):  # not worth parsing
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes are the script's concern
        visitor = _Visitor(symtable.symtable(text, "script", "exec"))
        visitor.visit(ast.parse(text))
    return sorted(visitor.found(), key=lambda name: name.line)


def _is_of_apex(name: str) -> bool:
    return name.partition(".")[0] in ROOTS


class _Visitor(ast.NodeVisitor):
    """Visits a script; Python's symbol table says which scope binds a name."""

    def __init__(self, module: symtable.SymbolTable) -> None:
        self._tables = [module]  # of the scopes around the visited node
        self._imports: dict[tuple[int, str], set[str]] = defaultdict(set)
        self._direct: list[Name] = []
        self._reads: list[tuple[int, str, list[str], Name]] = []
        self._calls: dict[ast.expr, tuple[str, ...]] = {}

    def found(self) -> Iterator[Name]:
        """Yields the names; an import may stand below the function that reads it."""
        yield from self._direct
        for owner, root, attributes, use in self._reads:
            # Of several imports (`try` and `except`), apex's wins.
            imported = min(filter(_is_of_apex, self._imports[owner, root]), default=None)
            full = ".".join([imported or root, *attributes])
            if imported is not None and full not in ROOTS:  # `apex is None` adds nothing
                yield Name(full, use.line, use.keywords)
            for attribute in () if imported is not None else attributes:
                if attribute in ATTRIBUTES:
                    yield Name(OPTIMIZER + attribute, use.line)

    def _owner(self, name: str) -> int:
        """Returns the table that binds ``name``; the module's if no scope around does."""
        for depth, table in reversed([*enumerate(self._tables)]):
            try:
                symbol = table.lookup(name)
            except KeyError:
                continue
            if table.get_type() == "class" and depth < len(self._tables) - 1:
                continue  # its names are not visible in its methods
            if symbol.is_global():
                break
            if not symbol.is_free():
                return table.get_id()
        return self._tables[0].get_id()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            package = alias.name.partition(".")[0]
            bound = alias.asname or package
            full = alias.name if alias.asname else package
            self._imports[self._owner(bound), bound].add(full)
            if _is_of_apex(alias.name):
                self._direct.append(Name(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "" if node.level else node.module or ""  # a relative import is never apex's
        for alias in node.names:
            full, bound = f"{module}.{alias.name}", alias.asname or alias.name
            self._imports[self._owner(bound), bound].add(full)
            if _is_of_apex(full):
                self._direct.append(Name(module if bound == "*" else full, alias.lineno))

    def visit_Call(self, node: ast.Call) -> None:
        self._calls[node.func] = tuple(each.arg for each in node.keywords if each.arg)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        attributes: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            attributes.insert(0, root.attr)
            root = root.value
        name = root.id if isinstance(root, ast.Name) else ""
        use = Name("", node.end_lineno or node.lineno, self._calls.get(node, ()))
        self._reads.append((self._owner(name), name, attributes, use))
        if not name:
            self.visit(root)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            use = Name("", node.lineno, self._calls.get(node, ()))
            self._reads.append((self._owner(node.id), node.id, [], use))

    def _visit_scope(self, node: Any) -> None:
        """Visits the body in its own scope, and the rest (defaults, bases) in the one around."""
        for child in ast.iter_child_nodes(node):
            if child not in node.body:
                self.visit(child)
        around = self._tables[-1]
        own = [
            table
            for table in around.get_children()
            if (table.get_name(), table.get_lineno()) == (node.name, node.lineno)
        ]
        self._tables.append(own[-1] if own else around)
        for child in node.body:
            self.visit(child)
        self._tables.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope  # noqa: N815


# -- verdicts --------------------------------------------------------------------------------------


def verdict_of(use: Name) -> tuple[Kind, str]:
    """Returns the verdict on one use, including its arguments, and the remedy."""
    kind, text = verdict_of_name(use.name)
    if kind == "not supported" or use.name.startswith(OPTIMIZER):
        return kind, text
    taken = _parameters(resolve(use.name)) if use.keywords else None
    if taken is not None and (unknown := [each for each in use.keywords if each not in taken]):
        return "not supported", f"{use.name} takes no argument {', '.join(unknown)}: remove it."
    idle = [each for each in use.keywords if each in IDLE.get(_noted_name(use.name), ())]
    return _noted(text, *(f"{each} has no effect: remove it." for each in idle))


@cache
def verdict_of_name(name: str) -> tuple[Kind, str]:
    """Returns the verdict on a full name, such as ``apex.optimizers.FusedAdam``."""
    if name.startswith(OPTIMIZER):
        return _noted(ATTRIBUTES[name.removeprefix(OPTIMIZER)])
    if (instead := _instead(name)) is not None:
        return "not supported", f"Use {instead}."
    try:
        resolve(name)
    except LookupError as error:
        return "not supported", str(error.args[0])
    return _noted(NOTES.get(_noted_name(name), ""))


def resolve(name: str) -> Any:
    """Returns the object with a full name; for an attribute of an object, the object.

    Raises:
        LookupError: If the package has no such name.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        if not isinstance(found, ModuleType) or found.__name__ in NOT_IMPORTED:
            break
        found = _member(found, part, ".".join(parts[: index + 1]))
    return found


def _member(module: ModuleType, part: str, name: str) -> Any:
    try:
        return getattr(module, part)
    except AttributeError as missing:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            own = not isinstance(error, ModuleNotFoundError) or error.name != name
            message = str(error) if own else str(missing)
            # Our own explanations name the missing object in full.
            if not message.startswith(name) and not (own and name in message):
                message = (
                    f"{name} is not part of this apex. If it comes from a fork, keep that fork."
                )
            raise LookupError(message) from error


def _instead(name: str) -> str | None:
    return next((INSTEAD[key] for key in INSTEAD if f"{name}.".startswith(f"{key}.")), None)


def _noted(*notes: str) -> tuple[Kind, str]:
    text = " ".join(filter(None, notes))
    return ("note", text) if text else ("works", "")


def _noted_name(name: str) -> str:
    """Returns the name that the notes use for the same object, which apex exports twice."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if (prefix := ".".join(parts[:end])) in NOTES:
            return prefix
    return _names_of_objects().get(id(resolve(name)), name)


@cache
def _names_of_objects() -> dict[int, str]:
    return {id(resolve(name)): name for name in sorted({*NOTES, *IDLE})}


def _parameters(function: Any) -> frozenset[str] | None:
    """Returns the names of the arguments; None if any name is accepted."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)
