"""How a script uses amp: its one ``initialize``, its one ``scale_loss``, its one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from apex.tools.migrate.script import Script, below, dotted
from apex.tools.migrate.to_torch.places import (
    Statement,
    function_of,
    is_in,
    statement_of,
    suite_of,
)
from apex.tools.migrate.to_torch.precision import OptionReader, Precision, arguments_of
from apex.tools.migrate.to_torch.reasons import Findings

AMP = "apex.amp"

HANDLED = frozenset(
    f"{AMP}.{name}"
    for name in ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
)
"""What is rewritten."""

LEFT_ALONE = (
    *("apex.optimizers.Fused", "apex.parallel", "apex.normalization", "apex.mlp", "apex.RNN"),
    *("apex.contrib.clip_grad", "apex.contrib.layer_norm", "apex.contrib.xentropy"),
    *("apex.multi_tensor_apply", "amp_C", "apex_C"),
)
"""Begins the names that go on working under ``torch.amp``."""


@dataclass(frozen=True)
class Initialize:
    """The call that prepares model and optimizer.

    Attributes:
        call: It.
        statement: The assignment.
        targets: Names that get the prepared model and optimizer.
        values: What is given to the call in their place.
        guard: The ``if`` around the statement that makes amp optional; None without one.
    """

    call: cst.Call
    statement: cst.SimpleStatementLine
    targets: tuple[str, str]
    values: tuple[cst.BaseExpression, cst.BaseExpression]
    guard: cst.If | None


@dataclass(frozen=True)
class ScaleLoss:
    """The block with the backward pass.

    Attributes:
        block: The ``with`` statement.
        loss: The loss as given.
        optimizer: The optimizer as given.
        backward: The call of ``backward`` inside.
        guard: The ``if`` around the block that makes amp optional; None without one.
    """

    block: cst.With
    loss: cst.BaseExpression
    optimizer: cst.BaseExpression
    backward: cst.Call
    guard: cst.If | None

    @property
    def statement(self) -> Statement:
        """The block, or the ``if`` around it."""
        return self.guard or self.block


Calls = Mapping[str, list[cst.Call]]
"""The calls of what is rewritten, by the last part of the name."""


def uses_amp(script: Script) -> bool:
    """Returns whether a script names anything of apex.amp, imports aside."""
    return any(name.startswith(f"{AMP}.") for _, name in script.references)


def calls_of(findings: Findings) -> Calls:
    """Returns the calls that are rewritten; any other use of amp is a reason to refuse."""
    script = findings.script
    found: dict[str, list[cst.Call]] = {name.rpartition(".")[2]: [] for name in HANDLED}
    for node, name in script.references:
        parent = next(script.parents(node))
        if name in HANDLED and isinstance(parent, cst.Call) and parent.func is node:
            found[name.rpartition(".")[2]].append(parent)
        elif name not in ("apex", *_allowed(name)):
            what = "is used as a value" if name == AMP or name in HANDLED else "is used"
            findings.refuse(node, f"{name} {what}, which torch.amp has no equal for.")
    return found


def initialize_of(
    findings: Findings, calls: Calls, level: str | None
) -> tuple[Initialize, Precision] | None:
    """Returns the one call of ``initialize`` and what its options mean."""
    if len(calls["initialize"]) != 1:
        _refuse_count(findings, calls)
        return None
    (call,) = calls["initialize"]
    arguments = arguments_of(call)
    if arguments is None:
        findings.refuse(call, "amp.initialize gets arguments by * or **: they are not known here.")
        return None
    precision = OptionReader(findings, arguments, level).precision()
    try:
        found = _initialize(findings.script, call, arguments)
    except ValueError as error:
        findings.refuse(call, str(error))
        return None
    if precision is None:
        return None
    if found.guard is not None:
        if precision.enabled is not None:
            findings.refuse(call, "amp is optional twice: by an if and by enabled=.")
        condition = findings.script.code(found.guard.test)
        precision = Precision(
            precision.level, precision.dtype, precision.scales, precision.scaler_options, condition
        )
    return found, precision


def scale_loss_of(findings: Findings, calls: Calls) -> ScaleLoss | None:
    """Returns the one block of ``scale_loss``."""
    found = calls["scale_loss"]
    for call in found[1:]:
        findings.refuse(call, "a second amp.scale_loss: several losses or training loops.")
    if not found:
        (call,) = calls["initialize"]
        findings.refuse(
            call, "no amp.scale_loss in this file: the backward pass is in another one."
        )
        return None
    if len(found) > 1:
        return None
    try:
        return _scale_loss(findings.script, found[0])
    except ValueError as error:
        findings.refuse(found[0], str(error))
        return None


def _allowed(name: str) -> tuple[str, ...]:
    return (name,) if name.startswith(LEFT_ALONE) and not name.endswith("LARC") else ()


def _refuse_count(findings: Findings, calls: Calls) -> None:
    for call in calls["initialize"][1:]:
        findings.refuse(
            call, "a second amp.initialize: which of them a step belongs to is unclear."
        )
    if not calls["initialize"]:
        for call in (call for each in calls.values() for call in each):
            findings.refuse(call, "amp.initialize is not called in this file.")


def _initialize(
    script: Script, call: cst.Call, arguments: Mapping[str, cst.BaseExpression]
) -> Initialize:
    values = arguments.get("models"), arguments.get("optimizers")
    statement = statement_of(script, call)
    line = _only_part(statement)
    if not isinstance(line, cst.Assign) or line.value is not call or len(line.targets) != 1:
        raise ValueError("The result of amp.initialize is not simply assigned.")
    target = line.targets[0].target
    if values[0] is None or values[1] is None or not isinstance(target, cst.Tuple):
        raise ValueError("amp.initialize is not given one model and one optimizer.")
    names = [dotted(element.value) for element in target.elements]
    if len(names) != 2 or not all(names) or any(_is_several(script, v) for v in values if v):
        raise ValueError("Several models or optimizers: each loss would need a scaler of its own.")
    if not isinstance(statement, cst.SimpleStatementLine):
        raise ValueError("The result of amp.initialize is not simply assigned.")
    return Initialize(
        call,
        statement,
        (str(names[0]), str(names[1])),
        (values[0], values[1]),
        _guard(script, statement),
    )


def _guard(script: Script, statement: Statement) -> cst.If | None:
    """Returns the ``if name:`` around a statement.

    Raises:
        ValueError: If the statement stands in any other block than a function, or an ``if`` on a
            plain name without an ``else``.
    """
    suite = suite_of(script, statement)
    if isinstance(suite, cst.Module):
        return None
    owner = next(script.parents(suite))
    if isinstance(owner, cst.FunctionDef) or _is_main(owner):
        return None
    if isinstance(owner, cst.If) and dotted(owner.test) is not None and owner.orelse is None:
        outer = next(script.parents(owner))
        around = None if isinstance(outer, cst.Module) else next(script.parents(outer))
        if around is None or isinstance(around, cst.FunctionDef) or _is_main(around):
            return owner
    raise ValueError("amp.initialize stands in a block that may not run, or run twice.")


def _is_main(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.If) and "__name__" in {
        name.value for name in (*node.test.children, node.test) if isinstance(name, cst.Name)
    }


def _is_several(script: Script, value: cst.BaseExpression) -> bool:
    several = cst.List | cst.Tuple | cst.ListComp | cst.GeneratorExp | cst.StarredElement
    if isinstance(value, several):
        return True
    name = dotted(value)
    return any(
        isinstance(node, cst.Assign)
        and any(dotted(target.target) == name for target in node.targets)
        and isinstance(node.value, several)
        for node in script.nodes
    )


_IDLE_ARGUMENTS = {"loss_id": "0", "delay_unscale": "False", "delay_overflow_check": "False"}
"""Arguments of ``scale_loss`` with the value that changes nothing."""


def _scale_loss(script: Script, call: cst.Call) -> ScaleLoss:
    block = next((p for p in script.parents(call) if isinstance(p, cst.With)), None)
    item = block.items[0] if block is not None and len(block.items) == 1 else None
    if block is None or item is None or item.item is not call or item.asname is None:
        raise ValueError("amp.scale_loss is not the one thing that a with statement opens.")
    given = _scale_loss_arguments(script, call)
    line = _only_part(block.body)
    backward = line.value if isinstance(line, cst.Expr) else None
    scaled = dotted(item.asname.name)
    if not isinstance(backward, cst.Call) or dotted(backward.func) != f"{scaled}.backward":
        raise ValueError("The block of amp.scale_loss does more than call backward().")
    if any(isinstance(node, cst.Call) for node in below(given["loss"])):
        raise ValueError(
            "The loss is computed in the call of amp.scale_loss: give it a name first."
        )
    if any(dotted(n) == scaled and not is_in(script, n, block) for n in script.nodes):
        raise ValueError(f"{scaled} is used outside the block of amp.scale_loss.")
    return ScaleLoss(
        block, given["loss"], given["optimizers"], backward, _backward_guard(script, block)
    )


def _scale_loss_arguments(script: Script, call: cst.Call) -> dict[str, cst.BaseExpression]:
    names = ["loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check"]
    given = {}
    for index, argument in enumerate(call.args):
        if argument.star:
            raise ValueError("amp.scale_loss gets arguments by * or **: they are not known here.")
        given[argument.keyword.value if argument.keyword else names[index]] = argument.value
    for name, idle in _IDLE_ARGUMENTS.items():
        if name in given and script.code(given[name]) != idle:
            raise ValueError(f"{name}={script.code(given[name])} has no equal in torch.amp.")
    if "loss" not in given or "optimizers" not in given:
        raise ValueError("amp.scale_loss is not given a loss and an optimizer.")
    return given


def _backward_guard(script: Script, block: cst.With) -> cst.If | None:
    owner = next(script.parents(suite_of(script, block)), None)
    if not isinstance(owner, cst.If) or dotted(owner.test) is None or owner.orelse is None:
        return None
    if isinstance(next(script.parents(owner)), cst.If):
        raise ValueError("amp.scale_loss stands in an elif.")
    return owner


def _only_part(node: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """Returns the one simple statement that a line or a block consists of."""
    if isinstance(node, cst.IndentedBlock) and len(node.body) == 1:
        node = node.body[0]
    if isinstance(node, cst.SimpleStatementLine | cst.SimpleStatementSuite) and len(node.body) == 1:
        return node.body[0]
    return None


def same_function(script: Script, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Returns whether both run in the same call of a function."""
    return function_of(script, one) is function_of(script, other)
