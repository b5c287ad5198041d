"""Puts what computes under ``autocast``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from apex.tools.migrate.script import Script, dotted
from apex.tools.migrate.to_torch.context import Context
from apex.tools.migrate.to_torch.places import (
    assigned,
    describe,
    function_of,
    functions_of,
    parameters,
)
from apex.tools.migrate.to_torch.regions import Region
from apex.tools.migrate.to_torch.roles import WRAPPERS, Role

_CPU = (
    "on a CPU torch.autocast leaves exp, log, softmax, layer_norm, sum, RNNs and others in another "
    "dtype than amp does: compare losses there if the model uses these."
)

_ONLY_LOOKS = frozenset(
    {
        *("print", "len", "id", "type", "isinstance", "str", "repr", "next", "list"),
        *("hasattr", "getattr", "setattr"),
    }
)
"""Functions that may be given a model without calling it."""


def put_under_autocast(context: Context) -> None:
    """Adds the regions of the training step and of other calls of the model to the edits."""
    training = context.regions.training(context.scaled)
    if training is None or context.precision.dtype is None:
        return
    regions = [training, *context.regions.others(training)]
    _refuse_early(context, regions)
    _refuse_unknown_conditions(context, regions)
    _refuse_replicas(context)
    if training.device != '"cuda"':
        context.findings.note(context.scaled.block, _CPU)
    _note_strangers(context, regions)
    context.edits.regions = [(region, _autocast(context, region)) for region in regions]


def _autocast(context: Context, region: Region) -> str:
    enabled = context.precision.enabled
    more = f", enabled={enabled}" if enabled else ""
    more += "" if region.caches else ", cache_enabled=False"
    return f"torch.autocast({region.device}, {context.precision.dtype}{more})"


def _refuse_early(context: Context, regions: Sequence[Region]) -> None:
    early = context.roles.called_early()
    for region in regions:
        if early & set(functions_of(context.script, region.statements[0])):
            context.findings.refuse(
                region.statements[0],
                "this function is called before amp.initialize, too, where nothing is cast.",
            )


def _refuse_unknown_conditions(context: Context, regions: Sequence[Region]) -> None:
    enabled = context.precision.enabled
    for region in regions:
        node = region.statements[0]
        if enabled and not _is_known(context, enabled.partition(".")[0], node):
            place = describe(function_of(context.script, node))
            context.findings.refuse(node, f"{enabled} is not known in {place}: pass it on.")


def _refuse_replicas(context: Context) -> None:
    for node in context.script.nodes:
        name = dotted(node.func) if isinstance(node, cst.Call) else None
        if (name or "").rpartition(".")[2] == "DataParallel" and context.precision.level == "O4":
            context.findings.refuse(
                node, "DataParallel's threads know only that autocast is on, not that of bf16."
            )


def _note_strangers(context: Context, regions: Sequence[Region]) -> None:
    """Notes where the model goes to code of other files, which ran under amp's casts."""
    script, roles = context.script, context.roles
    inside = {statement for region in regions for statement in region.statements}
    for node in script.nodes:
        if not isinstance(node, cst.Call) or isinstance(node.func, cst.Attribute):
            continue
        name = dotted(node.func) or ""
        given = any(roles.of(argument.value) is Role.MODEL for argument in node.args)
        if not given or name in WRAPPERS | _ONLY_LOOKS or roles.functions_called(node):
            continue
        if not roles.is_early(node) and inside.isdisjoint(script.parents(node)):
            context.findings.note(
                node, f"the model goes to {name}, which ran under amp's casts, and does no more."
            )


def _is_known(context: Context, name: str, node: cst.CSTNode) -> bool:
    for function in functions_of(context.script, node):
        if name in parameters(function) or name in assigned(function):
            return True
    if function_of(context.script, context.prepared.statement) is None:
        return True
    return name in set(_module_names(context.script))


def _module_names(script: Script) -> Iterator[str]:
    for statement in script.module.body:
        if not isinstance(statement, cst.FunctionDef | cst.ClassDef):
            yield from assigned(statement)
