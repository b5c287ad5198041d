"""Which names stand for the prepared model and optimizer, function by function."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import libcst as cst

from apex.tools.migrate.script import Script, dotted
from apex.tools.migrate.to_torch.places import (
    class_of,
    function_of,
    functions_of,
    parameters,
)

WRAPPERS = frozenset(
    {"DistributedDataParallel", "DDP", "DataParallel", "compile", "convert_syncbn_model"}
)
"""Calls whose result stands for the model that they are given."""


class Role(Enum):
    """What a name stands for."""

    MODEL = "model"
    OPTIMIZER = "optimizer"


class Roles:
    """Follows model and optimizer through assignments and calls inside one file."""

    def __init__(self, script: Script, since: cst.CSTNode) -> None:
        """Starts without any; in its function nothing has a role before the statement ``since``."""
        self._script = script
        self._since = since
        self._roles: dict[tuple[cst.CSTNode | None, str], Role] = {}
        self._functions = [n for n in script.nodes if isinstance(n, cst.FunctionDef)]

    def give(self, node: cst.CSTNode, name: str, role: Role) -> None:
        """Gives ``name`` a role where ``node`` stands, and all that it is passed on to."""
        self._roles[self._key(node, name)] = role
        while any(self._pass_on(each) for each in self._script.nodes):
            pass

    def of(self, node: cst.CSTNode) -> Role | None:
        """Returns the role of an expression."""
        name = dotted(node)
        return None if name is None else self.of_name(node, name)

    def of_name(self, node: cst.CSTNode, name: str) -> Role | None:
        """Returns the role that ``name`` has where ``node`` stands."""
        if name.startswith("self."):
            return self._roles.get((class_of(self._script, node), name))
        for function in functions_of(self._script, node):
            if (role := self._roles.get((function, name))) is not None:
                return role
            if name in parameters(function):
                return None
        return self._roles.get((None, name))

    def names(self, node: cst.CSTNode, role: Role) -> list[str]:
        """Returns the names with ``role`` that are known where ``node`` stands."""
        known = dict.fromkeys(name for _, name in self._roles)
        return [name for name in known if self.of_name(node, name) is role]

    def functions_called(self, call: cst.Call) -> list[cst.FunctionDef]:
        """Returns the functions of this file that ``call`` may mean, by name."""
        name = dotted(call.func)
        if name is None:
            return []
        own_class = class_of(self._script, call) if name.startswith("self.") else None
        wanted = name.removeprefix("self.")
        return [
            function
            for function in self._functions
            if function.name.value == wanted and class_of(self._script, function) is own_class
        ]

    def is_early(self, node: cst.CSTNode) -> bool:
        """Returns whether ``node`` runs before model and optimizer are prepared."""
        script = self._script
        here = function_of(script, node) is function_of(script, self._since)
        return here and script.line(node) < script.line(self._since)

    def called_early(self) -> set[cst.FunctionDef]:
        """Returns the functions of this file that run before that, too."""
        calls = (n for n in self._script.nodes if isinstance(n, cst.Call) and self.is_early(n))
        return {function for call in calls for function in self.functions_called(call)}

    def _key(self, node: cst.CSTNode, name: str) -> tuple[cst.CSTNode | None, str]:
        place = class_of if name.startswith("self.") else function_of
        return place(self._script, node), name

    def _pass_on(self, node: cst.CSTNode) -> bool:
        """Follows one assignment or call; returns whether that gave a new role."""
        new = []
        if not isinstance(node, cst.Assign | cst.Call) or self.is_early(node):
            return False
        if isinstance(node, cst.Assign) and len(node.targets) == 1:
            role, name = self._of_value(node.value), dotted(node.targets[0].target)
            if role is not None and name is not None:
                new.append((self._key(node, name), role))
        elif isinstance(node, cst.Call):
            for function, parameter, value in self._passed(node):
                if (role := self.of(value)) is not None:
                    new.append(((function, parameter), role))
        added = [key for key, role in new if self._roles.get(key) is not role]
        self._roles.update(new)
        return bool(added)

    def _of_value(self, value: cst.BaseExpression) -> Role | None:
        if isinstance(value, cst.Call) and value.args:
            name = (dotted(value.func) or "").rpartition(".")[2]
            value = value.args[0].value if name in WRAPPERS else value
        return self.of(value)

    def _passed(self, call: cst.Call) -> Iterator[tuple[cst.CSTNode, str, cst.BaseExpression]]:
        for function in self.functions_called(call):
            names = parameters(function)
            if class_of(self._script, function) is not None:
                names = names[1:]
            for index, argument in enumerate(call.args):
                if argument.star:
                    break
                keyword = argument.keyword.value if argument.keyword else None
                if keyword is None and index < len(names):
                    yield function, names[index], argument.value
                elif keyword in names and keyword is not None:
                    yield function, keyword, argument.value
