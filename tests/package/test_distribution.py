"""What pip installs: names, versions, dependencies, typing marker, cost of the import."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import resources
from pathlib import Path

import pytest

import apex

ROOT = Path(__file__).parents[1]


def project_field(pyproject, field):
    """A quoted field of [project]; tomllib is newer than our oldest Python."""
    return re.search(rf'^{field} = "([^"]+)"', pyproject.read_text("utf-8"), re.MULTILINE)[1]


def run_python(code):
    """Runs code in a fresh interpreter, away from this folder; returns the literal it prints."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_version_is_that_of_pyproject():
    assert apex.__version__ == project_field(ROOT / "pyproject.toml", "version")


def test_version_is_that_of_the_installed_distribution():
    assert apex.__version__ == importlib.metadata.version("apex-amp")


def test_metadata_distribution_has_the_same_version_and_requires_it():
    pyproject = ROOT / "packaging/apex-metadata/pyproject.toml"
    assert project_field(pyproject, "name") == "apex"
    assert project_field(pyproject, "version") == apex.__version__
    assert f'dependencies = ["apex-amp=={apex.__version__}"]' in pyproject.read_text("utf-8")


def test_public_names_of_the_package_are_these():
    assert apex.__all__ == [
        "RNN",
        "__version__",
        "amp",
        "contrib",
        "debug",
        "fp16_utils",
        "fused_dense",
        "mlp",
        "multi_tensor_apply",
        "normalization",
        "optimizers",
        "parallel",
        "reparameterization",
    ]


@pytest.mark.parametrize("name", apex.__all__)
def test_every_public_name_is_reached_as_an_attribute(name):
    code = f"import apex; print(repr(getattr(apex, {name!r}) is not None))"
    assert run_python(code)


def test_torch_is_the_only_dependency_outside_extras():
    required = importlib.metadata.requires("apex-amp")
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.6"]


@pytest.mark.parametrize("version", [None, "2.5.1+cu121", "1.13.1"])
@pytest.mark.parametrize("name", ["apex", "apex.amp", "apex.optimizers"])
def test_a_missing_or_old_torch_is_one_error_with_the_command(tmp_path, name, version):
    (tmp_path / "torch").mkdir()
    text = "raise ModuleNotFoundError(name='torch')" if version is None else ""
    (tmp_path / "torch" / "__init__.py").write_text(text or f"__version__ = {version!r}")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {name}"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"ImportError: apex-amp needs torch 2.6 or newer, and {found(version)}" in done.stderr
    assert "pip install --upgrade 'torch>=2.6'" in done.stderr
    assert "During handling" not in done.stderr


def found(version):
    return "torch is not installed" if version is None else f"this is torch {version}"


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the repository")
def test_links_of_the_readme_hold_outside_the_repository():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)|^\[.+\]: (.+)$", text, re.MULTILINE)
    targets = [inline or listed for inline, listed in targets]
    assert len(targets) > 5
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pages = re.escape(re.search(r'^Homepage = "(.+)"$', project, re.MULTILINE)[1])
    for target in targets:
        match = re.fullmatch(rf"{pages}/(?:blob|tree|raw)/main/([^#]+)(#.*)?", target)
        assert match is not None, target
        assert (ROOT / match[1]).exists(), target


@pytest.mark.slow
def test_the_sdist_builds_the_wheel_that_the_repository_builds(tmp_path):
    build(ROOT, "sdist", tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    contents = []
    for source in (ROOT, tmp_path / sdist.name.removesuffix(".tar.gz")):
        out = tmp_path / f"wheel-{len(contents)}"
        build(source, "wheel", out)
        (wheel,) = out.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            contents.append({info.filename: info.CRC for info in archive.infolist()})
    assert contents[0] == contents[1]
    metadata = importlib.metadata.metadata("apex-amp")
    assert metadata["Metadata-Version"] == "2.4"


def build(source, target, out):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


def test_package_is_marked_as_typed():
    assert resources.files("apex").joinpath("py.typed").is_file()


def test_wheel_is_pure_python():
    wheel = importlib.metadata.distribution("apex-amp").read_text("WHEEL")
    assert "Root-Is-Purelib: true" in wheel
    assert "Tag: py3-none-any" in wheel


def test_installed_files_stay_in_the_package_and_its_metadata():
    files = [Path(file) for file in importlib.metadata.files("apex-amp")]
    command = {file for file in files if file.stem == "apex" and file.parts[0] == ".."}
    assert len(command) == 1
    tops = {file.parts[0] for file in files if file not in command}
    editable = {"_editable_impl_apex_amp.pth"}  # in place of the package, in a developer's .venv
    modules = {"amp_C", "apex", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"}
    assert tops - editable - modules == {f"apex_amp-{apex.__version__}.dist-info"}


def test_license_is_installed():
    text = importlib.metadata.distribution("apex-amp").read_text("licenses/LICENSE")
    assert "the apex-amp authors" in text


@pytest.mark.parametrize("name", ["amp", "parallel"])
def test_import_apex_reaches_its_parts_as_attributes(name):
    code = f"import apex, types; print(isinstance(apex.{name}, types.ModuleType))"
    assert run_python(code) is True


def test_import_after_torch_loads_only_apex_and_the_standard_library():
    loaded = run_python(
        "import sys, torch; before = set(sys.modules); import apex.amp; "
        "print(sorted(set(sys.modules) - before))"
    )
    assert "apex.amp" in loaded
    standard = {"apex", *sys.stdlib_module_names}
    assert [name for name in loaded if name.partition(".")[0] not in standard] == []


def test_import_asks_importlib_metadata_nothing():
    code = (
        "import sys, torch, importlib.metadata as m; asked = []; "
        "m.Distribution.from_name = asked.append; m.distributions = asked.append; "
        "import apex; print(asked)"
    )
    assert run_python(code) == []


def test_import_prints_nothing_and_warns_of_nothing():
    code = "import torch, warnings; warnings.simplefilter('error'); import apex.amp; print(None)"
    assert run_python(code) is None


@pytest.fixture(scope="module")
def metadata_wheel(tmp_path_factory):
    """The wheel of the metadata-only distribution, built from a copy."""
    source = tmp_path_factory.mktemp("apex-metadata") / "source"
    shutil.copytree(ROOT / "packaging/apex-metadata", source)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = (source / "dist").iterdir()
    return wheel


def test_metadata_wheel_is_named_apex(metadata_wheel):
    assert metadata_wheel.name == f"apex-{apex.__version__}-py3-none-any.whl"


def test_metadata_wheel_holds_no_module(metadata_wheel):
    names = zipfile.ZipFile(metadata_wheel).namelist()
    assert names
    assert {name.split("/")[0] for name in names} == {f"apex-{apex.__version__}.dist-info"}


def test_metadata_wheel_requires_apex_amp(metadata_wheel):
    info = f"apex-{apex.__version__}.dist-info/METADATA"
    metadata = zipfile.ZipFile(metadata_wheel).read(info).decode()
    assert f"Requires-Dist: apex-amp=={apex.__version__}" in metadata
