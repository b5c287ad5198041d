"""Replaces ``amp.master_params``, ``amp.state_dict`` and ``amp.load_state_dict``."""

from __future__ import annotations

import libcst as cst

from apex.tools.migrate.to_torch.context import Context
from apex.tools.migrate.to_torch.places import function_of, statement_of
from apex.tools.migrate.to_torch.roles import Role


def replace_expressions(context: Context) -> None:
    """Adds what becomes of these calls to the edits."""
    for call in context.calls["master_params"]:
        _replace_master_params(context, call)
    for call in context.calls["state_dict"]:
        _replace_state(context, call)
    for call in context.calls["load_state_dict"]:
        _replace_load(context, call)
    for call in (*context.calls["state_dict"], *context.calls["load_state_dict"])[:1]:
        context.findings.note(
            call,
            "checkpoints of amp.state_dict() and those of the new script are not interchangeable; "
            "docs/migrating.md converts a scale.",
        )


def _replace_master_params(context: Context, call: cst.Call) -> None:
    given = call.args[0].value if len(call.args) == 1 else None
    if given is None or context.roles.of(given) is not Role.OPTIMIZER:
        context.findings.refuse(call, "this optimizer is not seen to come from amp.initialize.")
        return
    models = context.roles.names(call, Role.MODEL)
    if models and _steps_all_parameters(context):
        context.edits.expressions[call] = f"{models[0]}.parameters()"
    else:
        groups = f"{context.script.code(given)}.param_groups"
        every = f'(param for group in {groups} for param in group["params"])'
        context.edits.expressions[call] = every


def _steps_all_parameters(context: Context) -> bool:
    """Returns whether the optimizer is seen to be made of all parameters of the model."""
    script, prepared = context.script, context.prepared
    model, optimizer = (script.code(value) for value in prepared.values)
    place = function_of(script, prepared.statement)
    made = [
        node.value
        for node in script.nodes
        if isinstance(node, cst.Assign)
        and function_of(script, node) is place
        and any(script.code(target.target) == optimizer for target in node.targets)
    ]
    return any(
        isinstance(value, cst.Call)
        and bool(value.args)
        and script.code(value.args[0].value) == f"{model}.parameters()"
        for value in made
    )


def _replace_state(context: Context, call: cst.Call) -> None:
    if context.precision.scales:
        context.require_scaler(call)
        context.edits.expressions[call] = f"{context.scaler}.state_dict()"
    else:
        context.edits.expressions[call] = "{}"


def _replace_load(context: Context, call: cst.Call) -> None:
    if context.precision.scales:
        context.require_scaler(call)
        context.edits.expressions[call.func] = f"{context.scaler}.load_state_dict"
        return
    statement = statement_of(context.script, call)
    if not _is_expression(statement, call):
        context.findings.refuse(call, "amp.load_state_dict is not a statement of its own.")
    context.edits.statements[statement] = []


def _is_expression(statement: cst.CSTNode, call: cst.Call) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    part = statement.body[0]
    return isinstance(part, cst.Expr) and part.value is call
