"""Detects files of another distribution in this package's folder and refuses to run."""

import os
import sys

# Files that only other projects' packages `apex` have. They reveal installations that the metadata,
# checked first, does not show (a copied folder, a broken uninstall).
_FOREIGN_FILES = {
    "_autocast_utils.py": "NVIDIA's apex",
    os.path.join("_extensions", "__init__.py"): "NVIDIA's apex",
    os.path.join("transformer", "__init__.py"): "NVIDIA's apex",
    "forms.py": "the web toolkit apex of PyPI",
    "views.py": "the web toolkit apex of PyPI",
}


def check(package: str) -> None:
    """Raises if the package folder also belongs to another distribution.

    pip lets two distributions write to the same folder: the later one overwrites files of the
    earlier, and uninstalling either removes files of both. This check runs at every import, so it
    costs only one directory listing and a few file tests, without ``importlib.metadata``.

    Args:
        package: The folder of the imported package ``apex``.

    Raises:
        ImportError: If another distribution has modules in the folder. The metadata-only
            distribution ``apex`` has none and is accepted.
    """
    owner = _owner_by_metadata(package) or _owner_by_files(package)
    if owner is not None:
        raise ImportError(
            f"The package `apex` of apex-amp shares its folder with {owner}, so their files are "
            f"mixed in {package}. An environment can contain only one of them. "
            "To keep apex-amp, run:\n"
            f"    {sys.executable} -m pip uninstall -y apex apex-amp\n"
            f"    {sys.executable} -m pip install .  # in a checkout of apex-amp\n"
            f"If this error persists, delete the folder {package} between the two commands.",
            name="apex",
            path=package,
        )


def _owner_by_metadata(package: str) -> str | None:
    parent = os.path.dirname(package)
    for entry in _listing(parent):
        stem, extension = os.path.splitext(entry)
        name, _, version = stem.partition("-")
        if name.lower() != "apex" or extension not in (".dist-info", ".egg-info"):
            continue
        if _owns_modules(os.path.join(parent, entry)):
            version = version.partition("-py")[0]  # egg-info folders are named name-version-pyX.Y
            return f"the distribution `{name}` {version} (its metadata: {entry})"
    return None


def _owns_modules(metadata: str) -> bool:
    if os.path.isfile(metadata):  # from distutils: no file list; such packages always have modules
        return True
    lines = _lines(os.path.join(metadata, "RECORD"))
    top_level = _lines(os.path.join(metadata, "top_level.txt")) if not lines else []
    return "apex" in top_level or any(line.startswith("apex/") for line in lines)


def _owner_by_files(package: str) -> str | None:
    for file, owner in _FOREIGN_FILES.items():
        if os.path.isfile(os.path.join(package, file)):
            return f"{owner} (it left {file})"
    return None


def _listing(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # imported from an archive, where nothing else can write
        return []


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError:
        return []
