"""One script, from amp to ``torch.amp``: read, judged, and changed if all of it is understood."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from apex.tools.migrate.script import Script, dotted
from apex.tools.migrate.to_torch.edits import Edits, edited
from apex.tools.migrate.to_torch.flow import (
    Calls,
    Initialize,
    ScaleLoss,
    calls_of,
    initialize_of,
    scale_loss_of,
)
from apex.tools.migrate.to_torch.imports import remove_imports
from apex.tools.migrate.to_torch.places import (
    assigned,
    class_of,
    describe,
    function_of,
    functions_of,
    parameters,
    statement_of,
    suite_of,
)
from apex.tools.migrate.to_torch.precision import Precision
from apex.tools.migrate.to_torch.reasons import Findings, Remark
from apex.tools.migrate.to_torch.regions import Region, RegionFinder
from apex.tools.migrate.to_torch.roles import WRAPPERS, Role, Roles
from apex.tools.migrate.to_torch.stepping import Step, step_of

_CPU = (
    "on a CPU torch.autocast leaves exp, log, softmax, layer_norm, sum, RNNs and others in another "
    "dtype than amp does: compare losses there if the model uses these."
)


@dataclass(frozen=True)
class Rewritten:
    """What became of a script.

    Attributes:
        after: Its new source; None if it stays as it is.
        refusals: Why it stays.
        notes: What to know of the new one.
    """

    after: str | None
    refusals: tuple[Remark, ...]
    notes: tuple[Remark, ...]


def rewritten(script: Script, *, level: str | None) -> Rewritten:
    """Returns the script in terms of ``torch.amp``, or why it stays.

    Args:
        script: One that uses amp.
        level: The level to assume where the script computes it.
    """
    findings = Findings(script)
    edits = _edits(findings, level)
    refusals = tuple(sorted(findings.refusals))
    if refusals or edits is None:
        return Rewritten(None, refusals, ())
    after = edited(script.module, edits).code
    ast.parse(after)  # raises rather than hand on what is no Python
    return Rewritten(after, (), tuple(sorted(findings.notes)))


def _edits(findings: Findings, level: str | None) -> Edits | None:
    calls = calls_of(findings)
    found = initialize_of(findings, calls, level)
    scaled = scale_loss_of(findings, calls) if len(calls["initialize"]) == 1 else None
    if found is None or scaled is None:
        return None
    prepared, precision = found
    roles = Roles(findings.script, prepared.statement)
    roles.give(prepared.statement, prepared.targets[0], Role.MODEL)
    roles.give(prepared.statement, prepared.targets[1], Role.OPTIMIZER)
    if roles.of(scaled.optimizer) is not Role.OPTIMIZER:
        findings.refuse(scaled.block, "this optimizer is not seen to come from amp.initialize.")
        return None
    return _Rewriter(findings, calls, prepared, precision, scaled, roles).edits()


class _Rewriter:
    def __init__(
        self,
        findings: Findings,
        calls: Calls,
        prepared: Initialize,
        precision: Precision,
        scaled: ScaleLoss,
        roles: Roles,
    ) -> None:
        self._findings = findings
        self._script = findings.script
        self._calls = calls
        self._prepared = prepared
        self._precision = precision
        self._scaled = scaled
        self._roles = roles
        self._edits = Edits()
        first = self._prepared.targets[0]
        name = "scaler" if "scaler" not in assigned(self._script.module) else "grad_scaler"
        self._scaler = f"self.{name}" if first.startswith("self.") else name

    def edits(self) -> Edits:
        self._check_guards()
        finder = RegionFinder(self._findings, self._roles, [self._prepared_block])
        self._put_under_autocast(finder)
        self._replace_initialize(finder)
        self._replace_backward()
        if self._precision.scales:
            step = step_of(self._findings, self._roles, self._scaled)
            if step is not None:
                self._replace_step(step)
        for call in self._calls["master_params"]:
            self._replace_master_params(call)
        self._replace_states()
        remove_imports(self._findings, self._edits)
        return self._edits

    # -- what amp being optional means ---------------------------------------------------------

    @property
    def _prepared_block(self) -> cst.SimpleStatementLine | cst.If:
        return self._prepared.guard or self._prepared.statement

    def _check_guards(self) -> None:
        guard, enabled = self._scaled.guard, self._precision.enabled
        if guard is not None and self._script.code(guard.test) != enabled:
            condition = self._script.code(guard.test)
            self._findings.refuse(
                guard, f"the backward pass depends on {condition}, amp.initialize does not."
            )
        if guard is None and self._prepared.guard is not None:
            self._findings.refuse(
                self._scaled.block, f"amp.initialize depends on {enabled}, amp.scale_loss does not."
            )

    # -- autocast ------------------------------------------------------------------------------

    def _put_under_autocast(self, finder: RegionFinder) -> None:
        training = finder.training(self._scaled)
        if training is None or self._precision.dtype is None:
            return
        regions = [training, *finder.others(training)]
        early = self._roles.called_early()
        for region in regions:
            self._require_condition(region)
            if early & set(functions_of(self._script, region.statements[0])):
                self._findings.refuse(
                    region.statements[0],
                    "this function is called before amp.initialize, too, where nothing is cast.",
                )
        self._refuse_replicas()
        self._edits.regions = [(region, self._autocast(region)) for region in regions]
        if training.device != '"cuda"':
            self._findings.note(self._scaled.block, _CPU)
        self._note_strangers(regions)

    def _refuse_replicas(self) -> None:
        for node in self._script.nodes:
            name = dotted(node.func) if isinstance(node, cst.Call) else None
            if (name or "").rpartition(".")[2] == "DataParallel" and self._precision.level == "O4":
                self._findings.refuse(
                    node, "DataParallel's threads know only that autocast is on, not that of bf16."
                )

    def _autocast(self, region: Region) -> str:
        enabled = self._precision.enabled
        more = f", enabled={enabled}" if enabled else ""
        more += "" if region.caches else ", cache_enabled=False"
        return f"torch.autocast({region.device}, {self._precision.dtype}{more})"

    def _require_condition(self, region: Region) -> None:
        enabled = self._precision.enabled
        node = region.statements[0]
        if enabled and not self._is_known(enabled.partition(".")[0], node):
            place = describe(function_of(self._script, node))
            self._findings.refuse(node, f"{enabled} is not known in {place}: pass it on.")

    def _note_strangers(self, regions: list[Region]) -> None:
        """Notes where the model goes to code of other files, which ran under amp's casts."""
        inside = {id(s) for region in regions for s in region.statements}
        known = WRAPPERS | _ONLY_LOOKS
        for node in self._script.nodes:
            if not isinstance(node, cst.Call) or isinstance(node.func, cst.Attribute):
                continue
            name = dotted(node.func) or ""
            given = any(self._roles.of(argument.value) is Role.MODEL for argument in node.args)
            if not given or name in known or self._roles.functions_called(node):
                continue
            if not any(id(parent) in inside for parent in self._script.parents(node)):
                self._findings.note(
                    node,
                    f"the model goes to {name}, which ran under amp's casts, and does no more.",
                )

    # -- statements ----------------------------------------------------------------------------

    def _replace_initialize(self, finder: RegionFinder) -> None:
        script, prepared = self._script, self._prepared
        sources = [script.code(value) for value in prepared.values]
        same = list(prepared.targets) == sources
        lines = [] if same else [f"{', '.join(prepared.targets)} = {', '.join(sources)}"]
        scaler = [self._scaler_line(finder)] if self._precision.scales else []
        block = self._prepared_block
        if prepared.guard is None:
            self._edits.statements[block] = [*lines, *scaler]
            return
        if not same:
            self._findings.refuse(block, "amp.initialize is optional and gives new names.")
        self._edits.statements[prepared.statement] = []
        self._edits.before[block] = scaler

    def _scaler_line(self, finder: RegionFinder) -> str:
        enabled = self._precision.enabled
        options = dict(self._precision.scaler_options)
        if enabled:
            options["enabled"] = enabled
        device = finder.device_type(self._prepared.statement)
        arguments = [device, *(f"{key}={value}" for key, value in options.items())]
        return f"{self._scaler} = torch.amp.GradScaler({', '.join(arguments)})"

    def _replace_backward(self) -> None:
        script, scaled = self._script, self._scaled
        loss = script.code(scaled.loss)
        if self._precision.scales:
            self._require_scaler(scaled.block)
            loss = f"{self._scaler}.scale({loss})"
        elif not isinstance(scaled.loss, cst.Name | cst.Attribute | cst.Subscript):
            loss = f"({loss})"
        arguments = ", ".join(script.code(a).rstrip(", ") for a in scaled.backward.args)
        line = f"{loss}.backward({arguments})"
        guard = scaled.guard
        if guard is not None and self._is_plain_alternative(guard):
            self._edits.statements[guard] = [line]
        else:
            self._edits.statements[scaled.block] = [line]

    def _is_plain_alternative(self, guard: cst.If) -> bool:
        """Returns whether the other branch calls backward on the same loss, and both do no more."""
        other = guard.orelse.body.body if isinstance(guard.orelse, cst.Else) else ()
        loss = self._script.code(self._scaled.loss)
        backward = f"{loss}.backward()"
        codes = [self._script.code(each).strip() for each in other]
        return len(guard.body.body) == 1 and codes == [backward] and not self._scaled.backward.args

    def _replace_step(self, step: Step) -> None:
        optimizer = self._script.code(self._scaled.optimizer)
        self._require_scaler(step.statement)
        self._edits.statements[step.statement] = [
            f"{self._scaler}.step({optimizer})",
            f"{self._scaler}.update()",
        ]
        if step.unscale_before is not None:
            self._edits.before[step.unscale_before] = [f"{self._scaler}.unscale_({optimizer})"]
        if suite_of(self._script, step.statement) is not suite_of(
            self._script, self._scaled.statement
        ):
            self._findings.note(
                step.statement,
                "the scale moves once for each step now; amp moved it at each backward pass.",
            )

    # -- expressions ---------------------------------------------------------------------------

    def _replace_master_params(self, call: cst.Call) -> None:
        given = call.args[0].value if len(call.args) == 1 else None
        if given is None or self._roles.of(given) is not Role.OPTIMIZER:
            self._findings.refuse(call, "this optimizer is not seen to come from amp.initialize.")
            return
        models = self._roles.names(call, Role.MODEL)
        if models and self._steps_all_parameters():
            self._edits.expressions[call] = f"{models[0]}.parameters()"
        else:
            groups = f"{self._script.code(given)}.param_groups"
            every = f'(param for group in {groups} for param in group["params"])'
            self._edits.expressions[call] = every

    def _steps_all_parameters(self) -> bool:
        """Returns whether the optimizer is seen to be made of all parameters of the model."""
        model, optimizer = (self._script.code(value) for value in self._prepared.values)
        place = function_of(self._script, self._prepared.statement)
        made = [
            node.value
            for node in self._script.nodes
            if isinstance(node, cst.Assign)
            and function_of(self._script, node) is place
            and any(self._script.code(t.target) == optimizer for t in node.targets)
        ]
        return any(
            isinstance(value, cst.Call)
            and bool(value.args)
            and self._script.code(value.args[0].value) == f"{model}.parameters()"
            for value in made
        )

    def _replace_states(self) -> None:
        for call in self._calls["state_dict"]:
            if self._precision.scales:
                self._require_scaler(call)
            self._edits.expressions[call] = (
                f"{self._scaler}.state_dict()" if self._precision.scales else "{}"
            )
        for call in self._calls["load_state_dict"]:
            self._replace_load(call)
        states = (*self._calls["state_dict"], *self._calls["load_state_dict"])
        for call in states[:1]:
            self._findings.note(
                call,
                "checkpoints of amp.state_dict() and those of the new script are not "
                "interchangeable; docs/migrating.md converts a scale.",
            )

    def _replace_load(self, call: cst.Call) -> None:
        if self._precision.scales:
            self._require_scaler(call)
            self._edits.expressions[call.func] = f"{self._scaler}.load_state_dict"
            return
        statement = statement_of(self._script, call)
        if not _is_expression(statement, call):
            self._findings.refuse(call, "the result of amp.load_state_dict is used.")
        self._edits.statements[statement] = []

    # -- names ---------------------------------------------------------------------------------

    def _require_scaler(self, node: cst.CSTNode) -> None:
        """Refuses where the scaler would not be known."""
        script, made = self._script, self._prepared.statement
        if self._scaler.startswith("self."):
            known = class_of(script, node) is class_of(script, made)
        else:
            place = function_of(script, made)
            known = place is None or any(f is place for f in functions_of(script, node))
        if not known:
            here, there = function_of(script, made), function_of(script, node)
            self._findings.refuse(
                node,
                f"the scaler would be made in {describe(here)} and used in {describe(there)}: "
                "pass it on by hand, or use O4, which needs none.",
            )

    def _is_known(self, name: str, node: cst.CSTNode) -> bool:
        made = self._prepared.statement
        for function in functions_of(self._script, node):
            if name in parameters(function) or name in assigned(function):
                return True
        if function_of(self._script, made) is None:
            return True
        return name in set(_module_names(self._script))


_ONLY_LOOKS = frozenset(
    {
        *("print", "len", "id", "type", "isinstance", "str", "repr", "next", "list"),
        *("hasattr", "getattr", "setattr"),
    }
)
"""Functions that may be given a model without calling it."""


def _module_names(script: Script) -> Iterator[str]:
    for statement in script.module.body:
        if isinstance(statement, cst.FunctionDef | cst.ClassDef):
            continue
        yield from assigned(statement)


def _is_expression(statement: cst.CSTNode, call: cst.Call) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    part = statement.body[0]
    return isinstance(part, cst.Expr) and part.value is call
