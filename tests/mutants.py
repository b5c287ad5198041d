"""Plants faults, one by one, in a copy of the sources; each must fail its tests: ``make mutants``.

Prints a table for tests/README.md. ``python -m tests.mutants overflow`` plants those of that name.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    fault: str
    file: str
    right: str
    wrong: str
    tests: str


ENGINE, CORE = "apex/_engine", "apex/_core"
MUTANTS = [
    Mutant(
        "masters from rounded weights",
        f"{ENGINE}/masters.py",
        "make_master(exact, Master)",
        "make_master(param, Master)",
        "tests/loop/test_masters.py tests/parity",
    ),
    Mutant(
        "gradients rounded before unscaling",
        f"{ENGINE}/masters.py",
        "            pair.model.grad = wide\n",
        "            pair.model.grad = wide.to(torch.bfloat16).float()\n",
        "tests/loop/test_gradients.py tests/parity",
    ),
    Mutant(
        "growth interval off by one",
        f"{ENGINE}/scaler.py",
        "            rule.growth_interval,\n",
        "            rule.growth_interval + 1,\n",
        "tests/loop/test_scale_rule.py tests/loop/test_loss_scale.py",
    ),
    Mutant(
        "an overflow that does not skip",
        f"{ENGINE}/optimizer/prepared.py",
        "result = None if skipped else run()",
        "result = run()",
        "tests/loop/test_overflow.py",
    ),
    Mutant(
        "masters not written back",
        f"{ENGINE}/masters.py",
        "        foreach.copy_(models, masters)\n",
        "        pass\n",
        "tests/loop/test_masters.py tests/parity",
    ),
    Mutant(
        "a table row dropped",
        f"{CORE}/op_rows.py",
        "rms_norm softmax.int",
        "rms_norm",
        "tests/casts/test_table.py",
    ),
    Mutant(
        "`max_loss_scale` ignored",
        f"{ENGINE}/scaler.py",
        "self.loss_scale.clamp_(rule.least, rule.greatest)",
        "self.loss_scale.clamp_(min=rule.least)",
        "tests/loop/test_scale_rule.py tests/loop/test_loss_scale.py",
    ),
    Mutant(
        "a saved entry that is the rounded weight",
        f"{ENGINE}/masters.py",
        "torch.where(rounded == weight, exact, weight)",
        "weight",
        "tests/model/test_state_dict.py tests/loop/test_masters.py",
    ),
    Mutant(
        "LAMB's trust ratio gone",
        "apex/_optimizer_rules/lamb.py",
        "return torch.where(both, param_norms / update_norms, 1.0)",
        "return torch.ones_like(param_norms)",
        "tests/names/test_optimizer_rules.py tests/names/test_optimizers.py",
    ),
    Mutant(
        "a mixed norm's dtype",
        "apex/normalization/fused_layer_norm.py",
        "weight, bias, eps, out=weight.dtype",
        "weight, bias, eps, out=input.dtype",
        "tests/names/test_norms.py",
    ),
    Mutant(
        "casts on in `step`",
        f"{ENGINE}/optimizer/prepared.py",
        "    uncast = ambient.UncastBlock()\n",
        "    uncast = nullcontext()\n",
        "tests/loop/test_step_casts.py",
    ),
    Mutant(
        "a host sync in a fused step",
        f"{ENGINE}/optimizer/prepared.py",
        "return run(), flag\n",
        "return run(), bool(flag.tolist())\n",
        "tests/loop/test_cost.py",
    ),
    Mutant(
        "`no_sync` gradients unsent",
        f"{ENGINE}/session.py",
        "not self.ddp_tracker.sends(prepared):\n            return False",
        "not self.ddp_tracker.sends(prepared):\n            pass",
        "tests/distributed/test_data_parallel.py",
    ),
    Mutant(
        "the wrong operator named",
        "apex/debug/overflow.py",
        "        if not births:\n            return self._first_birth(observed, bad, kind)\n",
        "        if not births or births:\n"
        "            return self._first_birth(observed, bad, kind)\n",
        "tests/debug/test_planted_faults.py tests/debug/test_overflow.py",
    ),
    Mutant(
        "a gradient of another optimizer left scaled",
        f"{ENGINE}/backward.py",
        "            self._lenders.append(lender)\n",
        "",
        "tests/loop/test_gradients.py",
    ),
    Mutant(
        "gradients that add up in 16 bits",
        f"{ENGINE}/optimizer/prepared.py",
        "            masters.widen_nonzero_grads(self.pairs)",
        "            pass",
        "tests/loop/test_gradients.py",
    ),
    Mutant(
        "a gradient put aside that nobody clears",
        f"{ENGINE}/optimizer/prepared.py",
        "        self.stash.drop(cleared)\n",
        "",
        "tests/loop/test_facts.py",
    ),
    Mutant(
        "a group with gradients let in between delayed blocks",
        f"{ENGINE}/optimizer/prepared.py",
        "if any(param.grad is not None for param in new):",
        "if False:",
        "tests/loop/test_facts.py",
    ),
    Mutant(
        "an overflow lost on its way to another device",
        f"{ENGINE}/scaler.py",
        "self._flag = moved(self._flag, found_inf.device)",
        "self._flag = torch.zeros_like(found_inf)",
        "tests/loop/test_facts.py tests/loop/test_overflow.py",
    ),
    Mutant(
        "a delayed check that another optimizer's block forgets",
        f"{ENGINE}/scaler.py",
        "for flag in flags:",
        "for flag in [*flags][-1:]:",
        "tests/loop/test_facts.py",
    ),
    Mutant(
        "sharers of sharers left out",
        f"{ENGINE}/session.py",
        "for prepared in sharing:",
        "for prepared in list(sharing):",
        "tests/loop/test_facts.py",
    ),
    Mutant(
        "a block let in inside another of its optimizer",
        f"{ENGINE}/backward.py",
        "            if delayed.is_open:",
        "            if False:",
        "tests/loop/test_scale_loss.py",
    ),
    Mutant(
        "a failed block that takes back what a delayed one added",
        f"{ENGINE}/backward.py",
        "if self._continued is None:\n            self._restore_grads",
        "if True:\n            self._restore_grads",
        "tests/loop/test_facts.py",
    ),
    Mutant(
        "gradients of an overflow that `restore` keeps",
        f"{ENGINE}/restore.py",
        "prepared.drop_overflowed()",
        "pass",
        "tests/loop/test_facts.py",
    ),
    Mutant(
        "casts of the oldest session instead of the newest",
        f"{ENGINE}/autocast/ambient.py",
        "for spec in [*self.sessions.values()]:",
        "for spec in [*reversed(self.sessions.values())]:",
        "tests/casts/test_sessions.py",
    ),
    Mutant(
        "loaded masters rounded at the first step",
        f"{ENGINE}/masters.py",
        "before_step and pair.state is MasterState.FRESH and",
        "before_step and",
        "tests/distributed/test_resume.py",
    ),
    Mutant(
        "a bucket's view stashed without a copy",
        f"{ENGINE}/ddp.py",
        "wrapper.gradient_as_bucket_view and id(param) in state.sent",
        "False",
        "tests/distributed/test_resume.py",
    ),
]


def caught(mutant: Mutant) -> str | None:
    """Returns the first test that fails under the fault, or None.

    Raises:
        ValueError: If the sources no longer hold the right line.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / mutant.file
        text = path.read_text()
        if mutant.right not in text:
            raise ValueError(f"{mutant.file} has no {mutant.right!r}: write the fault anew.")
        path.write_text(text.replace(mutant.right, mutant.wrong))
        run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*run, *mutant.tests.split()],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1].split("[")[0] if failed else None


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.fault for word in sys.argv[1:])]
    print("| fault | caught by |\n|---|---|")
    missed = 0
    for mutant in chosen:
        test = caught(mutant)
        missed += test is None
        print(f"| {mutant.fault} | {'**nothing**' if test is None else f'`{test}`'} |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
