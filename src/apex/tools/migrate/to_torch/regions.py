"""Which statements go under ``autocast``.

See Note [Equivalent]: from the first statement that may compute to the last one before the backward
pass. Statements that surely cast nothing are left out at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from apex.tools.migrate.script import Script, below
from apex.tools.migrate.to_torch.flow import ScaleLoss
from apex.tools.migrate.to_torch.places import (
    Statement,
    assigned,
    body_of,
    is_in,
    read,
    statement_of,
    suite_of,
)
from apex.tools.migrate.to_torch.reasons import Findings
from apex.tools.migrate.to_torch.roles import Role, Roles

_NEUTRAL_METHODS = frozenset(
    {
        # of tensors
        *("contiguous", "cuda", "detach", "dim", "float", "half", "item", "long", "numel"),
        *("permute", "requires_grad_", "reshape", "size", "squeeze", "to", "transpose"),
        *("unsqueeze", "view", "backward"),
        # of models, optimizers and schedulers
        *("children", "eval", "load_state_dict", "modules", "named_modules", "named_parameters"),
        *("parameters", "set_epoch", "state_dict", "step", "train", "zero_grad"),
        # of containers, logs and clocks
        *("append", "clear", "debug", "extend", "format", "get", "info", "items", "join", "keys"),
        *("perf_counter", "set_description", "set_postfix", "synchronize", "time", "update"),
        *("values", "warning", "write"),
    }
)
"""Methods that no level casts: they move, view, count, print or switch."""

_NEUTRAL_FUNCTIONS = frozenset(
    {
        *("dict", "enumerate", "float", "format", "int", "isinstance", "len", "list", "max"),
        *("min", "next", "print", "range", "str", "tqdm", "tuple", "zip"),
    }
)


_WITHOUT_GRADIENTS = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


@dataclass(frozen=True)
class Region:
    """Statements of one suite, to be put under ``autocast``.

    Attributes:
        suite: The suite.
        first: Index of the first of them.
        last: Index of the last.
        device: Source of the device type.
        caches: Whether ``autocast`` may keep the weights that it has cast.
    """

    suite: cst.BaseSuite | cst.Module
    first: int
    last: int
    device: str
    caches: bool = True

    @property
    def statements(self) -> Sequence[cst.CSTNode]:
        """The statements."""
        return body_of(self.suite)[self.first : self.last + 1]


class RegionFinder:
    """Finds the region of the training step, and those of other calls of the model."""

    def __init__(self, findings: Findings, roles: Roles, prepared: Iterable[Statement]) -> None:
        """Takes the roles of names, and the statements that prepare model and optimizer."""
        self._findings = findings
        self._script = findings.script
        self._roles = roles
        self._prepared = tuple(prepared)

    def training(self, scaled: ScaleLoss) -> Region | None:
        """Returns the statements before the backward pass that may compute."""
        suite = suite_of(self._script, scaled.statement)
        body = list(body_of(suite))
        end = body.index(scaled.statement)
        begin = max((body.index(s) + 1 for s in self._prepared if s in body[:end]), default=0)
        computing = [i for i in range(begin, end) if not is_neutral(body[i])]
        loss = read(scaled.loss)
        if not computing or not loss & set().union(*map(assigned, body[begin:end])):
            self._findings.refuse(
                scaled.block,
                f"{self._script.code(scaled.loss)} is not computed in the same block as "
                "amp.scale_loss.",
            )
            return None
        device = self.device_type(scaled.block, scaled.optimizer)
        region = Region(suite, computing[0], computing[-1], device)
        if any(map(self._stops_gradients, region.statements)):
            region = replace(region, caches=False)
        return region if self._is_sound(region, body[begin:end]) else None

    def others(self, training: Region) -> list[Region]:
        """Returns regions for the model's calls elsewhere, such as an evaluation."""
        found: list[Region] = []
        for call in self._forward_calls():
            if self._is_covered(call, [training, *found]):
                continue
            region = self._around(call)
            if region is None:
                self._findings.note(
                    call, "this call of the model ran under amp's casts, and runs in fp32 now."
                )
            else:
                found = [*(old for old in found if not _is_within(old, region)), region]
        return found

    def device_type(self, node: cst.CSTNode, optimizer: cst.BaseExpression | None = None) -> str:
        """Returns source of the device type that the model is on."""
        if _is_always_cuda(self._script):
            return '"cuda"'
        models = self._roles.names(node, Role.MODEL)
        if models or optimizer is None:
            return f"next({models[0]}.parameters()).device.type"
        return f'{self._script.code(optimizer)}.param_groups[0]["params"][0].device.type'

    def _is_deferred(self, call: cst.Call) -> bool:
        """Returns whether a call runs later than its statement."""
        parent = next(
            p
            for p in self._script.parents(call)
            if isinstance(p, cst.Lambda | cst.GeneratorExp | cst.BaseSmallStatement)
        )
        return not isinstance(parent, cst.BaseSmallStatement)

    def _is_sound(self, region: Region, before: Sequence[cst.CSTNode]) -> bool:
        well = True
        for statement in before:
            for node in below(statement):
                if isinstance(node, cst.Call) and self._is_of_another_step(node):
                    self._findings.refuse(node, "another backward pass or step before this one's.")
                    well = False
        if any(_leaves(statement) for statement in region.statements):
            self._findings.refuse(region.statements[0], "a yield between forward and backward.")
            well = False
        return well

    def _stops_gradients(self, statement: cst.CSTNode) -> bool:
        """Returns whether a part of it, or of what it calls in this file, runs without gradients.

        ``autocast`` would keep the weights cast there, and hand them to the part with gradients.
        """
        found, seen = [statement], {statement}
        while found:
            for node in below(found.pop()):
                if isinstance(node, cst.Name) and node.value in _WITHOUT_GRADIENTS:
                    return True
                if isinstance(node, cst.Call):
                    new = set(self._roles.functions_called(node)) - seen
                    seen |= new
                    found += new
        return False

    def _is_of_another_step(self, call: cst.Call) -> bool:
        if not isinstance(call.func, cst.Attribute):
            return False
        method = call.func.attr.value
        is_step = method == "step" and self._roles.of(call.func.value) is Role.OPTIMIZER
        return is_step or method == "backward"

    def _forward_calls(self) -> Iterable[cst.Call]:
        for node in self._script.nodes:
            if isinstance(node, cst.Call) and not self._roles.is_early(node):
                if self._roles.of(node.func) is Role.MODEL:
                    yield node
                elif isinstance(node.func, cst.Attribute) and not is_neutral(node.func):
                    method = node.func.attr.value not in _NEUTRAL_METHODS
                    if method and self._roles.of(node.func.value) is Role.MODEL:
                        yield node

    def _is_covered(self, call: cst.Call, regions: Sequence[Region]) -> bool:
        """Returns whether a call runs under ``autocast``: itself, or all calls of its function."""
        inside = {s for region in regions for s in region.statements}
        if any(node in inside for node in (call, *self._script.parents(call))):
            return True
        callers = [
            each
            for each in self._script.nodes
            if isinstance(each, cst.Call)
            and any(is_in(self._script, call, f) for f in self._roles.functions_called(each))
        ]
        return bool(callers) and all(
            any(node in inside for node in self._script.parents(each)) for each in callers
        )

    def _around(self, call: cst.Call) -> Region | None:
        """Returns the statement of a call and those behind it that read what it made."""
        statement = statement_of(self._script, call)
        if not isinstance(statement, cst.SimpleStatementLine) or self._is_deferred(call):
            return None
        suite = suite_of(self._script, statement)
        body = list(body_of(suite))
        first = last = body.index(statement)
        made = assigned(statement)
        for index in range(first + 1, len(body)):
            if made & read(body[index]):
                last = index
                made |= set().union(*map(assigned, body[first : last + 1]))
        region = Region(suite, first, last, self.device_type(call))
        if any(map(_goes_backward, region.statements)):
            self._findings.refuse(call, "forward and backward pass are in different blocks.")
        return None if any(map(_leaves, region.statements)) else region


