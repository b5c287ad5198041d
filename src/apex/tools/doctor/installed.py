"""Other installed packages named apex."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import apex

MODULES = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""Our top-level modules that in NVIDIA's apex are compiled extensions."""


def conflicts() -> list[str]:
    """Returns a sentence for each installation that conflicts with this one, or may do so."""
    return [*_distributions(), *_hidden_packages(), *_compiled_modules()]


def _distributions() -> Iterator[str]:
    for distribution in metadata.distributions(name="apex"):
        files = distribution.files
        modules = [f for f in files or () if f.parts and f.parts[0] == "apex"]
        if files is None or modules:
            yield (
                f"the distribution `apex` {distribution.version} contains modules; "
                f"uninstall it: {sys.executable} -m pip uninstall apex"
            )


def _hidden_packages() -> list[str]:
    ours = Path(apex.__file__).parent.resolve()
    folders = {(Path(entry) / "apex").resolve() for entry in sys.path}
    others = sorted(f for f in folders if f != ours and (f / "__init__.py").is_file())
    return [
        f"another package apex in {folder} is shadowed by this one; remove it, so that the order "
        "of sys.path does not matter"
        for folder in others
    ]


def _compiled_modules() -> Iterator[str]:
    site = Path(apex.__file__).parents[1].resolve()
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            yield f"the module {name} is missing; reinstall apex-amp"
        elif site not in Path(spec.origin).resolve().parents:
            yield (
                f"the module {name} comes from {spec.origin}, not from this package; uninstall "
                "that apex"
            )
