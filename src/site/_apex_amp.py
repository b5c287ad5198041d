"""Provides ``apex`` if no other package does; otherwise adds the parts that the other one lacks.

``apex_amp.pth`` runs :func:`install` whenever Python starts. Therefore this file imports only
modules that the interpreter has already loaded.
"""

import os
import sys
from _thread import _local

TYPE_CHECKING = False  # importing typing would take 2 ms
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution
    from types import ModuleType
    from typing import Any

# Importing importlib.machinery would take 1 ms.
PathFinder: "Any" = sys.modules["_frozen_importlib_external"].PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))
INSTALLED = os.path.join(HERE, "apex_amp", "_site")
SITE = INSTALLED if os.path.isdir(INSTALLED) else os.path.dirname(HERE)  # a checkout: src/
"""The folder of our ``apex`` and kernels; no other distribution writes to it."""

REAL_SITE = os.path.realpath(SITE)

KERNELS = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")

PARTS = (
    "RNN", "amp", "contrib", "debug", "fp16_utils", "fused_dense", "mlp", "multi_tensor_apply",
    "normalization", "optimizers", "parallel", "reparameterization",
)  # fmt: skip
"""Our subpackages, for ``import apex; apex.amp.initialize(...)`` under another ``apex``."""

_searching = _local()  # threads may import at the same time


class Finder:
    """The first finder in ``sys.meta_path``; finds only ``apex`` and the kernels."""

    @classmethod
    def find_spec(cls, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """Returns the spec of another distribution's module if there is one, otherwise of ours.

        Raises:
            ModuleNotFoundError: If the other ``apex`` has ``amp``, but lacks this kernel. After
                None, Python would find our kernel by the path line of ``apex_amp.pth``.
        """
        if name != "apex" and name not in KERNELS:
            return None
        if getattr(_searching, "on", False):
            return None
        theirs = find_theirs(name)
        if theirs is not None:
            folders = theirs.submodule_search_locations
            if name == "apex" and folders is not None and not has_amp(theirs):
                folders.append(os.path.join(SITE, "apex"))
                _add_parts(theirs.loader)
            return theirs
        if name != "apex" and has_amp(find_theirs("apex")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        ours: ModuleSpec | None = PathFinder.find_spec(name, [SITE])
        return ours

    @classmethod
    def find_distributions(cls, context: "Any" = None) -> "Iterator[Distribution]":
        """Yields metadata for the name ``apex`` if no other distribution has that name."""
        if getattr(context, "name", None) != "apex" or getattr(_searching, "on", False):
            return
        from importlib import metadata
        from pathlib import Path

        _searching.on = True
        try:
            known = next(iter(metadata.distributions(name="apex")), None)
        finally:
            _searching.on = False
        if known is None:

            class Metadata(metadata.Distribution):
                def read_text(self, filename: str) -> "str | None":
                    if filename != "METADATA":
                        return None
                    version = metadata.version("apex-amp")
                    return f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n"

                def locate_file(self, path: "Any") -> "Any":
                    return Path(SITE, path)

            yield Metadata()


def find_theirs(name: str) -> "ModuleSpec | None":
    """Returns the spec of a module outside SITE, or None; ignores namespace packages."""
    _searching.on = True
    try:
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is Finder or find is None:
                continue
            path = _path_without_ours() if finder is PathFinder else None
            spec: ModuleSpec | None = find(name, path)
            if spec is not None and spec.origin is not None:
                return spec
    finally:
        _searching.on = False
    return None


def has_amp(spec: "ModuleSpec | None") -> bool:
    """Returns whether a spec belongs to an ``apex`` from before May 2025, which has ``amp``."""
    if spec is None:
        return False
    folders = spec.submodule_search_locations or ()
    return any(os.path.isfile(os.path.join(folder, "amp", "__init__.py")) for folder in folders)


def _path_without_ours() -> list[str]:
    return [entry for entry in sys.path if os.path.realpath(entry) != REAL_SITE]


def _add_parts(loader: "Any") -> None:
    """Makes the loader add our parts to the module that it executes, as attributes."""
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        execute(module)
        theirs = getattr(module, "__getattr__", None)

        def __getattr__(name: str) -> "Any":  # noqa: N807 - becomes the module's
            if name in PARTS:
                from importlib import import_module

                return import_module(f"apex.{name}")
            if theirs is not None:
                return theirs(name)
            raise AttributeError(f"module 'apex' has no attribute {name!r}")

        module.__dict__["__getattr__"] = __getattr__

    loader.exec_module = exec_module  # only for this instance


def main() -> int:
    """Runs the command ``apex``; says which other ``apex`` leaves no room for it, if one does."""
    try:
        from apex import cli
    except ImportError as error:
        theirs = find_theirs("apex")
        if theirs is None:
            raise
        sys.stderr.write(
            f"apex: {error}\n"
            f"Python finds another apex: {theirs.origin}. If it is from before May 2025, with an "
            "amp of its own, or another project, uninstall it: pip uninstall -y apex\n"
        )
        return 1
    return cli.main()


def install() -> None:
    """Installs the finder; with the environment's ``APEX_AMP=off``, hides the package instead."""
    if os.environ.get("APEX_AMP") == "off":
        sys.path[:] = _path_without_ours()
    elif Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
