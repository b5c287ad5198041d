"""What pip installs: names, versions, dependencies, files, licence; what the README links to."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import apex
from apex._core.project import ADDRESS, VERSION
from tests.support.loops import every

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def test_there_is_one_version_and_one_address():
    (written,) = re.findall(r'^version = "([^"]+)"', PYPROJECT, re.MULTILINE)
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert {written, cited, apex.__version__, importlib.metadata.version("apex-amp")} == {VERSION}
    addresses = set(re.findall(r"https://github\.com/[\w-]+/[\w-]+", PYPROJECT))
    assert addresses == {ADDRESS}


@every(version=[None, "2.5.1+cu121"], name=["apex", "apex.amp", "apex.optimizers"])
def test_a_missing_or_old_torch_is_one_error_with_the_command(tmp_path, name, version):
    if version is not None:
        info = tmp_path / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    paths = [str(tmp_path), str(Path(apex.__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {paths}; import {name}"
    run = [sys.executable, "-S", "-c", code]  # without site-packages, and so without torch
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    found = "torch is not installed" if version is None else f"this is torch {version}"
    assert done.returncode == 1
    assert f"ImportError: apex-amp needs torch 2.6 or newer, and {found}" in done.stderr
    assert "pip install --upgrade 'torch>=2.6'" in done.stderr
    assert "During handling" not in done.stderr


def test_links_of_the_readme_are_relative_and_absolute_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        described = archive.read(f"apex_amp-{VERSION}.dist-info/METADATA").decode()
    text = (ROOT / "README.md").read_text("utf-8")
    links = r"\]\(([^)]+)\)|^\[.+\]: (.+)$"
    relative, absolute = (
        [inline or listed for inline, listed in re.findall(links, page, re.MULTILINE)]
        for page in (text, described)
    )
    assert len(relative) > 5
    assert absolute == [
        f"{ADDRESS}/{'raw' if path.endswith(('.png', '.svg')) else 'blob'}/main/{path}"
        for path in relative
    ]
    assert "Description-Content-Type: text/markdown" in described


def test_the_wheel_puts_everything_where_no_other_apex_lies(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = [Path(name) for name in archive.namelist()]
        path_line, start_line = archive.read("apex_amp.pth").decode().splitlines()
        entry = archive.read("apex_amp.start").decode()
        metadata = archive.read(f"apex_amp-{VERSION}.dist-info/METADATA").decode()
        licence = archive.read(f"apex_amp-{VERSION}.dist-info/licenses/LICENSE").decode()
    outside = {"_apex_amp.py", "apex_amp", "apex_amp.pth", "apex_amp.start"}
    assert {file.parts[0] for file in files} == {*outside, f"apex_amp-{VERSION}.dist-info"}
    inside = {"amp_C", "apex", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"}
    assert {file.parts[2] for file in files if file.parts[1:2] == ("_site",)} == inside
    assert path_line == "apex_amp/_site"
    assert start_line == "import _apex_amp; _apex_amp.install()"
    assert entry == "_apex_amp:install\n"  # PEP 829, Python 3.15
    assert Path("apex_amp/_site/apex/py.typed") in files
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "the apex-amp authors" in licence
    required = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    assert required == ["torch>=2.6.0a0"]  # development builds of NVIDIA's images satisfy it


@pytest.mark.slow
def test_the_sdist_builds_the_wheel_that_the_repository_builds(wheel, tmp_path):
    build(ROOT, "sdist", tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / sdist.name.removesuffix(".tar.gz"), "wheel", tmp_path)
    (second,) = tmp_path.glob("*.whl")
    assert contents(second) == contents(wheel)


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def build(source, target, out):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
