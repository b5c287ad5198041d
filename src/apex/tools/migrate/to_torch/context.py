"""What is known of a script while it is rewritten, and what is to change in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import libcst as cst

from apex.tools.migrate.script import Script
from apex.tools.migrate.to_torch.edits import Edits
from apex.tools.migrate.to_torch.flow import Calls, Initialize, ScaleLoss
from apex.tools.migrate.to_torch.places import class_of, describe, function_of, functions_of
from apex.tools.migrate.to_torch.precision import Precision
from apex.tools.migrate.to_torch.reasons import Findings
from apex.tools.migrate.to_torch.regions import RegionFinder
from apex.tools.migrate.to_torch.roles import Roles


@dataclass(frozen=True)
class Context:
    """One script on its way.

    Attributes:
        findings: Gets reasons and notes.
        calls: The calls of amp.
        prepared: The one call of ``initialize``.
        precision: What its options mean.
        scaled: The one block of ``scale_loss``.
        roles: Which names are the model and the optimizer.
        edits: Gets the changes.
    """

    findings: Findings
    calls: Calls
    prepared: Initialize
    precision: Precision
    scaled: ScaleLoss
    roles: Roles
    edits: Edits = field(default_factory=Edits)

    @property
    def script(self) -> Script:
        """The script."""
        return self.findings.script

    @property
    def prepared_block(self) -> cst.SimpleStatementLine | cst.If:
        """The statement of ``initialize``, or the ``if`` around it."""
        return self.prepared.guard or self.prepared.statement

    @cached_property
    def regions(self) -> RegionFinder:
        """Finds what goes under ``autocast``."""
        return RegionFinder(self.findings, self.roles, [self.prepared_block])

    @cached_property
    def scaler(self) -> str:
        """The name for the scaler: on ``self`` if the model is there."""
        taken = {node.value for node in self.script.nodes if isinstance(node, cst.Name)}
        name = "grad_scaler" if "scaler" in taken else "scaler"
        return f"self.{name}" if self.prepared.targets[0].startswith("self.") else name

    def require_scaler(self, node: cst.CSTNode) -> None:
        """Refuses where the scaler would not be known, or not yet."""
        script, made = self.script, self.prepared.statement
        if self.scaler.startswith("self."):
            known = class_of(script, node) is class_of(script, made)
        else:
            place = function_of(script, made)
            known = place is None or any(f is place for f in functions_of(script, node))
        if not known:
            here, there = function_of(script, made), function_of(script, node)
            self.findings.refuse(
                node,
                f"the scaler would be made in {describe(here)} and used in {describe(there)}: "
                "pass it on by hand, or use O4, which needs none.",
            )
        elif self.roles.is_early(node):
            self.findings.refuse(node, "the scaler is needed before amp.initialize makes it.")
