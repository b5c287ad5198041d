"""Replaces the three lines and the step."""

from __future__ import annotations

import libcst as cst

from apex.tools.migrate.to_torch.context import Context
from apex.tools.migrate.to_torch.places import suite_of
from apex.tools.migrate.to_torch.stepping import Step, step_of


def replace_statements(context: Context) -> None:
    """Adds what becomes of ``initialize``, ``scale_loss`` and the step to the edits."""
    _check_guards(context)
    _replace_initialize(context)
    _replace_backward(context)
    if context.precision.scales:
        step = step_of(context.findings, context.roles, context.scaled)
        if step is not None:
            _replace_step(context, step)


def _check_guards(context: Context) -> None:
    """Refuses a backward pass that depends on something else than ``initialize`` does."""
    guard, enabled = context.scaled.guard, context.precision.enabled
    condition = None if guard is None else context.script.code(guard.test)
    if condition not in (None, enabled):
        context.findings.refuse(
            context.scaled.block,
            f"the backward pass depends on {condition}, amp.initialize does not.",
        )
    if guard is None and context.prepared.guard is not None:
        context.findings.refuse(
            context.scaled.block, f"amp.initialize depends on {enabled}, amp.scale_loss does not."
        )


def _replace_initialize(context: Context) -> None:
    prepared, edits = context.prepared, context.edits
    sources = [context.script.code(value) for value in prepared.values]
    same = list(prepared.targets) == sources
    lines = [] if same else [f"{', '.join(prepared.targets)} = {', '.join(sources)}"]
    scaler = [_scaler_line(context)] if context.precision.scales else []
    if prepared.guard is None:
        edits.statements[prepared.statement] = [*lines, *scaler]
        return
    if not same:
        context.findings.refuse(
            prepared.statement, "amp.initialize is optional and gives new names."
        )
    edits.statements[prepared.statement] = []
    edits.before[prepared.guard] = scaler


def _scaler_line(context: Context) -> str:
    options = dict(context.precision.scaler_options)
    if context.precision.enabled:
        options["enabled"] = context.precision.enabled
    device = context.regions.device_type(context.prepared.statement)
    arguments = [device, *(f"{key}={value}" for key, value in options.items())]
    return f"{context.scaler} = torch.amp.GradScaler({', '.join(arguments)})"


def _replace_backward(context: Context) -> None:
    script, scaled = context.script, context.scaled
    loss = script.code(scaled.loss)
    if context.precision.scales:
        context.require_scaler(scaled.block)
        loss = f"{context.scaler}.scale({loss})"
    elif not isinstance(scaled.loss, cst.Name | cst.Attribute | cst.Subscript):
        loss = f"({loss})"
    arguments = ", ".join(script.code(a).rstrip(", ") for a in scaled.backward.args)
    line = f"{loss}.backward({arguments})"
    guard = scaled.guard
    if guard is not None and _is_plain_alternative(context, guard):
        context.edits.statements[guard] = [line]
    else:
        context.edits.statements[scaled.block] = [line]


def _is_plain_alternative(context: Context, guard: cst.If) -> bool:
    """Returns whether the other branch calls backward on the same loss, and both do no more."""
    other = guard.orelse.body.body if isinstance(guard.orelse, cst.Else) else ()
    backward = f"{context.script.code(context.scaled.loss)}.backward()"
    codes = [context.script.code(each).strip() for each in other]
    bare = not context.scaled.backward.args
    return len(guard.body.body) == 1 and codes == [backward] and bare


def _replace_step(context: Context, step: Step) -> None:
    script, scaler = context.script, context.scaler
    optimizer = script.code(context.scaled.optimizer)
    context.require_scaler(step.statement)
    context.edits.statements[step.statement] = [
        f"{scaler}.step({optimizer})",
        f"{scaler}.update()",
    ]
    if step.unscale_before is not None:
        context.edits.before[step.unscale_before] = [f"{scaler}.unscale_({optimizer})"]
    if suite_of(script, step.statement) is not suite_of(script, context.scaled.statement):
        context.findings.note(
            step.statement,
            "the scale moves once for each step now; amp moved it at each backward pass.",
        )
