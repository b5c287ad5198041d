"""Which packages called apex there are, beside this one."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import apex

MODULES = ("amp_C", "apex_C")
"""Top-level modules of ours that NVIDIA's apex compiles."""


def conflicts() -> list[str]:
    """Returns a sentence for each installation that is, or may come, in the way; empty if none."""
    return [*_distributions(), *_hidden_packages(), *_compiled_modules()]


def _distributions() -> list[str]:
    found = []
    for distribution in metadata.distributions(name="apex"):
        files = distribution.files
        modules = [f for f in files or () if f.parts and f.parts[0] == "apex"]
        if files is None or modules:
            found.append(
                f"the distribution `apex` {distribution.version} has modules of its own; "
                f"uninstall it: {sys.executable} -m pip uninstall apex"
            )
    return found


def _hidden_packages() -> list[str]:
    ours = Path(apex.__file__).parent.resolve()
    folders = {(Path(entry) / "apex").resolve() for entry in sys.path}
    others = sorted(f for f in folders if f != ours and (f / "__init__.py").is_file())
    return [
        f"another package apex in {folder} comes after this one on the path and is never imported; "
        "remove it, so that nothing depends on the order"
        for folder in others
    ]


def _compiled_modules() -> list[str]:
    site = Path(apex.__file__).parents[1].resolve()
    found = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            found.append(f"the module {name} is missing; install apex-amp again")
        elif site not in Path(spec.origin).resolve().parents:
            found.append(
                f"the module {name} is that of {spec.origin}, not this package's; uninstall the "
                "apex it came with"
            )
    return found
