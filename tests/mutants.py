"""Plants faults, one by one, in a copy of the sources; each must fail its test: ``make mutants``.

The table of tests/README.md names the test. ``python -m tests.mutants overflow`` plants those of
that name.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    fault: str
    file: str  # below src/apex
    right: str
    wrong: str


MUTANTS = [Mutant(*row) for row in [
    ("masters from rounded weights", "_engine/master_table.py",
     "make_master(value, master_class", "make_master(param, master_class"),
    ("gradients rounded before unscaling", "_engine/masters.py",
     "            _replace_grad(model, grad, wide)\n",
     "            _replace_grad(model, grad, wide.to(torch.bfloat16).float())\n"),
    ("growth interval off by one", "_engine/scaler.py",
     "            rule.growth_interval,\n", "            rule.growth_interval + 1,\n"),
    ("an overflow that does not skip", "_engine/optimizer/prepared.py",
     "            if self.must_skip():\n", "            if False:\n"),
    ("masters not written back", "_engine/masters.py",
     "        foreach.copy_(models, masters)\n", "        pass\n"),
    ("a table row dropped", "_core/op_rows.py",
     "rms_norm softmax.int", "rms_norm"),
    ("`max_loss_scale` ignored", "_engine/scaler.py",
     "self.loss_scale.clamp_(rule.least, rule.greatest)", "self.loss_scale.clamp_(min=rule.least)"),
    ("a saved entry that is the rounded weight", "_engine/masters.py",
     "torch.where(rounded == weight, exact, weight)", "weight"),
    ("LAMB's trust ratio gone", "_optimizer_rules/lamb.py",
     "return torch.where(both, param_norms / update_norms, 1.0)",
     "return torch.ones_like(param_norms)"),
    ("a mixed norm's dtype", "normalization/fused_layer_norm.py",
     "weight, bias, eps, out=weight.dtype", "weight, bias, eps, out=input.dtype"),
    ("casts on in `step`", "_engine/optimizer/prepared.py",
     "    uncast = ambient.UncastBlock(ambient.devices_on())\n", "    uncast = nullcontext()\n"),
    ("a host sync in a fused step", "_engine/optimizer/prepared.py",
     "return run(), flag\n", "return run(), bool(flag.tolist())\n"),
    ("`no_sync` gradients unsent", "_torch/ddp.py",
     "wrapper.require_backward_grad_sync or wrapper.__dict__.get(SENDS_LATER)", "True"),
    ("the wrong operator named", "debug/overflow.py",
     "        if not births:  # the inputs", "        if not births or births:  # the inputs"),
    ("a gradient of another optimizer left scaled", "_engine/backward.py",
     "            self._lenders.append(lender)\n", ""),
    ("gradients that add up in 16 bits", "_engine/passes.py",
     "    widen_nonzero_grads(pairs, views=bool(wrappers.states))", "    pass"),
    ("a gradient put aside that nobody clears", "_engine/optimizer/prepared.py",
     "        self.stash.drop(cleared)\n", ""),
    ("gradients of one rank that the pass that sends leaves out", "_engine/backward.py",
     "if wrappers.states and wrappers.sends_earlier", "if False and wrappers.sends_earlier"),
    ("an overflow lost on its way to another device", "_engine/scaler.py",
     "self._flag = moved(self._flag, found_inf.device)",
     "self._flag = torch.zeros_like(found_inf)"),
    ("a delayed check that another optimizer's block forgets", "_engine/scaler.py",
     "for flag in flags:", "for flag in [*flags][-1:]:"),
    ("sharers of sharers left out", "_engine/optimizer/prepared.py",
     "for prepared in sharing:", "for prepared in list(sharing):"),
    ("a block let in inside another of its optimizer", "_engine/backward.py",
     "            elif earlier.is_open:", "            elif False:"),
    ("a failed block that takes back what a delayed one added", "_engine/backward.py",
     "if self.adds_in_place:\n            self._unscale_unchecked",
     "if False:\n            self._unscale_unchecked"),
    ("gradients of an overflow that `restore` keeps", "_engine/restore.py",
     "prepared.drop_overflowed()", "False"),
    ("casts of the oldest session instead of the newest", "_engine/autocast/ambient.py",
     "        for spec in specs:\n            Casts(",
     "        for spec in reversed(specs):\n            Casts("),
    ("loaded masters rounded at the first step", "_engine/masters.py",
     "pair.state is fresh and ranks", "pair.state is not MasterState.TRAINED and ranks"),
    ("a bucket's view stashed without a copy", "_engine/wrappers/ddp.py",
     "if wrapper.gradient_as_bucket_view:", "if False:"),
]]  # fmt: skip


def tests() -> dict[str, str]:
    """Returns the test that must catch each fault, as tests/README.md names it."""
    table = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| (.+) \| `(tests/\S+::\S+)` \|$", table, re.MULTILINE))


def is_caught(mutant: Mutant) -> bool:
    """Returns whether the fault's test fails under it.

    Raises:
        ValueError: If the sources no longer hold the right line.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "apex" / mutant.file
        text = path.read_text()
        if mutant.right not in text:
            raise ValueError(f"{mutant.file} has no {mutant.right!r}: write the fault anew.")
        path.write_text(text.replace(mutant.right, mutant.wrong))
        run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*run, tests()[mutant.fault]],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    return any(line.startswith(("FAILED", "ERROR")) for line in done.stdout.splitlines())


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.fault for word in sys.argv[1:])]
    missed = 0
    for mutant in chosen:
        caught = is_caught(mutant)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'}: {mutant.fault}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
