"""The optimizer's step, and what looks at gradients before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from apex.tools.migrate.script import Script, dotted
from apex.tools.migrate.to_torch.flow import ScaleLoss, same_function
from apex.tools.migrate.to_torch.places import Statement, ancestor_in, is_in, statement_of, suite_of
from apex.tools.migrate.to_torch.reasons import Findings
from apex.tools.migrate.to_torch.roles import Role, Roles

_BLIND = frozenset({"step", "zero_grad", "train", "eval", "param_groups", "state_dict"})
"""Attributes of models and optimizers that tell nothing of gradients."""


@dataclass(frozen=True)
class Step:
    """The step, and where the gradients have to be unscaled before it.

    Attributes:
        statement: ``optimizer.step()``.
        unscale_before: The first statement that may look at gradients; None if the step is the
            first to do so.
    """

    statement: Statement
    unscale_before: Statement | None


def step_of(findings: Findings, roles: Roles, scaled: ScaleLoss) -> Step | None:
    """Returns the one step of the optimizer, for levels with a scaler."""
    script = findings.script
    calls = [n for n in script.nodes if isinstance(n, cst.Call) and _is_step(roles, n)]
    if len(calls) != 1:
        where = calls[1] if calls else scaled.block
        findings.refuse(where, f"{len(calls)} steps of the optimizer in this file, not one.")
        return None
    call, statement = calls[0], statement_of(script, calls[0])
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        findings.refuse(call, "optimizer.step() is not a statement of its own.")
        return None
    if call.args or not _is_only(statement, call):
        findings.refuse(call, "GradScaler.step takes no closure and tells nothing.")
        return None
    if not same_function(script, call, scaled.block) or _is_before(script, call, scaled.block):
        findings.refuse(call, "optimizer.step() does not follow amp.scale_loss in its function.")
        return None
    _check_backwards(findings, scaled, statement)
    return Step(statement, _first_look(findings, roles, scaled, statement))


def _check_backwards(findings: Findings, scaled: ScaleLoss, step: Statement) -> None:
    """Refuses steps without a scaled backward pass, and unscaled ones."""
    script = findings.script
    plain = scaled.guard.orelse if scaled.guard is not None else None
    for node in script.nodes:
        is_backward = isinstance(node, cst.Attribute) and node.attr.value == "backward"
        if is_backward and not _is_in_any(script, node, (scaled.block, plain)):
            findings.refuse(node, "a backward pass without amp.scale_loss: it would be unscaled.")
    suite = suite_of(script, step)
    for parent in script.parents(scaled.statement):
        if parent is suite or is_in(script, step, parent):
            break
        if isinstance(parent, cst.If | cst.Else | cst.Try | cst.ExceptHandler):
            findings.refuse(parent, "the backward pass may be left out, and the step taken.")


def _first_look(
    findings: Findings, roles: Roles, scaled: ScaleLoss, step: Statement
) -> Statement | None:
    """Returns the first statement between backward pass and step that may look at gradients.

    It must be one that runs once for each step: ``unscale_`` may be called only once.
    """
    script = findings.script
    branches = [suite_of(script, scaled.block), suite_of(script, step)]
    once = suite_of(script, scaled.statement) is branches[1]
    found: list[Statement] = []
    for node in _looks(findings, roles, scaled, step):
        suites = branches if once else branches[1:]
        holder = next((s for b in suites if (s := ancestor_in(script, node, b))), None)
        if holder is None or script.line(holder) < script.line(scaled.block):
            findings.refuse(
                node,
                "gradients are looked at between backward and step, more often than steps are "
                "taken: GradScaler unscales once for each step.",
            )
        else:
            found.append(holder)
    return min(found, key=script.line, default=None)


def _looks(
    findings: Findings, roles: Roles, scaled: ScaleLoss, step: Statement
) -> Iterator[cst.CSTNode]:
    script = findings.script
    others = scaled.guard.orelse if scaled.guard is not None else None
    inside: set[cst.CSTNode] = set()
    for node in script.nodes:
        if node in inside:
            inside.update(node.children)
            continue
        if not isinstance(node, cst.Name | cst.Attribute) or not same_function(script, node, step):
            continue
        if isinstance(node, cst.Attribute) and _is_blind(roles, node):
            inside.update(node.children)
        elif _is_gradient(node) or roles.of(node) is not None:
            if script.line(scaled.block) < script.line(node) < script.line(step):
                if not _is_in_any(script, node, (scaled.block, others)):
                    yield node
            elif _is_gradient(node):
                findings.refuse(node, "gradients are read where they may be scaled.")


def _is_before(script: Script, node: cst.CSTNode, other: cst.CSTNode) -> bool:
    return script.line(node) < script.line(other)


def _is_in_any(
    script: Script, node: cst.CSTNode, containers: tuple[cst.CSTNode | None, ...]
) -> bool:
    return any(is_in(script, node, container) for container in containers if container is not None)


def _is_blind(roles: Roles, node: cst.Attribute) -> bool:
    return node.attr.value in _BLIND and roles.of(node.value) is not None


def _is_gradient(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Attribute) and node.attr.value == "grad"


def _is_step(roles: Roles, call: cst.Call) -> bool:
    function = call.func
    return (
        isinstance(function, cst.Attribute)
        and function.attr.value == "step"
        and roles.of(function.value) is Role.OPTIMIZER
    )


def _is_only(statement: cst.SimpleStatementLine, call: cst.Call) -> bool:
    part = statement.body[0]
    return isinstance(part, cst.Expr) and part.value is call and dotted(call.func) is not None