def is_neutral(node: cst.CSTNode) -> bool:
    """Returns whether no operator that a level casts can be in ``node``."""
    return not any(_computes(each) for each in below(node))


def _computes(node: cst.CSTNode) -> bool:
    operators = cst.MatrixMultiply | cst.MatrixMultiplyAssign | cst.Power | cst.PowerAssign
    if isinstance(node, operators):
        return True
    if not isinstance(node, cst.Call):
        return False
    if isinstance(node.func, cst.Attribute):
        return node.func.attr.value not in _NEUTRAL_METHODS
    return not isinstance(node.func, cst.Name) or node.func.value not in _NEUTRAL_FUNCTIONS


def _leaves(statement: cst.CSTNode) -> bool:
    return any(isinstance(node, cst.Yield | cst.Await) for node in below(statement))


def _goes_backward(statement: cst.CSTNode) -> bool:
    return any(
        isinstance(n, cst.Attribute) and n.attr.value == "backward" for n in below(statement)
    )


def _is_within(one: Region, other: Region) -> bool:
    return one.suite is other.suite and other.first <= one.first <= one.last <= other.last


def _is_always_cuda(script: Script) -> bool:
    text = script.text
    return (
        ".cuda()" in text
        and "is_available" not in text
        and not any(
            isinstance(node, cst.SimpleString) and node.evaluated_value in ("cpu", "mps", "xpu")
            for node in script.nodes
        )
    )
